"""The forecast in the terminal: the layouts, the memory, the step, and the curve."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samestep.forecast.forecast import Forecast
from samestep.forecast.layout import Layout
from samestep.forecast.search import Candidate, Point, in_gib

MAX_LAYOUTS = 12


def print_forecast(forecast: Forecast, console: Console | None = None) -> None:
    """Prints all of it."""
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 200  # nothing is folded or cut in a file or a pipe
    wish, kind = forecast.wish, forecast.machines.kind
    size = f"{forecast.num_parameters:,} parameters, {operations(forecast.flops)} a sample"
    console.print(f"{forecast.subject}: {size}", markup=False)
    batch = f"global batch {wish.batch_size:,}, {wish.precision}"
    console.print(f"{forecast.machines}, {kind.memory_gib:g} GiB each; {batch}", markup=False)
    for table in (layouts_table(forecast), memory_table(forecast.chosen), curve_table(forecast)):
        console.print()
        console.print(table)
    console.print()
    mark = "→" if forecast.chosen.fits else "✗"
    console.print(f"{mark} {forecast.reason}", markup=False)
    for line in forecast.advice:
        console.print(f"  · {line}", markup=False)


def layouts_table(forecast: Forecast) -> Table:
    """The ways that were weighed; `→` is the one to take."""
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=0)
    for name in ("", "strategy", "microbatches"):
        table.add_column(name, overflow="fold")
    for name in ("memory", "step", f"{forecast.unit}/s", "exposed"):
        table.add_column(name, justify="right")
    table.add_column("fits")
    shown = _shown(forecast)
    for candidate, step in zip(shown, in_one_unit([each.time.step for each in shown]), strict=True):
        layout = candidate.layout
        again = ", checkpointed" if layout.is_checkpointed else ""
        table.add_row(
            "→" if candidate is forecast.chosen else "",
            escape(_named(layout) + again),
            f"{layout.num_microbatches} of {layout.microbatch_size}",
            in_gib(candidate.memory.total),
            step,
            _rate(forecast.rate(candidate)),
            f"{100 * candidate.time.exposed / candidate.time.step:.0f} %",
            "yes" if candidate.fits else "no",
        )
    return table


def memory_table(chosen: Candidate) -> Table:
    """The memory of the fullest device, by category."""
    table = Table("memory of the fullest device", box=box.SIMPLE, show_edge=False, pad_edge=False, padding=0)
    table.add_column(f"in the {chosen.memory.phase}", justify="right")
    for name, value in chosen.memory.rows():
        table.add_row(name, in_gib(value))
    table.add_section()
    table.add_row("total", in_gib(chosen.memory.total))
    return table


def curve_table(forecast: Forecast) -> Table:
    """The chosen layout on other numbers of devices: with the same global batch, and with one that grows along."""
    points = efficiencies(forecast)
    same_batches = [point.same_batch for point, *_ in points]
    has_gaps = None in same_batches
    table = Table(
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
        padding=0,
        caption=f"- : a global batch of {forecast.wish.batch_size:,} has no microbatch for each of them"
        if has_gaps
        else None,
        caption_justify="left",
    )
    for name in ("devices", "same batch:\nstep", "\nefficiency", "\nmemory"):
        table.add_column(name, justify="right")
    for name in (f"batch grows:\n{forecast.unit}/s", "\nefficiency"):
        table.add_column(name, justify="right")
    steps = iter(in_one_unit([own.time.step for own in same_batches if own is not None]))
    for point, same, larger in points:
        own = point.same_batch
        first = ("-", "-", "-") if own is None else (next(steps), _percent(same), _memory(own))
        rate = forecast.rate(point.larger_batch) if point.larger_batch.fits else 0.0
        table.add_row(
            f"{point.num_devices:,}",
            *first,
            _rate(rate) if rate else "does not fit",
            _percent(larger) if rate else "-",
        )
    return table


def efficiencies(forecast: Forecast) -> list[tuple[Point, float | None, float]]:
    """The points with their speed a device, as a part of the first point's: same batch, and batch that grows along."""
    first = forecast.curve[0]
    base_same = None if first.same_batch is None else forecast.rate(first.same_batch) / first.num_devices
    base_larger = forecast.rate(first.larger_batch) / first.num_devices
    found = []
    for point in forecast.curve:
        same = None
        if point.same_batch is not None and base_same is not None:
            same = forecast.rate(point.same_batch) / point.num_devices / base_same
        found.append((point, same, forecast.rate(point.larger_batch) / point.num_devices / base_larger))
    return found


def in_one_unit(times: Sequence[float]) -> list[str]:
    """Seconds as `12.34 s` or `1,234.5 ms`: all in one unit, the shortest to three digits."""
    shortest = min(times, default=1.0)
    unit, scale = ("s", 1) if shortest >= 1 else ("ms", 1000)
    digits = max(0, 2 - math.floor(math.log10(scale * shortest)))
    return [f"{scale * time:,.{digits}f} {unit}" for time in times]


def _shown(forecast: Forecast) -> list[Candidate]:
    """Those that fit, and the others as far as there is room."""
    fitting = sum(candidate.fits for candidate in forecast.candidates)
    room = max(0, MAX_LAYOUTS - fitting)
    shown = []
    for candidate in forecast.candidates:
        if candidate.fits or candidate is forecast.chosen:
            shown.append(candidate)
        elif room:
            room -= 1
            shown.append(candidate)
    return shown


def _named(layout: Layout) -> str:
    """The strategy, with the sizes of the mesh where it has more than one axis."""
    if layout.tensor == layout.pipe == 1:
        return layout.strategy
    kind = "sharded, " if layout.is_sharded else "shard_optimizer, " if layout.is_optimizer_sharded else ""
    return kind + layout.mesh


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _memory(candidate: Candidate) -> str:
    return in_gib(candidate.memory.total) + ("" if candidate.fits else " (too much)")


def operations(count: float) -> str:
    """A number of floating-point operations in the largest unit of which there is one: 532 TFLOP."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:,.0f} FLOP"
