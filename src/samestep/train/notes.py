"""The notes: what every rank remembers of the steps taken, and what is written down of them by the one that is rank 0.

A rank writes by its `Recorder`. When rank 0 is lost, the next one opens a recorder of its own, and writes down what it
remembers and the one before did not get to write.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.comm.membership import Membership
from samestep.data.batch import Batch
from samestep.data.randomness import Generators
from samestep.engine.result import StepResult
from samestep.engine.step import TrainStep
from samestep.errors import NonFiniteError, UsageError
from samestep.train.agreement import Change
from samestep.train.checksum import StateChecksum
from samestep.train.display import make_display
from samestep.train.drift import Drift
from samestep.train.epoch import EpochRecord, EpochSoFar
from samestep.train.folder import create_folder
from samestep.train.ledger import lacking
from samestep.train.lock import LOCK_SECONDS, FolderLock, take_lock
from samestep.train.loggers import Aside, Logger
from samestep.train.naming import CHECKPOINT_FOLDER, LEDGER_FILE, check_untaken
from samestep.train.parts import gathered, in_order, is_spread
from samestep.train.recorder import Recorder, StepNote
from samestep.train.saving import SavedCheckpoint
from samestep.train.spreading import has_part_files, write_together
from samestep.train.state import State
from samestep.train.temporary import remove_leftovers
from samestep.train.writing import check_retries, retrying

REMEMBERED_STEPS = 1024
TAKE_OVER_SECONDS = 30.0  # the supervisor is ending whoever held the lock


class Notes:
    """What one rank has noted.

    Args:
        membership: the ranks.
        step: whose steps are noted.
        folder: of the run; None writes nothing but to the loggers.
        loggers: of the user's.
        keep: how many checkpoints are kept.
        digest_every: a step has a checksum of the whole state every so many steps, which the ranks compare.
        checkpoint_steps: a checkpoint is due after every so many steps; None for by time alone.
        checkpoint_minutes: one is due when the last is that old, by rank 0's clock; None for by steps alone.
        checkpoint_retries: how often one that cannot be written is tried again.

    Attributes:
        folder: of the run.
        display: where this rank shows how the run gets on.
        recorder: on the rank that writes; None on the others, and before the run begins.
        has_begun: whether the run has; on all ranks.
        last_loss: of the last step whose scalars have arrived.
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
        checkpoint_retries: int,
    ) -> None:
        _check_counts(checkpoint_steps, checkpoint_minutes, keep, digest_every)
        check_retries(checkpoint_retries)
        self.folder = folder
        self.display = make_display(membership.rank)
        self.recorder: Recorder | None = None
        self.has_begun = False
        self.last_loss: float | None = None
        self._membership, self._step = membership, step
        self._generators = Generators(membership.communicator.device)
        self._loggers: list[Logger] = [Aside(list(loggers), self._generators)] if loggers else []
        self._keep = keep
        self._digest_every = digest_every
        self._checkpoint_steps = checkpoint_steps
        self._checkpoint_seconds = None if checkpoint_minutes is None else 60 * checkpoint_minutes
        self._checkpoint_retries = checkpoint_retries
        self._checksum = StateChecksum(step)
        self._drift = Drift(membership, [step])
        self._lock: FolderLock | None = None
        self._recent: deque[StepNote] = deque(maxlen=REMEMBERED_STEPS)
        self._unread: deque[StepNote] = deque()
        self._num_healed = 0
        self._last_checkpoint = (0, time.monotonic())

    def say(self, text: str) -> None:
        """Shows a line on rank 0."""
        self.display.line(text)

    def lock(self, wait_seconds: float = LOCK_SECONDS) -> None:
        """Keeps others from writing to the folder, if it is there.

        Raises:
            UsageError: another run writes to it.
            RunFolderError: it cannot be written to.
        """
        if self._lock is not None or self.folder is None or not self.folder.is_dir():
            return
        heartbeat = self._membership.heartbeat

        def live() -> None:
            heartbeat.enter(heartbeat.phase)

        self._lock = take_lock(self.folder, self.say, wait_seconds, live)

    def make_folder(self) -> None:
        """Makes the folder of a new run; raises as `lock` does, and a `UsageError` if a run is there."""
        if self.folder is not None:
            create_folder(self.folder)
            self.lock()
            check_untaken(self.folder)  # once more: another run may have begun, and ended, until now

    def unlock(self) -> None:
        """Lets others write to the folder."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def begin(
        self, contract: Mapping[str, Any], goes_on: bool, resumed_from: str | None, changes: Sequence[Change]
    ) -> None:
        """Opens what is written to all along, and says how the run begins; see `Recorder.begin`."""
        if goes_on and resumed_from is not None and self.folder is not None:
            lack = lacking(self.folder / LEDGER_FILE, self._step.num_steps)
            if lack:
                self.say(f"{lack}; the run goes on, and its state is not affected")
        recorder = self._open(self._step.num_steps if goes_on else None, contract)
        try:
            recorder.begin(self._step.num_steps, resumed_from, changes)
        except BaseException:
            self.close()
            raise

    def join(self) -> None:
        """Begins on a rank that joined a run under way: what was healed before is not ours to tell."""
        self.has_begun = True
        self._num_healed = len(self._membership.healed)
        self.display = make_display(self._membership.rank)

    def note(self, result: StepResult, batch: Any, rates: list[float]) -> None:
        """Remembers a step until its scalars have arrived."""
        is_due = (result.step + 1) % self._digest_every == 0
        digest = self._checksum.compute() if is_due and self.folder is not None else None
        if is_due:
            self._drift.check(None if is_spread(self._step) else digest)
        known = batch if isinstance(batch, Batch) else None
        seconds = self._membership.heartbeat.take_seconds()
        self._unread.append(StepNote(result, known, rates, self._membership.world_size, digest, seconds))

    def compare(self) -> None:
        """Compares the state over the ranks; all of them call it, and raise a `DeterminismError` if it differs."""
        self._drift.check()

    def settle(self, epoch: EpochSoFar, wait: bool) -> None:
        """Writes down the steps whose scalars have arrived, and adds them to the epoch; all of them if told to wait.

        Raises:
            NonFiniteError: one was not finite; the state is the one from before it.
        """
        while self._unread and (wait or self._unread[0].result.is_there):
            note = self._unread.popleft()
            try:
                note.result.check()
            except NonFiniteError:
                self._step.check()  # raises the same, and takes the step back to the state before
                raise
            if not note.result.skipped:
                epoch.total += note.result.total
                epoch.count += note.result.count
            self.last_loss = note.result.loss
            light = None if note.batch is None else note.result.batch
            note = StepNote(note.result, light, note.rates, note.world_size, note.digest, note.seconds)
            if self._membership.can_heal:
                self._recent.append(note)
            if self.recorder is not None:
                self.recorder.step(note)

    def forget_unread(self) -> None:
        """Forgets what followed a step that was not finite: it never happened."""
        self._unread.clear()

    def note_losses(self, epoch: EpochSoFar) -> None:
        """Writes down what was healed since the last call; takes over where rank 0 was lost."""
        healed = self._membership.healed
        if len(healed) == self._num_healed:
            return
        self.settle(epoch, wait=True)
        if self._membership.rank == 0 and self.recorder is None:
            self.take_over()
        for view, seconds in healed[self._num_healed :]:
            if self.recorder is not None:
                seconds = round(seconds, 3)
                self.recorder.healed(max(0, self._step.num_steps - 1), view, seconds)
                self._tell_ledger(view.number, seconds)
        self._num_healed = len(healed)

    def take_over(self) -> None:
        """Becomes the rank that writes, after the one before was lost."""
        self.display = make_display(self._membership.rank)
        recorder = self._open(self._recent[0].result.step + 1 if self._recent else self._step.num_steps)
        recorder.catch_up(self._recent)

    def is_checkpoint_due(self) -> bool:
        """Whether one is to be written now; all ranks say the same after the same step."""
        membership = self._membership
        if self.folder is None:
            return False
        step, when = self._last_checkpoint
        if self._checkpoint_steps is not None and self._step.num_steps % self._checkpoint_steps == 0:
            return step != self._step.num_steps
        is_old = self._checkpoint_seconds is not None and time.monotonic() - when >= self._checkpoint_seconds
        if membership.world_size == 1:
            return is_old
        membership.asks_checkpoint = is_old and membership.rank == 0  # the others hear of it in the next step
        return membership.checkpoint_agreed and step != self._step.num_steps

    @property
    def has_checkpoint(self) -> bool:
        """Whether the last checkpoint, written or taken up, is of the last step."""
        return self._last_checkpoint[0] == self._step.num_steps

    def count_checkpoint(self) -> None:
        """Notes that the state of the last step is kept, from now on."""
        self._last_checkpoint = (self._step.num_steps, time.monotonic())
        self._membership.asks_checkpoint = False

    def checkpoint(self, epoch: EpochSoFar, capture: Callable[[], State]) -> None:
        """Has the state written, on the rank that writes; where it is spread, by all ranks.

        Args:
            epoch: under way.
            capture: gives the state, when all steps are settled.
        """
        all_write = is_spread(self._step)
        if self.folder is None or (self.recorder is None and not all_write):
            return
        self.settle(epoch, wait=True)
        heartbeat = self._membership.heartbeat
        before = heartbeat.enter("checkpoint")
        if self.recorder is not None:
            self.recorder.flush()
        if all_write:
            self._checkpoint_together(self.folder / CHECKPOINT_FOLDER, capture())
        elif self.recorder is not None:
            self.recorder.checkpoint(self._step.num_steps, capture())
        self.count_checkpoint()
        heartbeat.enter(before)

    def _checkpoint_together(self, folder: Path, state: State) -> None:
        """Writes a state of which each rank has a part."""
        number, communicator = self._step.num_steps, self._membership.communicator
        state = State(in_order(state.files, self._step.spread_over), state.facts)
        if not has_part_files(state):
            state = State(gathered(state.files, self._step.spread_over, communicator.rank == 0), state.facts)
            if self.recorder is not None:
                self.recorder.checkpoint(number, state)
            return
        start = time.perf_counter()

        def write() -> Path:
            return write_together(communicator, self._step.spread_over, folder, number, state, self._keep)

        path = retrying(write, self._checkpoint_retries, self.say)
        if self.recorder is not None:
            self.recorder.wrote(SavedCheckpoint(path.name, number, time.perf_counter() - start))

    def draw(self, history: Sequence[EpochRecord], name: str) -> None:
        """Draws the losses so far, on the rank that writes."""
        if self.recorder is None:
            return
        per_epoch = max(1, self._step.num_steps // max(1, len(history)))
        with self._generators.aside(self._step.num_steps):  # a library that it loads may draw
            self.recorder.draw([(r.epoch * per_epoch, r.eval["loss"]) for r in history if "loss" in r.eval], name)

    def close(self) -> None:
        """Waits for the last checkpoint; closes the ledger and the loggers, and gives back the lock."""
        recorder, self.recorder = self.recorder, None
        try:
            if recorder is not None:
                recorder.close()
            elif not self.has_begun and self._membership.rank == 0:
                for logger in self._loggers:
                    logger.close()
        finally:
            self.unlock()

    def _open(self, purge_step: int | None, contract: Mapping[str, Any] | None = None) -> Recorder:
        """Opens the recorder of this rank, as the only one that writes to the folder."""
        self.lock(TAKE_OVER_SECONDS if self._membership.healed else LOCK_SECONDS)
        if self.folder is not None:
            for folder in (self.folder, self.folder / CHECKPOINT_FOLDER):
                remove_leftovers(folder)
        told = (self._checkpoint_retries, self.say)
        with self._generators.aside(self._step.num_steps):
            self.recorder = Recorder(
                self._membership, self.folder, self._loggers, self._keep, purge_step, contract, *told
            )
        self._tell_ledger()
        return self.recorder

    def _tell_ledger(self, view: int | None = None, seconds: float | None = None) -> None:
        """Tells who shows the run what stands in the ledger, if there is one."""
        if self.folder is not None:
            self.display.ledger(view, seconds)


def _check_counts(steps: int | None, minutes: float | None, keep: int, digest_every: int) -> None:
    """Raises a `UsageError` for a number that cannot be."""
    for name, value in (("checkpoint_steps", steps), ("keep", keep), ("digest_every", digest_every)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"got {name}={value!r}; it must be 1 or more ({option})")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UsageError(f"got checkpoint_minutes={minutes!r}; it must be above 0 (--checkpoint-minutes)")
