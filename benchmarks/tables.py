"""The tables of the measurements, for the terminal and for the page alike."""

from collections.abc import Mapping, Sequence
from typing import Any

import rich.table
from rich.console import Console
from roster import BY_NAME, PLAIN
from scores import PAIRS, defaults, of_workload, ratio, slope, spread

STEEPER = 0.05
"""Slopes closer than this are equal: over a range of 100, 1.26 times the time."""
Table = tuple[list[str], list[list[str]]]
"""The head and the rows; samestep's own rows begin with `**`, as in Markdown."""


def wide_console() -> Console:
    """A console as wide as the terminal; 130 columns if there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=130)


def default_table(steps: Mapping[str, Any], workload: str) -> Table:
    """Each tool by default: the median time of a step, and how many times plain PyTorch's."""
    rounds = of_workload(steps["measurements"], workload)
    rows = []
    for num_processes in (2, 1):
        plain = rounds.get((PLAIN, num_processes))
        for who in defaults(rounds, num_processes):
            entrant, values = BY_NAME[who[0]], rounds[who]
            title = {"ours": f"**{entrant.title}**", "limit": f"*{entrant.title}*"}.get(entrant.role, entrant.title)
            times = None if plain is None else ratio(values, plain)
            cells = ["", ""] if times is None else [f"{times.median:.2f}", times.span]
            rows.append([title, str(num_processes), f"{spread(values).median:,.0f}", *cells])
    return ["by default", "processes", "µs a step", "× PyTorch", "least to greatest"], rows


def equal_table(steps: Mapping[str, Any], workload: str) -> Table:
    """The pairs that were measured: both medians, and the ratio round by round."""
    rounds = of_workload(steps["measurements"], workload)
    rows = []
    for pair in PAIRS:
        if pair.ours in rounds and pair.theirs in rounds:
            times = ratio(rounds[pair.ours], rounds[pair.theirs])
            ours, theirs = (f"{spread(rounds[who]).median:,.0f}" for who in (pair.ours, pair.theirs))
            cells = [str(pair.ours[1]), ours, BY_NAME[pair.theirs[0]].title, theirs, f"{times.median:.2f}", times.span]
            rows.append([f"**{pair.text}**", *cells])
    return ["samestep", "processes", "µs a step", "beside", "µs a step", "ratio", "least to greatest"], rows


def change_table(measurements: Sequence[Mapping[str, Any]], commit: str) -> Table:
    """Each of samestep's entrants over itself at another commit (`name@commit`), in each workload."""
    rows = []
    for workload in dict.fromkeys(entry["workload"] for entry in measurements):
        rounds = of_workload(measurements, workload)
        for (name, processes), values in rounds.items():
            if (before := rounds.get((f"{name}@{commit}", processes))) is not None:
                times = ratio(values, before)
                rows.append([workload, BY_NAME[name].title, str(processes), f"{times.median:.2f}", times.span])
    return ["workload", "entrant", "processes", f"now, over {commit}", "least to greatest"], rows


def startup_table(variants: Mapping[str, Any]) -> Table:
    """Seconds and megabytes of each way to start."""
    rows = []
    for found in variants.values():
        seconds, megabytes = spread(found["seconds"]), spread(found["megabytes"])
        span = f"{seconds.least:.1f} to {seconds.greatest:.1f}"
        rows.append([found["title"], f"{seconds.median:.1f}", span, f"{megabytes.median:,.0f}"])
    return ["to the first step or all-reduce", "seconds", "least to greatest", "MB"], rows


def ranks_table(ranks: Mapping[str, Mapping[str, Any]]) -> Table:
    """Time and peak of memory of a script by torchrun and on one and two devices; ratios of times round by round."""
    rows = []
    for count, ways in ranks.items():
        theirs = ways.get("torchrun")
        if theirs is None:
            rows.append([f"torchrun, {count} processes", "not run: no memory", *[""] * 6])
        for way, found in ways.items():
            is_theirs = found is theirs
            row = [f"torchrun, {count} processes" if is_theirs else f"**{count} logical devices, {way}**"]
            for unit, digits in (("seconds", 1), ("cpu_seconds", 0), ("megabytes", 0)):
                values = _of_rounds(found, unit)
                times = None if is_theirs or theirs is None else ratio(values, _of_rounds(theirs, unit))
                row += [f"{spread(values).median:,.{digits}f}", "" if times is None else f"{times.median:.2f}"]
                row += [] if unit != "seconds" else ["" if times is None else times.span]
            rows.append(row)
    return ["examples/ddp.py", "seconds", "ratio", "least to greatest", "CPU seconds", "ratio", "MB", "ratio"], rows


def _of_rounds(way: Mapping[str, Any], unit: str) -> list[float]:
    """What was measured in each round; of memory the peak of all, since samples may miss it."""
    return [max(way[unit])] if unit == "megabytes" else way[unit]


def growth_tables(measured: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """One dimension of growth: the medians of PyTorch and samestep at each size; tables of equal sizes are joined."""
    tables: dict[tuple[str, ...], Table] = {}
    for text, points in measured.items():
        head, rows = tables.setdefault(tuple(points), ([""], [[_size(int(name))] for name in points]))
        unit = text if text == "kB" else f"{text}, µs"
        head += [f"{unit}: PyTorch", "samestep"]
        for row, point in zip(rows, points.values(), strict=True):
            row += [f"{spread(point[who]).median:,.0f}" if who in point else "" for who in ("pytorch", "samestep")]
    return list(tables.values())


def slope_table(growth: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """The slopes of both, their difference round by round, and whether samestep's is steeper in all of these."""
    rows = []
    for name, measured in growth.items():
        for text, points in measured.items():
            ours, theirs = (_slopes(points, who) for who in ("samestep", "pytorch"))
            difference = spread([a - b for a, b in zip(ours, theirs, strict=True)])
            sizes = [int(size) for size in points]
            cells = [name, text, f"{_size(min(sizes))} to {_size(max(sizes))}"]
            cells += [f"{spread(slopes).median:.2f}" for slopes in (theirs, ours)]
            cells += [f"{difference.least:+.2f} to {difference.greatest:+.2f}"]
            rows.append([*cells, "**steeper**" if difference.least > STEEPER else "no steeper"])
    return ["against", "", "from", "slope, PyTorch", "slope, samestep", "difference, least to greatest", ""], rows


def _slopes(points: Mapping[str, Any], who: str) -> list[float]:
    """The slope of each round, over the sizes that were measured."""
    known = {int(size): point[who] for size, point in points.items() if who in point}
    return [slope(list(known), times) for times in zip(*known.values(), strict=True)]


def _size(value: int) -> str:
    """`2^40` or `10,000`."""
    return f"2^{value.bit_length() - 1}" if value > 10_000 and value & (value - 1) == 0 else f"{value:,}"


def terminal(title: str, table: Table) -> rich.table.Table:
    """A table for the terminal."""
    head, rows = table
    shown = rich.table.Table(title=title)
    words = _are_words(table)
    for name, is_words in zip(head, words, strict=True):
        shown.add_column(name, justify="left" if is_words else "right")
    for row in rows:
        cells = [cell.strip("*") for cell in row]
        shown.add_row(*cells, style="bold" if any(cell.startswith("**") for cell in row) else None)
    return shown


def markdown(table: Table) -> str:
    """A Markdown table; columns of numbers are set right."""
    head, rows = table
    rules = ["---" if is_words else "---:" for is_words in _are_words(table)]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(rules)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _are_words(table: Table) -> list[bool]:
    """Whether each column has words; the first is one of names."""
    head, rows = table
    return [n == 0 or any(row[n].strip("*")[:1].isalpha() for row in rows) for n in range(len(head))]
