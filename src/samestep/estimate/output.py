"""The estimate in the terminal: the layouts, and the memory of the chosen one."""

import math
from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from samestep.estimate.estimate import Estimate, in_gib
from samestep.estimate.layout import Layout
from samestep.estimate.search import Candidate
from samestep.text import make_console

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


def _name(layout: Layout) -> str:
    return layout.mesh if layout.pipe > 1 else layout.strategy


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _flops(count: float) -> str:
    """`532 TFLOP`, in the largest unit of which there is one."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:,.0f} FLOP"
