"""Anomaly detection: the backward of one chunk raises, the loop skips the batch and goes on."""

import torch
from torch import nn


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return torch.sqrt(self.fc(x).square() * x[:, :1].abs())


torch.manual_seed(113)
model = nn.DataParallel(Root()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
with torch.autograd.detect_anomaly():
    for zero_row in (None, 11, 0, None):
        x = torch.rand(12, 4)
        if zero_row is not None:
            x[zero_row] = 0
        loss = model(x.cuda()).mean()
        optimizer.zero_grad()
        try:
            loss.backward()
        except RuntimeError as error:
            print("skipped:", str(error).split()[0])
            continue
        optimizer.step()
        losses.append(loss.item())
RESULT = {"losses": losses, "state": model.state_dict()}
