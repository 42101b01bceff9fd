"""Inputs that are lists, tuples, dicts and named tuples of tensors."""

from typing import NamedTuple

import torch
from torch import nn


class Batch(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(5, 4)

    def forward(self, pair, batch, extra):
        assert isinstance(pair, list), type(pair)
        assert isinstance(batch, Batch), type(batch)
        h = self.a(pair[0]) + self.b(pair[1]) + extra["bias"]["value"] * extra["weights"][0]
        return nn.functional.cross_entropy(h + batch.images, batch.labels, reduction="none")


torch.manual_seed(13)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    pair = [torch.randn(10, 3).cuda(), torch.randn(10, 5).cuda()]
    batch = Batch(torch.randn(10, 4).cuda(), torch.randint(4, (10,)).cuda())
    extra = {"bias": {"value": torch.randn(10, 1).cuda()}, "weights": (torch.rand(10, 4).cuda(), 3)}
    losses = model(pair, batch, extra)
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
RESULT = {"losses": losses, "state": model.state_dict()}
