"""Tables for the terminal, and a bar chart of each entrant's ratio to the limit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from roster import BY_NAME
from scores import best_peer, of_workload, spread, to_limit

COLOURS = {"limit": "#9e9e9e", "peer": "#78909c", "ours": "#00897b"}


def wide_console() -> Console:
    """A console as wide as the terminal; 130 columns if there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=130)


def steps_table(results: Mapping[str, Any], workload: str) -> Table:
    """Each entrant of a workload: the median time of a step, and its ratio to the limit."""
    rounds = of_workload(results["measurements"], workload)
    table = Table(title=f"{workload}: {results['workloads'][workload]['title']}")
    for name in ("entrant", "processes", "µs a step", "× limit", "least to greatest", "MAD", ""):
        table.add_column(name, justify="left" if name in ("entrant", "") else "right")
    for who, values in sorted(rounds.items(), key=lambda item: (item[0][1], spread(item[1]).median)):
        entrant, times = BY_NAME[who[0]], to_limit(rounds, who)
        best = "best peer" if who == best_peer(rounds, who[1]) else ""
        table.add_row(
            entrant.title,
            str(who[1]),
            f"{spread(values).median:,.0f}",
            "-" if times is None else f"{times.median:.2f}",
            "-" if times is None else f"{times.least:.2f} to {times.greatest:.2f}",
            "-" if times is None else f"{times.deviation:.2f}",
            best,
            style="bold" if entrant.role == "ours" else None,
        )
    return table


def targets_table(verdicts: Sequence[Mapping[str, Any]], title: str = "Targets") -> Table:
    """All targets and whether each was reached."""
    table = Table("workload", "ratio", "against", "target", "measured", "least to greatest", "", title=title)
    for verdict in verdicts:
        found, most = verdict["ratio"], verdict["most"]
        reached = {True: "[green]reached[/]", False: "[red]not reached[/]", None: ""}[verdict["reached"]]
        table.add_row(
            verdict["workload"],
            verdict["text"],
            verdict["against"],
            "-" if most is None else f"≤ {most:.2f}",
            f"{found['median']:.2f}",
            f"{found['least']:.2f} to {found['greatest']:.2f}",
            reached,
        )
    return table


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Writes the bar chart: a plot for each workload and number of processes with a limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fields = []
    for workload in results["workloads"]:
        rounds = of_workload(results["measurements"], workload)
        for num_processes in sorted({who[1] for who in rounds}):
            ratios = [(BY_NAME[who[0]], to_limit(rounds, who)) for who in rounds if who[1] == num_processes]
            if known := [(entrant, times) for entrant, times in ratios if times is not None]:
                fields.append((workload, num_processes, known))
    if not fields:
        return
    columns = min(2, len(fields))
    lines = -(-len(fields) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(6.5 * columns, 3.6 * lines), squeeze=False)
    for axis in axes.flat[len(fields) :]:
        axis.set_visible(False)
    for axis, (workload, num_processes, bars) in zip(axes.flat, fields, strict=False):
        bars = sorted(bars, key=lambda bar: -bar[1].median)
        names = [entrant.title for entrant, _ in bars]
        medians = [times.median for _, times in bars]
        spans = [
            [times.median - times.least for _, times in bars],
            [times.greatest - times.median for _, times in bars],
        ]
        colours = [COLOURS[entrant.role] for entrant, _ in bars]
        axis.barh(names, medians, color=colours, xerr=spans, error_kw={"ecolor": "#424242", "elinewidth": 0.8})
        axis.axvline(1.0, color="#424242", linewidth=0.8)
        axis.set_title(f"{workload}, {num_processes} process{'es' * (num_processes > 1)}: times the limit", fontsize=10)
        axis.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
