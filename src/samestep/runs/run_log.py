"""The run log: the steps that every rank remembers, and the files that rank 0 writes of them.

If rank 0 is lost, the next rank 0 opens a recorder of its own and writes what the one before owed: steps, epochs, and a
checkpoint if one was begun and is not complete. A line just before the loss may be there twice: the later one counts.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.checkpoint.contract_diff import ContractChange
from samestep.checkpoint.digest import Drift, state_checksum
from samestep.checkpoint.local_shards import is_sharded, whole_tensors
from samestep.checkpoint.run_folder import (
    CHECKPOINT_FOLDER,
    LEDGER_FILE,
    LOCK_SECONDS,
    FolderLock,
    check_entries,
    check_untaken,
    create_folder,
    take_lock,
)
from samestep.checkpoint.state import check_storable
from samestep.checks import check_counts, check_number
from samestep.comm.events import Channel
from samestep.comm.heartbeat import HeartbeatPage
from samestep.comm.membership import Membership
from samestep.data.batch import Batch
from samestep.data.randomness import Generators
from samestep.engine.result import StepResult
from samestep.engine.step import TrainStep
from samestep.errors import NonFiniteError, RunFolderError
from samestep.files import remove_leftovers, retrying
from samestep.runs.history import EpochRecord, EpochSoFar
from samestep.runs.ledger import lacking
from samestep.runs.recorder import IsolatedLoggers, Logger, Recorder, StepNote
from samestep.text import show

if TYPE_CHECKING:
    from samestep.checkpoint.async_save import CheckpointSaver, SavedCheckpoint
    from samestep.checkpoint.storage import Snapshot

REFRESH_SECONDS = 0.1
SHOWN_SECONDS = 0.5
# Far more than a writer that is lost has not written: gathered lines (`GATHERED_BYTES`), and steps whose scalars are on
# the device.
REMEMBERED_STEPS = 1024
TAKE_OVER_SECONDS = 30.0  # the supervisor is ending the process that held the lock


class TrainingDisplay:
    """Progress and lines of a training loop, shown on rank 0: sent to the supervisor, which draws them, or printed.

    A process without a supervisor prints lines and no progress: its terminal is the user's own.
    """

    def __init__(self, rank: int) -> None:
        self._prints = rank == 0
        self._channel = Channel.from_environment() if rank == 0 else None
        given = HeartbeatPage.from_environment()
        self._page = None if given is None else given[0]
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether to call `progress`: ten times a second."""
        now = time.monotonic()
        if self._channel is None or now < self._next:
            return False
        self._next = now + REFRESH_SECONDS
        return True

    def progress(self, **fields: Any) -> None:
        """Shows how far an epoch is: epoch, epochs, step, steps, loss, samples_per_second."""
        self._send("progress", **fields)

    def line(self, text: str) -> None:
        """Shows a line of text, which stays, before what this process prints next."""
        if self._channel is None:
            if self._prints:
                show(text, sys.stdout)
            return
        shown = self._shown()
        self._send("line", text=text)
        # A stopped supervisor must not stop the training.
        deadline = time.monotonic() + SHOWN_SECONDS
        while self._shown() == shown and time.monotonic() < deadline:
            time.sleep(0.0005)

    def _shown(self) -> int | None:
        """The number of lines that the supervisor has shown, if it says so."""
        return None if self._page is None else self._page.shown

    def ledger(self, quorum: int | None = None, seconds: float | None = None) -> None:
        """Reports that there is a ledger, or its duration of the healing that ended in a quorum."""
        self._send("ledger", quorum=quorum, seconds=seconds)

    def _send(self, name: str, **fields: Any) -> None:
        if self._channel is not None:
            self._channel.send(name, **fields)


class RunLog:
    """The log of one rank; its arguments are as in `Trainer`.

    Every rank remembers a step (`remember_step`) while its scalars may still be on the device. Once they have arrived
    the step is recorded (`record_arrived`): in the sums of the epoch on all ranks, and in the files by the rank that
    writes. The others keep the last steps, and the epochs, that the files may lack: if rank 0 is lost, the next rank 0
    records those that are not there (`take_over`). A step is so recorded once or, if the writer was lost just after
    it, twice with the same content.
    """

    def __init__(
        self,
        membership: Membership,
        step: TrainStep,
        *,
        folder: Path | None,
        loggers: Sequence[Logger],
        keep: int,
        digest_every: int,
        checkpoint_steps: int | None,
        checkpoint_minutes: float | None,
    ) -> None:
        check_counts(checkpoint_steps=checkpoint_steps, keep=keep, digest_every=digest_every)
        if checkpoint_minutes is not None:
            check_number("checkpoint_minutes", checkpoint_minutes, above=0, whole=False)
        if folder is not None:
            check_storable(step)  # before the training rather than at its first checkpoint
        self.folder = folder
        self.display = TrainingDisplay(membership.rank)
        self.has_begun = False  # on all ranks
        self.last_loss: float | None = None  # of the last step whose scalars have arrived
        self._membership, self._step = membership, step
        self._generators = Generators(membership.communicator.device)
        self._loggers: list[Logger] = [IsolatedLoggers(list(loggers), self._generators)] if loggers else []
        self._keep = keep
        self._digest_every = digest_every
        self._checkpoint_steps = checkpoint_steps
        self._checkpoint_seconds = None if checkpoint_minutes is None else 60 * checkpoint_minutes
        self._drift = Drift(membership, [step])
        self._lock: FolderLock | None = None
        self._recorder: Recorder | None = None
        self._saver: CheckpointSaver | None = None  # while there are checkpoints to be written
        self._blocked: dict[int, list[float]] = {}  # seconds that training waited for checkpoints, by their step
        self._recent: deque[StepNote] = deque(maxlen=REMEMBERED_STEPS)
        self._unread: deque[StepNote] = deque()
        self._owed: list[tuple[int, EpochRecord, str]] = []  # the epochs that may not be recorded yet
        self._begun = 0  # the step of the last checkpoint that was begun, on all ranks
        self._num_healed = self._num_audited = 0
        self._last_checkpoint = (0, time.monotonic())
        self.checkpoint_step = 0  # of the last checkpoint, written or resumed from

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes; False before the run begins."""
        return self._recorder is not None

    # The folder: locked, made, and opened by the rank that writes.

    def lock(self, wait_seconds: float = LOCK_SECONDS) -> None:
        """Locks the folder, if it exists, for this process; raises as `take_lock` does."""
        if self._lock is not None or self.folder is None or not self.folder.is_dir():
            return
        check_entries(self.folder)
        heartbeat = self._membership.heartbeat

        def beat() -> None:  # entering the phase again is a sign of life: a rank that waits for the lock does not hang
            heartbeat.enter(heartbeat.phase)

        self._lock = take_lock(self.folder, self.display.line, wait_seconds, beat)

    def unlock(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def make_folder(self) -> None:
        """Makes and locks the folder of a new run; raises as `lock` does, and a `UsageError` if a run is there."""
        if self.folder is not None:
            create_folder(self.folder)
            self.lock()
            # Once more: another run may have begun, and ended, until now.
            check_untaken(self.folder)

    def record_start(
        self, contract: Mapping[str, Any], goes_on: bool, resumed_from: str | None, changes: Sequence[ContractChange]
    ) -> None:
        """Opens the recorder and records how the run begins; see `Recorder.record_start`."""
        if goes_on and resumed_from is not None and self.folder is not None:
            lack = lacking(self.folder / LEDGER_FILE, self._step.num_steps)
            if lack:
                self.display.line(f"{lack}; the run goes on, and its state is not affected")
        recorder = self._open(self._step.num_steps + 1 if goes_on else None, contract)
        try:
            recorder.record_start(self._step.num_steps, resumed_from, changes)
        except BaseException:
            self.close()
            raise

    def join(self) -> None:
        """Begins on a rank that joined a run under way; others have recorded the healings before."""
        self.has_begun = True
        self._num_healed = len(self._membership.healed)
        self.display = TrainingDisplay(self._membership.rank)

    def take_over(self) -> None:
        """Makes this rank the writer after the one before was lost, and records what that one owed."""
        from samestep.checkpoint.storage import list_checkpoints

        self.display = TrainingDisplay(self._membership.rank)
        recorder = self._open(None)
        recorder.catch_up(self._recent)
        for step, record, line in self._owed:
            if not recorder.has_epoch(record.epoch):
                self._record_epoch(step, record, line)
        if self.folder is not None:
            complete = (step for step, _ in list_checkpoints(self.folder / CHECKPOINT_FOLDER))
            if self._begun > max(complete, default=0):
                self._last_checkpoint = (0, -inf)  # one is due

    def _open(self, purge_step: int | None, contract: Mapping[str, Any] | None = None) -> Recorder:
        """Opens the recorder of this rank, as the only one that writes to the folder."""
        self.lock(TAKE_OVER_SECONDS if self._membership.healed else LOCK_SECONDS)
        if self.folder is not None:
            for folder in (self.folder, self.folder / CHECKPOINT_FOLDER):
                remove_leftovers(folder)
        with self._generators.aside(self._step.num_steps):
            self._recorder = Recorder(self._membership, self.folder, self._loggers, purge_step, contract)
        if self.folder is not None:
            self.display.ledger()
        return self._recorder

    # Steps, events and epochs.

    def remember_step(self, result: StepResult, batch: Any, rates: list[float]) -> None:
        """Remembers a step until its scalars have arrived."""
        # The checksum is taken now: by the time that the scalars are read, further steps have changed the state.
        is_due = result.step % self._digest_every == 0
        digest = state_checksum(self._step) if is_due and self.folder is not None else None
        if is_due:
            self._drift.check(None if is_sharded(self._step) else digest)
        known = batch if isinstance(batch, Batch) else None
        seconds = self._membership.heartbeat.take_seconds()
        self._unread.append(StepNote(result, known, rates, self._membership.world_size, digest, seconds))

    def compare(self) -> None:
        """Compares the state over the ranks; a collective call that raises a `DeterminismError` if it differs."""
        self._drift.check()

    def record_arrived(self, epoch: EpochSoFar, wait: bool) -> None:
        """Records the steps whose scalars have arrived, or all after waiting, and adds them to the epoch."""
        # A failure is left to the step, by which all ranks raise it together, unless they all wait here.
        while self._unread and (wait or self._unread[0].result.is_good):
            note = self._unread.popleft()
            try:
                note.result.check()
            except NonFiniteError:
                # Raises the same, and takes the step back to the state before.
                self._step.check()
                raise
            if not note.result.skipped:
                epoch.total += note.result.total
                epoch.count += note.result.count
                for name, (total, count) in note.result.scalar_sums.items():
                    before = epoch.scalars.get(name, (0.0, 0.0))
                    epoch.scalars[name] = before[0] + total, before[1] + count
            self.last_loss = note.result.loss
            light = None if note.batch is None else note.result.batch  # holds no samples
            note = StepNote(note.result, light, note.rates, note.world_size, note.digest, note.seconds)
            if self._membership.can_heal:
                self._recent.append(note)
            if self._recorder is not None:
                self._recorder.step(note)

    def forget_unread(self) -> None:
        """Drops the steps after one that was not finite, which were taken back."""
        self._unread.clear()

    def record_healings(self, epoch: EpochSoFar) -> None:
        """Records the healings since the last call; takes over if rank 0 was lost."""
        healed = self._membership.healed
        if len(healed) == self._num_healed:
            return
        self.record_arrived(epoch, wait=True)
        if self._membership.rank == 0 and self._recorder is None:
            self.take_over()
        for quorum, seconds in healed[self._num_healed :]:
            if self._recorder is not None:
                seconds = round(seconds, 3)
                self._recorder.healed(self._step.num_steps, quorum, seconds)
                if self.folder is not None:
                    self.display.ledger(quorum.number, seconds)
        self._num_healed = len(healed)

    def record_audits(self) -> None:
        """Records what audits have found since the last call, on the rank that writes."""
        findings = self._step.audit_findings
        for finding in findings[self._num_audited :]:
            if self._recorder is not None:
                fields = finding._asdict()
                self._recorder.event("audit", fields.pop("step"), **fields)
        self._num_audited = len(findings)

    def event(self, name: str, **fields: Any) -> None:
        """Records an event after the steps taken, on the rank that writes."""
        if self._recorder is not None:
            self._recorder.event(name, self._step.num_steps, **fields)

    def epoch(self, record: EpochRecord, line: str) -> None:
        """Records an epoch and shows its line, on the rank that writes; on all it is owed until `epochs_agreed`."""
        # Owed on all ranks: the writer may be lost before the line is in its files.
        self._owed.append((self._step.num_steps, record, line))
        # One of this step is without the record.
        self._last_checkpoint = (-1, self._last_checkpoint[1])
        self._record_epoch(*self._owed[-1])

    def epochs_agreed(self, epoch: EpochSoFar) -> None:
        """Ends what is owed of epochs, after an operation that no writer enters before it has recorded them."""
        self.record_healings(epoch)
        self._owed.clear()

    def _record_epoch(self, step: int, record: EpochRecord, line: str) -> None:
        if self._recorder is not None:
            self._recorder.log(step, record.tags())
            self._recorder.flush()
            self.display.line(line)

    def draw(self, history: Sequence[EpochRecord]) -> None:
        """Draws the losses so far, on the rank that writes."""
        if self._recorder is not None:
            per_epoch = max(1, self._step.num_steps // max(1, len(history)))
            evals = {record.epoch * per_epoch: record.eval["loss"] for record in history if "loss" in record.eval}
            # A library that it loads may draw.
            with self._generators.aside(self._step.num_steps):
                self._recorder.draw(evals)

    # Checkpoints: whole states are written by a thread, sharded ones by all ranks while training waits.

    def is_checkpoint_due(self) -> bool:
        """Whether a checkpoint is to be written now; the same on all ranks after the same step."""
        membership = self._membership
        if self.folder is None:
            return False
        step, when = self._last_checkpoint
        if self._checkpoint_steps is not None and self._step.num_steps % self._checkpoint_steps == 0:
            return step != self._step.num_steps
        # Clocks differ between ranks: rank 0's decides, and its decision travels with the messages of the next step, so
        # that all ranks take the checkpoint after the same one.
        is_old = time.monotonic() - when >= (self._checkpoint_seconds or inf)
        if membership.world_size == 1:
            return is_old
        # Sent to the others with the next step.
        membership.requests.asks_checkpoint = is_old and membership.rank == 0
        return membership.requests.checkpoint and step != self._step.num_steps

    @property
    def has_checkpoint(self) -> bool:
        """Whether the last checkpoint, written or resumed from, is of the last step."""
        return self._last_checkpoint[0] == self._step.num_steps

    def count_checkpoint(self) -> None:
        """Counts the state of the last step as kept, from now on."""
        self.checkpoint_step = self._step.num_steps
        self._last_checkpoint = (self._step.num_steps, time.monotonic())
        self._membership.requests.asks_checkpoint = False

    def checkpoint(self, epoch: EpochSoFar, capture: Callable[[], "Snapshot"]) -> None:
        """Has the state written on the rank that writes; if it is sharded, by all ranks in a collective call."""
        collective = is_sharded(self._step)
        if self.folder is None:
            return
        self.record_arrived(epoch, wait=True)  # on every rank: it may raise
        # The ranks have compared their states just now, perhaps without the writer.
        self.record_healings(epoch)
        self._begun = self._step.num_steps
        if self._recorder is None and not collective:
            return
        heartbeat = self._membership.heartbeat
        state, folder = heartbeat.call("checkpoint", capture), self.folder / CHECKPOINT_FOLDER
        # A slow disk, and a rank that waits for the one that writes, do not hang.
        before = heartbeat.enter("files")
        if self._recorder is not None:
            self._recorder.flush()
        is_written = False
        if collective:
            from samestep.checkpoint.async_save import has_local_shards, with_rows

            state = with_rows(state, self._membership.communicator)
            if is_written := has_local_shards(state):
                self._write_sharded(folder, state)
        if not is_written and self._recorder is not None:
            self._save(self._recorder, folder, state)
        self.count_checkpoint()
        heartbeat.enter(before)

    def poll(self) -> None:
        """Records the checkpoints completed since the last call; raises a `RunFolderError` if one failed for good."""
        if self._saver is None or self._recorder is None:
            return
        for failure in self._saver.failures():
            self.display.line(failure)
        try:
            done = self._saver.poll()
        except RunFolderError:
            self._recorder.flush()  # says more if the folder was moved away
            raise
        for saved in done:
            self._record_checkpoint(saved, self._blocked[saved.step].pop(0))

    def finish_checkpoints(self) -> None:
        """Waits until the last checkpoint is complete; raises as `poll` does."""
        if self._saver is not None:
            self._saver.close()
            self.poll()
            self._saver = None

    def close(self) -> None:
        """Waits for the last checkpoint; closes the ledger and the loggers, and gives the lock back."""
        try:
            self.finish_checkpoints()
        finally:
            recorder, self._recorder = self._recorder, None
            try:
                if recorder is not None:
                    recorder.close()
                elif not self.has_begun and self._membership.rank == 0:
                    for logger in self._loggers:
                        logger.close()
            finally:
                self.unlock()

    def _save(self, recorder: Recorder, folder: Path, state: "Snapshot") -> None:
        """Copies a state and has the thread write it."""
        from samestep.checkpoint.async_save import CheckpointSaver

        if self._saver is None:
            self._saver = CheckpointSaver(folder, self._keep)
        start = time.perf_counter()
        self._saver.save(replace(state, files=self._saver.to_host_copy(whole_tensors(state.files))))
        seconds = time.perf_counter() - start
        self._blocked.setdefault(state.step, []).append(seconds)
        recorder.log(state.step, {"checkpoint/blocked_milliseconds": 1000 * seconds})

    def _write_sharded(self, folder: Path, state: "Snapshot") -> None:
        """Writes a sharded state on all ranks."""
        from samestep.checkpoint.async_save import SavedCheckpoint, write_sharded

        start = time.perf_counter()
        write = partial(write_sharded, self._membership.communicator, folder, state, self._keep, replaces=True)
        path = retrying(write, self.display.line)
        seconds = time.perf_counter() - start
        if self._recorder is not None:
            self._recorder.log(state.step, {"checkpoint/blocked_milliseconds": 1000 * seconds})
        self._record_checkpoint(SavedCheckpoint(path.name, state.step, seconds), seconds)

    def _record_checkpoint(self, saved: "SavedCheckpoint", blocked: float) -> None:
        if self._recorder is not None:
            seconds = {"blocked_seconds": round(blocked, 6), "seconds": round(saved.seconds, 6)}
            self._recorder.event("checkpoint", saved.step, name=saved.name, **seconds)
