"""What stands in for CUDA graphs on a CPU: the same Python again, writing where the first run wrote; and models."""

import torch
from engine_programs import mean_squared, squared, table
from torch import nn

from samestep.engine.buffers import COMPARED_ELEMENTS
from samestep.engine.graphs import MicrobatchGraphs
from samestep.engine.losses import Mean, MicrobatchLoss


class Rerun:
    """Records by keeping the function; a replay fills the memory of the recorded run, as that of a CUDA graph does.

    It moves no version of a buffer and leaves every buffer's place as it was. Outputs hold NaN before a replay.
    """

    def __init__(self, step):
        self.step = step
        self.num_runs = 0
        self.num_replays = 0

    def warm_up(self, run):
        self.num_runs += 1
        run()

    def record(self, run):
        self.num_runs += 1
        parameters = self.step._layout.gradients.parameters
        places = self.step._layout.buffers._places
        starts = [place.get() for place in places]
        loss = run()
        outputs = [parameter.grad for parameter in parameters]
        ends = [place.get() for place in places]
        count = loss.count.clone() if isinstance(loss.count, torch.Tensor) else loss.count
        loss = MicrobatchLoss(torch.full_like(loss.value, torch.nan), loss.weight, count)
        for output in outputs:
            if output is not None:
                output.fill_(torch.nan)

        def replay():
            self.num_replays += 1
            versions = [-1 if start is None else start._version for start in starts]
            for parameter in parameters:
                parameter.grad = None
            again = run()
            fill([loss.value], [again.value])
            if isinstance(loss.count, torch.Tensor):
                fill([loss.count], [again.count])
            fill(outputs, [parameter.grad for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None
            for place, start, end, version in zip(places, starts, ends, versions, strict=True):
                if end is not start:
                    fill([end], [place.get()])
                    place.put(start)
                if start is not None:
                    torch._C._autograd._unsafe_set_version_counter((start,), (version,))

        return replay, loss


def fill(targets, sources):
    """Writes without a trace."""
    for target, source in zip(targets, sources, strict=True):
        assert (target is None) == (source is None)
        if target is not None:
            target.data.copy_(source)


def with_graphs(step, length):
    """Lets a step on a CPU run its microbatches by what stands in for CUDA graphs; returns that."""
    recorders = []

    def make(device):
        recorders.append(Rerun(step))
        return recorders[-1]

    step.microbatches.graphs = MicrobatchGraphs(length, torch.device("cpu"), make)
    return recorders


class Replacing(nn.Module):
    """Counts its calls in a buffer that it replaces, and in one that it writes to and that is too large to compare."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 1)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("writes", torch.zeros(COMPARED_ELEMENTS + 1))
        self.register_buffer("unused", None)

    def forward(self, x):
        self.calls = self.calls + 1
        self.writes.add_(2)
        return self.linear(x) * (1 + self.calls) + self.writes[0]


def dropping():
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def tokens(model, batch):
    """A sum and a count that depends on the values."""
    losses = squared(model, batch)
    chosen = batch[0][:, 0] > 0
    return Mean((losses * chosen).sum(), chosen.sum())


def shares(model, batch, counts):
    return squared(model, batch).sum() / counts["samples"]


def counting_from_one(model, ids):
    """A loss that writes to its microbatch, and cannot be given what it wrote."""
    return model(ids.sub_(1)).square().sum(1)


def sized(batch):
    return {"samples": len(batch[0])}


CASES = {
    "batchnorm-and-dropout": {},
    "a-loss-a-sample": {"loss": squared},
    "counts-on-the-device": {"loss": tokens},
    "global-counts": {"loss": shares, "counts_fn": sized},
    "buffers-replaced": {"model_fn": Replacing},
    "a-loss-that-writes-to-its-microbatch": {
        "model_fn": lambda: nn.Embedding(3, 4),
        "loss": counting_from_one,
        "data": torch.arange(42) % 3 + 1,
    },
    "one-microbatch": {"num_microbatches": 1},
    "two-sizes": {"num_microbatches": 3},
    "more-microbatches-than-samples": {"num_microbatches": 32, "model_fn": dropping},
    "bf16": {"precision": "bf16-mixed"},
    "fp16-scaled": {"precision": "16-mixed", "epochs": 2},
    "clipped": {"max_grad_norm": 0.1},
    "dicts": {
        "data": dict(zip("xy", table(42), strict=True)),
        "loss": lambda model, batch: mean_squared(model, (batch["x"], batch["y"])),
    },
}
