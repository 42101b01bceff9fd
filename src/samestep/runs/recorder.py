"""The recorder: writes contract, ledger, metrics and loggers' scalars of a run, on the rank that is rank 0.

A logger is any object with the two methods of `Logger`; there is no base class. Every rank makes one, and only rank 0
calls it, so it opens what it writes to at its first call. Loggers for other tools are in `mirrors`.

Tags are TensorBoard's, `loss/train`, `loss/eval`, `accuracy/eval`. Both loggers here write each call to the
file at once and from the calling thread, so that a full disk is an error of the step that met it.
"""

import hashlib
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol, runtime_checkable

import psutil
import torch
from torch import Tensor

from samestep.checkpoint.contract_diff import ContractChange
from samestep.checkpoint.digest import as_hex
from samestep.checkpoint.run_folder import (
    CONTRACT_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    PICTURE_FILE,
    TENSORBOARD_FOLDER,
    holds_run,
    recorded,
    signed,
)
from samestep.checks import check_type
from samestep.comm.heartbeat import Quorum
from samestep.comm.membership import Membership
from samestep.data.batch import Batch
from samestep.data.randomness import Generators
from samestep.engine.result import StepResult
from samestep.errors import UsageError
from samestep.extras import is_installed, missing
from samestep.files import append_whole, make_folder, open_unbuffered, write_json
from samestep.runs.ledger import (
    TIMED_KINDS,
    LedgerWriter,
    complete_last_line,
    ledger_entry,
    lines_backwards,
    read_losses,
)
from samestep.text import notify


@runtime_checkable
class Logger(Protocol):
    """Takes the scalars of a run."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records scalars by tag, measured after `step` optimizer updates; non-finite ones are recorded as such."""

    def close(self) -> None:
        """Ends the record; a second call does nothing."""


class IsolatedLoggers:
    """The user's loggers as one; their draws leave the global generators unchanged, since only rank 0 calls them."""

    def __init__(self, loggers: Sequence[Logger], generators: Generators) -> None:
        for logger in loggers:
            fits = isinstance(logger, Logger) and not isinstance(logger, type)
            check_type("a logger", logger, fits, "an object with log(step, scalars) and close()")
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
        # Cuts off a line that a crash left unfinished.
        complete_last_line(self._file, self._path, lambda _: False)

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
                # By it TensorBoard drops what earlier files have from this step on.
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


TIMING_SECONDS = 1.0


@dataclass(frozen=True)
class StepNote:
    """The record of a step, which every rank keeps so that any of them can write it down."""

    result: StepResult
    batch: Batch | None  # of a loader of the run, without its samples
    rates: list[float]  # the learning rate of each parameter group, as used
    world_size: int
    digest: Tensor | None  # the checksum of the state after the step
    seconds: Mapping[str, float]  # host seconds of this rank by kind since the step before

    def entry(self) -> dict[str, Any]:
        """The ledger's line."""
        digest = None if self.digest is None else as_hex(int(self.digest))
        return ledger_entry(self.result, self.batch, self.rates, self.world_size, digest, self.seconds)

    def scalars(self) -> dict[str, float]:
        """The scalars for loggers."""
        beside = {f"{name}/train": value for name, value in self.result.scalars.items()}
        scalars = {"loss/train": self.result.loss, **beside, "grad_norm": self.result.grad_norm}
        return {**scalars, "lr": self.rates[0]} if self.rates else scalars


class Recorder:
    """Writes ledger, metrics and TensorBoard events into `folder`, if there is one, and to the user's loggers.

    `purge_step` is the first step, as loggers count, that a resumed run records again; `contract` is None for a rank
    that takes over: it goes on after the last step in the ledger, which is the last of a step's records to be written.
    Raises a `RunFolderError` if the folder cannot be written to.
    """

    def __init__(
        self,
        membership: Membership,
        folder: Path | None,
        loggers: Sequence[Logger],
        purge_step: int | None = None,
        contract: Mapping[str, Any] | None = None,
    ) -> None:
        self._membership, self._folder = membership, folder
        self._loggers = list(loggers)
        self._ledger: LedgerWriter | None = None
        self._timed_steps, self._timed_at = 0, time.monotonic()
        self._known_deaths: set[int] = set()
        self._seconds: dict[str, float] = defaultdict(float)
        self._metrics: JsonlLogger | None = None
        self._last: int | None = None  # the last step that the writer before has recorded
        if folder is None:
            return
        try:
            if contract is not None:
                # First: a folder with other files of a run, and without this one, could never be resumed.
                before = recorded(folder) if holds_run(folder) else {}
                record = {**relaunch(), "earlier_starts": starts_of(before), **contract}
                write_json(folder / CONTRACT_FILE, signed(record))
            self._ledger = LedgerWriter(folder / LEDGER_FILE)
            if contract is None:
                self._known_deaths, self._last = self._ledger.recorded_deaths(), self._ledger.last_step()
                # Loggers count the updates.
                purge_step = 1 if self._last is None else self._last + 1
            if is_installed("tensorboard"):
                self._loggers.append(TensorBoardLogger(folder / TENSORBOARD_FOLDER, purge_step))
            self._metrics = JsonlLogger(folder / METRICS_FILE)
            self._loggers.append(self._metrics)  # the last one: what it has, all have
            # Once a run: a rank that takes over does not repeat it.
            if contract is not None:
                for module, file in (("tensorboard", "TensorBoard's event file"), ("matplotlib", PICTURE_FILE)):
                    if not is_installed(module):
                        notify(missing(module, file))
        except BaseException:
            self.close()
            raise

    def record_start(self, step: int, resumed_from: str | None, changes: Sequence[ContractChange]) -> None:
        """Records the start of the run, or its resume after `step` updates with the contract's changes since then."""
        where = {"world_size": self._membership.world_size, "device_kind": self._membership.communicator.device.type}
        if resumed_from is None:
            self.event("start", 0, **where)
            return
        self.event("resume", step, **{"from": resumed_from}, **where)
        if changes:
            self.event("contract_change", step, fields=[[each.field, each.before, each.after] for each in changes])

    def step(self, note: StepNote) -> None:
        """Records a step."""
        self.log(note.result.step, note.scalars())
        if self._ledger is not None:
            # After the loggers: a step in the ledger is owed to none of them.
            self._ledger.write(note.entry())
        for kind, seconds in note.seconds.items():
            self._seconds[kind] += seconds
        self._timed_steps += 1
        if time.monotonic() - self._timed_at >= TIMING_SECONDS:
            self._log_times(note.result.step)

    def catch_up(self, notes: Iterable[StepNote]) -> None:
        """Records the steps that the previous writer did not get to."""
        for note in notes:
            if self._last is None or note.result.step > self._last:
                self.step(note)

    def has_epoch(self, epoch: int) -> bool:
        """Whether an epoch is recorded."""
        return self._metrics is not None and epoch <= (self._metrics.last_value("epoch") or 0)

    def event(self, name: str, step: int, /, **fields: Any) -> None:
        """Writes an event to the ledger, at once."""
        if self._ledger is not None:
            self._ledger.write_event(name, step, **fields)

    def healed(self, step: int, quorum: Quorum, seconds: float) -> None:
        """Records that a quorum has done a step again, after workers were lost or joined."""
        about = {"world_size": len(quorum.slots), "seconds": seconds}
        # A quorum names all workers that were lost so far, and a death is recorded once.
        lost = [loss for loss in quorum.lost if loss["slot"] not in self._known_deaths]
        for loss in lost:
            self._known_deaths.add(loss["slot"])
            self.event("death", step, **{key: value for key, value in loss.items() if key != "step"})
        if lost or not quorum.joined:  # connections may break although no worker is lost
            self.event("heal", step, **about, lost=[loss["rank"] for loss in lost])
        if quorum.joined:
            self.event("join", step, **about)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Passes scalars to all loggers."""
        for logger in self._loggers:
            logger.log(step, scalars)

    def draw(self, evals: Mapping[int, float]) -> None:
        """Draws the losses so far, with the evaluations' losses by the updates done."""
        if self._folder is None or not is_installed("matplotlib"):
            return
        # At the end of a run only.
        from samestep.runs.curves import Curve, draw_losses, loss_series

        self.flush()
        losses = read_losses(self._folder / LEDGER_FILE)
        if losses:
            series = loss_series(0, Curve.of(losses), Curve.of(evals))
            draw_losses(self._folder / PICTURE_FILE, [self._folder.absolute().name], series)

    def flush(self) -> None:
        """Writes the gathered lines of the ledger."""
        if self._ledger is not None:
            self._ledger.flush()

    def close(self) -> None:
        """Closes the ledger and the loggers, each of them even if another fails to."""
        with ExitStack() as stack:
            for each in (*self._loggers, self._ledger):
                if each is not None:
                    stack.callback(each.close)
            self._ledger, self._loggers = None, []

    def _log_times(self, step: int) -> None:
        """Logs host seconds a step since the last call, and memory."""
        kinds = (*TIMED_KINDS, "checkpoint")
        scalars = {f"seconds/{kind}": self._seconds[kind] / self._timed_steps for kind in kinds}
        scalars["memory/host_bytes"] = float(psutil.Process().memory_info().rss)
        device = self._membership.communicator.device
        if device.type == "cuda":
            scalars["memory/device_bytes"] = float(torch.cuda.max_memory_allocated(device))
        self.log(step, scalars)
        self._seconds.clear()
        self._timed_steps, self._timed_at = 0, time.monotonic()


def relaunch() -> dict[str, Any]:
    """The command that starts this program again on one device, under any launcher, and its working folder.

    "command" is such as ["python", "train.py", "--epochs", "3"] or ["python", "-m", "package.train"]; None for a
    function that a notebook or another program gave to `samestep.launch`. "script_sha256" hashes the file it runs,
    "code" are the files beside it that are imported, "packages" the versions of all that is installed.
    """
    try:
        working_folder = os.getcwd()
    except FileNotFoundError:  # it was removed
        working_folder = None
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return {
        "command": _command(),
        "working_folder": working_folder,
        "script_sha256": file and file_sha256(Path(file)),
        "code": None if file is None else _code(Path(file).resolve().parent),
        "packages": dict(sorted((each.name, each.version) for each in distributions())),
    }


def starts_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The hashes of the program at each start of a run, by its record; starts with equal hashes count once."""
    earlier = record.get("earlier_starts")
    starts = [each for each in earlier if isinstance(each, dict)] if isinstance(earlier, list) else []
    own = {name: record[name] for name in ("script_sha256", "code") if name in record}
    return starts if not own or own in starts else [*starts, own]


def _code(folder: Path) -> dict[str, Any] | None:
    """The SHA-256 of all files below a folder that are imported, packages in an environment there aside; the commit."""
    if folder.is_relative_to(Path(__file__).parents[1]):  # a recipe, whose code goes with samestep's version
        return None
    own = {Path(str(module.__file__)).resolve() for module in [*sys.modules.values()] if is_own(module)}
    below = sorted(path for path in own if path.is_relative_to(folder))
    hashes = {path.relative_to(folder).as_posix(): file_sha256(path) for path in below}
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        words = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        commit = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return {"folder": str(folder), "files": hashes, "commit": commit}


def is_own(module: ModuleType) -> bool:
    """Whether a module is of the user's program: of a file that is neither installed nor of samestep."""
    file = getattr(module, "__file__", None) or ""
    return os.path.isabs(file) and not file.startswith((sys.prefix, sys.base_prefix, str(Path(__file__).parents[1])))


def file_sha256(path: Path) -> str | None:
    """The SHA-256 of a file; None if it cannot be read, or is a pipe, whose content has gone into Python."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _command() -> list[str] | None:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    arguments = sys.argv[1:]
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        is_command = name.partition(".")[0] == "samestep" and not name.startswith("samestep.recipes.")
        return None if is_command else ["python", "-m", name, *arguments]
    file = getattr(main, "__file__", None)
    if file is None or Path(file).suffix != ".py":
        return None
    return ["python", sys.argv[0] or file, *arguments]
