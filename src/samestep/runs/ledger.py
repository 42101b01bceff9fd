"""The ledger: a line a step and a line an event, by which runs are compared and replayed; its reader, and differences.

A line is a JSON object whose last field is the CRC-32 of all bytes before it, so that a bit that flips on a disk is
found; floats are hexadecimal digits. Neither torch nor NumPy is needed: commands read ledgers without them.
"""

import hashlib
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeGuard

from samestep.checkpoint.contract_diff import ContractChange, decides, shown
from samestep.checkpoint.run_folder import LEDGER_FILE
from samestep.errors import DataError, RunFolderError
from samestep.files import append_whole, check_length, distinct, is_at, open_unbuffered, read_lines, reason, writing
from samestep.text import make_table

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table
    from torch.optim import Optimizer

    from samestep.data.batch import Batch
    from samestep.engine.result import StepResult

GATHERED_BYTES = 8192
READ_BYTES = 65_536
TIMED_KINDS = ("data", "compute", "exchange", "update")
KEY: Final = "crc"
_SEAL_BYTES: Final = len(b', "crc": "01234567"}')
# "step" is the first field of a step's line, so that `lacking` need not parse each line of a long ledger.
_STEP = re.compile(rb'\{"step": (\d+), "')


def to_line(entry: dict[str, Any]) -> bytes:
    """An entry as a line of the ledger, with its checksum."""
    body = json.dumps(entry).encode()[:-1]
    return body + _seal(body) + b"\n"


def from_line(line: bytes) -> dict[str, Any] | None:
    """The entry in a line without its newline, the checksum left out; None for a damaged or torn line."""
    if not is_whole(line):
        return None
    try:
        value = json.loads(line.decode(), object_pairs_hook=distinct)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        del value[KEY]
    return value if isinstance(value, dict) else None


def is_whole(line: bytes) -> bool:
    """Whether the checksum of a line without its newline fits its bytes."""
    return line[-_SEAL_BYTES:] == _seal(line[:-_SEAL_BYTES])


def fault(line: bytes) -> str:
    """The fault of a line that is not whole, as the end of a sentence."""
    if b'"crc"' in line[-2 * _SEAL_BYTES :]:
        return "is damaged: its checksum does not fit its bytes"
    return "is damaged or none of a ledger: it has no checksum"


class LedgerWriter:
    """Appends to a ledger; floats are hexadecimal digits, so that no bit is lost.

    Lines are gathered and written whole, so a full disk leaves no half line. If a crash tore the last line, it is
    removed on opening; a whole line without its newline gets one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = bytearray()
        self._file = open_unbuffered(path, "a+b")
        try:
            complete_last_line(self._file, path, lambda line: from_line(line) is not None)
        except BaseException:
            self._file.close()
            raise

    def write(self, entry: dict[str, Any]) -> None:
        """Appends an entry, which reaches the file at the next flush at the latest; may raise as `flush` does."""
        self._waiting += to_line(entry)
        if len(self._waiting) >= GATHERED_BYTES:
            self.flush()

    def write_event(self, name: str, step: int, /, **fields: Any) -> None:
        """Appends an event and flushes."""
        assert not fields.keys() & {"event", "time"}, fields
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._waiting += to_line({"event": name, "step": step, "time": now, **fields})
        self.flush()

    def last_step(self) -> int | None:
        """The number of the last step in the file, gathered ones aside; None if there is none."""
        for entry in self._entries_backwards():
            if "event" not in entry and isinstance(entry.get("step"), int):
                return int(entry["step"])
        return None

    def recorded_deaths(self) -> set[int]:
        """The slots of the workers whose death is in the file since the last start or resume."""
        slots: set[int] = set()
        for entry in self._entries_backwards(b'"event"'):
            if entry.get("event") in ("start", "resume"):
                break
            if entry.get("event") == "death":
                slots.add(int(entry["slot"]))
        return slots

    def flush(self) -> None:
        """Writes the gathered lines; raises a `RunFolderError` if that fails or the file was moved."""
        self._append()
        # After the writing: a file that was moved lacks no line when the run goes on where it is now.
        if not is_at(self._path, self._file):
            raise RunFolderError(
                f"{self._path} is not the file any more that this run writes to: it was moved or replaced meanwhile, "
                "with its folder perhaps. The run ends; go on with it where it is now by resume=… (--resume FOLDER)"
            )

    def close(self) -> None:
        """Writes the gathered lines and closes the file; a second call does nothing."""
        try:
            self._append()
        finally:
            self._file.close()

    def _append(self) -> None:
        # Emptied first: `close` would try the lines that a full disk has refused again, and hide the first error.
        data, self._waiting = bytes(self._waiting), bytearray()
        append_whole(self._file, self._path, data)

    def _entries_backwards(self, having: bytes = b"") -> Iterator[dict[str, Any]]:
        """The whole entries in the file, from the last on; of lines that contain some bytes."""
        with writing(self._path):
            for line in lines_backwards(self._file, self._path):
                entry = from_line(line) if having in line else None
                if entry is not None:
                    yield entry


def ledger_entry(
    result: "StepResult",
    batch: "Batch | None",
    learning_rates: Sequence[float],
    world_size: int,
    digest: str | None = None,
    seconds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The ledger's entry of a step whose scalars have arrived; `batch` is None for one of the user's own."""
    known = batch is not None and batch.epoch >= 0
    ids = batch.ids() if batch is not None and batch.ids is not None else None
    entry: dict[str, Any] = {
        "step": result.step,
        "epoch": batch.epoch if known and batch is not None else None,
        "position": batch.position if known and batch is not None else None,
        "num_samples": result.num_samples,
        "ids": None if ids is None else ids_hash(ids),
        "loss": result.loss.hex(),
        "grad_norm": result.grad_norm.hex(),
        "lr": [float(rate).hex() for rate in learning_rates],
        "skipped": result.skipped,
        "world_size": world_size,
    }
    if seconds is not None:
        entry["seconds"] = {kind: round(seconds.get(kind, 0.0), 6) for kind in TIMED_KINDS}
    return entry if digest is None else {**entry, "digest": digest}


def ids_hash(ids: "np.ndarray") -> str:
    """The first 64 bits of SHA-256 over the sample ids as little-endian 64-bit integers, in order."""
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:16]


def learning_rates(optimizers: Sequence["Optimizer"]) -> list[float]:
    """The learning rate of every parameter group."""
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]


def read_losses(path: Path) -> dict[int, float]:
    """The loss of every step in a ledger; of a step that was run twice the later line's."""
    losses: dict[int, float] = {}
    for line in read_lines(path):
        with suppress(ValueError, KeyError, TypeError):
            entry = from_line(line.removesuffix(b"\n")) or {}
            if "event" not in entry:
                losses[int(entry["step"])] = float.fromhex(entry["loss"])
    return losses


def lacking(path: Path, steps: int) -> str:
    """A sentence on missing and damaged lines of the first `steps` steps in the ledger of a resumed run, or "".

    A ledger that begins with a resume has only the steps after that.
    """
    seen, damaged, first = set[int](), list[int](), 0
    if not path.exists():
        return f"{path} is gone, with its lines of {steps} steps"
    with writing(path):
        for number, line in enumerate(read_lines(path), 1):
            line = line.removesuffix(b"\n")
            if not is_whole(line):
                damaged.append(number)
            elif match := _STEP.match(line):
                seen.add(int(match[1]))
            elif number == 1 and (begin := from_line(line)) is not None and begin.get("event") == "resume":
                first = int(begin["step"])
    lost = [step for step in range(first + 1, steps + 1) if step not in seen]
    parts = [f"missing steps: {len(lost)} of {steps} (step {lost[0]} first)"] if lost else []
    parts += [f"damaged lines: {len(damaged)} (line {damaged[0]} first)"] if damaged else []
    return f"{path}: {', '.join(parts)}" if parts else ""


def gaps(folder: Path) -> Iterator[str]:
    """Sentences on lines of steps that are missing between others (after a resume steps come again), and on names."""
    last: int | None = None
    for number, line in enumerate(read_lines(folder / LEDGER_FILE), 1):
        entry = from_line(line.removesuffix(b"\n")) or {}
        step, is_event = entry.get("step"), "event" in entry
        known = {"step", *NAMES.get(entry.get("event", ""), ()), *(("event", "time") if is_event else ())}
        within = {name: value for name, value in entry.items() if isinstance(value, dict)}
        strange = entry.keys() - known | within.keys() - {"seconds"} | within.get("seconds", {}).keys() - {*TIMED_KINDS}
        if strange:
            yield f"line {number} of the ledger has {min(strange)!r}, which no run writes there"
        if not isinstance(step, int) or (is_event and entry["event"] != "resume"):
            continue
        # A ledger may begin with a resume of a run in another folder.
        if (last is not None and step > last + 1) or (last is None and step > 1 and not is_event):
            yield f"line {number} of the ledger is of step {step}, and that before it of step {last}"
        last = step


def complete_last_line(file: IO[bytes], path: Path, is_whole: Callable[[bytes], bool]) -> None:
    """Ends a last line without a newline if it is whole, else cuts it off."""
    with writing(path):
        if not (last := next(lines_backwards(file, path))):
            return
        if not is_whole(last):
            file.truncate(file.seek(0, os.SEEK_END) - len(last))
            return
    append_whole(file, path, b"\n")


def lines_backwards(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """The lines of a file without newlines, from the last on; the first is what follows the last newline."""
    # `pieces` are of one line, whose beginning is not read yet: its end comes first.
    start, pieces = file.seek(0, os.SEEK_END), list[bytes]()
    while start > 0:
        size = min(READ_BYTES, start)
        start -= size
        file.seek(start)
        first, *lines = file.read(size).split(b"\n")
        if lines:
            pieces.append(lines.pop())
            yield b"".join(reversed(pieces))
            yield from reversed(lines)
            pieces = []
        pieces.append(first)
        check_length(sum(map(len, pieces)), path)
    yield b"".join(reversed(pieces))


def _seal(body: bytes) -> bytes:
    return b', "crc": "%08x"}' % zlib.crc32(body)


FIELDS: Final = ("num_samples", "ids", "lr", "loss", "grad_norm", "skipped", "digest")
PLACE: Final = ("epoch", "position")
NAMES: Final[Mapping[str, Sequence[str]]] = {  # of a step's line, and of each event's, its time aside
    "": (*PLACE, *FIELDS, "world_size", "seconds"),
    "start": ("world_size", "device_kind"),
    "resume": ("from", "world_size", "device_kind"),
    "contract_change": ("fields",),
    "checkpoint": ("name", "blocked_seconds", "seconds"),
    "stop": ("signal",),
    "end": ("digest",),
    "death": ("slot", "rank", "device", "cause", "phase"),
    "heal": ("world_size", "seconds", "lost"),
    "join": ("world_size", "seconds"),
    "audit": ("microbatch", "ranks", "devices", "names", "action", "found"),
}
FINAL_DIGEST: Final = "final digest"
_NOT_FINITE = ("nan", "inf", "-inf")
# Only what `float.hex` writes: `float.fromhex` reads many other texts.
_HEX_FLOAT = re.compile(r"-?0x[01](\.[0-9a-f]+)?p[+-]\d+")
_MAX_PROBLEMS = 100


@dataclass(frozen=True)
class Repeat:
    """A step that was taken twice, after a resume or a restart, with another result the second time."""

    step: int
    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Ledger:
    """A ledger that was read."""

    steps: Mapping[int, Mapping[str, Any]]  # by number, in order; of a step that was taken twice the later entry
    events: Sequence[Mapping[str, Any]]
    torn: bool = False  # whether the last line is unfinished: the run was killed as it wrote, or is writing now
    repeats_that_differ: Sequence[Repeat] = ()
    num_repeated: int = 0  # lines of steps that were there before, under the same contract
    problems: Sequence[str] = ()  # lines that cannot be read, each as a sentence with its number; the first hundred


@dataclass(frozen=True)
class FieldDifference:
    """A field of a step that differs between two ledgers."""

    field: str  # one of `FIELDS`, or `FINAL_DIGEST`
    a: Any  # its value in the first ledger, as it is there
    b: Any
    relative: float | None = None  # of finite numbers, |a - b| / max(|a|, |b|)


@dataclass(frozen=True)
class LedgerDifference:
    """The first step in which two ledgers differ."""

    step: int
    fields: Sequence[FieldDifference]  # in the order in which a step computes them
    agreed: int  # the number of earlier steps that both have; they agree
    proven: int | None = None  # the last step before it after which both recorded a checksum of the state
    known_samples: bool = True  # whether both recorded which samples it took
    alone: bool = False  # whether there are steps after it, and all that both have agree, as do the final states


@dataclass(frozen=True)
class Extent:
    """How far two ledgers can be compared."""

    common: int  # the number of steps that both have
    digests: int  # the number of those after which both recorded a checksum of the state
    only_a: int
    only_b: int
    final: bool = False  # whether both ended after the same step, each with a digest of its final state


def read_ledger(path: Path) -> Ledger:
    """Reads a ledger, damaged or not; raises `DataError` if there is none."""
    # A link that the user names.
    file = path / LEDGER_FILE if path.is_dir() else Path(os.path.realpath(path))
    try:
        return _read(file)
    except OSError as error:
        raise DataError(f"no ledger at {file}: {reason(error)}; name a run's folder or a ledger") from error


def _read(file: Path) -> Ledger:
    steps: dict[int, Mapping[str, Any]] = {}
    events: list[Mapping[str, Any]] = []
    repeats: list[Repeat] = []
    problems: list[str] = []
    torn, num_repeated = False, 0
    for number, line in enumerate(read_lines(file), 1):
        if not line.endswith(b"\n"):
            torn = True
            break
        if not line.strip():
            continue
        entry, problem = _parse(line[:-1])
        if problem:
            problems.append(f"line {number} {problem}")
        elif "event" in entry:
            events.append(entry)
            # Steps under another contract are no repetitions.
            if entry["event"] == "contract_change":
                steps = {step: kept for step, kept in steps.items() if step <= entry["step"]}
        else:
            # After a crash a run goes on from its last checkpoint: the steps since then are there twice.
            if entry["step"] in steps:
                num_repeated += 1
                found = differing_fields(steps[entry["step"]], entry)
                repeats += [Repeat(entry["step"], change.field, change.a, change.b) for change in found]
            steps[entry["step"]] = entry
    if problems and not steps and not events:
        raise DataError(f"{file} is no ledger: {problems[0]}")
    return Ledger(dict(sorted(steps.items())), events, torn, repeats, num_repeated, problems[:_MAX_PROBLEMS])


def compare(a: Ledger, b: Ledger) -> LedgerDifference | None:
    """The first step that both have and in which they differ; None if there is none.

    Compared are the samples and their number, learning rates, loss, gradient norm, whether the update was skipped and
    the checksum of the state, each if both recorded it, to the bit; and the digests of the final states, if both ended
    after the same step. Devices and events are no difference.
    """
    agreed, proven = 0, None
    for step, one, other in _common(a, b):
        found = differing_fields(one, other)
        if found:
            return LedgerDifference(step, found, agreed, proven, _both(one, other, "ids"), _agree_after(step, a, b))
        agreed += 1
        if _both(one, other, "digest"):
            proven = step
    ends = _same_end(a, b)
    if ends is not None and ends[1] != ends[2]:
        return LedgerDifference(ends[0], (FieldDifference(FINAL_DIGEST, *ends[1:]),), agreed, proven)
    return None


def _common(a: Ledger, b: Ledger) -> list[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """The steps that both have, with both entries."""
    return [(step, one, b.steps[step]) for step, one in a.steps.items() if step in b.steps]


def _agree_after(step: int, a: Ledger, b: Ledger) -> bool:
    """Whether both have steps after this one, and they and the final states agree."""
    later = [pair for number, *pair in _common(a, b) if number > step]
    ends = _same_end(a, b)
    return bool(later) and (ends is None or ends[1] == ends[2]) and not any(differing_fields(*pair) for pair in later)


def extent(a: Ledger, b: Ledger) -> Extent:
    """The number of steps that can be compared, and of those that only one of two ledgers has."""
    common = _common(a, b)
    digests = sum(_both(one, other, "digest") for _, one, other in common)
    only = (len(a.steps) - len(common), len(b.steps) - len(common))
    return Extent(len(common), digests, *only, final=_same_end(a, b) is not None)


def differing_fields(
    a: Mapping[str, Any], b: Mapping[str, Any], *, strict: bool = False
) -> tuple[FieldDifference, ...]:
    """The fields that two entries of one step both have, with different values.

    If it is strict, the place in the data too, and those that one of them lacks; a digest is not in each line.
    """
    return tuple(
        _field_difference(field, a.get(field), b.get(field))
        for field in ((*PLACE, *FIELDS) if strict else FIELDS)
        if (_both(a, b, field) or (strict and field != "digest")) and _bits(a.get(field)) != _bits(b.get(field))
    )


def cause(difference: LedgerDifference) -> str:
    """The likely cause in a sentence or two, by the first field in the order of a step that differs."""
    fields, step = {change.field for change in difference.fields}, difference.step
    if difference.alone:
        return "All steps after it agree, so the runs did not part: one of the ledgers is wrong about this step"
    if fields & {"num_samples", "ids"}:
        return "The data differ: other samples, or another order. Look at seed, shuffle, the batch size and the dataset"
    if "lr" in fields:
        return "The learning rates differ: look at the schedule, and at what was resumed"
    earlier = _earlier(difference)
    if "loss" in fields:
        samples = "on the same samples" if difference.known_samples else "or the data: which samples is not recorded"
        return f"The forward differs, {samples}: model, precision, kernels or random numbers{earlier}"
    if "grad_norm" in fields:
        return f"The backward or the sum over devices differs: the loss is the same{earlier}"
    if "skipped" in fields:
        return f"One run skipped the update: the gradients differ in values that are not finite{earlier}"
    if difference.proven == step - 1 or FINAL_DIGEST in fields:
        return "Only the state differs: the optimizer's update, or a buffer such as BatchNorm's statistics"
    return (
        "Only the state differs: an update, a buffer, or gradients of equal norm, since the last checksum that agreed"
    )


def _earlier(difference: LedgerDifference) -> str:
    """An addition if the state before the step may have differed already."""
    if difference.agreed == 0:
        return " (or the state before: no earlier step was compared)"
    if difference.proven == difference.step - 1:
        return ""
    since = "" if difference.proven is None else f" since step {difference.proven}"
    return f" (or the state before: no checksum of it was compared{since}; record one each step to find out)"


def number(value: Any) -> float | None:
    """A number as the ledger writes it, `0x1.8p+0`; None for anything else."""
    if isinstance(value, str) and (value in _NOT_FINITE or _HEX_FLOAT.fullmatch(value)):
        try:
            return float.fromhex(value)
        except (ValueError, OverflowError):
            return None
    return None


def is_step(value: Any) -> TypeGuard[int]:
    """Whether a value of a file is a number of steps."""
    return type(value) is int and 0 <= value < 2**53


def _parse(line: bytes) -> tuple[dict[str, Any], str]:
    """A line's entry, and its fault, or ""."""
    entry = from_line(line)
    if entry is None:
        return {}, fault(line)
    step, digest, rates = entry.get("step"), entry.get("digest"), entry.get("lr", [])
    if not is_step(step):
        return {}, f"has no number of a step, but {step!r}"
    if "event" in entry:
        return (entry, "") if isinstance(entry["event"], str) else ({}, f"has the event {entry['event']!r}")
    numbers = [("loss", entry.get("loss")), ("grad_norm", entry.get("grad_norm"))]
    for field, value in (*numbers, *(("lr", rate) for rate in (rates if isinstance(rates, list) else [rates]))):
        if number(value) is None:
            return {}, f"has {value!r} as {field}; needed: a hexadecimal float such as 0x1.8p+0"
    if digest is not None and not isinstance(digest, str):
        return {}, f"has {digest!r} as digest; needed: hexadecimal digits"
    return entry, ""


def _both(a: Mapping[str, Any], b: Mapping[str, Any], field: str) -> bool:
    return a.get(field) is not None and b.get(field) is not None


def _bits(value: Any) -> Any:
    """A value that is equal for equal bits, in whatever way a number is written."""
    if isinstance(value, list):
        return [_bits(item) for item in value]
    known = number(value)
    return value if known is None else struct.pack("<d", known)


def _field_difference(field: str, a: Any, b: Any) -> FieldDifference:
    """A field that differs, with the relative distance of its numbers: of several the two that are farthest apart."""
    if field not in ("lr", "loss", "grad_norm"):
        return FieldDifference(field, a, b)
    pairs = zip(a, b, strict=False) if isinstance(a, list) and isinstance(b, list) else [(a, b)]
    distances = [distance for one, other in pairs if (distance := _distance(number(one), number(other))) is not None]
    return FieldDifference(field, a, b, max(distances, default=None))


def _distance(a: float | None, b: float | None) -> float | None:
    """The distance of two finite numbers relative to the larger; None for others."""
    if a is None or b is None or not math.isfinite(a) or not math.isfinite(b):
        return None
    larger = max(abs(a), abs(b))
    # Divided first: the difference of two huge numbers may be infinite.
    return abs(a / larger - b / larger) if larger else 0.0


def _same_end(a: Ledger, b: Ledger) -> tuple[int, Any, Any] | None:
    """The step after which both ended, and the digest of each; None if they did not end after the same one."""
    one, other = _end(a), _end(b)
    return None if one is None or other is None or one[0] != other[0] else (*one, other[1])


def _end(ledger: Ledger) -> tuple[int, Any] | None:
    """The step after which a run ended, and the digest of its final state; None if it did not end."""
    ends = [event for event in ledger.events if event["event"] == "end" and event.get("digest") is not None]
    return (ends[-1]["step"], ends[-1]["digest"]) if ends else None


_NAMES = {
    "num_samples": "samples",
    "ids": "sample ids",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "world_size": "devices",
    "digest": "state",
}


def fields_table(fields: Iterable[FieldDifference], a: str, b: str) -> "Table":
    """The fields in which a step differs, with the titles of both records."""
    from rich.markup import escape  # draws from Python's random at its first import: no program that trains loads it

    table = make_table("", a, b, "apart")
    for change in fields:
        apart = "" if change.relative is None else f"{change.relative:.2g} of it"
        values = (escape(ledger_value(change.a)), escape(ledger_value(change.b)))
        table.add_row(field_name(change.field), *values, apart)
    return table


def changes_table(changes: Iterable[ContractChange], a: str, b: str) -> "Table":
    """The fields in which contracts differ, and what each of them decides."""
    from rich.markup import escape

    table = make_table("contract", a, b, "decides")
    for change in changes:
        values = (escape(shown(change.before)), escape(shown(change.after)))
        table.add_row(escape(change.field), *values, decides(change.field) if change.breaks else "no bits, as a rule")
    return table


def field_name(field: str) -> str:
    """The display name of a field of the ledger."""
    return _NAMES.get(field, field)


def ledger_value(value: Any, short: bool = False) -> str:
    """A value of the ledger for people: numbers in decimal digits, all of them or six."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(ledger_value(item, short) for item in value)
    known = number(value)
    if known is None:
        return value if isinstance(value, str) else json.dumps(value)
    return f"{known:.6g}" if short else repr(known)
