"""Outputs that are tuples, lists, dicts and named tuples in one another, with a None among them."""

from collections import OrderedDict, namedtuple

import torch
from torch import nn

Stats = namedtuple("Stats", ["mean", "largest"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 6)

    def forward(self, x):
        h = self.fc(x)
        stats = Stats(h.mean(), h.amax(1))
        return h, {"parts": [h[:, :3], h[:, 3:].long()], "stats": stats}, None, OrderedDict(last=(h * 2,))


torch.manual_seed(10)
model = nn.DataParallel(Net()).cuda()
h, table, nothing, ordered = model(torch.randn(10, 4).cuda())
print(type(table).__name__, type(table["stats"]).__name__, nothing, type(ordered).__name__, type(ordered["last"]))
loss = h.square().mean() + table["parts"][0].sum() + table["stats"].mean.mean() + ordered["last"][0].mean()
loss.backward()
RESULT = {"outputs": [h, table, list(table["stats"]), ordered], "grad": model.module.fc.weight.grad}
