"""What does reading a batch sample by sample cost, by a run's loader and by torch's DataLoader?

    python benchmarks/reading.py [--microbatches 1 8] [--rounds 15]

Rounds of both take turns in one process, without workers; a round is an epoch of the data of workload W2, shuffled.
Shown are the medians of the rounds, microseconds a batch, and the median of the rounds' ratios. Datasets: rows of
tensors, which can draw nothing; the same after a call of a function, which might, so that each sample is seeded; and
samples with noise from torch's generator.
"""

import argparse
import statistics
import time
from itertools import starmap

import torch
from torch.utils.data import DataLoader
from workloads import WORKLOADS, Samples

import samestep

STEPS = 32


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


def seconds(loader):
    """Seconds a batch in one epoch."""
    start = time.perf_counter()
    count = sum(1 for _ in loader)
    return (time.perf_counter() - start) / count


def main():
    """Measures each dataset with each number of microbatches, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    workload = WORKLOADS["W2"]
    batch_size = workload.global_batch_size
    print(f"{'dataset':8} {'microbatches':>12} {'DataLoader':>11} {'samestep':>9} {'ratio':>6}")
    for kind in (Samples, Called, Noisy):
        dataset = kind(*workload.data(STEPS))
        for count in options.microbatches:
            run = samestep.Run(batch_size, count, seed=0)
            loaders = DataLoader(dataset, batch_size, shuffle=True), run.loader(dataset, shuffle=True)
            rounds = [tuple(map(seconds, loaders)) for _ in range(1 + options.rounds)][1:]
            plain, ours = (statistics.median(found) * 1e6 for found in zip(*rounds, strict=True))
            ratio = statistics.median(starmap(lambda before, after: after / before, rounds))
            print(f"{kind.__name__:8} {count:12} {plain:11.0f} {ours:9.0f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
