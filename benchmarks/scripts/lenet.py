"""What the LeNet scripts have in common: the model, made-up images, and a clock that prints the median step."""

import json
import statistics
import time

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 256
SKIPPED_STEPS = 4


class LeNet(nn.Module):
    """LeNet-5 for [n, 1, 28, 28]."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)
        )

    def forward(self, images):
        """Scores of the ten classes."""
        return self.classifier(self.features(images))


def made_up_images(num_samples=4096):
    """Images and labels, drawn once and for all."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num_samples, 1, 28, 28, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (num_samples,), generator=generator))


def cpu_seconds():
    """What this process and those beside it, the other ranks, have computed."""
    return sum(sum(process.cpu_times()[:2]) for process in psutil.Process().parent().children())


class Clock:
    """Times steps; prints the median and the processor time of all ranks, which other programs disturb less."""

    def __init__(self):
        self.seconds = []
        self._cpu = 0.0
        self._last = time.perf_counter()

    def tick(self):
        """Ends a step."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        if len(self.seconds) == SKIPPED_STEPS:
            self._cpu = cpu_seconds()

    def report(self):
        """Prints the median step, and the processor time of one, in milliseconds."""
        kept = self.seconds[SKIPPED_STEPS:]
        cpu_ms = (cpu_seconds() - self._cpu) / len(kept) * 1e3
        values = {"step_ms": statistics.median(kept) * 1e3, "cpu_ms": cpu_ms, "num_steps": len(kept)}
        print(json.dumps(values), flush=True)
