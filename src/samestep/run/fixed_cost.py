"""A hint for runs with microbatches too small for their device: most of their time is the fixed cost of operations.

A kernel on few samples costs what it takes to start it. The cost of an operation's forward and backward is measured on
tensors of one element, and multiplied by the operations in the graph of a microbatch: so nothing of the user's runs
once more, and no generator is touched.

On a GPU the host's times tell nothing: it runs ahead, or, with about a thousand kernels queued, is held up by them.
There two microbatches of the last step are measured, each after a wait for the device: the first shows how long the
host takes to queue its kernels; the second is queued behind a pause, so that its kernels run without gaps, and events
show how long the device takes. Only if the host takes longer is there a fixed cost.
"""

import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samestep.data.batch import Batch
from samestep.engine.forward_backward import graph_nodes
from samestep.engine.losses import MicrobatchLoss
from samestep.engine.observer import StepObserver
from samestep.engine.result import StepResult
from samestep.text import counted

if TYPE_CHECKING:
    from samestep.engine.step import TrainStep

FIRST_STEP, LAST_STEP = 4, 16  # those measured: after the first ones, which are watched and warm up
LEAST_GAIN = 1.25
LEAST_SHARE = 0.7  # of a step that the microbatches must take
NUM_LAYERS, NUM_ROUNDS = 8, 10
CYCLES_A_SECOND, MOST_PAUSE = 2e9, 0.2  # the clock of a GPU, at most; seconds


class FixedCost(StepObserver):
    """Prints, once in a run, which number of microbatches would be faster, if much; or how long compiling took."""

    reads_gradients = False

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._inside: list[float] = []  # seconds from a batch to the exchange
        self._computing: list[float] = []  # of them, in the forward and backward of one microbatch
        self._began, self._forward_began = 0.0, 0.0
        self._num_own, self._num_nodes = 0, 0
        self._gpu: torch.device | None = None  # in the step in which two microbatches are measured on it
        self._host = 0.0  # seconds in which the host queued the first of them
        self._events: list[torch.Event] = []  # around the second on the device

    def on_step(self, step: "TrainStep", batch: Any) -> None:
        """Notes when a step begins."""
        self._starts.append(time.perf_counter())
        device = step.communicator.device
        self._gpu = device if device.type == "cuda" and len(self._starts) == LAST_STEP else None

    def on_batch(self, batch: Batch) -> None:
        """Notes when the microbatches begin."""
        self._began, self._num_own = time.perf_counter(), len(batch.microbatches)

    def on_phase(self, phase: str) -> None:
        """Notes when a forward begins, and when all microbatches have ended."""
        if phase == "forward":
            if self._gpu is not None and len(self._events) < 2:
                self._begin_measured(self._gpu)
            self._forward_began = time.perf_counter()
        elif phase == "exchange":
            self._inside.append(time.perf_counter() - self._began)

    def on_loss(self, index: int, loss: MicrobatchLoss) -> None:
        """Counts the operations of one microbatch."""
        if self._num_nodes == 0:
            self._num_nodes = len(graph_nodes([loss.value]))

    def on_gradients(self, index: int | None) -> None:
        """Notes when a backward has ended."""
        if index is None:
            return
        self._computing.append(time.perf_counter() - self._forward_began)
        if self._gpu is not None and self._host == 0:
            self._host = self._computing[-1]
        elif self._gpu is not None and len(self._events) == 1:
            self._events.append(self._record(self._gpu))

    def on_update(self, step: "TrainStep", result: StepResult) -> None:
        """Forgets what the first steps took; prints the line after the last one, and leaves."""
        if len(self._starts) <= FIRST_STEP:
            self._inside, self._computing = [], []
        if len(self._starts) < LAST_STEP:
            return
        step.observers.remove(self)
        if step.config.compile and self._computing:
            step.membership.notice(self._describe_compiled())
        elif self._num_own > 1:
            self._hint(step, result.num_samples)

    def _begin_measured(self, device: torch.device) -> None:
        """Lets the device end what is queued; before the second microbatch it then pauses until that is queued."""
        torch.cuda.synchronize(device)
        if self._host > 0:
            torch.cuda._sleep(int(min(2 * self._host, MOST_PAUSE) * CYCLES_A_SECOND))
            self._events.append(self._record(device))

    def _record(self, device: torch.device) -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _fixed_on_gpu(self) -> float:
        """The seconds by which the host needs longer for a microbatch than the device."""
        if len(self._events) < 2:
            return 0.0
        first, last = self._events
        last.synchronize()
        on_device: float = first.elapsed_time(last) / 1e3
        return max(0.0, self._host - on_device)

    def _hint(self, step: "TrainStep", num_samples: int) -> None:
        """Prints the line if fewer microbatches would be much faster."""
        # With one microbatch a device a step would lack the fixed cost of all but one of those that it has now.
        whole = median(later - earlier for earlier, later in pairwise(self._starts[FIRST_STEP:]))
        inside, computing = median(self._inside), median(self._computing)
        if self._gpu is not None:
            fixed = min(self._fixed_on_gpu(), computing)
        else:
            fixed = min(self._num_nodes * seconds_of_operation(step.communicator.device), computing)
            # What a microbatch costs beside its operations.
            fixed += max(0.0, inside / self._num_own - computing)
        rest = whole - (self._num_own - 1) * fixed
        if inside < LEAST_SHARE * whole or whole < LEAST_GAIN * rest:
            return
        membership = step.membership
        num_devices = len([one for one in membership.ranges if one])
        size = -(-num_samples // membership.num_microbatches)
        membership.notice(
            f"microbatches of {counted(size, 'sample')} are small for this device: about "
            f"{100 * fixed * self._num_own / inside:.0f}% of their time is the fixed cost of operations. "
            f"num_microbatches={num_devices} would make a step about {whole / rest:.1f} times as fast on "
            f"{counted(num_devices, 'device')}; it is another contract, with other bits"
        )

    def _describe_compiled(self) -> str:
        """The time that compiling took, beside that of a microbatch."""
        later = self._starts[FIRST_STEP:]
        usual = (later[-1] - later[0]) / (len(later) - 1)
        took = self._starts[FIRST_STEP] - self._starts[0] - FIRST_STEP * usual
        return (
            f"torch.compile took {max(0.0, took):.1f} s of the first steps; a microbatch now takes "
            f"{1e3 * median(self._computing):.2f} ms. If that is well below 1 ms, compare with a run without compile: "
            "a call of compiled code has a cost of its own"
        )


def seconds_of_operation(device: torch.device) -> float:
    """The seconds that the forward and backward of an operation take the host, on one element."""
    one = torch.ones(1, 1, device=device)
    layer = nn.utils.skip_init(nn.Linear, 1, 1, device=device)  # draws nothing
    seconds, count = [], 1
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        value = one
        for _ in range(NUM_LAYERS):
            value = layer(value).relu()
        torch.autograd.grad(value.sum(), tuple(layer.parameters()))
        seconds.append(time.perf_counter() - start)
        count = len(graph_nodes([value])) + 1
    return median(seconds) / count
