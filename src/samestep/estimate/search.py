"""The search over layouts: memory and time of each, and the one to take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from samestep.errors import UsageError
from samestep.estimate.hardware import Cluster
from samestep.estimate.layout import STRATEGIES, Layout, layout_problem
from samestep.estimate.memory import USABLE_SHARE, Memory, needed_memory
from samestep.estimate.step_time import StepTime, step_time
from samestep.estimate.trace import Traces
from samestep.estimate.workload import Workload

SIMPLER_IF_WITHIN = 1.05  # a simpler layout is taken if the fastest is not faster by more
STAGES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Request:
    """The options of an estimate; those that are None are searched."""

    batch_size: int
    precision: str = "32-true"
    num_microbatches: int | None = None
    strategy: str | None = None
    shard_optimizer: bool | None = None
    pipe: int | None = None
    checkpointing: bool | None = None
    rate: float | None = None  # measured: units a second on one such device


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory on the fullest device and its time."""

    layout: Layout
    memory: Memory
    time: StepTime
    fits: bool


@dataclass(frozen=True)
class Search:
    """Layouts of a workload on a cluster; made by `make_search`."""

    traces: Traces
    cluster: Cluster
    request: Request
    dtype_bits: int  # of products' inputs
    slowness: float

    def evaluate(self, layout: Layout) -> Candidate:
        """Memory and time of a layout."""
        kind = self.cluster.kind
        trace = self.traces.at(layout.microbatch_size, layout.is_checkpointed)
        memory = needed_memory(trace, layout, kind)
        time = step_time(trace, layout, self.cluster, self.dtype_bits, self.slowness)
        return Candidate(layout, memory, time, bool(memory.total <= USABLE_SHARE * kind.memory_bytes))

    def candidates(self) -> list[Candidate]:
        """All layouts that the options allow, each with its best number of microbatches; from the simplest on.

        Checkpointed ones are among them if asked for, or if some layout does not fit without.
        """
        asked = self.request.checkpointing
        found = self._with_checkpointing(bool(asked))
        if asked is None and not all(candidate.fits for candidate in found) and self.traces.num_blocks():
            found += self._with_checkpointing(True)
        return found

    def _with_checkpointing(self, checkpointing: bool) -> list[Candidate]:
        found, problems = [], []
        num_blocks = self.traces.num_blocks(checkpointing)
        for layout in self._layouts(checkpointing, num_blocks):
            powers = (layout.data * 2**power for power in range(7))  # up to 64 a group of devices
            counts = [count for count in powers if count <= layout.batch_size] or [layout.data]
            evaluated = []
            for count in counts if self.request.num_microbatches is None else [self.request.num_microbatches]:
                trial = replace(layout, num_microbatches=count)
                problem = layout_problem(trial, self.cluster, num_blocks, self.traces.workload.name)
                if problem is not None:
                    problems.append(problem)
                    break
                evaluated.append(self.evaluate(trial))
            if evaluated:
                found.append(best_of(evaluated))
        if not found:
            raise UsageError(problems[0])
        return found

    def _layouts(self, checkpointing: bool, num_blocks: int) -> Iterator[Layout]:
        """From the simplest on; the numbers of microbatches are still open."""
        request, count = self.request, self.cluster.num_devices
        is_mixed = request.precision != "32-true"
        whole = Layout(count, count, request.batch_size, is_checkpointed=checkpointing, is_mixed=is_mixed)
        if request.pipe is not None:
            yield _staged(whole, request.pipe)
            return
        chosen = STRATEGIES if request.strategy is None else (request.strategy,)
        if "replicate" in chosen:
            if not request.shard_optimizer or count == 1:
                yield whole
            if request.shard_optimizer is not False and count > 1:
                yield replace(whole, is_optimizer_sharded=True)
        if "sharded" in chosen and (count > 1 or request.strategy):
            yield replace(whole, is_sharded=True)
        if "pipeline" in chosen:
            for stages in STAGES:
                if count % stages == 0 and (request.strategy or num_blocks >= stages):
                    yield _staged(whole, stages)


def make_search(workload: Workload, cluster: Cluster, request: Request) -> Search:
    """The search, with the speed of computing from the measurement if there is one."""
    kind, precision = cluster.kind, request.precision
    is_half = precision == "16-mixed" or (precision == "bf16-mixed" and kind.has_bfloat16)
    search = Search(Traces(workload, not kind.is_cpu, precision), cluster, request, 16 if is_half else 32, 1.0)
    if request.rate is None:
        return search
    layout = Layout(
        *(1, request.num_microbatches or min(8, request.batch_size), request.batch_size),
        is_checkpointed=bool(request.checkpointing),
        is_mixed=precision != "32-true",
    )
    trace = search.traces.at(layout.microbatch_size, layout.is_checkpointed)
    estimated = step_time(trace, layout, replace(cluster, num_devices=1, num_nodes=1), search.dtype_bits).step
    return replace(search, slowness=request.batch_size * workload.units / request.rate / estimated)


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest that fits, or a simpler one that is about as fast; if none fits, the smallest."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return min(candidates, key=lambda candidate: candidate.memory.total)
    limit = min(candidate.time.step for candidate in fitting) * SIMPLER_IF_WITHIN
    return next(candidate for candidate in fitting if candidate.time.step <= limit)


def _staged(layout: Layout, stages: int) -> Layout:
    data = max(1, layout.data // stages)
    return replace(layout, data=data, num_microbatches=data, pipe=stages)
