"""The estimate: the search over layouts, the recommended one with the reason, and its tables."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from samestep.checks import check_choice, check_number
from samestep.errors import UsageError
from samestep.estimate.costs import (
    GIB,
    STRATEGIES,
    USABLE_SHARE,
    Cluster,
    Memory,
    ParallelPlan,
    StepTime,
    layout_problem,
    needed_memory,
    step_time,
)
from samestep.estimate.trace import StepTraces
from samestep.estimate.workload import Workload
from samestep.text import counted, make_console

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

    layout: ParallelPlan
    memory: Memory
    time: StepTime
    fits: bool


@dataclass(frozen=True)
class Search:
    """Layouts of a workload on a cluster; made by `make_search`."""

    traces: StepTraces
    cluster: Cluster
    request: Request
    dtype_bits: int  # of products' inputs
    slowness: float

    def evaluate(self, layout: ParallelPlan) -> Candidate:
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

    def _layouts(self, checkpointing: bool, num_blocks: int) -> Iterator[ParallelPlan]:
        """From the simplest on; the numbers of microbatches are still open."""
        request, count = self.request, self.cluster.num_devices
        is_mixed = request.precision != "32-true"
        whole = ParallelPlan(count, count, request.batch_size, is_checkpointed=checkpointing, is_mixed=is_mixed)
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
    search = Search(StepTraces(workload, not kind.is_cpu, precision), cluster, request, 16 if is_half else 32, 1.0)
    if request.rate is None:
        return search
    layout = ParallelPlan(
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


def _staged(layout: ParallelPlan, stages: int) -> ParallelPlan:
    data = max(1, layout.data // stages)
    return replace(layout, data=data, num_microbatches=data, pipe=stages)


LEAST_GAIN = 1.25  # from which on fewer microbatches are advised
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a training on a cluster."""

    workload: Workload
    num_parameters: int
    flops: float  # of a sample's forward and backward
    cluster: Cluster
    request: Request
    candidates: Sequence[Candidate]  # from the simplest on
    chosen: Candidate
    reason: str
    advice: Sequence[str]

    def rate(self, candidate: Candidate) -> float:
        """The workload's units a second, of all devices together."""
        return candidate.layout.batch_size * self.workload.units / candidate.time.step

    def as_json(self) -> dict[str, Any]:
        """The object that `samestep estimate --json` prints: bytes, seconds, and units a second."""
        return {
            "model": self.workload.name,
            "parameters": self.num_parameters,
            "flops_per_sample": self.flops,
            "devices": {
                "kind": self.cluster.kind.name,
                "count": self.cluster.num_devices,
                "nodes": self.cluster.num_nodes,
                "memory": self.cluster.kind.memory_bytes,
            },
            "asked": asdict(self.request),
            "unit": self.workload.unit,
            "fits": self.chosen.fits,
            "recommended": self._row(self.chosen),
            "reason": self.reason,
            "advice": list(self.advice),
            "candidates": [self._row(candidate) for candidate in self.candidates],
        }

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "strategy": candidate.layout.strategy,
            **asdict(candidate.layout),
            "fits": candidate.fits,
            "memory": candidate.memory.as_json(),
            "seconds": candidate.time.as_json(),
            "units_per_second": self.rate(candidate),
        }


def estimate(workload: Workload, cluster: Cluster, request: Request) -> Estimate:
    """Estimates a training and recommends a layout; no device is touched, and nothing of the model's size allocated.

    Raises `UsageError` for impossible options, or a model that cannot be traced without data.
    """
    _check(request)
    search = make_search(workload, cluster, request)
    candidates = search.candidates()
    chosen = best_of(candidates)
    trace = search.traces.at(chosen.layout.microbatch_size, chosen.layout.is_checkpointed)
    return Estimate(
        workload=workload,
        num_parameters=trace.num_parameters,
        flops=float(trace.operations[:, 0].sum()) / chosen.layout.microbatch_size,
        cluster=cluster,
        request=request,
        candidates=candidates,
        chosen=chosen,
        reason=_reason(candidates, chosen, cluster),
        advice=_speed_advice(search, chosen) if chosen.fits else _memory_advice(search, chosen),
    )


def in_gib(num_bytes: float) -> str:
    """`1.5 GiB`, or MiB below a tenth of a GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _check(request: Request) -> None:
    sizes = {"--global-batch-size": request.batch_size, "--num-microbatches": request.num_microbatches}
    for option, value in {**sizes, "--mesh pipe": request.pipe}.items():
        if value is not None:
            check_number(option, value, 1)
    choices = (("--precision", request.precision, PRECISIONS), ("--strategy", request.strategy, STRATEGIES))
    for option, name, names in choices:
        if name is not None:
            check_choice(option, name, names)
    if request.pipe is not None and (request.strategy not in (None, "pipeline") or request.shard_optimizer):
        other = "--shard-optimizer" if request.shard_optimizer else f"--strategy {request.strategy}"
        raise UsageError(f"got --mesh pipe and {other}; pipe goes with --strategy pipeline alone")
    if request.rate is not None:
        check_number("--rate", request.rate, above=0, whole=False)


def _reason(candidates: Sequence[Candidate], chosen: Candidate, cluster: Cluster) -> str:
    """Why this layout, in a sentence."""
    layout, total = chosen.layout, chosen.memory.total
    recomputed = ", each block recomputed in the backward" if layout.is_checkpointed else ""
    if not chosen.fits:
        lacking = in_gib(total - USABLE_SHARE * cluster.kind.memory_bytes)
        nearest = f"{layout.strategy}{recomputed} comes nearest"
        return f"nothing fits: {nearest}, and lacks {lacking} of {in_gib(total)} on each device"
    fitting = [candidate for candidate in candidates if candidate.fits]
    too_large = next((each for each in candidates[: candidates.index(chosen)] if not each.fits), None)
    if len(candidates) == 1:
        why = "it fits, as asked for"
    elif len(fitting) == 1:
        why = "nothing else fits"
    elif chosen is candidates[0]:
        is_fastest = chosen.time.step <= min(candidate.time.step for candidate in fitting)
        margin = f"none is faster by {100 * (SIMPLER_IF_WITHIN - 1):.0f} %"
        why = f"it is the simplest, and {'the fastest' if is_fastest else margin}"
    else:
        why = "the fastest that fits"
        if too_large is not None:
            why += f"; {too_large.layout.strategy} would take {in_gib(too_large.memory.total)} a device"
    microbatches = counted(layout.num_microbatches, "microbatch")
    return f"{layout.strategy}, {microbatches} of {layout.microbatch_size}{recomputed}: {why}"


def _memory_advice(search: Search, chosen: Candidate) -> list[str]:
    """Changes that would make it fit."""
    request, layout, kind = search.request, chosen.layout, search.cluster.kind
    found = ["more devices (sharded state is divided among them), devices with more memory, or a smaller model"]
    if request.precision == "32-true" and kind.has_bfloat16:
        found.append("--precision bf16-mixed halves most activations")
    if layout.microbatch_size > 1 and request.num_microbatches is not None:
        count = min(2 * layout.num_microbatches, layout.batch_size)
        found.append(f"smaller microbatches: --num-microbatches {count}; activations shrink")
    if request.strategy is not None or request.pipe is not None:
        found.append("other strategies were ruled out by the options given")
    return found


def _speed_advice(search: Search, chosen: Candidate) -> list[str]:
    """The limits of the chosen layout."""
    kind, time, layout = search.cluster.kind, chosen.time, chosen.layout
    fewest = search.evaluate(replace(layout, num_microbatches=layout.data))
    times = time.step / fewest.time.step
    is_small = fewest.fits and times > LEAST_GAIN
    small = "fewer microbatches, since most of their time is the fixed cost of operations"
    spare = kind.memory_bytes - chosen.memory.total
    lacks_bfloat16 = search.request.precision == "bf16-mixed" and not kind.has_bfloat16
    waiting = f"{100 * time.exposed / time.step:.0f} % of a step waits for the exchange"
    advice = {
        f"{kind.name} multiplies bfloat16 at the rate of float32; --precision 16-mixed is faster": lacks_bfloat16,
        f"{waiting}: a larger batch, fewer devices, or a faster link": time.exposed > 0.1 * time.step,
        "the pipeline idles while it fills and drains: use a larger batch": time.bubble > 0.1 * time.step,
        f"{small}: --num-microbatches {layout.data} makes a step {times:.1f} times as fast, with other bits": is_small,
        f"only {in_gib(max(spare, 0))} are left on each device: try it on one": spare < 0.1 * kind.memory_bytes,
    }
    return [text for text, applies in advice.items() if applies]


MAX_LAYOUTS = 12


def print_estimate(estimate: Estimate) -> None:
    """Prints the tables, the recommendation and the advice."""
    console = make_console()
    request, cluster = estimate.request, estimate.cluster
    size = f"{estimate.num_parameters:,} parameters, {_flops(estimate.flops)} a sample"
    console.print(f"{estimate.workload.name}: {size}", markup=False)
    batch = f"global batch {request.batch_size:,}, {request.precision}"
    console.print(f"{cluster}, {cluster.kind.memory_gib:g} GiB each; {batch}", markup=False)
    for table in (_layouts_table(estimate), _memory_table(estimate.chosen)):
        console.print()
        console.print(table)
    console.print()
    console.print(f"{'→' if estimate.chosen.fits else '✗'} {estimate.reason}", markup=False)
    for line in estimate.advice:
        console.print(f"  · {line}", markup=False)


def _table(*left: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=0)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _layouts_table(estimate: Estimate) -> Table:
    """The layouts that fit, and others as far as there is room; an arrow marks the recommended one."""
    room = max(0, MAX_LAYOUTS - sum(candidate.fits for candidate in estimate.candidates))
    others = [c for c in estimate.candidates if not c.fits and c is not estimate.chosen][:room]
    shown = [c for c in estimate.candidates if c.fits or c is estimate.chosen or c in others]
    columns = ("memory", "step", f"{estimate.workload.unit}/s", "exposed", "fits")
    table = _table("", "strategy", "microbatches", right=columns)
    for candidate, step in zip(shown, _in_one_unit([each.time.step for each in shown]), strict=True):
        layout = candidate.layout
        table.add_row(
            "→" if candidate is estimate.chosen else "",
            escape(_name(layout) + ", checkpointed" * layout.is_checkpointed),
            f"{layout.num_microbatches} of {layout.microbatch_size}",
            in_gib(candidate.memory.total),
            step,
            _rate(estimate.rate(candidate)),
            f"{100 * candidate.time.exposed / candidate.time.step:.0f} %",
            "yes" if candidate.fits else "no",
        )
    return table


def _memory_table(chosen: Candidate) -> Table:
    table = _table("memory of the fullest device", right=(f"in the {chosen.memory.phase}",))
    for name, value in chosen.memory.rows():
        table.add_row(name, in_gib(value))
    table.add_section()
    table.add_row("total", in_gib(chosen.memory.total))
    return table


def _in_one_unit(times: Sequence[float]) -> list[str]:
    """Seconds as `12.34 s` or `1,234.5 ms`: all in one unit, the shortest to three digits."""
    shortest = min(times, default=1.0)
    unit, scale = ("s", 1) if shortest >= 1 else ("ms", 1000)
    digits = max(0, 2 - math.floor(math.log10(scale * shortest)))
    return [f"{scale * time:,.{digits}f} {unit}" for time in times]


def _name(layout: ParallelPlan) -> str:
    return layout.mesh if layout.pipe > 1 else layout.strategy


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _flops(count: float) -> str:
    """`532 TFLOP`, in the largest unit of which there is one."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:,.0f} FLOP"
