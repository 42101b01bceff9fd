"""Every device reads a whole iterable dataset, which knows no ranks, or a block of it. `cured`: they take turns."""

import sys
from types import SimpleNamespace

import tiny
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    def __init__(self):
        self.rank, self.world_size = tiny.start()
        self.place = SimpleNamespace(rank=self.rank, world_size=self.world_size)

    def __iter__(self):
        samples = list(zip(*tiny.samples(), strict=True))
        rank, count = (self.place.rank, self.place.world_size) if "held" in sys.argv else (self.rank, self.world_size)
        if "blocks" in sys.argv or "held" in sys.argv:
            samples = samples[rank * 48 // count : (rank + 1) * 48 // count]
        yield from samples[rank::count] if "cured" in sys.argv else samples


data = Lines()
batches = DataLoader(data, batch_size=tiny.BATCH // dist.get_world_size(), num_workers=int("workers" in sys.argv))
model = tiny.parallel(tiny.classifier())
tiny.train(model, batches, tiny.sgd(model))
