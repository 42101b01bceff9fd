"""Every device draws its samples by a WeightedRandomSampler of its own; `alike`: every device draws the same.

`cured`: each takes its share of one draw.
"""

import sys

import tiny
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

rank, world_size = tiny.start()
generator = torch.Generator().manual_seed(0 if {"alike", "cured"} & {*sys.argv} else rank)
sampler = WeightedRandomSampler([1.0, 3.0] * 24, 48, generator=generator)
if "cured" in sys.argv:
    sampler = list(sampler)[rank::world_size]
batches = DataLoader(tiny.dataset(), batch_size=tiny.BATCH // world_size, sampler=sampler)
model = tiny.parallel(tiny.classifier())
tiny.train(model, batches, tiny.sgd(model))
