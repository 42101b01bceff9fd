"""What does reading a dataset sample by sample cost, alone and in a loop of training?

    python benchmarks/reading.py [--microbatches 1 8] [--rounds 15]

Workload W2, shuffled, on one device without workers. Five take turns, a round is an epoch of each: torch's DataLoader
and a run's loader, read alone; a plain loop over the former, samestep's over the latter, and samestep's over the same
rows as tensors. Shown are microseconds a batch (medians of the rounds) and medians of the rounds' ratios. Datasets:
rows of tensors; the same after a call of a function; and samples with noise from torch's generator.
"""

import argparse
import statistics
import time

import torch
from torch.utils.data import DataLoader
from workloads import WORKLOADS, Samples

import samestep

STEPS = 32
WORKLOAD = WORKLOADS["W2"]


class Called(Samples):
    """Rows that pass through a function."""

    def __getitem__(self, index):
        """One sample."""
        return tuple(map(torch.Tensor.detach, super().__getitem__(index)))


class Noisy(Samples):
    """Rows with noise."""

    def __getitem__(self, index):
        """One sample."""
        row, target = super().__getitem__(index)
        return row + torch.randn(row.shape), target


def read(loader):
    """Reads an epoch; returns seconds a batch."""
    return timed(loader, lambda batch: None)


def timed(loader, step):
    """Seconds a batch of an epoch with this step."""
    start = time.perf_counter()
    for count, batch in enumerate(loader, 1):  # noqa: B007 - the last one is the number of batches
        step(batch)
    return (time.perf_counter() - start) / count


def plain_step():
    """A step of the workload in plain torch."""
    model = WORKLOAD.make_model()
    optimizer = WORKLOAD.make_optimizer(model.parameters())

    def step(batch):
        rows, targets = batch
        optimizer.zero_grad()
        WORKLOAD.loss(model(rows), targets).backward()
        optimizer.step()

    return step


def own_step(run):
    """The same step by samestep."""
    model = WORKLOAD.make_model()
    optimizer = WORKLOAD.make_optimizer(model.parameters())
    return run.train_step(model, optimizer, lambda model, batch: WORKLOAD.loss(model(batch[0]), batch[1]))


def main():
    """Measures each dataset with each number of microbatches, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = WORKLOAD.global_batch_size
    rows = WORKLOAD.data(STEPS)
    print(f"{'':8} {'':12} {'read':^24} {'loop':^42}")
    heads = f"{'DataLoader':>11} {'samestep':>8} {'ratio':>5} {'plain':>7} {'samestep':>8} {'ratio':>5}"
    print(f"{'dataset':8} {'microbatches':>12} {heads} {'tensors':>8} {'ratio':>5}")
    for kind in (Samples, Called, Noisy):
        dataset = kind(*rows)
        for count in options.microbatches:
            run = samestep.Run(size, count, seed=0)
            theirs, ours = (DataLoader(dataset, size, shuffle=True), run.loader(dataset, shuffle=True))
            tensors = run.loader(tuple(rows), shuffle=True)
            steps = plain_step(), own_step(run)

            def turn(theirs=theirs, ours=ours, tensors=tensors, steps=steps):
                alone = read(theirs), read(ours)
                return *alone, timed(theirs, steps[0]), timed(ours, steps[1]), timed(tensors, steps[1])

            rounds = [turn() for _ in range(1 + options.rounds)][1:]
            times = [statistics.median(found) * 1e6 for found in zip(*rounds, strict=True)]
            pairs = ((0, 1), (2, 3), (4, 3))
            ratios = [statistics.median(found[after] / found[before] for found in rounds) for before, after in pairs]
            figures = f"{times[0]:11.0f} {times[1]:8.0f} {ratios[0]:5.2f} {times[2]:7.0f} {times[3]:8.0f}"
            figures += f" {ratios[1]:5.2f} {times[4]:8.0f} {ratios[2]:5.2f}"
            print(f"{kind.__name__:8} {count:12} {figures}", flush=True)


if __name__ == "__main__":
    main()
