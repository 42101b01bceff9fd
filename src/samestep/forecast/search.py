"""The search: every way to lay a model out on the devices, the one to take, and how far it goes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from samestep.errors import UsageError
from samestep.forecast.devices import GIB, Machines
from samestep.forecast.layout import STRATEGIES, Layout, layout_problem
from samestep.forecast.memory import USABLE_SHARE, Memory, needed_memory
from samestep.forecast.speed import StepTime, slowness_of, step_time
from samestep.forecast.subject import Subject
from samestep.forecast.trace import Trace, TraceLine, trace_line

MAX_MICROBATCHES_PER_GROUP = 64
MAX_DEVICES = 1024
SIMPLER_IF_WITHIN = 1.05
MODEL_SIZES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Wish:
    """What the user asked for; None leaves it to the search.

    Attributes:
        batch_size: samples of the global batch.
        precision: "32-true", "bf16-mixed" or "16-mixed".
        num_microbatches: V.
        strategy: one of `STRATEGIES`.
        shard_optimizer: divide the optimizer state.
        tensor: devices that share every matrix.
        pipe: stages.
        checkpointing: recompute the blocks.
        measured_seconds: a step of this batch, measured on one such device.
        rate: units a second, measured on one such device.
    """

    batch_size: int
    precision: str = "32-true"
    num_microbatches: int | None = None
    strategy: str | None = None
    shard_optimizer: bool | None = None
    tensor: int | None = None
    pipe: int | None = None
    checkpointing: bool | None = None
    measured_seconds: float | None = None
    rate: float | None = None


@dataclass(frozen=True)
class Candidate:
    """One way to do it.

    Attributes:
        layout: how.
        memory: of the fullest device.
        time: of a step.
        fits: in the memory of a device, with the share that is lost between pieces.
    """

    layout: Layout
    memory: Memory
    time: StepTime
    fits: bool


@dataclass(frozen=True)
class Point:
    """A point of the scaling curve: the layout of the forecast on another number of devices.

    Attributes:
        num_devices: so many.
        same_batch: with the same global batch, which is the same training; None where it has too few samples.
        larger_batch: with as many samples a device as before, which is another training.
    """

    num_devices: int
    same_batch: Candidate | None
    larger_batch: Candidate


class Search:
    """Traces a model once for each form, and weighs layouts.

    Args:
        subject: what is trained.
        machines: the devices.
        wish: what was asked for.
    """

    def __init__(self, subject: Subject, machines: Machines, wish: Wish) -> None:
        self.subject, self.machines, self.wish = subject, machines, wish
        self._line: Callable[[bool], TraceLine] = cache(self._traced)
        self._at: Callable[[bool, int], Trace] = cache(lambda checkpointing, size: self._line(checkpointing).at(size))
        self.dtype_bits = 16 if self._computes_in_half() else 32
        self._slowness: Callable[[], float] = cache(self._measured_slowness)

    def trace_of(self, layout: Layout) -> Trace:
        """The trace of one of a layout's microbatches."""
        return self._at(layout.is_checkpointed, layout.microbatch_size)

    def weigh(self, layout: Layout, machines: Machines | None = None) -> Candidate:
        """Memory and time of a layout."""
        devices = machines or self.machines
        trace = self.trace_of(layout)
        memory = needed_memory(trace, layout, devices.kind)
        time = step_time(trace, layout, devices, self.dtype_bits, self._slowness())
        return Candidate(layout, memory, time, bool(memory.total <= USABLE_SHARE * devices.kind.memory_bytes))

    def candidates(self, machines: Machines | None = None, checkpointing: bool | None = None) -> list[Candidate]:
        """Every layout that was not ruled out, the fastest number of microbatches for each; checkpointed only if need be.

        Raises:
            UsageError: no layout is possible, with why the first is not.
        """
        devices = machines or self.machines
        asked = self.wish.checkpointing if checkpointing is None else checkpointing
        found = self._weighed(devices, bool(asked))
        if asked is None and not all(candidate.fits for candidate in found) and self._line(False).few.num_blocks:
            found += self._weighed(devices, True)
        return found

    def best(self, candidates: Sequence[Candidate]) -> Candidate:
        """The fastest that fits, or a simpler one that is as fast; of those that do not fit the smallest."""
        fitting = [candidate for candidate in candidates if candidate.fits]
        if not fitting:
            return min(candidates, key=lambda candidate: candidate.memory.total)
        limit = min(candidate.time.step for candidate in fitting) * SIMPLER_IF_WITHIN
        return next(candidate for candidate in fitting if candidate.time.step <= limit)

    def curve(self, chosen: Candidate) -> list[Point]:
        """The layout on 1, 2, 4 … 1,024 groups of devices, and on those that were asked for."""
        layout = chosen.layout
        model = layout.tensor * layout.pipe
        counts = {model * 2**power for power in range(11) if model * 2**power <= MAX_DEVICES} | {layout.num_devices}
        return [self._point(layout, count // model, count) for count in sorted(counts)]

    def fitting_devices(self) -> Candidate | None:
        """The least power of two of such devices, up to 1,024, on which it fits; None if it never does."""
        count = 2 * self.machines.num_devices
        while count <= MAX_DEVICES:
            enlarged = replace(self.wish, batch_size=max(self.wish.batch_size, count), num_microbatches=None)
            search = Search(self.subject, self.machines.resized(count), enlarged)
            search._line, search._at = self._line, self._at
            search._slowness = self._slowness
            best = search.best(search.candidates())
            if best.fits:
                return best
            count *= 2
        return None

    def _point(self, layout: Layout, data: int, count: int) -> Point:
        machines = self.machines.resized(count)
        microbatches = max(layout.num_microbatches, data)
        same = None
        if data <= layout.batch_size and microbatches <= layout.batch_size:
            same = self.weigh(replace(layout, data=data, num_microbatches=microbatches), machines)
        size = max(1, layout.batch_size * data // layout.data)
        per_group = max(1, min(layout.microbatches_per_group, size // data))
        larger = replace(layout, data=data, num_microbatches=data * per_group, batch_size=max(size, data * per_group))
        return Point(count, same, self.weigh(larger, machines))

    def _weighed(self, machines: Machines, checkpointing: bool) -> list[Candidate]:
        found, problems = [], []
        for layout in self._layouts(machines, checkpointing):
            best, problem = self._best_microbatches(layout, machines)
            if best is not None:
                found.append(best)
            elif problem is not None:
                problems.append(problem)
        if not found:
            raise UsageError(problems[0])
        return found

    def _best_microbatches(self, layout: Layout, machines: Machines) -> tuple[Candidate | None, str | None]:
        """The fastest number of microbatches that fits, else that which takes least memory."""
        weighed, problem = [], None
        for num_microbatches in self._numbers_of_microbatches(layout):
            trial = replace(layout, num_microbatches=num_microbatches)
            problem = layout_problem(trial, machines, self._line(layout.is_checkpointed).few, self.subject.name)
            if problem is not None:
                break
            weighed.append(self.weigh(trial, machines))
        return (self.best(weighed) if weighed else None), problem

    def _numbers_of_microbatches(self, layout: Layout) -> Iterator[int]:
        if self.wish.num_microbatches is not None:
            yield self.wish.num_microbatches
            return
        per_group = 1
        while per_group == 1 or (
            per_group <= MAX_MICROBATCHES_PER_GROUP and layout.data * per_group <= layout.batch_size
        ):
            yield layout.data * per_group
            per_group *= 2

    def _layouts(self, machines: Machines, checkpointing: bool) -> Iterator[Layout]:
        """From the simplest on."""
        wish, count = self.wish, machines.num_devices
        is_mixed = wish.precision != "32-true"

        def layout(tensor: int = 1, pipe: int = 1, **options: Any) -> Layout:
            data = max(1, count // (tensor * pipe))
            microbatches = data
            return Layout(
                data,
                microbatches,
                wish.batch_size,
                tensor,
                pipe,
                is_checkpointed=checkpointing,
                is_mixed=is_mixed,
                **options,
            )

        if wish.strategy is not None and wish.strategy not in STRATEGIES:
            raise UsageError(f"got --strategy {wish.strategy!r}; it is one of {', '.join(STRATEGIES)}")
        fixed = (wish.tensor or 1) * (wish.pipe or 1)
        if wish.tensor is not None or wish.pipe is not None:
            yield layout(
                wish.tensor or 1,
                wish.pipe or 1,
                is_sharded=wish.strategy == "sharded",
                is_optimizer_sharded=bool(wish.shard_optimizer) and wish.strategy != "sharded" and count > fixed,
            )
            return
        chosen = STRATEGIES if wish.strategy is None else (wish.strategy,)
        if "replicate" in chosen:
            if not wish.shard_optimizer or count == 1:
                yield layout()
            if wish.shard_optimizer is not False and count > 1:
                yield layout(is_optimizer_sharded=True)
        if "sharded" in chosen and (count > 1 or wish.strategy):
            yield layout(is_sharded=True)
        sizes = [size for size in MODEL_SIZES if size <= count and count % size == 0]
        trace = self._line(checkpointing).few
        if "tensor" in chosen:
            fitting = [size for size in sizes if size <= machines.per_node]
            yield from (layout(tensor=size) for size in fitting if wish.strategy or trace.tensor_divisors)
        if "pipeline" in chosen:
            yield from (layout(pipe=size) for size in sizes if wish.strategy or trace.num_blocks >= size)

    def _traced(self, checkpointing: bool) -> TraceLine:
        return trace_line(self.subject, not self.machines.kind.is_cpu, self.wish.precision, checkpointing)

    def _computes_in_half(self) -> bool:
        kind, precision = self.machines.kind, self.wish.precision
        return precision == "16-mixed" or (precision == "bf16-mixed" and kind.has_bfloat16)

    def _measured_slowness(self) -> float:
        wish = self.wish
        seconds = wish.measured_seconds
        if wish.rate is not None:
            seconds = wish.batch_size * self.subject.units / wish.rate
        if seconds is None:
            return 1.0
        layout = Layout(1, wish.num_microbatches or min(8, wish.batch_size), wish.batch_size)
        layout = replace(layout, is_checkpointed=bool(wish.checkpointing), is_mixed=wish.precision != "32-true")
        return slowness_of(self.trace_of(layout), layout, self.machines, self.dtype_bits, seconds)


def in_gib(num_bytes: float) -> str:
    """`1.5 GiB`, or MiB where that is less than a tenth."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
