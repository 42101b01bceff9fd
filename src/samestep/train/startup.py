"""The startup of a trainer's run: resuming a state and opening the log; and workers that join a run under way."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.core.cursor import Cursor
from samestep.data.loader import Loader
from samestep.engine.step import TrainStep
from samestep.train.checkpoint.local_shards import whole_tensors
from samestep.train.checkpoint.resume import (
    Resumed,
    broadcast_state,
    check_state,
    find_state,
    is_same_run,
    receive_state,
)
from samestep.train.checkpoint.saver import to_host_copy
from samestep.train.contract_diff import Change
from samestep.train.paths import CHECKPOINT_FOLDER
from samestep.train.progress import Progress
from samestep.train.rank_zero import on_main
from samestep.train.runlog.run_log import RunLog


def open_run(
    membership: Membership,
    step: TrainStep,
    contract: Mapping[str, Any],
    progress: Progress,
    log: RunLog,
    resume: str | Path | None,
    allow_change: bool,
) -> None:
    """Restores a state, if there is one to resume from, and opens the log; see `Trainer.fit`."""
    resumed: Resumed | None = None
    changes: list[Change] = []
    goes_on = False
    try:
        if resume is not None:
            # Locked first: another process that writes there may be about to leave another checkpoint.
            _perform_on_main(membership, log.lock)
            resumed = receive_state(membership, step, lambda: find_state(resume, log.folder, log.say))
            if resumed is not None:
                folder = None if log.folder is None else log.folder / CHECKPOINT_FOLDER
                changes = check_state(step, resumed, contract, allow_change, folder, log.say)
            goes_on = is_same_run(resume, resumed, log.folder)
        if log.folder is not None and not goes_on:
            _perform_on_main(membership, log.make_folder)
        if resumed is not None:
            _restore(resumed, step, progress, log)
    except BaseException:
        log.unlock()
        raise
    log.has_begun = True
    source = None if resumed is None else resumed.name
    # Done by another rank, if rank 0 is lost meanwhile.
    _perform_on_main(membership, lambda: log.begin(contract, goes_on, source, changes))


def join_run(membership: Membership, step: TrainStep, progress: Progress, log: RunLog) -> None:
    """Receives the state of a run that is under way, in a worker that was started late."""
    resumed = membership.join(lambda communicator, source: broadcast_state(communicator, None, source))
    assert resumed is not None, "the rank that takes in a late worker has a state"
    _restore(resumed, step, progress, log)
    log.join()


def give_state(
    communicator: Communicator,
    source: int,
    step: TrainStep,
    contract: Mapping[str, Any],
    progress: Progress,
    log: RunLog,
    loader: Loader | DataLoader[Any],
    batch: Any,
) -> None:
    """Sends the state before the step on this batch to ranks that join; the other side of `join_run`."""
    state = None
    if communicator.rank == source:
        log.settle(progress.epoch, wait=True)
        cursor = loader.state_at(Cursor(batch.epoch, batch.position)) if isinstance(loader, Loader) else None
        captured = progress.capture(loader, cursor, contract)
        files = to_host_copy(whole_tensors(captured.files))
        state = Resumed(f"rank {source}", step.num_steps, files, captured.facts)
    broadcast_state(communicator, state, source)


def _restore(resumed: Resumed, step: TrainStep, progress: Progress, log: RunLog) -> None:
    """Restores the trainer's state."""
    progress.restore(resumed)
    log.count_checkpoint()
    log.say(f"resumed from {resumed.name}, epoch {len(progress.history) + 1}, step {step.num_steps}")


def _perform_on_main(membership: Membership, action: Callable[[], None]) -> None:
    """Calls `action` on the rank that is rank 0, for which all wait; again if a rank is lost meanwhile."""
    membership.perform(lambda: on_main(membership.communicator, action))
