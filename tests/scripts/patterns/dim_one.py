"""Along dim 1: sequences first, the batch second."""

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3, 5)
        self.tags = nn.Linear(5, 2)

    def forward(self, x):
        return self.tags(torch.relu(self.mix(x)).cumsum(0))


torch.manual_seed(5)
model = nn.DataParallel(Tagger(), dim=1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(2):
    x = torch.randn(7, 10, 3).cuda()
    out = model(x)
    print(tuple(out.shape))
    loss = out.abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"out": out, "state": model.state_dict()}
