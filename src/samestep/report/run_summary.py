"""The summary of runs: everything that a report shows, gathered from the run folders."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

import numpy as np

from samestep.errors import UsageError
from samestep.report.elapsed_time import ElapsedTime, elapsed_time
from samestep.report.events import Event, as_event
from samestep.report.findings import Comparison, Finding, compare_runs, ledger_findings
from samestep.report.formatting import command_text, number, optimizer_text
from samestep.report.reader import (
    Epochs,
    check_run,
    json_number,
    ledger_curves,
    read_metrics,
    read_steps,
)
from samestep.text import counted
from samestep.train.contract_diff import differences
from samestep.train.curves import Curve
from samestep.train.paths import CONTRACT_FILE, LEDGER_FILE, METRICS_FILE, RESULT_FILE
from samestep.verify.ledger import Ledger
from samestep.verify.runs import run_status, try_object

PHASES = ("data", "compute", "exchange", "update", "checkpoint")
MAX_SIZES = 4  # changes of the number of devices that are listed one by one
RATE_TAG = "samples_per_second"


@dataclass(frozen=True)
class Phases:
    """Seconds of a step by phase: `seconds` `[N, phases]` are means since the row before, at `steps` `[N]`."""

    names: tuple[str, ...]
    steps: np.ndarray
    seconds: np.ndarray

    @property
    def totals(self) -> np.ndarray:
        """Seconds of the whole run, `[phases]`."""
        totals: np.ndarray = np.diff(self.steps, prepend=0) @ self.seconds
        return totals

    @property
    def shares(self) -> dict[str, float]:
        """Each phase's share of the whole; empty if nothing was measured."""
        whole = float(self.totals.sum())
        return dict(zip(self.names, (self.totals / whole).tolist(), strict=True)) if whole > 0 else {}

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step, of all phases."""
        return float(self.totals.sum() / self.steps[-1]) if len(self.steps) else None

    def thinned(self, bins: int) -> "Phases":
        """Means over at most so many bins; a row counts by the steps that it stands for."""
        if len(self.steps) <= bins:
            return self
        weights = np.diff(self.steps, prepend=0).astype(np.float64)
        bin_of = (self.steps - self.steps[0]) * bins // (self.steps[-1] - self.steps[0] + 1)
        starts = np.flatnonzero(np.diff(bin_of, prepend=-1))
        seconds = np.add.reduceat(self.seconds * weights[:, None], starts)
        seconds /= np.add.reduceat(weights, starts)[:, None]
        return Phases(self.names, self.steps[[*(starts[1:] - 1), len(self.steps) - 1]], seconds)


@dataclass(frozen=True)
class RunSummary:
    """The summary of one run."""

    name: str  # the folder's name, with as much of the path as makes it unique
    folder: Path
    contract: Mapping[str, Any]  # run.json; empty if there is none
    state: str  # "finished", "running", "running?", "stopped by SIGINT" or "crashed"
    digest: str | None  # SHA-256 of the final state; None before the end
    num_steps: int  # updates done
    curves: Mapping[str, Curve]  # by tag
    epochs: Epochs
    phases: Phases
    events: tuple[Event, ...]
    time: ElapsedTime
    world_sizes: tuple[int, ...]  # in the order in which they were used
    findings: tuple[Finding, ...]

    @property
    def title(self) -> str:
        """Recipe and data; of a script its command, with its arguments."""
        facts = [str(self.contract[key]) for key in ("recipe", "script", "data") if self.contract.get(key)]
        return " on ".join(facts[:2]) or command_text(self.contract.get("command")) or "samestep run"

    @property
    def begun(self) -> str:
        """When it began: `2026-01-31 12:00 UTC`; empty if that is not known."""
        first = next((event.time for event in self.events if event.time is not None), None)
        return "" if first is None else first.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")

    @property
    def terms(self) -> str:
        """The contract in a few words."""
        contract = self.contract
        words = []
        if "global_batch_size" in contract and "num_microbatches" in contract:
            microbatches = counted(contract["num_microbatches"], "microbatch")
            words.append(f"{counted(contract['global_batch_size'], 'sample')} a step = {microbatches}")
        words += [optimizer_text(contract["optimizer"], contract.get("lr"))] if contract.get("optimizer") else []
        words += [f"seed {contract['seed']}"] if "seed" in contract else []
        words += [str(contract[key]) for key in ("precision", "reduction", "device_kind") if contract.get(key)]
        return " · ".join(words)

    @property
    def devices(self) -> str:
        """The number of devices: `3 devices`, `3 → 2 devices`."""
        sizes = [*map(str, self.world_sizes)]
        if len(sizes) > MAX_SIZES:
            return f"{sizes[0]} → … → {sizes[-1]} devices, {min(self.world_sizes)} to {max(self.world_sizes)}"
        return f"{' → '.join(sizes)} {'device' if sizes == ['1'] else 'devices'}" if sizes else ""

    @property
    def eval_tags(self) -> tuple[str, ...]:
        """The tags of evaluation metrics."""
        return tuple(tag for tag in self.curves if tag.endswith("/eval"))

    @property
    def metric(self) -> tuple[str, float] | None:
        """Name and last value of one metric: the first of the evaluation that is not the loss, else that."""
        tags = sorted(self.eval_tags, key=lambda tag: tag == "loss/eval")
        last = self.curves[tags[0]].last if tags else None
        return None if last is None else (tags[0].removesuffix("/eval"), last)

    @property
    def train_loss(self) -> float | None:
        """The last training loss: of the last epoch, else of the last step."""
        tags = [tag for tag in ("loss/train_epoch", "loss/train") if tag in self.curves]
        return self.curves[tags[0]].last if tags else None

    @property
    def throughput(self) -> float | None:
        """Samples a second, the mean over the epochs."""
        curve = self.curves.get(RATE_TAG)
        return float(curve.finite.mean()) if curve is not None and len(curve.finite) else None

    @property
    def memory(self) -> dict[str, float]:
        """The highest memory in use: bytes by "host" and "device"."""
        tags = {name: self.curves.get(f"memory/{name}_bytes") for name in ("host", "device")}
        return {name: float(curve.finite.max()) for name, curve in tags.items() if curve and len(curve.finite)}

    def epoch_table(self) -> tuple[list[str], list[list[str]]]:
        """Titles and rows of the epochs: number, steps, training loss, metrics, the user's own values, throughput."""
        tags = list(dict.fromkeys(tag for record in self.epochs.values() for tag in record))
        metrics = [tag for tag in tags if tag.endswith("/eval")]
        own = [tag for tag in tags if tag not in ("step", "loss/train_epoch", RATE_TAG, *metrics)]
        names = [tag.removesuffix("/eval") + " (eval)" for tag in metrics]
        titles = ["epoch", "steps", "train loss", *names, *own, "samples/s"]
        columns = ("loss/train_epoch", *metrics, *own, RATE_TAG)
        return titles, [
            [f"{epoch:,}", f"{int(record['step']):,}", *(number(record.get(tag)) for tag in columns)]
            for epoch, record in self.epochs.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """The summary as a JSON object; of each curve the ends and the extremes."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "state": self.state,
            "digest": self.digest,
            "steps": self.num_steps,
            "seconds": self.time.duration,
            "world_sizes": list(self.world_sizes),
            "samples_per_second": self.throughput,
            "epochs": [
                {"epoch": epoch, **{tag: json_number(value) for tag, value in record.items()}}
                for epoch, record in self.epochs.items()
            ],
            "curves": {tag: _curve_json(curve) for tag, curve in self.curves.items()},
            "phases": self.phases.shares,
            "memory": self.memory,
            "events": [event.as_json() for event in self.events],
            "findings": [asdict(finding) for finding in self.findings],
            "contract": dict(self.contract),
        }


@dataclass(frozen=True)
class Report:
    """At least one run, and each further run beside the first."""

    runs: tuple[RunSummary, ...]
    comparisons: tuple[Comparison, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "runs": [run.as_json() for run in self.runs],
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
        }


def make_report(folders: Sequence[str | os.PathLike[str]]) -> Report:
    """Gathers the report of run folders, each counted once; raises `UsageError` if one is not the folder of a run."""
    paths = [check_run(Path(folder)) for folder in folders]
    unique = list({path.resolve(): path for path in reversed(paths)}.values())[::-1]
    if not unique:
        raise UsageError("no run is named; give the folder of a run, such as runs/NAME")
    names = distinct_names([path.resolve() for path in unique])
    (first, first_ledger), *others = (_summarize(path, name) for path, name in zip(unique, names, strict=True))
    comparisons = tuple(
        compare_runs(first.name, first_ledger, run.name, ledger, differences(first.contract, run.contract))
        for run, ledger in others
    )
    return Report((first, *(run for run, _ in others)), comparisons)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of different paths, as many as make them unique."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _summarize(folder: Path, name: str) -> tuple[RunSummary, Ledger]:
    ledger = read_steps(folder)
    metrics, epochs = read_metrics(folder / METRICS_FILE)
    contract, result = (try_object(folder / name, []) for name in (CONTRACT_FILE, RESULT_FILE))
    events = tuple(event for event in map(as_event, ledger.events) if event is not None)
    recorded = ledger_curves(ledger.steps)
    phases = _phases(metrics)
    curves = {tag: curve for tag, curve in {**recorded, **metrics}.items() if not tag.startswith("seconds/")}
    num_steps = max([*(int(curve.steps[-1]) for curve in curves.values() if len(curve)), 0])
    listed, devices = run_status(folder), contract.get("devices")
    signals = [event.fields.get("signal") for event in events if event.name == "stop"]
    is_named = listed.state == "stopped" and signals and signals[-1]
    run = RunSummary(
        name=name,
        folder=folder,
        contract=contract,
        state=f"stopped by {signals[-1]}" if is_named else listed.state,
        digest=_digest(events, result),
        num_steps=num_steps,
        curves=curves,
        epochs=epochs,
        phases=phases,
        events=events,
        time=elapsed_time(events, phases.step_seconds or _step_seconds(metrics, contract), num_steps),
        world_sizes=listed.world_sizes or ((len(devices),) if isinstance(devices, list) else ()),
        findings=(
            *ledger_findings(ledger),
            *(Finding("note", f"{each}.") for each in listed.problems if not each.startswith(LEDGER_FILE)),
        ),
    )
    return run, ledger


def _digest(events: Sequence[Event], result: Mapping[str, Any]) -> str | None:
    """The digest of the final state."""
    ends = [event.fields.get("digest") for event in events if event.name == "end"]
    return next((digest for digest in (result.get("digest"), *reversed(ends)) if isinstance(digest, str)), None)


def _phases(metrics: Mapping[str, Curve]) -> Phases:
    """The phases that were measured, the known ones first, at all steps of any of them."""
    found = {tag.removeprefix("seconds/"): curve for tag, curve in metrics.items() if tag.startswith("seconds/")}
    found = {name: curve for name, curve in found.items() if len(curve.finite)}
    names = (*(name for name in PHASES if name in found), *sorted(found.keys() - set(PHASES)))
    steps = np.unique(np.concatenate([np.empty(0, np.int64), *(found[name].steps for name in names)]))
    steps = steps[steps > 0]
    seconds = np.zeros((len(steps), len(names)))
    for column, name in enumerate(names):
        known = dict(zip(found[name].steps.tolist(), found[name].values.tolist(), strict=True))
        seconds[:, column] = [known.get(step, 0.0) for step in steps.tolist()]
    return Phases(names, steps, np.where(np.isfinite(seconds) & (seconds >= 0), seconds, 0.0))


def _step_seconds(metrics: Mapping[str, Curve], contract: Mapping[str, Any]) -> float | None:
    """Mean seconds of a step by the throughput of the epochs."""
    size, curve = contract.get("global_batch_size"), metrics.get(RATE_TAG)
    if curve is None or not isinstance(size, int) or not (curve.finite > 0).any():
        return None
    return float(np.mean(size / curve.finite[curve.finite > 0]))


def _curve_json(curve: Curve) -> dict[str, Any]:
    finite = curve.finite
    return {
        "points": len(curve),
        "non_finite": len(curve) - len(finite),
        "first": json_number(float(curve.values[0])) if len(curve) else None,
        "last": json_number(curve.last),
        "min": float(finite.min()) if len(finite) else None,
        "max": float(finite.max()) if len(finite) else None,
    }
