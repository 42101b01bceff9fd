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

from roster import BY_NAME
from scores import best_peer, of_workload, ratio, spread, to_limit
from tables import draw

PICTURE = "benchmarks.png"
HEAD = """# Benchmarks

<!-- Written by benchmarks/page.py; `make bench` measures anew and writes it again. -->

The time of a training step with samestep and its peers, measured side by side on one machine by `make bench`. The
programs are in `benchmarks/`; each peer is written as in its own documentation.
"""
STEPS = """## A step

All entrants of a workload are started once and then run in turns, {rounds}, so that noise of the machine affects all of
them alike. Each uses two cores: one process with two threads, or two processes with one thread each. The *limit*
trains on one cached batch and does nothing else; with two processes each trains on half of the batch without
communication. The limit in 8 micro-batches is the cost of computing a batch in 8 parts: kernels are less efficient on
less data. Ratios are computed per round; the tables have their median, minimum and maximum. Logging, checkpoints and
progress display are off in all of them.
"""
STARTUP = """## The start

The time from the command to the end of the first step on all workers, of a first all-reduce in a script that does
nothing else, or of the import of torch; and the memory of all processes then (PSS: each shared page is divided by the
number of processes that share it). {rounds}, in turns.
"""
GROWTH = """## How the cost grows

The time of a step by number of microbatches, on one device with one thread, and by number of CPU workers, with the
default of eight microbatches, on {cores}. {rounds}, in turns.
"""
INVARIANCE = """## What the number of processes changes

LeNet on 1,000 scanned digits, global batch 256, two epochs, shuffled: the final parameters, compared with those of the
same tool with one process. Then one step on one batch, and the number of samples counted in an evaluation.
"""
LOADER = """The loader over virtual datasets by number of samples, shuffled; a sample is computed from its id.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page, and the picture if steps were measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).parent
    parser.add_argument("--results", type=Path, default=root / "results", metavar="FOLDER")
    parser.add_argument("--docs", type=Path, default=root.parent / "docs", metavar="FOLDER")
    options = parser.parse_args(arguments)
    results = {name: read(options.results / f"{name}.json") for name in ("steps", "startup", "growth", "invariance")}
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
        parts += [STEPS.format(rounds=rounds_of(steps["settings"]["rounds"])), f"![Times the limit]({PICTURE})\n"]
        parts += [workload_section(steps, name) for name in steps["workloads"]]
        parts += absentees(steps)
    if startup := results.get("startup"):
        parts += [STARTUP.format(rounds=rounds_of(startup["rounds"]).capitalize()), startup_rows(startup["variants"])]
    if growth := results.get("growth"):
        cores = f"{growth['facts']['cores']} cores"
        parts += [GROWTH.format(cores=cores, rounds=rounds_of(growth["rounds"]).capitalize()), *growth_parts(growth)]
    if invariance := results.get("invariance"):
        measured_parts = [part for part in ("images", "masked", "batchnorm", "scored") if part in invariance]
        parts += [INVARIANCE, *(invariance_rows(part, invariance[part]) for part in measured_parts)]
    if verdicts := [verdict for found in results.values() for verdict in found.get("targets", [])]:
        parts += ["## Targets\n", target_rows(verdicts)]
    return "\n".join(parts)


def where(facts: Mapping[str, Any]) -> str:
    """A paragraph about the machine and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"Measured on {facts['date']}: {facts['cpu']}, {facts['cores']} cores, {facts['system']}, Python "
        f"{facts['python']}; {versions}. The load of the machine at the start was {facts['load_at_start']}.\n"
    )


def workload_section(steps: Mapping[str, Any], workload: str) -> str:
    """The table of a workload."""
    told, rounds = steps["workloads"][workload], of_workload(steps["measurements"], workload)
    rows = []
    for who, values in sorted(rounds.items(), key=lambda item: (item[0][1], spread(item[1]).median)):
        entrant, times = BY_NAME[who[0]], to_limit(rounds, who)
        title = f"**{entrant.title}**" if entrant.role == "ours" else entrant.title
        title += " (best peer)" if who == best_peer(rounds, who[1]) else ""
        cells = ["", ""] if times is None else [f"{times.median:.2f}", f"{times.least:.2f} to {times.greatest:.2f}"]
        rows.append([title, str(who[1]), f"{spread(values).median:,.0f}", *cells])
    head = ["", "processes", "µs a step", "× limit", "least to greatest"]
    return f"### {workload}: {told['title']}\n\n{told['parameters']:,} parameters.\n\n{markdown(head, rows)}"


def absentees(steps: Mapping[str, Any]) -> list[str]:
    """The entrants that were left out or failed."""
    out = [f"{BY_NAME[entry['entrant']].title} ({entry['reason']})" for entry in steps["left_out"]]
    out += [f"{BY_NAME[e['entrant']].title} on {e['workload']} (failed)" for e in steps["failed"]]
    return [f"Left out: {', '.join(out)}.\n"] if out else []


def startup_rows(variants: Mapping[str, Any]) -> str:
    """Seconds and megabytes of each way to start."""
    rows = []
    for found in variants.values():
        seconds, megabytes = spread(found["seconds"]), spread(found["megabytes"])
        span = f"{seconds.least:.1f} to {seconds.greatest:.1f}"
        rows.append([found["title"], f"{seconds.median:.1f}", span, f"{megabytes.median:,.0f}"])
    return markdown(["", "seconds", "least to greatest", "MB"], rows)


def growth_parts(growth: Mapping[str, Any]) -> list[str]:
    """The tables of growth: microbatches, devices, parameters, samples."""
    parts = []
    for what in ("microbatches", "devices"):
        for workload, measured in growth[what].items():
            rows = [times_row(name, values, measured["1"]) for name, values in measured.items()]
            parts.append(markdown([f"{workload}: {what}", "µs a step", "× 1", "least to greatest"], rows))
    rows = []
    for parameters, found in growth["parameters"].items():
        ratios = [f"{ratio(found[name], found['pytorch']).median:.2f}" for name in ("1", "8")]
        rows.append([f"{int(parameters):,}", f"{spread(found['pytorch']).median:,.0f}", *ratios])
    parts.append(markdown(["parameters", "PyTorch's loop, µs", "samestep, 1 microbatch ×", "8 microbatches ×"], rows))
    rows = []
    for power, found in growth["loader"].items():
        rows.append([f"2^{power}", f"{spread(found['microseconds']).median:,.0f}", f"{found['peak_bytes'] / 1e3:,.0f}"])
    return [*parts, LOADER, markdown(["samples", "µs a batch", "peak kB"], rows)]


def times_row(name: str, values: Sequence[float], base: Sequence[float]) -> list[str]:
    """A row: microseconds, and the ratio to another entrant."""
    times = ratio(values, base)
    span = f"{times.least:.2f} to {times.greatest:.2f}"
    return [name, f"{spread(values).median:,.0f}", f"{times.median:.2f}", span]


def target_rows(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """All targets, and whether each was reached."""
    rows = []
    for verdict in verdicts:
        found, most = verdict["ratio"], verdict["most"]
        against = BY_NAME[verdict["against"]].title if verdict["against"] in BY_NAME else verdict["against"]
        reached = {True: "reached", False: "**not reached**", None: ""}[verdict["reached"]]
        span = f"{found['least']:.2f} to {found['greatest']:.2f}"
        bound = "" if most is None else f"≤ {most:.2f}"
        rows.append([verdict["workload"], verdict["text"], against, bound, f"{found['median']:.2f}", span, reached])
    return markdown(["", "ratio", "against", "target", "measured", "least to greatest", ""], rows)


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
    return markdown([title, *(f"1 → {count} processes" for count in counts)], body)


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


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns of numbers are set right."""
    has_words = [any(row[n][:1].isalpha() or row[n][:1] == "*" for row in rows) for n in range(len(head))]
    rules = ["---" if n == 0 or has_words[n] else "---:" for n in range(len(head))]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(rules)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
