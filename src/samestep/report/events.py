"""An event of a run: a start, a death, a heal, a resume; as a sentence and as a label."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

QUIET = ("start", "end", "checkpoint")  # not marked by a line on the curves


@dataclass(frozen=True)
class Event:
    """An event as the ledger holds it.

    Attributes:
        name: start, resume, death, heal, join, stop, checkpoint, contract_change, end, or one that we do not know.
        step: updates done when it happened.
        time: with its zone; None if it is not known.
        fields: what else the ledger says of it.
    """

    name: str
    step: int
    time: datetime | None
    fields: Mapping[str, Any]

    @property
    def label(self) -> str:
        """A few words, for a mark on a curve."""
        fields = self.fields
        if self.name == "death":
            return f"rank {fields.get('rank', '?')} died"
        if self.name == "heal":
            return f"healed on {fields.get('world_size', '?')}"
        if self.name == "join":
            return f"joined, {fields.get('world_size', '?')} devices"
        if self.name == "contract_change":
            return "contract changed"
        return {"resume": "resumed", "stop": "stopped"}.get(self.name, self.name.replace("_", " "))

    @property
    def sentence(self) -> str:
        """What happened, in words."""
        fields = self.fields
        devices = counted(fields["world_size"], "device") if "world_size" in fields else "an unknown number of devices"
        if self.name == "start":
            return f"started on {devices}"
        if self.name == "resume":
            return f"resumed from {fields.get('from', 'a checkpoint')} on {devices}"
        if self.name == "death":
            return _death(fields)
        if self.name == "heal":
            lost = fields.get("lost")
            without = f" without rank {', '.join(map(str, lost))}" if isinstance(lost, list) and lost else ""
            seconds = fields.get("seconds")
            after = f" after {seconds:.3g} s" if isinstance(seconds, int | float) else ""
            return f"went on with {devices}{without}{after}"
        if self.name == "join":
            return f"a device joined: {devices}"
        if self.name == "stop":
            return f"stopped by {fields.get('signal', 'a signal')}"
        if self.name == "checkpoint":
            blocked = _seconds("; the step waited {}", fields.get("blocked_seconds"))
            return f"checkpoint {fields.get('name', '')}".strip() + _seconds(" in {}", fields.get("seconds")) + blocked
        if self.name == "contract_change":
            return f"contract changed: {_changes(fields.get('fields'))}"
        if self.name == "end":
            return "finished"
        rest = ", ".join(f"{key} {value}" for key, value in fields.items())
        return f"{self.name.replace('_', ' ')}{': ' + rest if rest else ''}"

    def as_json(self) -> dict[str, Any]:
        """The event as a JSON object."""
        time = None if self.time is None else self.time.isoformat(timespec="milliseconds")
        return {"event": self.name, "step": self.step, "time": time, "text": self.sentence, **self.fields}


def as_event(entry: Mapping[str, Any]) -> Event | None:
    """The event that a line of a ledger tells of; None if it cannot be read."""
    name, step = entry.get("event"), entry.get("step")
    if not isinstance(name, str) or isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
        return None
    fields = {key: value for key, value in entry.items() if key not in ("event", "step", "time", "text")}
    return Event(name, step, _time(entry.get("time")), fields)


def counted(number: Any, noun: str) -> str:
    """`1 device`, `1,200 devices`."""
    text = f"{number:,}" if isinstance(number, int) else str(number)
    return f"{text} {noun}{'' if number == 1 else 's'}"


def _death(fields: Mapping[str, Any]) -> str:
    device = f" ({fields['device']})" if fields.get("device") else ""
    phase = f" in {fields['phase']}" if fields.get("phase") else ""
    cause = fields.get("cause")
    if cause == "hang":
        return f"rank {fields.get('rank', '?')}{device} hung{phase} and was ended"
    return f"rank {fields.get('rank', '?')}{device} died{phase}{f': {cause}' if cause else ''}"


def _changes(changes: Any) -> str:
    """`seed 0 → 1, precision 32-true → bf16-mixed`."""
    rows = changes if isinstance(changes, list) else []
    texts = [f"{row[0]} {row[1]} → {row[2]}" for row in rows if isinstance(row, list) and len(row) == 3]
    return ", ".join(texts) or "fields are not recorded"


def _seconds(form: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return form.format(f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s")


def _time(value: Any) -> datetime | None:
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
