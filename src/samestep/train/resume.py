"""Resuming: finding the state to go on from, giving it to all ranks, and holding it to its contract."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.comm.pieces import Piece, Spread
from samestep.errors import CheckpointError, ContractError, UsageError
from samestep.train.agreement import Change, check_contract_kept, differences, explain, shown
from samestep.train.checkpoint import (
    LATEST_FILE,
    Found,
    Snapshot,
    is_checkpoint_name,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
)
from samestep.train.folder import holds_run
from samestep.train.naming import CHECKPOINT_FOLDER
from samestep.train.packing import as_bad_checkpoint
from samestep.train.parts import Layout, Stored, StoredFiles, divided
from samestep.train.reading import read_small
from samestep.train.state import NOT_OURS, Steps, check_captured, check_fits, layout_of, rest_of
from samestep.train.together import on_main, share_text

AUTO = "auto"
MAX_LATEST_BYTES = 1024


@dataclass(frozen=True)
class Resumed:
    """A state to go on from.

    Attributes:
        name: of its checkpoint, or where else it is from.
        step: updates that it has seen.
        files: tensors by name, for each file; in host memory. Of what is spread a rank may have its pieces only.
        state: what `state.capture` gave as facts.
        folder: its checkpoint is in; None for none.
        newer: the newest checkpoint in that folder, if it is another; else None.
    """

    name: str
    step: int
    files: StoredFiles
    state: Mapping[str, Any]
    folder: Path | None = None
    newer: str | None = None

    @property
    def rest(self) -> dict[str, Any]:
        """What was kept with it, the contract among it.

        Raises:
            CheckpointError: it was written by something else.
        """
        rest = rest_of(self.files, self.state)
        if not isinstance(rest.get("contract"), dict):
            raise CheckpointError(f"{self.name} was not written by a run: it has no contract")
        return rest


def find_run(
    membership: Membership,
    step: Steps,
    resume: str | Path,
    folder: Path | None,
    contract: Mapping[str, Any],
    allow_change: bool,
    tell: Callable[[str], None],
) -> tuple[Resumed | None, list[Change]]:
    """The state that a program is to go on from, on every rank, and how the contract has changed since.

    Args:
        membership: the ranks.
        step: of the program, still as it was made.
        resume: see `find_state`.
        folder: of the program's own run.
        contract: of the program.
        allow_change: whether it may go on with other bits.
        tell: takes a sentence on each checkpoint that was not good, and on each change.

    Raises:
        UsageError: there is nothing to resume from.
        CheckpointError: the checkpoint is not good, or of another model.
        ContractError: something changed that decides the bits, and that is not allowed.
    """

    def attempt() -> Resumed | None:
        found = on_main(membership.communicator, lambda: find_state(resume, folder, tell))
        return hand_out(membership.communicator, found, layout=layout_of(step))

    state = membership.perform(attempt)
    if state is None:
        return None, []
    beside = None if folder is None else folder / CHECKPOINT_FOLDER
    changes = check_state(step, state, contract, allow_change, beside)
    for change in changes:
        tell(f"changed since the checkpoint: {change.field}: {shown(change.before)} -> {shown(change.after)}")
    return state, changes


def is_same_run(resume: str | Path, state: Resumed | None, folder: Path | None) -> bool:
    """Whether a program goes on in the folder of the run that it resumes; one that "auto" begins anew does, too."""
    if state is None:
        return str(resume) == AUTO and folder is not None and holds_run(folder)
    return folder is not None and is_in(state, folder / CHECKPOINT_FOLDER)


def find_state(resume: str | Path, folder: Path | None, tell: Callable[[str], None]) -> Resumed | None:
    """Reads the newest good checkpoint of a run.

    Args:
        resume: a run folder, a checkpoint in one, or "auto".
        folder: the trainer's own run folder, which "auto" means.
        tell: takes a sentence on each checkpoint that was not good.

    Returns:
        None if "auto" finds nothing.

    Raises:
        UsageError: there is nothing to resume from.
        CheckpointError: the very checkpoint that was named is not good.
    """
    if str(resume) == AUTO:
        if folder is None:
            raise UsageError('got resume="auto" without a run folder; name one by run_dir=… (--run-dir), or a run')
        found = newest_checkpoint(folder / CHECKPOINT_FOLDER, tell=tell, check=_check_state_of_run)
        return None if found is None else _resumed(found)
    path = Path(resume)
    if names_checkpoint(path):
        return read_state(path)
    if not holds_run(path):
        raise UsageError(f"{path} holds neither a run nor a checkpoint; --resume takes the folder of a run, or auto")
    again = f'begin it anew with --resume auto --run-dir {path} (resume="auto")'
    return _newest(path / CHECKPOINT_FOLDER, f"the run in {path}", again, tell)


def find_checkpoint(place: str | Path, tell: Callable[[str], None]) -> Resumed | None:
    """Reads a checkpoint, or the newest good one of a folder.

    Args:
        place: a checkpoint, or the folder of some, which need not be there yet.
        tell: takes a sentence on each checkpoint that was not good.

    Returns:
        None if the folder has none.

    Raises:
        UsageError: it has some, and none is good.
        CheckpointError: the very checkpoint that was named is not good.
    """
    path = Path(place)
    if names_checkpoint(path):
        return read_state(path)
    return _newest(path, str(path), "start again in another folder", tell) if list_checkpoints(path) else None


def names_checkpoint(path: Path) -> bool:
    """Whether a path is meant to be one checkpoint: `…/step-00000010`, or `…/latest`."""
    return is_checkpoint_name(path.name) or (path.name == LATEST_FILE and path.is_file())


def read_state(path: Path) -> Resumed:
    """Reads one checkpoint.

    Raises:
        CheckpointError: it is not good.
    """
    path = named_checkpoint(path)
    return _resumed(Found(path, read_checkpoint(path, check=_check_state_of_run), ()))


def named_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: it itself, or the one that `latest` names.

    Raises:
        CheckpointError: `latest` names none.
    """
    if path.name != LATEST_FILE or path.is_dir():
        return path
    try:
        name = read_small(path, MAX_LATEST_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; name a checkpoint") from error
    if not is_checkpoint_name(name):
        raise CheckpointError(f"{path} does not hold the name of a checkpoint; name a checkpoint itself")
    return path.parent / name


def check_state(
    step: Steps, state: Resumed, now: Mapping[str, Any], allow_change: bool, folder: Path | None
) -> list[Change]:
    """Compares a state with the program that is to go on from it, and its contract with the program's.

    Args:
        step: one or several, still as they were made.
        state: from a checkpoint.
        now: the contract of the program.
        allow_change: whether it may go on with other bits.
        folder: where it writes its checkpoints; None if it writes none.

    Returns:
        The changes of the contract.

    Raises:
        CheckpointError: the state is that of another model.
        ContractError: something changed that decides the bits, and that is not allowed; or checkpoints of the old
            contract would be mistaken for its own.
    """
    with as_bad_checkpoint(NOT_OURS):
        changes = differences(state.rest["contract"], now)
    breaking = [change for change in changes if change.breaks]
    if allow_change or all("model" in change.field.split(".") for change in breaking):
        check_fits(step, state.files, state.state)  # says more than that the model's form is another
    check_contract_kept(changes, allow_change)
    if breaking and state.newer is not None and is_in(state, folder):
        raise ContractError(
            f"{folder} has checkpoints after {state.name}, up to {state.newer}, of the contract before:\n"
            f"{explain(changes)}\ngo on from the newest, or in a folder of its own (--run-dir)"
        )
    return changes


def is_in(state: Resumed, folder: Path | None) -> bool:
    """Whether a state is from a checkpoint in this folder."""
    return folder is not None and state.folder is not None and folder.resolve() == state.folder.resolve()


def hand_out(
    communicator: Communicator, state: Resumed | None, source: int = 0, layout: Layout | None = None
) -> Resumed | None:
    """Gives every rank the state that one of them has.

    Args:
        communicator: this rank's communicator.
        state: on rank `source`: the state, or None if there is none; not read on others.
        source: the rank that has it.
        layout: of what is spread, each rank but that one keeps its piece only; one tensor at a time is whole on all.
    """
    if communicator.world_size == 1:
        return state
    ours = communicator.rank == source
    value = json.loads(share_text(communicator, json.dumps(_head(state)) if ours else "", source))
    if not value:
        return None
    files: dict[str, dict[str, Stored]] = {}
    for name, forms in value.pop("forms").items():
        files[name] = {}
        for key, (dtype, shape, stride) in forms.items():
            tensor = state.files[name][key] if ours and state is not None else None
            assert not isinstance(tensor, Piece), "who hands out a state has it whole"
            home = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype))
            if home.numel() > 0:
                sent = None if tensor is None else _raw(tensor).to(communicator.device)
                home.untyped_storage().copy_(communicator.share(sent, source).cpu().untyped_storage())
            spread = None if ours or layout is None else layout.spread_of(name, key, home.shape)
            files[name][key] = home if spread is None or layout is None else _piece(home, spread, layout.rank)
    folder = value.pop("folder")
    return Resumed(**value, files=files, folder=None if folder is None else Path(folder))


def _head(state: Resumed | None) -> dict[str, Any]:
    """All of a state but its tensors, as JSON."""
    if state is None:
        return {}
    forms = {name: _forms(tensors) for name, tensors in divided(state.files)[0].items()}
    folder = None if state.folder is None else str(state.folder)
    head = {"name": state.name, "step": state.step, "state": state.state, "folder": folder, "newer": state.newer}
    return {**head, "forms": forms}


def _newest(folder: Path, what: str, advice: str, tell: Callable[[str], None]) -> Resumed:
    """The newest good checkpoint of a folder that should have one."""
    skipped: list[str] = []
    found = newest_checkpoint(folder, tell=skipped.append, check=_check_state_of_run)
    for sentence in skipped:
        tell(sentence)
    if found is None:
        why = "; ".join(skipped) or "none was written before the run ended"
        raise UsageError(f"{what} has no good checkpoint: {why}; {advice}")
    return _resumed(found)


def _check_state_of_run(snapshot: Snapshot) -> None:
    check_captured(snapshot.files, snapshot.facts, snapshot.step)


def _resumed(found: Found) -> Resumed:
    last = list_checkpoints(found.path.parent)[-1][1].name
    newer = last if last != found.path.name and last not in " ".join(found.skipped) else None
    snapshot = found.snapshot
    return Resumed(found.path.name, snapshot.step, snapshot.files, snapshot.facts, found.path.parent, newer)


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int], list[int]]]:
    return {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()))
        for name, tensor in tensors.items()
    }


def _piece(whole: Tensor, spread: Spread, rank: int) -> Piece:
    """A rank's piece, in memory of its own, so that that of the whole goes."""
    return Piece(spread.part(whole, rank).clone(), spread)


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, in the order of its memory."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    return whole[start : start + tensor.numel() * tensor.element_size()]
