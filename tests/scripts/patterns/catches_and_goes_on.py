"""A batch whose forward fails is skipped, and the training goes on."""

import torch
from torch import nn


class Strict(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x):
        if (x > 99).any():
            raise ValueError(f"a pixel of {x.max().item():.0f}")
        return self.fc(x)


torch.manual_seed(45)
model = nn.DataParallel(Strict()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(4):
    x = torch.randn(10, 3)
    if step in (1, 2):
        x[0 if step == 1 else 5, 0] = 100.0
    try:
        loss = model(x.cuda()).square().mean()
    except ValueError:
        print(f"step {step} skipped")
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
RESULT = {"losses": losses, "state": model.state_dict()}
