"""Two heads and a loss for each: backward is called twice for one forward, with nothing retained between."""

import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.policy = nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x):
        return self.value(x), self.policy(x)


torch.manual_seed(105)
model = nn.DataParallel(Heads()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    value, logits = model(torch.randn(12, 4).cuda())
    optimizer.zero_grad()
    first, second = value.square().mean(), nn.functional.cross_entropy(logits, torch.randint(3, (12,)).cuda())
    first.backward()
    second.backward()
    optimizer.step()
    losses.append([first.item(), second.item()])
RESULT = {"losses": losses, "state": model.state_dict()}
