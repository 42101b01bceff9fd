"""The files of a run: records and curves, and the events of its ledger."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from samestep.checkpoint.run_folder import CONTRACT_FILE, LEDGER_FILE
from samestep.errors import DataError, UsageError
from samestep.files import load_json, read_lines
from samestep.runs.curves import Curve
from samestep.runs.ledger import Ledger, is_step, number, read_ledger
from samestep.runs.run_list import is_run, unreadable
from samestep.text import counted

Epochs = dict[int, dict[str, float]]


def check_run(folder: Path) -> Path:
    """Returns the folder; raises `UsageError` if it is no run's folder."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "is not there"
    elif not is_run(folder):
        problem = f"is no run: it has no {CONTRACT_FILE} and no {LEDGER_FILE}"
    else:
        return folder
    raise UsageError(f"{folder} {problem}; give the folder of a run, such as runs/NAME")


def read_steps(folder: Path) -> Ledger:
    """The ledger of a run, an empty one if there is none yet."""
    try:
        return read_ledger(folder)
    except DataError as error:
        return Ledger({}, (), problems=() if isinstance(error.__cause__, FileNotFoundError) else (str(error),))


def read_metrics(path: Path, problems: list[str]) -> tuple[dict[str, Curve], Epochs]:
    """Curves by tag, and the values of each epoch; unreadable lines are skipped, later values of a step win."""
    values: dict[str, dict[int, float]] = {}
    epochs: Epochs = {}
    try:
        for line in _objects(path):
            step = line.pop("step", None)
            if not is_step(step):
                continue
            numbers = {tag: found for tag, value in line.items() if (found := as_number(value)) is not None}
            epoch = numbers.pop("epoch", None)
            for tag, found in numbers.items():
                values.setdefault(tag, {})[step] = found
            if epoch is not None and epoch.is_integer() and 0 <= epoch < 2**53:
                epochs[int(epoch)] = {"step": step, **numbers}
    except OSError as error:
        problems += unreadable(path.name, error)
    return {tag: Curve.of(by_step) for tag, by_step in values.items()}, dict(sorted(epochs.items()))


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file with one a line; lines that are none are skipped."""
    for line in read_lines(path):
        with suppress(ValueError):
            value = load_json(line)
            if isinstance(value, dict):
                yield value


def ledger_curves(steps: Mapping[int, Mapping[str, Any]]) -> dict[str, Curve]:
    """Loss, gradient norm, learning rate and world size after each step, by the tags of the metrics."""
    values: dict[str, dict[int, float]] = {}
    for step, entry in steps.items():
        rates = entry.get("lr")
        fields = {"loss/train": entry.get("loss"), "grad_norm": entry.get("grad_norm")}
        fields |= {"lr": rates[0] if isinstance(rates, list) and rates else None, "world_size": entry.get("world_size")}
        for tag, value in fields.items():
            if (found := as_number(value)) is not None:
                values.setdefault(tag, {})[step] = found
    return {tag: Curve.of(by_step) for tag, by_step in values.items()}


def as_number(value: Any) -> float | None:
    """A number as metrics and ledgers write it: JSON, "nan", "inf", "-inf" or hexadecimal digits; else None."""
    if type(value) is int:
        return float(value) if abs(value) < 2**1023 else None
    return value if type(value) is float else number(value)


def json_number(value: float | None) -> float | str | None:
    """A number for JSON, which lacks NaN and infinities: those become "nan", "inf" and "-inf"."""
    return value if value is None or math.isfinite(value) else str(value)


QUIET = ("start", "end", "checkpoint")  # not marked by a line on the curves


@dataclass(frozen=True)
class Event:
    """An event of the ledger; unknown names are kept."""

    name: str
    step: int  # in or after which it happened
    time: datetime | None  # with its zone
    fields: Mapping[str, Any]

    @property
    def label(self) -> str:
        """A few words, for a mark on a curve."""
        labels = {
            "death": f"rank {self.fields.get('rank', '?')} died",
            "heal": f"healed on {self.fields.get('world_size', '?')}",
            "join": f"joined, {self.fields.get('world_size', '?')} devices",
            "resume": "resumed",
            "stop": "stopped",
            "audit": "wrong bits",
            "contract_change": "settings changed",
        }
        return labels.get(self.name, self.name.replace("_", " "))

    @property
    def sentence(self) -> str:
        fields = self.fields
        devices = counted(fields["world_size"], "device") if "world_size" in fields else "an unknown number of devices"
        match self.name:
            case "start":
                return f"started on {devices}"
            case "resume":
                return f"resumed from {fields.get('from', 'a checkpoint')} on {devices}"
            case "death":
                return _death(fields)
            case "heal":
                lost, seconds = fields.get("lost"), fields.get("seconds")
                without = f" without rank {', '.join(map(str, lost))}" if isinstance(lost, list) and lost else ""
                after = f" after {seconds:.3g} s" if isinstance(seconds, int | float) else ""
                return f"went on with {devices}{without}{after}"
            case "join":
                return f"a device joined: {devices}"
            case "audit":
                return f"audit: {fields.get('found', 'wrong bits')} ({fields.get('action', '?')})"
            case "stop":
                return f"stopped by {fields.get('signal', 'a signal')}"
            case "checkpoint":
                waited = _seconds("; the step waited {}", fields.get("blocked_seconds"))
                name = f"checkpoint {fields.get('name', '')}".strip()
                return name + _seconds(" in {}", fields.get("seconds")) + waited
            case "contract_change":
                return f"settings changed: {_changes(fields.get('fields'))}"
            case "end":
                return "finished"
        rest = ", ".join(f"{key} {value}" for key, value in fields.items())
        return f"{self.name.replace('_', ' ')}{': ' + rest if rest else ''}"

    def as_json(self) -> dict[str, Any]:
        time = None if self.time is None else self.time.isoformat(timespec="milliseconds")
        return {"event": self.name, "step": self.step, "time": time, "text": self.sentence, **self.fields}


def as_event(entry: Mapping[str, Any]) -> Event | None:
    """The event of a line of the ledger; None if it is not readable."""
    name, step = entry.get("event"), entry.get("step")
    if not isinstance(name, str) or not is_step(step):
        return None
    fields = {key: value for key, value in entry.items() if key not in ("event", "step", "time", "text")}
    try:
        time = datetime.fromisoformat(entry.get("time", ""))
    except (TypeError, ValueError):
        return Event(name, step, None, fields)
    return Event(name, step, time if time.tzinfo is not None else time.replace(tzinfo=UTC), fields)


def _death(fields: Mapping[str, Any]) -> str:
    cause = fields.get("cause")
    rank = f"rank {fields.get('rank', '?')}" + (f" ({fields['device']})" if fields.get("device") else "")
    phase = f" in {fields['phase']}" if fields.get("phase") else ""
    if cause == "hang":
        return f"{rank} hung{phase} and was ended"
    return f"{rank} died{phase}{f': {cause}' if cause else ''}"


def _changes(changes: Any) -> str:
    """`seed 0 → 1, precision 32-true → bf16-mixed`."""
    rows = changes if isinstance(changes, list) else []
    texts = [f"{row[0]} {row[1]} → {row[2]}" for row in rows if isinstance(row, list) and len(row) == 3]
    return ", ".join(texts) or "fields are not recorded"


def _seconds(form: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return form.format(f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s")
