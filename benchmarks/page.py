"""Writes docs/benchmarks.md and its picture from the JSON files of the measurements.

    python benchmarks/page.py [--results benchmarks/results] [--docs docs]

Every number on the page comes from a file. Missing measurements are left out.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roster import BY_NAME, PLAIN, ROSTER
from scores import Who, defaults, of_workload, ratio
from tables import default_table, equal_table, markdown, ranks_table, slope_table, startup_table

PICTURE = "benchmarks.png"
HEAD = """# Benchmarks

<!-- Written by benchmarks/page.py; `make bench` measures anew and writes it again. -->

The time of a training step with samestep and its peers, measured side by side on one machine. The programs are in
`benchmarks/`; each peer is written as in its own documentation.

```bash
make bench-short    # ten minutes on two cores: the first table of each workload, in three rounds
make bench          # everything on this page, an hour or more
```

The first writes a page like this one, with your machine's figures, into `benchmarks/results/short`. Both use two cores
whatever there are. The machine should have nothing else to do: Linux divides busy cores among sessions (autogroups), of
which torchrun gives each worker one, so that other load slows the tools unequally.
"""
STEPS = """## A step

All entrants of a workload are started once and then run in turns, {rounds}, so that noise of the machine affects all of
them alike. Each may use two cores: two processes with one thread each, or one process with two threads. Ratios are
computed per round; the tables have their median, least and greatest. Logging, checkpoints and progress display are off
in all of them.

The first table of each workload has every tool **by default**: what a user gets who sets nothing. For samestep that is
8 microbatches, whatever the number of processes, and one thread a process, because the number of threads is part of
what fixes the bits: `python train.py` leaves the second core idle, `samestep run train.py` uses both. In W2, whose
arithmetic takes no time, it is the fixed cost of eight microbatches that is compared with the cost of one; fewer of
them give other, equally valid numbers, and are the better choice for such a model. The peers read a map-style dataset
(`__getitem__`) through a `DataLoader`; samestep is there with tensors, which it takes as they are, and with the same
map-style dataset. The *limit* trains on one cached batch and does nothing else; two processes of it train on half of
the batch each, without communication.

The second table has **equal terms**, the same data and threads on both sides: as many microbatches as processes, or 8
beside PyTorch in 8 micro-batches, which accumulates gradients under `no_sync`. Then samestep's fixed order of sums
beside the backend's, and a script with DistributedDataParallel under `samestep run --logical-devices` beside the same
script under torchrun.

![Step times of all tools by default, as multiples of plain PyTorch's]({picture})
"""
STARTUP = """## The start

The time from the command to the end of the first step on all workers, of a first all-reduce in a script that does
nothing else, or of the import of torch; and the memory of all processes then (PSS: each shared page is divided by the
number of processes that share it). {rounds}, in turns; measured on {date}.
"""
RANKS = """## A script for V devices on few

The whole of `examples/ddp.py`, from the command to its end, as V ranks on one and on two workers, and by torchrun with
V processes; on the same two cores, with one thread a process, in turns. CPU seconds are those of all processes, and say
more than seconds where the machine has other work: the load was {load} at the start. Memory is the greatest of samples
of the PSS of all processes. Measured on {date}: {rounds}.
"""
GROWTH = """## How the cost grows

The time of a step, or of loading a batch, as one quantity grows, beside that of plain PyTorch: with as many
micro-batches as samestep has microbatches; for ranks DistributedDataParallel, with one microbatch a rank in samestep;
for samples a `DataLoader` over the same virtual dataset, up to 2^22 samples, since it holds a permutation of all ids.
Ranks take turns on the cores if there are more of them. {rounds}, in turns, on {cores}, with one thread a process. A
slope is that of the line through the larger half of the sizes in a log-log plot; samestep's is *steeper* if it exceeds
PyTorch's by more than 0.05 in every round. The time at each size is in `benchmarks/results/growth.json`. Measured on
{date}.
"""
INVARIANCE = """## What the number of processes changes

LeNet on 1,000 scanned digits, global batch 256, two epochs, shuffled: the final parameters, compared with those of the
same tool with one process. Then one step on one batch, and the number of samples counted in an evaluation.
"""

PANELS = {2: "both cores: two processes", 1: "one process: samestep on one core, others on both"}
STYLES = {
    "peer": {"fmt": "o", "color": "#bdbdbd", "markersize": 6},
    "limit": {"fmt": "|", "color": "#424242", "markersize": 16},
    "ours": {"fmt": "o", "color": "#00796b", "markersize": 9},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page, and the picture if steps were measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).parent
    parser.add_argument("--results", type=Path, default=root / "results", metavar="FOLDER")
    parser.add_argument("--docs", type=Path, default=root.parent / "docs", metavar="FOLDER")
    options = parser.parse_args(arguments)
    results = {
        name: read(options.results / f"{name}.json") for name in ("steps", "startup", "ranks", "growth", "invariance")
    }
    if results["steps"]:
        draw(results["steps"], options.docs / PICTURE)
    (options.docs / "benchmarks.md").write_text(page(results), encoding="utf-8")
    return 0


def read(path: Path) -> dict[str, Any]:
    """A file of results; empty where there is none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page, as Markdown."""
    measured = next((found for found in results.values() if found), None)
    if measured is None:
        return "\n".join([HEAD, "Nothing has been measured yet.\n"])
    parts = [HEAD, where(measured["facts"])]
    if steps := results.get("steps"):
        parts.append(STEPS.format(rounds=rounds_of(steps["settings"]["rounds"]), picture=PICTURE))
        parts += absentees(steps)
        parts += [workload_section(steps, name) for name in steps["workloads"]]
    if startup := results.get("startup"):
        rounds = rounds_of(startup["rounds"]).capitalize()
        parts += [
            STARTUP.format(rounds=rounds, date=startup["facts"]["date"]),
            markdown(startup_table(startup["variants"])),
        ]
    if found := results.get("ranks"):
        counts = [f"V = {count} {rounds_of(len(ways['cpu:1']['seconds']))}" for count, ways in found["ranks"].items()]
        told = {"rounds": ", ".join(counts), "load": found["facts"]["load_at_start"], "date": found["facts"]["date"]}
        parts += [RANKS.format(**told), markdown(ranks_table(found["ranks"]))]
    if growth := results.get("growth"):
        rounds, cores = rounds_of(growth["rounds"]).capitalize(), f"{growth['facts']['cores']} cores"
        parts += [
            GROWTH.format(cores=cores, rounds=rounds, date=growth["facts"]["date"]),
            markdown(slope_table(growth["growth"])),
        ]
    if invariance := results.get("invariance"):
        measured_parts = [part for part in ("images", "masked", "batchnorm", "scored") if part in invariance]
        parts += [INVARIANCE, *(invariance_rows(part, invariance[part]) for part in measured_parts)]
    return "\n".join(parts)


def where(facts: Mapping[str, Any]) -> str:
    """A paragraph about the machine and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"Measured on {facts['date']}: {facts['cpu']}, {facts['cores']} cores, {facts['system']}, Python "
        f"{facts['python']}; {versions}. The load of the machine at the start was {facts['load_at_start']}.\n"
    )


def workload_section(steps: Mapping[str, Any], workload: str) -> str:
    """The tables of a workload that have rows."""
    told = steps["workloads"][workload]
    head = f"### {workload}: {told['title']}\n\n{told['parameters']:,} parameters.\n"
    tables = [table(steps, workload) for table in (default_table, equal_table)]
    return "\n".join([head, *(markdown(table) for table in tables if table[1])])


def absentees(steps: Mapping[str, Any]) -> list[str]:
    """The entrants that were left out or failed, and tools by default that these measurements do not have."""
    out = [f"{BY_NAME[entry['entrant']].title} ({entry['reason']})" for entry in steps["left_out"]]
    out += [f"{BY_NAME[e['entrant']].title} on {e['workload']} (failed)" for e in steps["failed"]]
    known = {(entry["entrant"], entry["processes"]) for entry in steps["measurements"]}
    known |= {(entry["entrant"], n) for what in ("left_out", "failed") for entry in steps[what] for n in (1, 2)}
    for entrant in ROSTER:
        lacks = [str(n) for n in (1, 2) if entrant.is_default and (entrant.name, n) not in known]
        out += [f"{entrant.title}, processes: {' and '.join(lacks)} (not measured)"] if lacks else []
    return [f"Left out: {'; '.join(out)}.\n"] if out else []


def invariance_rows(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """One part of the invariance benchmark: a row per tool, a column per number of processes above one."""
    title, say = {
        "images": ("two epochs of LeNet", _change),
        "masked": ("gradient of a masked loss", _gradient),
        "batchnorm": ("gradient with BatchNorm", _gradient),
        "scored": ("samples of a test set that are scored", _score),
    }[part]
    counts = sorted({row["processes"] for row in rows} - {1})
    said = {(row["tool"], row["processes"]): say(row) for row in rows}
    tools = dict.fromkeys(row["tool"] for row in rows)
    body = [[BY_NAME[tool].title, *(said.get((tool, count), "") for count in counts)] for tool in tools]
    return markdown(([title, *(f"1 → {count} processes" for count in counts)], body))


def _change(row: Mapping[str, Any]) -> str:
    """`1,024 samples an epoch, 24 of them twice; the same samples in no step; parameters differ by up to 0.0049`."""
    said = [f"{row['samples']:,} samples an epoch" + (f", {row['twice']} of them twice" if row["twice"] else "")]
    same, steps = row["same_samples"], row["steps"]
    share = "no step" if same == 0 else "every step" if same == steps else f"{same} of {steps} steps"
    said.append(f"the same samples in {share}")
    said.append("the same bits" if row["same_bits"] else f"parameters differ by up to {row['parameters']:.2g}")
    return "; ".join(said)


def _gradient(row: Mapping[str, Any]) -> str:
    """`differs by 2.7 %`, of its norm."""
    return "the same bits" if row["same_bits"] else f"differs by {100 * row['update']:.2g} %"


def _score(row: Mapping[str, Any]) -> str:
    """`1,004 of 1,003`."""
    return f"{row['scored']:,} of {row['samples']:,}"


def rounds_of(count: int) -> str:
    """`in 9 rounds`."""
    return f"in {count} round{'s' * (count != 1)}"


def draw(steps: Mapping[str, Any], path: Path) -> None:
    """Writes the chart: each tool by default, as multiples of plain PyTorch; a panel for each number of processes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = steps["workloads"]
    rounds = {name: of_workload(steps["measurements"], name) for name in workloads}
    peers = {entry["entrant"] for entry in steps["measurements"]} - {PLAIN}
    labels = {
        "peer": ", ".join(e.title for e in ROSTER if e.is_default and e.role == "peer" and e.name in peers),
        "limit": "limit: one cached batch, nothing else",
        "ours": "samestep: tensors (above), map-style dataset (below)",
    }
    panels = [count for count in PANELS if any((PLAIN, count) in measured for measured in rounds.values())]
    if not panels:
        return
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 1.4 + 0.8 * len(workloads)), sharey=True, squeeze=False
    )
    for axis, count in zip(axes[0], panels, strict=True):
        axis.axvline(1.0, color="#424242", linewidth=1.0, label=BY_NAME[PLAIN].title)
        for row, measured in enumerate(rounds.values()):
            if (PLAIN, count) in measured:
                _draw_row(axis, row, measured, count, labels)
        axis.set_title(PANELS[count], fontsize=11, loc="left")
        axis.set_xlim(0, 1.15 * axis.get_xlim()[1])
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", color="#eeeeee")
        axis.set_axisbelow(True)
    titles = [f"{name}: {workload['title'].partition(',')[0]}" for name, workload in workloads.items()]
    axes[0][0].set_yticks(range(len(titles)), titles)
    axes[0][0].set_ylim(len(titles) - 0.5, -0.5)
    found = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found, loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=2, frameon=False)
    figure.supxlabel("time of a step, × plain PyTorch's; less is better", fontsize=10, y=0.03)
    facts = steps["facts"]
    where = f"{facts['date']}: {facts['cpu']}, {facts['cores']} cores, torch {facts['versions']['torch']}"
    figure.suptitle(where, fontsize=9, color="#616161")
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)


def _draw_row(axis: Any, row: int, measured: Mapping[Who, Sequence[float]], count: int, labels: dict[str, str]) -> None:
    """Draws the tools on one workload; the points of samestep, which nearly coincide, below each other with numbers."""
    others = [name for name, _ in defaults(measured, count) if name != PLAIN]
    ours = sorted(name for name in others if BY_NAME[name].role == "ours")
    for name in sorted(others, key=lambda name: list(STYLES).index(BY_NAME[name].role)):
        role, median = BY_NAME[name].role, ratio(measured[name, count], measured[PLAIN, count]).median
        height = row + 0.34 * ours.index(name) - 0.17 * (len(ours) - 1) if name in ours else row
        axis.errorbar(median, height, label=labels[role], **STYLES[role])
        if name in ours:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
            axis.annotate(f"{median:.2f}", (median, height), bbox=box, **place)


if __name__ == "__main__":
    sys.exit(main())
