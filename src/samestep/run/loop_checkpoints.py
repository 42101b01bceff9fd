"""Checkpoints in loops of one's own, by collective calls: `Run.save_checkpoint` and `Run.load_checkpoint`.

Rank 0 writes and reads; if the state is sharded each rank writes its local shards.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from samestep.checkpoint.async_save import to_host_copy, write_sharded
from samestep.checkpoint.contract import loader_contract, step_contract
from samestep.checkpoint.digest import Drift
from samestep.checkpoint.local_shards import gathered, is_sharded, whole_tensors
from samestep.checkpoint.resume import check_state, find_checkpoint, names_checkpoint, receive_state
from samestep.checkpoint.run_folder import SIGNATURE, signed
from samestep.checkpoint.state import Steps, capture, restore
from samestep.checkpoint.storage import Snapshot, list_checkpoints, write_checkpoint
from samestep.checks import check_number, check_type
from samestep.comm.exceptions import on_main
from samestep.comm.membership import Membership
from samestep.data.loader import Loader
from samestep.engine.generator_states import check_alike
from samestep.engine.step import TrainStep
from samestep.errors import CheckpointError, UsageError


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
    program: Mapping[str, Any],
) -> Path:
    """Writes a checkpoint; see `samestep.Run.save_checkpoint`.

    `is_ours` says whether checkpoints that are in the folder already are of this run; `attempts` calls the function
    that writes, once or several times, on all ranks alike; `program` says which one is running.
    """
    check_number("keep", keep, 1)
    folder = Path(place)
    if names_checkpoint(folder):
        raise UsageError(f"got {place}, which names one checkpoint; needed: the folder for all of them")
    steps = _listed(step)
    values = _values(contract, steps, loader, rest)
    record = membership.heartbeat.call("files", lambda: signed({**values["contract"], **program}))
    values["program"] = {**program, SIGNATURE: record[SIGNATURE]}

    def check_ours() -> None:
        if list_checkpoints(folder) and not is_ours:
            raise UsageError(f"{folder} holds checkpoints of another run; go on by run.load_checkpoint, or use another")

    def write() -> str:
        heartbeat = membership.heartbeat
        state = heartbeat.call("checkpoint", lambda: capture(steps, values))
        snapshot = Snapshot(state.step, to_host_copy(whole_tensors(state.files)), state.facts)
        written = partial(write_checkpoint, folder, snapshot, keep, replace=True)
        return heartbeat.call("files", lambda: attempts(written)).name

    def attempt() -> str:
        communicator = membership.communicator
        if not is_sharded(steps):
            name: str = communicator.share_value(on_main(communicator, write))
            return name
        written = partial(write_sharded, communicator, folder, capture(steps, values), keep, replaces=True)
        return membership.heartbeat.call("files", lambda: attempts(written)).name

    # First: what rank 0 writes stands for the states of all.
    Drift(membership, steps).check()
    # In an operation of its own: writing is repeated after a loss, and would find what it has written.
    membership.perform(lambda: on_main(membership.communicator, check_ours))
    return folder / membership.perform(attempt)


def captured(contract: Mapping[str, Any], step: Steps, loader: Loader | None, rest: Any) -> Snapshot:
    """The state that `save` would write, whole on all ranks, without what is said of the program."""
    steps = _listed(step)
    state = capture(steps, _values(contract, steps, loader, rest))
    return replace(state, files=gathered(state.files, steps[0].communicator))


def _values(contract: Mapping[str, Any], steps: list[TrainStep], loader: Loader | None, rest: Any) -> dict[str, Any]:
    cursor = None if loader is None else _checked(loader).state_dict()
    return {"contract": _full_contract(contract, steps, loader), "cursor": cursor, "rest": rest}


def load(
    membership: Membership,
    contract: Mapping[str, Any],
    place: str | Path,
    step: Steps,
    loader: Loader | None,
    allow_contract_change: bool,
    tell: Callable[[str], None],
) -> tuple[Path, Any] | None:
    """Restores a checkpoint; see `samestep.Run.load_checkpoint`. Returns its folder and `rest`, or None without one."""
    steps = _listed(step)
    state = receive_state(membership, steps, lambda: find_checkpoint(place, tell))
    if state is None:
        tell(f"{place} holds no checkpoint: the run begins at its beginning")
        return None
    now = _full_contract(contract, steps, loader)
    check_state(steps, state, now, allow_contract_change, state.folder, tell)
    values = state.rest
    if not values.keys() >= {"cursor", "rest"}:
        raise CheckpointError(f"{state.name} was not written by run.save_checkpoint; resume it by Trainer.fit")
    if loader is not None:
        if values["cursor"] is None:
            raise UsageError(f"{state.name} was saved without a loader; leave loader=… out, or save with it")
        check_alike("place in the data", values["cursor"], _checked(loader).state_dict())
    rest = restore(steps, state.snapshot)
    if loader is not None:
        loader.load_state_dict(rest["cursor"])
    return state.folder or Path(place), rest["rest"]


def _full_contract(contract: Mapping[str, Any], steps: list[TrainStep], loader: Loader | None) -> dict[str, Any]:
    """The contract of a run with its steps' and its loader's contracts."""
    of_steps: dict[str, Any] = {"steps": {str(number): step_contract(each) for number, each in enumerate(steps)}}
    if len(steps) == 1:
        of_steps = step_contract(steps[0])
    return {**contract, **of_steps, **({} if loader is None else loader_contract(loader))}


def _listed(step: Steps) -> list[TrainStep]:
    return [step] if isinstance(step, TrainStep) else list(step)


def _checked(loader: Any) -> Loader:
    """The loader; raises a `UsageError` for one of the user's own, which has no cursor."""
    needed = "one of run.loader(…), which knows its place in the data, or None, and what you need to go on in rest"
    check_type("loader", loader, isinstance(loader, Loader), needed)
    return cast(Loader, loader)
