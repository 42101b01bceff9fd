"""Loggers of a run's scalars, called once a step.

A logger is any object with the two methods of `Logger`; there is no base class. Every rank makes one, and only rank 0
calls it, so it opens what it writes to at its first call. Weights & Biases, for example:

    class WandbLogger:
        def __init__(self, **options):
            self.options, self.run = options, None

        def log(self, step, scalars):
            if self.run is None:
                import wandb
                self.run = wandb.init(**self.options)
            self.run.log(dict(scalars), step=step)

        def close(self):
            if self.run is not None:
                self.run.finish()

Tags are those of TensorBoard, `loss/train`, `loss/eval`, `accuracy/eval`. Both loggers here write each call to the
file at once and from the calling thread, so that a full disk is an error of the step that met it.
"""

import itertools
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from samestep.data.randomness import Generators
from samestep.engine.losses import describe
from samestep.errors import UsageError
from samestep.extras import is_installed, missing
from samestep.train.atomic_io import append_whole, make_folder, open_unbuffered
from samestep.train.runlog.ledger import lines_backwards, mend_last_line


@runtime_checkable
class Logger(Protocol):
    """Takes the scalars of a run."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records scalars by tag, measured after `step` optimizer updates; non-finite ones are recorded as such."""

    def close(self) -> None:
        """Ends the record; a second call does nothing."""


class Aside:
    """The user's loggers as one; their draws leave the global generators unchanged, since only rank 0 calls them."""

    def __init__(self, loggers: Sequence[Logger], generators: Generators) -> None:
        for logger in loggers:
            if isinstance(logger, type) or not isinstance(logger, Logger):
                raise UsageError(
                    f"got {describe(logger)} as a logger; needed: an object with log(step, scalars) and close()"
                )
        self._loggers, self._generators, self._calls = loggers, generators, 0

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Has each logger record the scalars."""
        self._calls += 1
        with self._generators.aside(self._calls):
            for logger in self._loggers:
                logger.log(step, scalars)

    def close(self) -> None:
        """Closes each logger, even if another fails to."""
        self._calls += 1
        with self._generators.aside(self._calls), ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close)


class JsonlLogger:
    """Appends a JSON object a line, `{"step": 12, "loss/train": 0.31}`, to a file such as `metrics.jsonl`.

    NaN and infinities, which JSON lacks, are written as the strings "nan", "inf" and "-inf". After a resume a step may
    occur twice: the later line counts.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens the file, and makes its folder if there is none."""
        self._path = Path(path)
        make_folder(self._path.parent)
        self._file = open_unbuffered(self._path, "a+b")
        mend_last_line(self._file, self._path, lambda _: False)  # cuts off a line that a crash left unfinished

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one line."""
        if "step" in scalars:
            raise UsageError("got a scalar named 'step', as every line has one; needed: another name, such as 'step/…'")
        values = {tag: float(value) for tag, value in scalars.items()}
        line = {"step": int(step)} | {tag: v if math.isfinite(v) else str(v) for tag, v in values.items()}
        append_whole(self._file, self._path, (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode())

    def last_value(self, tag: str) -> float | None:
        """The last value of a tag in the file; None if there is none."""
        for line in lines_backwards(self._file, self._path):
            if f'"{tag}": '.encode() in line:
                return float(json.loads(line)[tag])
        return None

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardLogger:
    """Writes scalars as TensorBoard events into a new file of a folder such as `tensorboard/`."""

    def __init__(self, folder: str | os.PathLike[str], purge_step: int | None = None) -> None:
        """Makes the folder if there is none, and an event file in it."""
        if not is_installed("tensorboard"):
            raise UsageError(missing("tensorboard", "an event file"))
        # Not torch's SummaryWriter: it writes from a thread, where a full disk ends in a traceback and lost events.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._record_writer = Event, Summary, RecordWriter
        self._path, self._file = _new_event_file(Path(folder))
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            if purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))
        except BaseException:
            self.close()
            raise

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one event with all the scalars."""
        values = [self._summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items()]
        self._write(self._event(wall_time=time.time(), step=int(step), summary=self._summary(value=values)))

    def close(self) -> None:
        """Closes the event file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        record = BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        append_whole(self._file, self._path, record.getvalue())


def _new_event_file(folder: Path) -> tuple[Path, IO[bytes]]:
    """A new file named as TensorBoard wants it; files sort by time, which is the order they are read in."""
    make_folder(folder)
    stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    path = next(path for number in itertools.count() if not (path := folder / f"{stem}.{number}").exists())
    return path, open_unbuffered(path, "xb")
