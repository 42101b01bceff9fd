"""What a report says of runs: the figures of each, what was found in them, and how they differ."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from samestep.checkpoint.contract_diff import ContractChange, differences
from samestep.checkpoint.run_folder import CONTRACT_FILE, LEDGER_FILE, METRICS_FILE
from samestep.errors import UsageError
from samestep.report.formatting import command_text, number, optimizer_text
from samestep.report.reader import (
    Epochs,
    Event,
    as_event,
    check_run,
    json_number,
    ledger_curves,
    read_metrics,
    read_steps,
)
from samestep.runs.curves import Curve
from samestep.runs.ledger import (
    FINAL_DIGEST,
    Extent,
    Ledger,
    LedgerDifference,
    cause,
    compare,
    extent,
    field_name,
    ledger_value,
)
from samestep.runs.run_list import AUDIT, found_by_audit, run_status, try_object
from samestep.text import counted


@dataclass(frozen=True)
class Finding:
    """A sentence on a run, and whether a promise holds, fails, or neither."""

    verdict: Literal["holds", "fails", "note"]
    text: str


def ledger_findings(ledger: Ledger) -> tuple[Finding, ...]:
    """The findings on one run."""
    steps = ledger.steps
    if not steps:
        reasons = [Finding("fails", f"{problem}.") for problem in ledger.problems]
        return (Finding("note", "The ledger holds no step yet, so nothing is proven."), *reasons)
    found = [_completeness(ledger), *_repeats(ledger), *_order(ledger)]
    digests = [step for step, entry in steps.items() if entry.get("digest")]
    if digests:
        last = max(digests)
        times = "once" if len(digests) == 1 else f"{len(digests):,} times"
        text = f"A checksum of the state was taken {times}; after step {last:,} it is {steps[last]['digest']}."
        found.append(Finding("note", text))
    skipped = sum(bool(entry.get("skipped")) for entry in steps.values())
    if skipped:
        text = f"{counted(skipped, 'step')} changed nothing: a loss or gradient was not finite."
        found.append(Finding("note", text))
    found += [Finding("fails", f"{found_by_audit(event)}.") for event in ledger.events if event.get("event") == "audit"]
    if ledger.problems:
        text = f"{counted(len(ledger.problems), 'line')} of the ledger cannot be trusted: {ledger.problems[0]}."
        found.append(Finding("fails", text))
    if ledger.torn:
        found.append(Finding("note", "The last line of the ledger is unfinished: the run is under way, or was killed."))
    return tuple(found)


@dataclass(frozen=True)
class RunComparison:
    """A run beside the first one: the changes of the contract, and the two ledgers step by step."""

    first: str
    other: str
    changes: tuple[ContractChange, ...]
    extent: Extent
    difference: LedgerDifference | None  # the first step that differs
    lengths: tuple[int, int]  # steps of each

    @property
    def num_equal(self) -> int:
        """Steps in both ledgers that are equal, up to the first that differs."""
        return self.extent.common if self.difference is None else self.difference.agreed

    @property
    def finding(self) -> Finding:
        """The comparison as a sentence; different bits are a failure only under equal contracts."""
        if not self.extent.common:
            return Finding("note", "No step is in both ledgers, so there is nothing to compare.")
        if self.difference is None:
            return Finding("holds", self._equal())
        breaking = ", ".join(change.field for change in self.changes if change.breaks)
        if not breaking:
            return Finding("fails", _different(self.difference, self.num_equal))
        text = f"The contracts differ ({breaking}), so no equal bits were promised."
        return Finding("note", f"{_different(self.difference, self.num_equal)} {text}")

    def as_json(self) -> dict[str, Any]:
        difference = None if self.difference is None else asdict(self.difference)
        ledger = {"num_equal": self.num_equal, "extent": asdict(self.extent), "difference": difference}
        changes = [{"field": c.field, "before": c.before, "after": c.after, "breaks": c.breaks} for c in self.changes]
        return {
            "first": self.first,
            "other": self.other,
            "contract": changes,
            "ledger": {**asdict(self.finding), **ledger},
        }

    def _equal(self) -> str:
        steps = "the 1 step" if self.extent.common == 1 else f"all {self.extent.common:,} steps"
        if self.lengths[0] != self.lengths[1]:
            steps += f" that both have ({self.lengths[0]:,} and {self.lengths[1]:,} steps)"
        digests = self.extent.digests
        state = f"; after {counted(digests, 'step')} the state, by a checksum" if digests else ""
        final = " Both ended in the same state, by its digest." if self.extent.final else ""
        compared = f"sample ids, loss, gradient norm, learning rate{state}"
        return f"Same bits for {steps}. Compared in each: {compared}.{final}"


def compare_runs(
    first: str, first_ledger: Ledger, other: str, other_ledger: Ledger, changes: Sequence[ContractChange]
) -> RunComparison:
    """Compares two runs by name and ledger; their numbers of devices may differ."""
    lengths = (len(first_ledger.steps), len(other_ledger.steps))
    span = extent(first_ledger, other_ledger)
    return RunComparison(first, other, tuple(changes), span, compare(first_ledger, other_ledger), lengths)


def _different(difference: LedgerDifference, num_equal: int) -> str:
    first = difference.fields[0]
    since = f"after {counted(num_equal, 'equal step')}" if num_equal else "from the first step on"
    is_final = first.field == FINAL_DIGEST
    step = "the final state" if is_final else f"step {difference.step:,}, {field_name(first.field)}"
    return f"Different bits {since}: {step} {ledger_value(first.a)} and {ledger_value(first.b)}. {cause(difference)}."


def _repeats(ledger: Ledger) -> list[Finding]:
    """Whether steps that were done again gave the same bits."""
    if not ledger.repeats_that_differ:
        if not ledger.num_repeated:
            return []
        steps = "1 step was" if ledger.num_repeated == 1 else f"{ledger.num_repeated:,} steps were"
        return [Finding("holds", f"{steps} done again after a resume, with the same bits each time.")]
    first = ledger.repeats_that_differ[0]
    values = f"{field_name(first.field)} {ledger_value(first.before)} at first, {ledger_value(first.after)} later"
    others = len({repeat.step for repeat in ledger.repeats_that_differ}) - 1
    more = f"; so did {counted(others, 'other step')}" if others else ""
    return [Finding("fails", f"Step {first.step:,} was done again and gave other bits: {values}{more}.")]


def _completeness(ledger: Ledger) -> Finding:
    steps = ledger.steps
    missing = max(steps) - sum(step > 0 for step in steps)  # a stranger's ledger may have others
    if not missing:
        recorded = "1 step is" if len(steps) == 1 else f"{len(steps):,} steps are"
        return Finding("holds", f"{recorded} recorded, none is missing.")
    first = next(step for step in range(1, max(steps) + 1) if step not in steps)
    lacking = f"{counted(missing, 'step')} {'is' if missing == 1 else 'are'} missing, the first is step {first:,}"
    return Finding("fails", f"{counted(len(steps), 'step')} recorded; {lacking}.")


def _order(ledger: Ledger) -> list[Finding]:
    """Whether the batches of each epoch follow one another."""
    epochs: dict[int, list[tuple[int, int, int]]] = {}
    for step, entry in sorted(ledger.steps.items()):
        epoch, position, size = (entry.get(name) for name in ("epoch", "position", "num_samples"))
        if isinstance(epoch, int) and isinstance(position, int) and isinstance(size, int):
            epochs.setdefault(epoch, []).append((position, size, step))
    if not epochs:
        return []
    for epoch, batches in epochs.items():
        if batches[0][0] and len(epochs) > 1 and epoch == min(epochs):
            continue  # the ledger begins in the middle of it
        for (position, size, _), (following, _, step) in pairwise([(0, 0, -1), *batches]):
            if following != position + size:
                fault = "left out" if following > position + size else "used twice"
                text = f"In epoch {epoch + 1} samples were {fault} before step {step:,}: {position + size:,} of the "
                return [Finding("fails", f"{text}epoch were used, and the batch begins at {following:,}.")]
    total = sum(size for batches in epochs.values() for _, size, _ in batches)
    span = "the epoch" if len(epochs) == 1 else f"each of the {len(epochs):,} epochs"
    text = f"In {span} the batches follow one another, none left out, none twice: {total:,} samples."
    return [Finding("holds", text)]


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
    seconds: float | None  # of training: its steps by the mean time of a step; None if that is not known
    world_sizes: tuple[int, ...]  # in the order in which they were used
    findings: tuple[Finding, ...]

    @property
    def title(self) -> str:
        """The command, with its arguments."""
        return command_text(self.contract.get("command")) or "samestep run"

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
        words += [str(contract[key]) for key in ("precision", "device_kind") if contract.get(key)]
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
            "seconds": self.seconds,
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
class RunReport:
    """At least one run, and each further run beside the first."""

    runs: tuple[RunSummary, ...]
    comparisons: tuple[RunComparison, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": [run.as_json() for run in self.runs],
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
        }


def make_report(folders: Sequence[str | os.PathLike[str]]) -> RunReport:
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
    return RunReport((first, *(run for run, _ in others)), comparisons)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of different paths, as many as make them unique."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _summarize(folder: Path, name: str) -> tuple[RunSummary, Ledger]:
    ledger = read_steps(folder)
    problems: list[str] = []
    metrics, epochs = read_metrics(folder / METRICS_FILE, problems)
    contract = try_object(folder / CONTRACT_FILE, [])
    events = tuple(event for event in map(as_event, ledger.events) if event is not None)
    recorded = ledger_curves(ledger.steps)
    phases = _phases(metrics)
    curves = {tag: curve for tag, curve in {**recorded, **metrics}.items() if not tag.startswith("seconds/")}
    num_steps = max([*(int(curve.steps[-1]) for curve in curves.values() if len(curve)), 0])
    step_seconds = phases.step_seconds or _step_seconds(metrics, contract)
    listed = run_status(folder)
    problems += (each for each in listed.problems if not each.startswith((LEDGER_FILE, AUDIT)))
    signals = [event.fields.get("signal") for event in events if event.name == "stop"]
    is_named = listed.state == "stopped" and signals and signals[-1]
    run = RunSummary(
        name=name,
        folder=folder,
        contract=contract,
        state=f"stopped by {signals[-1]}" if is_named else listed.state,
        digest=_digest(events),
        num_steps=num_steps,
        curves=curves,
        epochs=epochs,
        phases=phases,
        events=events,
        seconds=None if step_seconds is None else num_steps * step_seconds,
        world_sizes=listed.world_sizes,
        findings=(*ledger_findings(ledger), *(Finding("note", f"{each}.") for each in problems)),
    )
    return run, ledger


def _digest(events: Sequence[Event]) -> str | None:
    """The digest of the final state."""
    ends = [event.fields.get("digest") for event in events if event.name == "end"]
    return next((digest for digest in reversed(ends) if isinstance(digest, str)), None)


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
