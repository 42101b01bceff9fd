"""A criterion with parameters of its own, wrapped twice by accident."""

import torch
from torch import nn


class CentreLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 2))

    def forward(self, features, labels):
        return (features - self.centres[labels]).square().sum(1)


torch.manual_seed(32)
model = nn.DataParallel(nn.Linear(5, 2)).cuda()
criterion = nn.DataParallel(nn.DataParallel(CentreLoss())).cuda()
optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
for _ in range(3):
    losses = criterion(model(torch.randn(10, 5).cuda()), torch.randint(3, (10,)).cuda())
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
RESULT = {"losses": losses, "model": model.state_dict(), "criterion": criterion.state_dict()}
