"""A forward that writes plain attributes, as one does for a later look."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)
        self.num_calls = 0
        self.last_mean = None

    def forward(self, x):
        self.num_calls += 1
        self.last_mean = x.mean().item()
        return self.fc(x)


torch.manual_seed(29)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.randn(10, 3).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
