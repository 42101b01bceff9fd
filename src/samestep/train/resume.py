"""Resuming: finding the state to go on from, giving it to all ranks, and holding it to its contract."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.errors import ContractError, UsageError
from samestep.train.agreement import Change, differences, explain
from samestep.train.checkpoint import Found, newest_checkpoint, read_checkpoint
from samestep.train.folder import holds_run
from samestep.train.manifest import MANIFEST_FILE
from samestep.train.naming import CHECKPOINT_FOLDER
from samestep.train.packing import unpack

AUTO = "auto"


@dataclass(frozen=True)
class Resumed:
    """A state to go on from.

    Attributes:
        name: of its checkpoint.
        step: updates that it has seen.
        files: tensors by name, for each file; in host memory.
        state: what `state.capture` gave as facts.
    """

    name: str
    step: int
    files: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]

    @property
    def contract(self) -> dict[str, Any]:
        """The contract of the run that wrote it."""
        contract: dict[str, Any] = unpack(self.state["run"], self.files["rest"])["rest"]["contract"]
        return contract


def find_state(resume: str | Path, folder: Path | None, tell: Callable[[str], None]) -> Resumed | None:
    """Reads the newest good checkpoint.

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
        found = newest_checkpoint(folder / CHECKPOINT_FOLDER, tell=tell)
        return None if found is None else _resumed(found)
    path = Path(resume)
    if (path / MANIFEST_FILE).exists():
        return _resumed(Found(path, read_checkpoint(path), ()))
    if not holds_run(path):
        raise UsageError(f"{path} holds neither a run nor a checkpoint; --resume takes the folder of a run, or auto")
    skipped: list[str] = []
    found = newest_checkpoint(path / CHECKPOINT_FOLDER, tell=skipped.append)
    for sentence in skipped:
        tell(sentence)
    if found is None:
        why = "; ".join(skipped) or "none was written before the run ended"
        raise UsageError(f"{path} has no good checkpoint: {why}; start the run again without --resume")
    return _resumed(found)


def check_contract_kept(before: Mapping[str, Any], now: Mapping[str, Any], allow_change: bool) -> list[Change]:
    """Compares the contract of a checkpoint with that of the run that is to go on from it.

    Returns:
        The changes.

    Raises:
        ContractError: one of them decides the bits, and that is not allowed.
    """
    changes = differences(before, now)
    if any(change.breaks for change in changes) and not allow_change:
        raise ContractError(
            f"the run to resume was made under another contract:\n{explain(changes)}\n"
            "go back to its values, or accept other bits from here on with --allow-contract-change "
            "(allow_contract_change=True)"
        )
    return changes


def hand_out(communicator: Communicator, state: Resumed | None, source: int = 0) -> Resumed | None:
    """Gives every rank the state that one of them has.

    Args:
        communicator: this rank's voice.
        state: on rank `source`: the state, or None if there is none; not read on others.
        source: the rank that has it.
    """
    if communicator.world_size == 1:
        return state
    ours = communicator.rank == source
    forms = None if state is None else {name: _forms(tensors) for name, tensors in state.files.items()}
    head = {} if state is None else {"name": state.name, "step": state.step, "state": state.state, "forms": forms}
    text = communicator.share(_as_bytes(json.dumps(head)) if ours else None, source)
    value = json.loads(bytes(text.cpu().tolist()))
    if not value:
        return None
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensors_forms in value["forms"].items():
        files[name] = {}
        for key, (dtype, shape, stride) in tensors_forms.items():
            tensor = state.files[name][key] if ours and state is not None else None
            files[name][key] = home = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype))
            if home.numel() > 0:
                flat = communicator.share(None if tensor is None else _raw(tensor), source).cpu()
                home.untyped_storage().copy_(flat.untyped_storage())
    return Resumed(value["name"], value["step"], files, value["state"])


def _resumed(found: Found) -> Resumed:
    return Resumed(found.path.name, found.snapshot.step, found.snapshot.files, found.snapshot.facts)


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int], list[int]]]:
    return {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()))
        for name, tensor in tensors.items()
    }


def _as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, in the order of its memory."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    return whole[start : start + tensor.numel() * tensor.element_size()]
