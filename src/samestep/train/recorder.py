"""The recorder: all that rank 0 writes of a run, from the contract to the weights."""

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from samestep.comm.heartbeat_page import Quorum
from samestep.comm.membership import Membership
from samestep.data.batch import Batch
from samestep.engine.result import StepResult
from samestep.errors import RunFolderError
from samestep.extras import is_installed, missing
from samestep.train.agreement import Change
from samestep.train.checkpoint import Snapshot
from samestep.train.checksum import as_hex
from samestep.train.epoch import EpochRecord
from samestep.train.folder import read_losses, write_json
from samestep.train.ledger import TIMED_KINDS, LedgerWriter, ledger_entry
from samestep.train.loggers import JsonlLogger, Logger, TensorBoardLogger
from samestep.train.naming import (
    CHECKPOINT_FOLDER,
    CONTRACT_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    PICTURE_FILE,
    RESULT_FILE,
    TENSORBOARD_FOLDER,
)
from samestep.train.origin import origin
from samestep.train.parts import divided
from samestep.train.saving import CheckpointSaver, SavedCheckpoint
from samestep.train.state import State

TIMING_SECONDS = 1.0


@dataclass(frozen=True)
class StepNote:
    """What every rank remembers of a step, so that any of them can write it down.

    Attributes:
        result: its scalars have arrived.
        batch: the loader's batch, without its samples; None for a batch of the user's own.
        rates: the learning rate of each parameter group, as used.
        world_size: devices that took part.
        digest: the checksum of the state after the step, where it was computed.
        seconds: host seconds of this rank by kind since the step before.
    """

    result: StepResult
    batch: Batch | None
    rates: list[float]
    world_size: int
    digest: Tensor | None
    seconds: Mapping[str, float]

    def entry(self) -> dict[str, Any]:
        """The ledger's line."""
        digest = None if self.digest is None else as_hex(int(self.digest))
        return ledger_entry(self.result, self.batch, self.rates, self.world_size, digest, self.seconds)

    def scalars(self) -> dict[str, float]:
        """What loggers are told."""
        scalars = {"loss/train": self.result.loss, "grad_norm": self.result.grad_norm}
        return {**scalars, "lr": self.rates[0]} if self.rates else scalars


class Recorder:
    """Writes ledger, metrics, TensorBoard events and checkpoints; only the rank that is rank 0 has one.

    Args:
        membership: whose heartbeat tells how long things took.
        folder: of the run; None writes nothing but to the loggers.
        loggers: of the user's.
        keep: how many checkpoints are kept.
        purge_step: where a run goes on: the first step that is run again.
        contract: of a run that begins or is resumed; None where another rank has written it.
        retries: how often a checkpoint that cannot be written is tried again.
        tell: takes a sentence on each such failure.

    Raises:
        RunFolderError: the folder cannot be written to.
    """

    def __init__(
        self,
        membership: Membership,
        folder: Path | None,
        loggers: Sequence[Logger],
        keep: int,
        purge_step: int | None = None,
        contract: Mapping[str, Any] | None = None,
        retries: int = 0,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._membership = membership
        self._retries, self._tell = retries, tell
        self._folder = folder
        self._keep = keep
        self._loggers = list(loggers)
        self._ledger: LedgerWriter | None = None
        self._saver: CheckpointSaver | None = None  # while there are checkpoints to be written
        self._blocked: dict[int, float] = {}
        self._timed_steps = 0
        self._seconds: dict[str, float] = defaultdict(float)
        self._timed_at = time.monotonic()
        self._known_losses: set[int] = set()
        if folder is None:
            return
        try:
            if contract is not None:
                # First: a folder with anything else of a run in it, and without this, could never be resumed.
                write_json(folder / CONTRACT_FILE, {**origin(), **contract})
                (folder / RESULT_FILE).unlink(missing_ok=True)  # of a run that goes on, which has not ended after all
            self._ledger = LedgerWriter(folder / LEDGER_FILE)
            self._loggers.append(JsonlLogger(folder / METRICS_FILE))
            if is_installed("tensorboard"):
                self._loggers.append(TensorBoardLogger(folder / TENSORBOARD_FOLDER, purge_step))
            if contract is not None:  # once a run: a rank that takes over does not repeat it
                for module, file in (("tensorboard", "TensorBoard's event file"), ("matplotlib", PICTURE_FILE)):
                    if not is_installed(module):
                        print(f"samestep: {missing(module, file)}", file=sys.stderr, flush=True)
        except BaseException:
            self.close()
            raise

    def begin(self, step: int, resumed_from: str | None, changes: Sequence[Change]) -> None:
        """Writes down how the run begins.

        Args:
            step: updates done.
            resumed_from: the checkpoint that it goes on from.
            changes: of the contract since then.

        Raises:
            RunFolderError: it cannot be written.
        """
        where = {"world_size": self._membership.world_size, "device_kind": self._membership.communicator.device.type}
        if resumed_from is None:
            self.event("start", 0, **where)
            return
        self.event("resume", step, **{"from": resumed_from}, **where)
        fields = [[change.field, change.before, change.after] for change in changes]
        if fields:
            self.event("contract_change", step, fields=fields)

    def step(self, note: StepNote) -> None:
        """Writes down a step."""
        if self._ledger is not None:
            self._ledger.write(note.entry())
        self.log(note.result.step + 1, note.scalars())
        for kind, seconds in note.seconds.items():
            self._seconds[kind] += seconds
        self._timed_steps += 1
        if time.monotonic() - self._timed_at >= TIMING_SECONDS:
            self._log_times(note.result.step + 1)

    def catch_up(self, notes: deque[StepNote]) -> None:
        """Writes down the steps that the rank before us did not get to write, and reads which losses it has."""
        self._known_losses = set() if self._ledger is None else self._ledger.losses()
        last = -1 if self._ledger is None else self._ledger.last_step()
        for note in notes:
            if last is None or note.result.step > last:
                self.step(note)

    def epoch(self, step: int, record: EpochRecord) -> None:
        """Tells the loggers of an epoch, and hands what was written to the system."""
        self.log(step, record.scalars())
        self.flush()

    def event(self, name: str, step: int, /, **fields: Any) -> None:
        """Writes an event to the ledger, at once."""
        if self._ledger is not None:
            self._ledger.write_event(name, step, **fields)

    def healed(self, step: int, quorum: Quorum, seconds: float) -> None:
        """Writes down what a healing was about: who was lost, or who joined.

        Args:
            step: that was carried out once more.
            quorum: who went on.
            seconds: how long it took this rank.
        """
        about = {"world_size": len(quorum.slots), "seconds": seconds}
        lost = [loss for loss in quorum.lost if loss["slot"] not in self._known_losses]
        for loss in lost:
            self._known_losses.add(loss["slot"])
            self.event("death", step, **{key: value for key, value in loss.items() if key != "step"})
        if lost or not quorum.joined:  # connections may break although nobody is lost
            self.event("heal", step, **about, lost=[loss["rank"] for loss in lost])
        if quorum.joined:
            self.event("join", step, **about)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Tells all loggers."""
        for logger in self._loggers:
            logger.log(step, scalars)

    def checkpoint(self, step: int, state: State) -> None:
        """Copies a state and has it written; training goes on as soon as it is copied."""
        if self._folder is None:
            return
        if self._saver is None:
            self._saver = CheckpointSaver(self._folder / CHECKPOINT_FOLDER, self._keep, self._retries)
        start = time.perf_counter()
        copies = self._saver.to_host_copy(divided(state.files)[0])
        self._saver.save(Snapshot(step, copies, state.facts))
        self._blocked[step] = time.perf_counter() - start
        self.log(step, {"checkpoint/blocked_milliseconds": 1000 * self._blocked[step]})

    def poll(self) -> None:
        """Writes down which checkpoints have been completed; raises if one could not be.

        Raises:
            RunFolderError: a checkpoint could not be written.
        """
        if self._saver is None:
            return
        for failure in self._saver.failures():
            self._tell(failure)
        try:
            done = self._saver.poll()
        except RunFolderError:
            self.flush()  # says more, where the folder was moved away
            raise
        for saved in done:
            self._note_checkpoint(saved, self._blocked.pop(saved.step, 0.0))

    def wrote(self, saved: SavedCheckpoint) -> None:
        """Writes down a checkpoint that all ranks have written, while training waited."""
        self.log(saved.step, {"checkpoint/blocked_milliseconds": 1000 * saved.seconds})
        self._note_checkpoint(saved, saved.seconds)

    def finish_checkpoints(self) -> None:
        """Waits until the last checkpoint is complete; raises as `poll` does."""
        if self._saver is not None:
            self._saver.close()
            self.poll()
            self._saver = None

    def end(self, step: int, digest: str) -> None:
        """Writes down the end of a run, when all its checkpoints are complete.

        Raises:
            RunFolderError: something could not be written.
        """
        self.finish_checkpoints()
        self.event("end", step, digest=digest)

    def draw(self, evals: Sequence[tuple[int, float]], name: str) -> None:
        """Draws the losses so far.

        Args:
            evals: (updates done, loss of an evaluation).
            name: of the run, above the picture.
        """
        if self._folder is None or not is_installed("matplotlib"):
            return
        from samestep.train.curves import Curve, loss_series
        from samestep.train.loss_plot import draw_losses

        self.flush()
        losses = read_losses(self._folder)
        if losses:
            series = loss_series(0, Curve.of(dict(losses)), Curve.of(dict(evals)))
            draw_losses(self._folder / PICTURE_FILE, [name], series)

    def flush(self) -> None:
        """Hands what was written to the system."""
        if self._ledger is not None:
            self._ledger.flush()

    def close(self) -> None:
        """Waits for the last checkpoint and closes everything."""
        try:
            self.finish_checkpoints()
        finally:
            if self._ledger is not None:
                self._ledger.close()
            for logger in self._loggers:
                logger.close()
            self._ledger, self._loggers = None, []

    def _note_checkpoint(self, saved: SavedCheckpoint, blocked_seconds: float) -> None:
        seconds = {"blocked_seconds": round(blocked_seconds, 6), "seconds": round(saved.seconds, 6)}
        self.event("checkpoint", saved.step, name=saved.name, **seconds)

    def _log_times(self, step: int) -> None:
        """Host seconds a step since the last time, and memory."""
        kinds = (*TIMED_KINDS, "checkpoint")
        scalars = {f"seconds/{kind}": self._seconds[kind] / self._timed_steps for kind in kinds}
        scalars["memory/host_bytes"] = float(psutil.Process().memory_info().rss)
        device = self._membership.communicator.device
        if device.type == "cuda":
            scalars["memory/device_bytes"] = float(torch.cuda.max_memory_allocated(device))
        self.log(step, scalars)
        self._timed_steps, self._timed_at = 0, time.monotonic()
        self._seconds.clear()
