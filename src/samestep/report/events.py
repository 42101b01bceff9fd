"""The events of a run (start, death, heal, resume, checkpoint, …), as sentences and as labels of marks."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from samestep.report.reader import is_step
from samestep.text import counted

QUIET = ("start", "end", "checkpoint")  # not marked by a line on the curves


@dataclass(frozen=True)
class Event:
    """An event of the ledger; unknown names are kept."""

    name: str
    step: int  # updates done when it happened
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
            "contract_change": "contract changed",
        }
        return labels.get(self.name, self.name.replace("_", " "))

    @property
    def sentence(self) -> str:
        """The event in a sentence."""
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
            case "stop":
                return f"stopped by {fields.get('signal', 'a signal')}"
            case "checkpoint":
                waited = _seconds("; the step waited {}", fields.get("blocked_seconds"))
                name = f"checkpoint {fields.get('name', '')}".strip()
                return name + _seconds(" in {}", fields.get("seconds")) + waited
            case "contract_change":
                return f"contract changed: {_changes(fields.get('fields'))}"
            case "end":
                return "finished"
        rest = ", ".join(f"{key} {value}" for key, value in fields.items())
        return f"{self.name.replace('_', ' ')}{': ' + rest if rest else ''}"

    def as_json(self) -> dict[str, Any]:
        """The event as a JSON object."""
        time = None if self.time is None else self.time.isoformat(timespec="milliseconds")
        return {"event": self.name, "step": self.step, "time": time, "text": self.sentence, **self.fields}


def as_event(entry: Mapping[str, Any]) -> Event | None:
    """The event of a line of the ledger; None if it is not readable."""
    name, step = entry.get("event"), entry.get("step")
    if not isinstance(name, str) or not isinstance(step, int) or not is_step(step):
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
