"""Programs whose memory is limited while they take a step: on a rank of a world, or `memory_programs.py PHASE …`."""

import ctypes
import os
import resource
import sys
from contextlib import contextmanager

import torch
from torch import nn

from samestep.checkpoint.digest import state_digest
from samestep.run.run import Run

MIB = 2**20
BATCH = 64
ROOM = 200 * MIB  # above what the process has; buffers of threads and connections are in it


@contextmanager
def limited(room):
    """Lets this process have so many bytes more of its GPU, or of address space on a CPU, and no others.

    What is freed is given back at once (a threshold of mallopt that does not move), else limits would depend on holes.
    """
    if os.environ.get("SAMESTEP_TEST_DEVICE") == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    threshold = -3  # M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(threshold, 128 * 1024)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Asking(torch.autograd.Function):
    """Asks for memory that nobody writes to, in forward or in backward: no page of it is ever there."""

    @staticmethod
    def forward(ctx, x, phase, size):
        ctx.phase, ctx.size = phase, size
        if phase == "forward":
            torch.empty(size, dtype=torch.uint8, device=x.device)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.phase == "backward":
            torch.empty(ctx.size, dtype=torch.uint8, device=gradient.device)
        return gradient, None, None


class Hungry(nn.Module):
    """Needs so many bytes a sample, before its last layer in backward: buckets of that one are on their way."""

    def __init__(self, phase, sample_bytes, norm=True):
        super().__init__()
        self.phase, self.sample_bytes = phase, sample_bytes
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(64) if norm else nn.Identity()

    def forward(self, x):
        hidden = Asking.apply(self.norm(self.first(x)), self.phase, len(x) * self.sample_bytes)
        return self.last(torch.relu(hidden))


def square(model, batch):
    """A loss."""
    return model(batch).square().mean()


def run_short(communicator, phases, sample_mib=32, norm=True, strategy="replicate"):
    """A step for which the memory of some ranks (those with a phase) does not suffice, and another after it.

    Returns the errors' classes and messages, and whether the state was as before.
    """
    run = Run(BATCH, 4, communicator=communicator)
    phase = phases[run.rank]
    model = Hungry(phase, 0, norm)
    optimizer = torch.optim.Adam(model.parameters())
    step = run.train_step(model, optimizer, square, bucket_bytes=1024, strategy=strategy)
    samples = torch.randn(BATCH, 8)
    step(samples[:8])  # what is made once is there
    before, said = state_digest(step), []
    with limited(ROOM):
        model.sample_bytes = sample_mib * MIB if phase else 0
        for _ in range(2):
            try:
                step(samples)
            except Exception as error:
                said.append((type(error).__name__, str(error)))
                if run.world_size > 1:
                    raise
    return said, state_digest(step) == before and step.num_steps == 1


class Stateful(torch.optim.SGD):
    """An optimizer that needs much memory for its state."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                much = torch.empty(2 * ROOM, dtype=torch.uint8, device=parameter.device)
                self.state[parameter].setdefault("much", much)
        return super().step(closure)


def run_update(communicator):
    """An optimizer whose state does not fit in its first step; what it says, and what a second attempt says."""
    run = Run(BATCH, 1, communicator=communicator)
    model = nn.Linear(8, 8, bias=False)
    step = run.train_step(model, Stateful(model.parameters(), lr=0.1), square)
    samples = torch.randn(BATCH, 8)
    said = []
    with limited(ROOM):
        for _ in range(2):
            try:
                step(samples)
            except Exception as error:
                said.append((type(error).__name__, str(error)))
    return said


if __name__ == "__main__":
    run_short(None, [None if phase == "-" else phase for phase in sys.argv[2:]], strategy=sys.argv[1])
