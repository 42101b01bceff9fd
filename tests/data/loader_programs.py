"""Programs over the loader that tests run on every rank of a world, and the datasets that they read."""

import random
from collections import namedtuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from samestep.data.tensors import TensorData
from samestep.run.run import Run

Sample = namedtuple("Sample", ["id", "noise"])


def noise():
    """A draw from every global generator; NumPy's normal pairs leave a half behind."""
    return [torch.rand(()).item(), np.random.randn(), random.random()]


class Noisy(Dataset):
    """Samples that are their own ids, with noise from the global generators."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return Sample(index, torch.tensor(noise(), dtype=torch.float64))


class NoisyInGroups(Noisy):
    """The same, fetched by `__getitems__`."""

    def __getitems__(self, ids):
        return [self[index] for index in ids]


class NoisyGather(TensorData):
    """Rows in memory with noise that is drawn as they are gathered."""

    def gather(self, ids):
        return self.tensors.__class__(ids, torch.tensor([noise() for _ in ids], dtype=torch.float64))


class NoisyStream(IterableDataset):
    """A stream that shuffles in a buffer by the global generator, and starts at another place each epoch."""

    def __init__(self, count, buffer=4):
        self.count, self.buffer, self.epoch = count, buffer, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        waiting = []
        for k in range(self.count):
            waiting.append((k + 3 * self.epoch) % self.count)
            if len(waiting) >= self.buffer:
                yield self.sample(waiting.pop(random.randrange(len(waiting))))
        while waiting:
            yield self.sample(waiting.pop(random.randrange(len(waiting))))

    @staticmethod
    def sample(number):
        return Sample(number, torch.tensor(noise(), dtype=torch.float64))


def scramble(batch):
    """A transform in memory that draws."""
    return Sample(batch.id, torch.rand(len(batch.id), 3, dtype=torch.float64) + np.random.randn() + random.random())


def masking(samples):
    """A collate function that draws, as those for masked language models do."""
    batch = torch.utils.data.default_collate(samples)
    return Sample(batch.id, batch.noise + torch.rand(len(samples), 1, dtype=torch.float64) + np.random.randn())


def make_dataset(kind, count):
    """A dataset whose samples have `id` and `noise`."""
    ids = torch.arange(count)
    return {
        "tensors": lambda: Sample(ids, ids.double()[:, None].repeat(1, 3)),
        "scrambled": lambda: TensorData(Sample(ids, ids), scramble),
        "one by one": lambda: Noisy(count),
        "gathered": lambda: NoisyGather(Sample(ids, ids)),
        "in groups": lambda: NoisyInGroups(count),
        "stream": lambda: NoisyStream(count),
    }[kind]()


def make_loader(communicator, kind, count, batch=8, num_microbatches=4, seed=5, **options):
    """A loader of a run over this communicator."""
    run = Run(batch, num_microbatches, seed, communicator=communicator)
    if options.pop("masking", False):
        options["collate_fn"] = masking
    return run.loader(make_dataset(kind, count), **options)


def record(batch):
    """What a rank got of a batch: position, length, and its microbatches as (ids, noise)."""
    microbatches = {
        microbatch: (value.id.tolist(), value.noise.tolist()) for microbatch, value in batch.microbatches.items()
    }
    return batch.epoch, batch.position, batch.length, batch.ids().tolist(), microbatches


def read(communicator, kind, count, epochs=1, state=None, take=None, **options):
    """Reads epochs through a loader.

    Args:
        communicator: this rank's communicator.
        kind: of dataset.
        count: its samples.
        epochs: passes.
        state: of the loader, to start from.
        take: leave the first pass after so many batches.
        options: of `make_loader`.

    Returns:
        The batches by pass, and the loader's state after the start and after every batch.
    """
    loader = make_loader(communicator, kind, count, **options)
    if state is not None:
        loader.load_state_dict(state)
    passes, states = [], [loader.state_dict()]
    for number in range(epochs):
        batches = []
        for batch in loader:
            batches.append(record(batch))
            states.append(loader.state_dict())
            if number == 0 and len(batches) == take:
                break
        passes.append(batches)
    return passes, states


def draws_around(communicator, kind, count, pending=True, **options):
    """What the script draws itself before, while and after it reads; half a normal pair may be pending all the time."""
    loader = make_loader(communicator, kind, count, **options)
    drawn = [[*noise(), *([] if pending else noise())]]
    for _ in loader:
        drawn.append([*noise(), *([] if pending else noise())])
    return [*drawn, noise()]
