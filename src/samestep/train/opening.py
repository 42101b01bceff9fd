"""The opening of a trainer's run: the state that it takes up, and what it begins to write; and how others join it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.core.cursor import Cursor
from samestep.data.loader import Loader
from samestep.engine.step import TrainStep
from samestep.train.agreement import Change
from samestep.train.notes import Notes
from samestep.train.parts import divided
from samestep.train.progress import Progress
from samestep.train.resume import Resumed, find_run, hand_out, is_same_run
from samestep.train.saving import to_host_copy
from samestep.train.together import on_main


def open_run(
    membership: Membership,
    step: TrainStep,
    contract: Mapping[str, Any],
    progress: Progress,
    notes: Notes,
    resume: str | Path | None,
    allow_change: bool,
) -> None:
    """Takes up a state, if there is one to take up, and opens what is written to all along; see `Trainer.fit`.

    Args:
        membership: the ranks.
        step: of the trainer, still as it was made.
        contract: of the run.
        progress: of the trainer; takes up the state.
        notes: of the trainer; begin, on rank 0.
        resume: see `Trainer.fit`.
        allow_change: whether the run may go on with other bits.

    Raises:
        UsageError: the run folder is taken, another run writes to it, or there is nothing to resume from.
        RunFolderError: the run folder cannot be written.
        CheckpointError: the checkpoint is not good, or of another model.
        ContractError: something changed that decides the bits, and that is not allowed.
    """
    resumed: Resumed | None = None
    changes: list[Change] = []
    goes_on = False
    try:
        if resume is not None:
            # Locked first: who writes there may be about to leave another checkpoint.
            _perform_on_main(membership, notes.lock)
            resumed, changes = find_run(membership, step, resume, notes.folder, contract, allow_change, notes.say)
            goes_on = is_same_run(resume, resumed, notes.folder)
        if notes.folder is not None and not goes_on:
            _perform_on_main(membership, notes.make_folder)
        if resumed is not None:
            _take_up(resumed, step, progress, notes)
    except BaseException:
        notes.unlock()
        raise
    notes.has_begun = True
    source = None if resumed is None else resumed.name
    # Done by another rank, if rank 0 is lost meanwhile.
    _perform_on_main(membership, lambda: notes.begin(contract, goes_on, source, changes))


def join_run(membership: Membership, step: TrainStep, progress: Progress, notes: Notes) -> None:
    """Receives the state of a run that is under way, in a worker that was started late."""
    resumed = membership.join(lambda communicator, source: hand_out(communicator, None, source))
    assert resumed is not None, "whoever takes in a late worker has a state"
    _take_up(resumed, step, progress, notes)
    notes.join()


def give_state(
    communicator: Communicator,
    source: int,
    step: TrainStep,
    contract: Mapping[str, Any],
    progress: Progress,
    notes: Notes,
    loader: Loader | DataLoader[Any],
    batch: Any,
) -> None:
    """Hands out the state before the step on this batch to ranks that join; the other side of `join_run`."""
    state = None
    if communicator.rank == source:
        notes.settle(progress.epoch, wait=True)
        cursor = loader.state_at(Cursor(batch.epoch, batch.position)) if isinstance(loader, Loader) else None
        captured = progress.capture(loader, cursor, contract)
        files = to_host_copy(divided(captured.files)[0])
        state = Resumed(f"rank {source}", step.num_steps, files, captured.facts)
    hand_out(communicator, state, source)


def _take_up(resumed: Resumed, step: TrainStep, progress: Progress, notes: Notes) -> None:
    """Puts this trainer in the place of the one that a state is of."""
    progress.take_up(resumed)
    notes.count_checkpoint()
    notes.say(f"resumed from {resumed.name}, epoch {len(progress.history) + 1}, step {step.num_steps}")


def _perform_on_main(membership: Membership, action: Callable[[], None]) -> None:
    """Has the rank that is rank 0 do something, for which all wait."""
    membership.perform(lambda: on_main(membership.communicator, action))
