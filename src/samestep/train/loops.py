"""Checkpoints of loops of one's own: all ranks call, and everything is put back to the bit.

Rank 0 writes and reads; where the state is spread over the ranks each of them writes its part.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from samestep.comm.membership import Membership
from samestep.data.loader import Loader
from samestep.engine.step import TrainStep
from samestep.errors import CheckpointError, UsageError
from samestep.train.checkpoint import Snapshot, check_keep, list_checkpoints, write_checkpoint
from samestep.train.contract import loader_contract, step_contract
from samestep.train.drift import Drift
from samestep.train.parts import divided, is_spread
from samestep.train.resume import check_state, find_checkpoint, hand_out, names_checkpoint
from samestep.train.saving import to_host_copy
from samestep.train.spreading import write_together
from samestep.train.state import Steps, capture, check_alike, layout_of, restore
from samestep.train.together import on_main, share_text

Loaders = Loader | DataLoader[Any] | None


def save(
    membership: Membership,
    contract: Mapping[str, Any],
    place: str | Path,
    step: Steps,
    loader: Loader | None,
    rest: Any,
    keep: int,
    is_ours: bool,
    attempts: Callable[[Callable[[], Path]], Path],
) -> Path:
    """Writes a checkpoint; see `samestep.Run.save_checkpoint`.

    Args:
        membership: the ranks.
        contract: of the run.
        place: the folder.
        step: one or several.
        loader: whose place in the data is kept.
        rest: what else is kept.
        keep: how many checkpoints are.
        is_ours: whether checkpoints that are in the folder already are of this run.
        attempts: calls what writes, once or several times; on all ranks alike.
    """
    check_keep(keep)
    folder = Path(place)
    if names_checkpoint(folder):
        raise UsageError(f"got {place}, which names one checkpoint; needed: the folder for all of them")
    number = sum(each.num_steps for each in _listed(step))
    values = {
        "contract": full_contract(contract, step, loader),
        "cursor": None if loader is None else _checked(loader).state_dict(),
        "rest": rest,
    }

    def check_ours() -> None:
        if list_checkpoints(folder) and not is_ours:
            raise UsageError(
                f"{folder} holds checkpoints of another run; go on from them by run.load_checkpoint, or choose another "
                "folder"
            )

    def write() -> str:
        check_ours()
        before = membership.heartbeat.enter("checkpoint")
        state = capture(step, values)
        snapshot = Snapshot(number, to_host_copy(divided(state.files)[0]), state.facts)
        name = attempts(partial(write_checkpoint, folder, snapshot, keep, replace=True)).name
        membership.heartbeat.enter(before)
        return name

    def attempt() -> str:
        if is_spread(step):
            on_main(membership.communicator, check_ours)
            state = capture(step, values)
            over = _listed(step)[0].spread_over
            write_all = partial(
                write_together, membership.communicator, over, folder, number, state, keep, replace=True
            )
            return attempts(write_all).name
        return share_text(membership.communicator, on_main(membership.communicator, write) or "")

    Drift(membership, _listed(step)).check()
    before = membership.heartbeat.enter("exchange")  # who waits for the one that writes is not silent for want of life
    try:
        return folder / membership.perform(attempt)
    finally:
        membership.heartbeat.enter(before)


def load(
    membership: Membership,
    contract: Mapping[str, Any],
    place: str | Path,
    step: Steps,
    loader: Loader | None,
    allow_contract_change: bool,
    tell: Callable[[str], None],
) -> tuple[Path, Any] | None:
    """Takes up a checkpoint; see `samestep.Run.load_checkpoint`.

    Args:
        membership: the ranks.
        contract: of the run.
        place: a folder, or a checkpoint in one.
        step: one or several, as they were saved.
        loader: that is to go on from its place in the data.
        allow_contract_change: whether other bits are accepted.
        tell: takes a sentence on what was passed over or changed.

    Returns:
        The folder and the rest that was saved; None if there is no checkpoint.
    """

    def attempt() -> Any:
        found = on_main(membership.communicator, lambda: find_checkpoint(place, tell))
        return hand_out(membership.communicator, found, layout=layout_of(step))

    state = membership.perform(attempt)
    if state is None:
        return None
    now = full_contract(contract, step, loader)
    for change in check_state(step, state, now, allow_contract_change, state.folder):
        tell(f"changed since the checkpoint: {change.field}: {change.before} -> {change.after}")
    if not state.rest.keys() >= {"cursor", "rest"}:
        raise CheckpointError(f"{state.name} was not written by run.save_checkpoint; resume it by Trainer.fit")
    if loader is not None:
        if state.rest["cursor"] is None:
            raise UsageError(f"{state.name} was saved without a loader; leave loader=… out, or save with it")
        check_alike("place in the data", state.rest["cursor"], _checked(loader).state_dict())
    rest = restore(step, state.files, state.state)
    if loader is not None:
        _checked(loader).load_state_dict(rest["cursor"])
    return state.folder or Path(place), rest["rest"]


def full_contract(contract: Mapping[str, Any], step: Steps, loader: Loader | None) -> dict[str, Any]:
    """The contract of a run with those of its steps and its loader."""
    steps = _listed(step)
    of_steps: dict[str, Any] = {"steps": {str(number): step_contract(each) for number, each in enumerate(steps)}}
    if len(steps) == 1:
        of_steps = step_contract(steps[0])
    return {**contract, **of_steps, **({} if loader is None else loader_contract(loader))}


def _listed(step: Steps) -> list[TrainStep]:
    return [step] if isinstance(step, TrainStep) else list(step)


def _checked(loader: Any) -> Loader:
    """The loader, which knows its place.

    Raises:
        UsageError: it is one of the user's own.
    """
    if not isinstance(loader, Loader):
        raise UsageError(
            f"got {type(loader).__name__} as loader, which does not know its place in the data; needed: one of "
            "run.loader(…), or loader=None and what you need to go on in rest"
        )
    return loader
