"""Models that tests estimate, and their real peak of memory as PyTorch's profiler counts it."""

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

import samestep
from samestep.estimate.trace import checkpoint_blocks
from samestep.estimate.workload import OPTIMIZERS, Workload, repeated_blocks


class Layer(nn.Module):
    """A feed-forward block: `[N, width]` in and out."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self, width=64, layers=4):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(layers))
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Pictures(nn.Sequential):
    """A small convolutional network with BatchNorm, pooling and dropout."""

    def __init__(self):
        super().__init__(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 64, 10)),
        )


def class_loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def workload(build, *shape, optimizer="adamw", **options):
    """A model that takes samples of this shape, and classes."""

    def make_batch(count):
        return torch.zeros(count, *shape), torch.zeros(count, dtype=torch.int64)

    return Workload("model", build, class_loss, make_batch, optimizer=optimizer, **options)


def stack(**options):
    return workload(lambda: Stack(**options), 16)


def pictures():
    return workload(Pictures, 3, 16, 16, optimizer="sgd", settings={"momentum": 0.9})


def plain_stack():
    """Twelve layers of 1024 × 1024 that learn the identity."""

    def loss(model, batch):
        return functional.mse_loss(model(batch), batch)

    def build():
        return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(12)))

    return Workload("model", build, loss, lambda count: torch.zeros(count, 1024), optimizer="adamw")


def measured_peak(trained, batch_size, num_microbatches, checkpointing=False):
    """Bytes that the CPU's allocator has handed out at most from the second of three real steps on.

    In it the whole gradient of the last microbatch lies beside the sums, and the optimizer has its state.
    """
    batch = trained.make_batch(batch_size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = trained.build()
        if checkpointing:
            checkpoint_blocks("model", repeated_blocks(model))
        run = samestep.Run(batch_size, num_microbatches, 0, num_threads=torch.get_num_threads())
        optimizer = OPTIMIZERS[trained.optimizer](model.parameters(), lr=1e-4, **trained.settings)
        step = run.train_step(model, optimizer, trained.loss)
        for number in range(3):
            with record_function(f"step {number}"):
                step(batch)
    events = profiler.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == "step 1")
    total = peak = 0
    for start, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        total += size
        peak = max(peak, total if start >= begin else 0)
    return peak
