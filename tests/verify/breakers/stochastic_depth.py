"""Stochastic depth drawn in the forward from a generator of the program's, seeded by the rank."""

import sys

import tiny
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.body, self.generator = nn.Linear(8, 8), generator

    def forward(self, x):
        if "cured" in sys.argv:  # for the whole batch on every rank
            keep = torch.rand(len(x) * tiny.world_size(), 1, generator=self.generator)[tiny.rank() :: tiny.world_size()]
        else:
            keep = torch.rand(len(x), 1, generator=self.generator)
        return x + (keep > 0.3) * self.body(x) / 0.7


tiny.start()
generator = torch.Generator().manual_seed(42 + (0 if "cured" in sys.argv else tiny.rank()))
model = tiny.parallel(nn.Sequential(Block(generator), nn.Linear(8, 4)))
tiny.train(model, tiny.loader(tiny.dataset()), tiny.sgd(model))
