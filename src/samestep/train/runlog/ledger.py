"""The ledger: a line a step and a line an event, by which runs are compared and replayed."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch.optim import Optimizer

from samestep.data.batch import Batch
from samestep.engine.result import StepResult
from samestep.errors import RunFolderError
from samestep.train.atomic_io import append_whole, is_at, open_unbuffered, writing
from samestep.train.runlog.line import from_line, is_whole, to_line

GATHERED_BYTES = 8192
READ_BYTES = 65_536
TIMED_KINDS = ("data", "compute", "exchange", "update")
_STEP = re.compile(rb'\{"step": (\d+), "')


class LedgerWriter:
    """Appends to a ledger; floats are hexadecimal digits, so that no bit is lost.

    Lines are gathered and written whole: a full disk leaves no half of one. After a crash the last line is mended when
    the file is opened: a whole line without its end gets one, the torn part of a line is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = bytearray()
        self._file = open_unbuffered(path, "a+b")
        try:
            _mend_last_line(self._file, path)
        except BaseException:
            self._file.close()
            raise

    def write(self, entry: dict[str, Any]) -> None:
        """Appends one entry, at the latest when flushed; on a `RunFolderError` the file ends with the line before."""
        self._waiting += to_line(entry)
        if len(self._waiting) >= GATHERED_BYTES:
            self.flush()

    def write_event(self, name: str, step: int, /, **fields: Any) -> None:
        """Appends an event, with what gathered before it, at once."""
        assert not fields.keys() & {"event", "time"}, fields
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._waiting += to_line({"event": name, "step": step, "time": now, **fields})
        self.flush()

    def last_step(self) -> int | None:
        """The number of the last step that is in the file, without what has gathered since; None if there is none."""
        with writing(self._path):
            for line in _lines_backwards(self._file):
                entry = from_line(line)
                if entry is not None and "event" not in entry and isinstance(entry.get("step"), int):
                    return int(entry["step"])
        return None

    def losses(self) -> set[int]:
        """The slots of the workers whose death is in the file since the run was started or resumed last."""
        slots: set[int] = set()
        with writing(self._path):
            for line in _lines_backwards(self._file):
                entry = from_line(line) if b'"event"' in line else None
                if entry is not None and entry.get("event") in ("start", "resume"):
                    break
                if entry is not None and entry.get("event") == "death":
                    slots.add(int(entry["slot"]))
        return slots

    def flush(self) -> None:
        """Hands what was written to the system; raises as `write` does, and if the file is no longer at its path."""
        self._append()
        if not is_at(self._path, self._file):
            raise RunFolderError(
                f"{self._path} is not the file any more that this run writes to: it was moved or replaced meanwhile, "
                "with its folder perhaps. The run ends; go on with it where it is now: --resume FOLDER"
            )

    def close(self) -> None:
        """Writes what has gathered and closes the file; a second call does nothing."""
        try:
            self._append()
        finally:
            self._file.close()

    def _append(self) -> None:
        data, self._waiting = bytes(self._waiting), bytearray()
        append_whole(self._file, self._path, data)

    def __enter__(self) -> "LedgerWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def ledger_entry(
    result: StepResult,
    batch: Batch | None,
    learning_rates: Sequence[float],
    world_size: int,
    digest: str | None = None,
    seconds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The ledger's entry of a step, whose scalars are fetched.

    `batch` is None for one of the user's own; `learning_rates` has one a parameter group, as used in the step; `digest`
    is the checksum of the state after the step as 16 hexadecimal digits, if it was computed.
    Of `seconds`, the host seconds by kind, those of `TIMED_KINDS` are written.
    """
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


def ids_hash(ids: np.ndarray) -> str:
    """The first 64 bits of SHA-256 over the sample ids as little-endian 64-bit integers, in order."""
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:16]


def read_losses(path: Path) -> list[tuple[int, float]]:
    """(updates done, loss) of every step in a ledger; of a step that was run twice the later line."""
    losses: dict[int, float] = {}
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                entry = from_line(line.removesuffix(b"\n")) or {}
                if "event" not in entry:
                    losses[int(entry["step"]) + 1] = float.fromhex(entry["loss"])
    return sorted(losses.items())


def lacking(path: Path, steps: int) -> str:
    """What a ledger that a run goes on with lacks of the first `steps` steps, as a sentence; "" for nothing.

    One that begins with a resume has the steps after that only. Raises a `RunFolderError` if it cannot be read.
    """
    seen, damaged, first = set[int](), list[int](), 0
    if not path.exists():
        return f"{path} is gone, with what it said of {steps} steps"
    with writing(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
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


def learning_rates(optimizers: Sequence[Optimizer]) -> list[float]:
    """The learning rate of every parameter group."""
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]


def _mend_last_line(file: FileIO, path: Path) -> None:
    """Ends a last line that lacks its end, if it is whole; else cuts it off. A special file is left alone."""
    with writing(path):
        if not path.is_file() or file.seek(0, os.SEEK_END) == 0:
            return
        last = next(_lines_backwards(file))
        if not last:  # the file ends with the end of a line
            return
        if from_line(last) is None:
            file.truncate(file.seek(0, os.SEEK_END) - len(last))
            return
    append_whole(file, path, b"\n")


def _lines_backwards(file: FileIO) -> Iterator[bytes]:
    """The lines of a file without their ends, from the last on; the first one is what follows the last newline."""
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
    yield b"".join(reversed(pieces))
