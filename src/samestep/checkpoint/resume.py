"""Resuming: finding the state to go on from, sending it to all ranks, and comparing its contract.

Rank 0 alone reads files, so that all ranks go on from one and the same checkpoint, even if a writer is still at work in
the folder or a disk gives one of them other bytes. `receive_state` sends it: facts, then tensors one by one. Nothing
of the program is changed before `check_state` has compared form and contract; `checkpoint.state.restore` then writes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from samestep.checkpoint.contract_diff import ContractChange, check_contract_kept, differences, explain, shown
from samestep.checkpoint.local_shards import ShardSpec, Stored, whole_tensors
from samestep.checkpoint.packing import as_bad_checkpoint
from samestep.checkpoint.run_folder import CHECKPOINT_FOLDER, holds_run
from samestep.checkpoint.state import (
    NOT_OURS,
    Steps,
    check_captured,
    check_fits,
    load_model,
    model_tensors,
    rest_of,
    shard_spec_of,
)
from samestep.checkpoint.storage import (
    BEST_FILE,
    LATEST_FILE,
    Found,
    Snapshot,
    checkpoint_name,
    is_checkpoint_name,
    list_checkpoints,
    located,
    newest_checkpoint,
    point_to,
    read_checkpoint,
)
from samestep.comm.communicator import Communicator
from samestep.comm.exceptions import on_main
from samestep.comm.membership import Membership
from samestep.engine.sharded_state import LocalShard
from samestep.engine.step import TrainStep
from samestep.errors import CheckpointError, ContractError, UsageError
from samestep.files import read_small

AUTO = "auto"
MAX_LATEST_BYTES = 1024


@dataclass(frozen=True)
class Resumed:
    """A state to go on from, in host memory; of sharded tensors a rank may have local shards only."""

    name: str  # of its checkpoint, or of the rank that sent it
    snapshot: Snapshot
    folder: Path | None = None  # of its checkpoint and others
    newer: str | None = None  # the newest checkpoint in that folder, if it is another

    @property
    def rest(self) -> dict[str, Any]:
        """The `rest` that was captured, with the contract; raises a `CheckpointError` if there is none."""
        rest = rest_of(self.snapshot)
        if not isinstance(rest.get("contract"), dict):
            raise CheckpointError(f"{self.name} was not written by a run: it has no contract")
        return rest

    def is_in(self, folder: Path | None) -> bool:
        """Whether the state is from a checkpoint in this folder."""
        return folder is not None and self.folder is not None and folder.resolve() == self.folder.resolve()


def receive_state(membership: Membership, step: Steps, find: Callable[[], Resumed | None]) -> Resumed | None:
    """The state that `find` returns on rank 0, on every rank; a collective call, done again if a rank is lost."""

    def attempt() -> Resumed | None:
        # In the phase of files: reading may take longer than --hang-seconds, and a restart would have to read the same.
        found = on_main(membership.communicator, lambda: membership.heartbeat.call("files", find))
        return broadcast_state(membership.communicator, found, shard_spec=shard_spec_of(step))

    return membership.perform(attempt)


@contextmanager
def weights_applied(
    membership: Membership,
    step: TrainStep,
    folder: Path,
    epoch: int,
) -> Iterator[None]:
    """Has the model the weights and buffers of the best checkpoint of a folder within the block, its own after it.

    Entered by all ranks; raises a `UsageError` if the folder has none of the end of this epoch, and a `CheckpointError`
    if it is not good, or of another model.
    """

    # Read on rank 0, and applied on each: the best checkpoint may be of a run on other ranks.
    def find() -> Resumed:
        there = "no best checkpoint"
        if (folder / BEST_FILE).is_file():
            path = named_checkpoint(folder / BEST_FILE)
            snapshot = read_checkpoint(path)
            if is_end_of(_resumed(Found(path, snapshot, ())).rest, epoch):
                only_model = replace(snapshot, files={"model": snapshot.files["model"]})
                return _resumed(Found(path, only_model, ()))
            there = f"{path.name} as its best"
        raise UsageError(
            f"the best weights, of epoch {epoch}, are not in {folder}, which has {there}: the metric, the folder or "
            "the checkpoint to resume has changed since; evaluate after another epoch with this one"
        )

    def write(tensors: Mapping[str, Stored]) -> None:
        load_model(step.model, tensors, step.sharded_state, step.communicator.rank)
        step.strategy.after_load()

    best = receive_state(membership, step, find)
    assert best is not None, "a checkpoint that is not there raises an error"
    held = model_tensors(step.model, step.sharded_state, step.communicator.world_size)
    own = {
        name: replace(t, local=t.local.clone()) if isinstance(t, LocalShard) else t.clone() for name, t in held.items()
    }
    try:
        write(best.snapshot.files["model"])
        yield
    finally:
        write(own)


def is_end_of(rest: Mapping[str, Any], epoch: int) -> bool:
    """Whether the `rest` of a trainer's state is of the end of an epoch, counted from 1."""
    return len(rest["history"]) == epoch and not rest["epoch"]["num_batches"]


def check_best(folder: Path) -> None:
    """Raises a `CheckpointError` if `best` of a folder names another checkpoint than the best by the newest state."""
    path, newest = named_checkpoint(folder / BEST_FILE), newest_checkpoint(folder, only="rest")
    with as_bad_checkpoint(NOT_OURS):
        best = None if newest is None else rest_of(newest.snapshot).get("best")
        if best is None or not is_end_of(rest_of(read_checkpoint(path, only="rest")), best):
            raise CheckpointError(
                f"{folder / BEST_FILE} names {path.name}, and the newest state has {best and f'epoch {best}'} as its "
                "best; name a checkpoint itself"
            )


def is_same_run(resume: str | Path, state: Resumed | None, folder: Path | None) -> bool:
    """Whether a program goes on in the folder of the run that it resumes, or that "auto" begins anew."""
    if state is None:
        return str(resume) == AUTO and folder is not None and holds_run(folder)
    return folder is not None and state.is_in(folder / CHECKPOINT_FOLDER)


def name_best(state: Resumed) -> None:
    """Has `best` name a state, whose writer may have ended before it did so."""
    if state.folder is not None:
        point_to(state.folder, BEST_FILE, checkpoint_name(state.snapshot.step))


def find_state(resume: str | Path, folder: Path | None, tell: Callable[[str], None]) -> Resumed | None:
    """Reads the newest good checkpoint of a run: of a run folder, of `folder` for "auto", or the one named.

    Returns None if "auto" finds nothing. `tell` takes a sentence on each checkpoint that was not good.
    """
    if not isinstance(resume, str | PathLike):
        raise UsageError(f'got resume={resume!r}; needed: "auto", the folder of a run, or a checkpoint (--resume)')
    if str(resume) == AUTO:
        if folder is None:
            raise UsageError('got resume="auto" without a run folder; name one by run_dir=… (--run-dir), or a run')
        found = newest_checkpoint(folder / CHECKPOINT_FOLDER, tell=tell, check=check_captured)
        return None if found is None else _resumed(found)
    path = Path(resume)
    if names_checkpoint(path):
        return read_state(path)
    if not holds_run(path):
        raise UsageError(f"{path} holds neither a run nor a checkpoint; resume (--resume) takes a run's folder or auto")
    again = f'begin it anew by run_dir={str(path)!r}, resume="auto" (--run-dir {path} --resume auto)'
    return _newest(path / CHECKPOINT_FOLDER, f"the run in {path}", again, tell)


def find_checkpoint(place: str | Path, tell: Callable[[str], None]) -> Resumed | None:
    """Reads a checkpoint, or the newest good one of a folder, which need not exist yet; None if it has none."""
    if not isinstance(place, str | PathLike):
        raise UsageError(f"got {place!r} as the place of a checkpoint; needed: its folder, or one that has some")
    path = Path(place)
    if names_checkpoint(path):
        return read_state(path)
    if path.is_file():
        raise UsageError(f"{path} is a file; needed: the folder that run.save_checkpoint wrote, or a checkpoint in it")
    if holds_run(path):
        raise UsageError(f"{path} is the run folder of a Trainer or a command: go on by fit(…, resume={str(path)!r})")
    if not path.exists() and (beside := list_checkpoints(path.parent)):
        names = ", ".join(each.name for _, each in beside[-3:])
        raise UsageError(f"there is no {path}; {path.parent} has {names}: name one, or the folder for the newest")
    return _newest(path, str(path), "start again in another folder", tell) if list_checkpoints(path) else None


def names_checkpoint(path: Path) -> bool:
    """Whether a path is meant to be one checkpoint: `…/step-00000010`, `…/latest` or `…/best`."""
    return is_checkpoint_name(path.name) or (
        path.name in (LATEST_FILE, BEST_FILE) and path.exists() and not path.is_dir()
    )


def read_state(path: Path) -> Resumed:
    """Reads one checkpoint; raises a `CheckpointError` if it is not good, or `best` names one that is not the best."""
    if path.name == BEST_FILE:
        check_best(path.parent)
    path = named_checkpoint(path)
    return _resumed(Found(path, read_checkpoint(path, check=check_captured), ()))


def named_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names, itself or by `latest` or `best`; a `CheckpointError` if there is none."""
    if path.name not in (LATEST_FILE, BEST_FILE) or path.is_dir():
        return located(path)
    try:
        name = read_small(path, MAX_LATEST_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; name a checkpoint") from error
    if not is_checkpoint_name(name):
        raise CheckpointError(f"{path} does not hold the name of a checkpoint; name a checkpoint itself")
    return located(path.parent / name)


def check_state(
    step: Steps,
    state: Resumed,
    now: Mapping[str, Any],
    allow_change: bool,
    folder: Path | None,
    tell: Callable[[str], None],
) -> list[ContractChange]:
    """Compares a state with the program that is to go on from it, and its contract with the program's, `now`."""
    with as_bad_checkpoint(NOT_OURS):
        changes = differences(state.rest["contract"], now)
    breaking = [change for change in changes if change.breaks]
    if allow_change or all("model" in change.field.split(".") for change in breaking):
        # Its error names the parameter, the contract's only the model's form.
        check_fits(step, state.snapshot)
    check_contract_kept(changes, allow_change)
    # Else the newest checkpoint of the folder, which a resume by "auto" takes, would be one of the old contract.
    if breaking and state.newer is not None and state.is_in(folder):
        raise ContractError(
            f"{folder} has checkpoints after {state.name}, up to {state.newer}, with the settings before:\n"
            f"{explain(changes)}\ngo on from the newest, or in a folder of its own by run_dir (--run-dir)"
        )
    for change in changes:
        tell(f"changed since the checkpoint: {change.field}: {shown(change.before)} -> {shown(change.after)}")
    return changes


def broadcast_state(
    communicator: Communicator, state: Resumed | None, source: int = 0, shard_spec: ShardSpec | None = None
) -> Resumed | None:
    """The state of rank `source`, which others have not, on every rank, None if it has none; a collective call.

    One tensor at a time is whole on all ranks; of those that `shard_spec` shards the others keep their local shard.
    """
    if communicator.world_size == 1:
        return state
    head = communicator.share_value(None if state is None else _head(state), source)
    if head is None:
        return None
    files: dict[str, dict[str, Stored]] = {}
    for file, names in head["names"].items():
        files[file] = {}
        for name in names:
            own = None if state is None else state.snapshot.files[file][name]
            assert not isinstance(own, LocalShard), "the rank that sends a state has it whole"
            whole = communicator.share(own, source)
            files[file][name] = whole if own is None else own
            if own is None and shard_spec is not None:
                sharding = shard_spec.sharding_of(file, name, whole.shape)
                if sharding is not None:  # in memory of its own, so that the whole tensor's is freed
                    files[file][name] = LocalShard(sharding.part(whole, shard_spec.rank).clone(), sharding)
    folder = None if head["folder"] is None else Path(head["folder"])
    return Resumed(head["name"], Snapshot(head["step"], files, head["facts"]), folder, head["newer"])


def _head(state: Resumed) -> dict[str, Any]:
    """All of a state but its tensors, and the tensors' names."""
    names = {file: list(tensors) for file, tensors in whole_tensors(state.snapshot.files).items()}
    folder = None if state.folder is None else str(state.folder)
    snapshot = {"step": state.snapshot.step, "facts": state.snapshot.facts, "names": names}
    return {"name": state.name, "folder": folder, "newer": state.newer, **snapshot}


def _newest(folder: Path, what: str, advice: str, tell: Callable[[str], None]) -> Resumed:
    """The newest good checkpoint of a folder that should have one."""
    skipped: list[str] = []
    found = newest_checkpoint(folder, tell=skipped.append, check=check_captured)
    for sentence in skipped:
        tell(sentence)
    if found is None:
        why = "; ".join(skipped) or "none was written before the run ended"
        raise UsageError(f"{what} has no good checkpoint: {why}; {advice}")
    return _resumed(found)


def _resumed(found: Found) -> Resumed:
    # A newer one that was skipped is damaged: going on from here loses nothing that could be had.
    last = list_checkpoints(found.path.parent)[-1][1].name
    newer = last if last != found.path.name and last not in " ".join(found.skipped) else None
    return Resumed(found.path.name, found.snapshot, found.path.parent, newer)
