"""The story of some runs: everything that a report tells of them, gathered from their folders."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samestep.errors import UsageError
from samestep.report.clock import Clock, make_clock
from samestep.report.curves import Curve, averaged, json_number
from samestep.report.events import Event, as_event, counted
from samestep.report.facts import Agreement, Finding, agreement, findings
from samestep.report.reading import Metrics, check_run, ledger_curves, read_metrics, read_object, read_steps
from samestep.train.agreement import Change, differences
from samestep.train.naming import CONTRACT_FILE, METRICS_FILE, RESULT_FILE
from samestep.verify.ledger import Ledger
from samestep.verify.runs import summarize

PHASES = ("data", "compute", "exchange", "update", "checkpoint")
MAX_SIZES = 4  # changes of the number of devices that are told one by one
RATE_TAG = "samples_per_second"


@dataclass(frozen=True)
class Phases:
    """Where the time of a step goes.

    Attributes:
        names: of the phases that were measured.
        steps: [N] updates done.
        seconds: [N, phases] mean seconds of a step since the row before.
        totals: [phases] seconds of the whole run.
    """

    names: tuple[str, ...]
    steps: np.ndarray
    seconds: np.ndarray
    totals: np.ndarray

    @property
    def shares(self) -> dict[str, float]:
        """Each phase's part of the whole, from 0 to 1; empty if nothing was measured."""
        whole = float(self.totals.sum()) if len(self.totals) else 0.0
        if whole <= 0:
            return {}
        return {name: float(total) / whole for name, total in zip(self.names, self.totals, strict=True)}

    def thinned(self, bins: int) -> "Phases":
        """The phases with at most so many rows."""
        steps, seconds = averaged(self.steps, self.seconds, bins)
        return Phases(self.names, steps, seconds, self.totals)


@dataclass(frozen=True)
class RunStory:
    """What is known of one run.

    Attributes:
        name: how the report calls it: the folder's name, with as much of the path as tells it from the others.
        folder: of the run.
        contract: run.json; empty if there is none.
        state: "finished", "running", "running?", "stopped by SIGINT" or "crashed".
        digest: SHA-256 of the final state; None before the end.
        num_steps: updates done.
        curves: by tag.
        epochs: what was logged after each epoch, by its number.
        phases: where the time goes.
        events: in the order of the ledger.
        clock: when each step was done.
        world_sizes: numbers of devices, in the order in which they were used.
        findings: what the ledger proves.
    """

    name: str
    folder: Path
    contract: Mapping[str, Any]
    state: str
    digest: str | None
    num_steps: int
    curves: Mapping[str, Curve]
    epochs: Mapping[int, Mapping[str, float]]
    phases: Phases
    events: tuple[Event, ...]
    clock: Clock
    world_sizes: tuple[int, ...]
    findings: tuple[Finding, ...]

    @property
    def title(self) -> str:
        """What was trained, as the contract has it."""
        facts = [str(self.contract[key]) for key in ("recipe", "script", "data") if self.contract.get(key)]
        return " on ".join(facts[:2]) or "samestep run"

    @property
    def terms(self) -> str:
        """The contract in a few words."""
        contract = self.contract
        words = []
        if "global_batch_size" in contract and "num_microbatches" in contract:
            words.append(
                f"{contract['global_batch_size']} samples a step = "
                f"{counted(contract['num_microbatches'], 'microbatch')}"
            )
        words += [f"{contract['optimizer']}, lr {contract.get('lr', '?')}"] if "optimizer" in contract else []
        words += [f"seed {contract['seed']}"] if "seed" in contract else []
        words += [str(contract[key]) for key in ("precision", "reduction", "device_kind") if contract.get(key)]
        return " · ".join(words)

    @property
    def devices(self) -> str:
        """On how many devices it ran: `3 devices`, `3 → 2 devices`."""
        sizes = [*map(str, self.world_sizes)]
        if not sizes:
            return ""
        if len(sizes) > MAX_SIZES:
            return f"{sizes[0]} → … → {sizes[-1]} devices, {min(self.world_sizes)} to {max(self.world_sizes)}"
        return f"{' → '.join(sizes)} {'device' if sizes == ['1'] else 'devices'}"

    @property
    def eval_tags(self) -> tuple[str, ...]:
        """The tags of evaluation metrics."""
        return tuple(tag for tag in self.curves if tag.endswith("/eval"))

    @property
    def throughput(self) -> float | None:
        """Samples a second, the mean over the epochs."""
        curve = self.curves.get(RATE_TAG)
        return float(curve.finite.mean()) if curve is not None and len(curve.finite) else None

    @property
    def memory(self) -> dict[str, float]:
        """The most memory that was seen in use: bytes by "host" and "device"."""
        tags = {name: self.curves.get(f"memory/{name}_bytes") for name in ("host", "device")}
        return {
            name: float(curve.finite.max()) for name, curve in tags.items() if curve is not None and len(curve.finite)
        }

    def as_json(self) -> dict[str, Any]:
        """The story as a JSON object; of the curves it holds the ends and the extremes."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "state": self.state,
            "digest": self.digest,
            "steps": self.num_steps,
            "seconds": self.clock.duration,
            "world_sizes": list(self.world_sizes),
            "samples_per_second": self.throughput,
            "epochs": [
                {"epoch": number, **{tag: json_number(value) for tag, value in record.items()}}
                for number, record in self.epochs.items()
            ],
            "curves": {tag: curve.summary() for tag, curve in self.curves.items()},
            "phases": self.phases.shares,
            "memory": self.memory,
            "events": [event.as_json() for event in self.events],
            "findings": [finding.as_json() for finding in self.findings],
            "contract": dict(self.contract),
        }


@dataclass(frozen=True)
class Comparison:
    """A run beside the first one.

    Attributes:
        first: name of the first.
        other: name of the run.
        changes: of the contract.
        agreement: of the ledgers.
    """

    first: str
    other: str
    changes: tuple[Change, ...]
    agreement: Agreement

    @property
    def breaks(self) -> bool:
        """Whether the contracts differ in something on which the bits depend."""
        return any(change.breaks for change in self.changes)

    @property
    def finding(self) -> Finding:
        """The comparison as a sentence: other bits are a failure only under equal contracts."""
        found = self.agreement.finding
        if found.verdict != "fails" or not self.breaks:
            return found
        fields = ", ".join(change.field for change in self.changes if change.breaks)
        return Finding("note", f"{found.text} The contracts differ ({fields}), so no equal bits were promised.")

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        changes = [{"field": c.field, "before": c.before, "after": c.after, "breaks": c.breaks} for c in self.changes]
        ledger = {**self.finding.as_json(), **self.agreement.as_json()}
        return {"first": self.first, "other": self.other, "contract": changes, "ledger": ledger}


@dataclass(frozen=True)
class Story:
    """What a report tells.

    Attributes:
        runs: at least one.
        comparisons: each further run beside the first.
    """

    runs: tuple[RunStory, ...]
    comparisons: tuple[Comparison, ...]

    def as_json(self) -> dict[str, Any]:
        """The story as a JSON object."""
        return {
            "runs": [run.as_json() for run in self.runs],
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
        }


def gather(folders: Sequence[str | os.PathLike[str]]) -> Story:
    """Gathers the story of some runs, as far as they got.

    Args:
        folders: run folders; one that is named twice is told once.

    Raises:
        UsageError: none is named, or one is not the folder of a run.
    """
    paths = [check_run(Path(folder)) for folder in folders]
    unique = list({path.resolve(): path for path in reversed(paths)}.values())[::-1]
    if not unique:
        raise UsageError("no run is named; give the folder of a run, such as runs/NAME")
    names = distinct_names([path.resolve() for path in unique])
    told = [_tell(path, name) for path, name in zip(unique, names, strict=True)]
    (first, first_ledger), *others = told
    comparisons = tuple(
        Comparison(
            first.name, run.name, tuple(differences(first.contract, run.contract)), agreement(first_ledger, ledger)
        )
        for run, ledger in others
    )
    return Story(tuple(run for run, _ in told), comparisons)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of different paths, as many as tell them apart."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _tell(folder: Path, name: str) -> tuple[RunStory, Ledger]:
    """The story of one run, and its ledger."""
    ledger, num_repeated = read_steps(folder)
    metrics = read_metrics(folder / METRICS_FILE)
    contract, result = read_object(folder / CONTRACT_FILE), read_object(folder / RESULT_FILE)
    events = tuple(event for event in map(as_event, ledger.events) if event is not None)
    recorded = ledger_curves(ledger.steps)
    worlds = recorded.get("world_size")
    curves = {**recorded, **metrics.curves}
    phases = _phases(curves)
    curves = {tag: curve for tag, curve in curves.items() if not tag.startswith("seconds/")}
    num_steps = max([*(int(curve.steps[-1]) for curve in curves.values() if len(curve)), 0])
    run = RunStory(
        name=name,
        folder=folder,
        contract=contract,
        state=_state(folder, events),
        digest=_digest(events, result),
        num_steps=num_steps,
        curves=curves,
        epochs=metrics.epochs,
        phases=phases,
        events=events,
        clock=make_clock(events, _step_seconds(phases, metrics, contract), num_steps),
        world_sizes=_world_sizes(worlds, events, contract),
        findings=findings(ledger, num_repeated),
    )
    return run, ledger


def _state(folder: Path, events: Sequence[Event]) -> str:
    """How the run stands, as far as its folder tells."""
    state = summarize(folder).state
    signals = [event.fields.get("signal") for event in events if event.name == "stop"]
    return f"stopped by {signals[-1]}" if state == "stopped" and signals and signals[-1] else state


def _digest(events: Sequence[Event], result: Mapping[str, Any]) -> str | None:
    """The digest of the final state."""
    ends = [event.fields.get("digest") for event in events if event.name == "end"]
    for digest in (result.get("digest"), *reversed(ends)):
        if isinstance(digest, str):
            return digest
    return None


def _phases(curves: Mapping[str, Curve]) -> Phases:
    """The phases that were measured, the known ones first; steps at which all of them were."""
    found = {tag.removeprefix("seconds/"): curve for tag, curve in curves.items() if tag.startswith("seconds/")}
    found = {name: curve for name, curve in found.items() if len(curve.finite)}
    names = (*(name for name in PHASES if name in found), *sorted(found.keys() - set(PHASES)))
    if not names:
        return Phases((), np.empty(0, np.int64), np.empty((0, 0)), np.empty(0))
    steps = np.unique(np.concatenate([found[name].steps for name in names]))
    steps = steps[steps > 0]
    seconds = np.zeros((len(steps), len(names)))
    for column, name in enumerate(names):
        known = dict(zip(found[name].steps.tolist(), found[name].values.tolist(), strict=True))
        seconds[:, column] = [known.get(step, 0.0) for step in steps.tolist()]
    seconds = np.where(np.isfinite(seconds) & (seconds >= 0), seconds, 0.0)
    return Phases(names, steps, seconds, np.diff(steps, prepend=0) @ seconds)


def _step_seconds(phases: Phases, metrics: Metrics, contract: Mapping[str, Any]) -> list[tuple[int, float]]:
    """(step, mean seconds of a step) from the phases; without them, from the throughput of the epochs."""
    if len(phases.steps):
        return list(zip(phases.steps.tolist(), phases.seconds.sum(1).tolist(), strict=True))
    size = contract.get("global_batch_size")
    curve = metrics.curves.get(RATE_TAG)
    if curve is None or not isinstance(size, int):
        return []
    return [
        (step, size / rate) for step, rate in zip(curve.steps.tolist(), curve.values.tolist(), strict=True) if rate > 0
    ]


def _world_sizes(worlds: Curve | None, events: Sequence[Event], contract: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of devices, each followed by another one."""
    sizes: list[Any] = [] if worlds is None else worlds.finite.astype(np.int64).tolist()
    sizes = sizes or [event.fields.get("world_size") for event in events]
    devices = contract.get("devices")
    if not any(isinstance(size, int) for size in sizes) and isinstance(devices, list):
        sizes = [len(devices)]
    kept: list[int] = []
    for size in sizes:
        if isinstance(size, int) and (not kept or kept[-1] != size):
            kept.append(size)
    return tuple(kept)
