"""The ledger: a line a step and a line an event, by which runs are compared and replayed.

A line is a JSON object whose last field is the CRC-32 of all bytes before it, so that a bit that flips on a disk is
found. Nothing here needs torch: commands read ledgers without it.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final

from samestep.errors import RunFolderError
from samestep.train.atomic_io import append_whole, check_length, is_at, open_unbuffered, read_lines, writing

if TYPE_CHECKING:
    import numpy as np
    from torch.optim import Optimizer

    from samestep.data.batch import Batch
    from samestep.engine.result import StepResult

GATHERED_BYTES = 8192
READ_BYTES = 65_536
TIMED_KINDS = ("data", "compute", "exchange", "update")
KEY: Final = "crc"
_SEAL_BYTES: Final = len(b', "crc": "01234567"}')
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
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        del value[KEY]
    return value if isinstance(value, dict) else None


def is_whole(line: bytes) -> bool:
    """Whether the checksum of a line without its newline is that of its bytes."""
    return line[-_SEAL_BYTES:] == _seal(line[:-_SEAL_BYTES])


def fault(line: bytes) -> str:
    """The fault of a line that is not whole, as the end of a sentence."""
    if b'"crc"' in line[-2 * _SEAL_BYTES :]:
        return "is damaged: its checksum is not that of its bytes"
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
            mend_last_line(self._file, path, lambda line: from_line(line) is not None)
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
        data, self._waiting = bytes(self._waiting), bytearray()
        append_whole(self._file, self._path, data)

    def _entries_backwards(self, having: bytes = b"") -> Iterator[dict[str, Any]]:
        """The whole entries in the file, from the last on; of lines that contain some bytes."""
        with writing(self._path):
            for line in lines_backwards(self._file, self._path):
                entry = from_line(line) if having in line else None
                if entry is not None:
                    yield entry

    def __enter__(self) -> "LedgerWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


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
    """The loss of every step in a ledger by the updates done; of a step that was run twice the later line's."""
    losses: dict[int, float] = {}
    for line in read_lines(path):
        with suppress(ValueError, KeyError, TypeError):
            entry = from_line(line.removesuffix(b"\n")) or {}
            if "event" not in entry:
                losses[int(entry["step"]) + 1] = float.fromhex(entry["loss"])
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
    lost = [step for step in range(first, steps) if step not in seen]
    parts = [f"missing steps: {len(lost)} of {steps} (step {lost[0]} first)"] if lost else []
    parts += [f"damaged lines: {len(damaged)} (line {damaged[0]} first)"] if damaged else []
    return f"{path}: {', '.join(parts)}" if parts else ""


def mend_last_line(file: IO[bytes], path: Path, is_whole: Callable[[bytes], bool]) -> None:
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
