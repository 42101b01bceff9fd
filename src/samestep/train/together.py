"""Together: what rank 0 does alone, such as reading and writing files, and all ranks hear of."""

import json
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.errors import CheckpointError, ContractError, RunFolderError, SamestepError, UsageError

T = TypeVar("T")

TOLD = (UsageError, CheckpointError, ContractError, RunFolderError)


def on_main(communicator: Communicator, action: Callable[[], T]) -> T | None:
    """Does something on rank 0, for which the others wait.

    Args:
        communicator: this rank's voice.
        action: called on rank 0 only.

    Returns:
        Its value on rank 0, None on the others.

    Raises:
        UsageError: as the action does, on all ranks; so it is with the three others.
        CheckpointError: on all ranks.
        ContractError: on all ranks.
        RunFolderError: on all ranks.
    """
    value, error = _attempt(action) if communicator.rank == 0 else (None, None)
    if communicator.world_size > 1:
        told = None if error is None else [next(k for k, c in enumerate(TOLD) if isinstance(error, c)), str(error)]
        theirs = share_text(communicator, json.dumps(told))
        if theirs != "null" and error is None:
            kind, message = json.loads(theirs)
            raise TOLD[kind](message)
    if error is not None:
        raise error
    return value


def share_text(communicator: Communicator, text: str, source: int = 0) -> str:
    """Gives every rank the text of one of them; that of the others is not looked at."""
    ours: Tensor | None = None
    if communicator.rank == source:
        ours = torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy()).to(communicator.device)
    return communicator.share(ours, source).cpu().numpy().tobytes().decode()


def _attempt(action: Callable[[], T]) -> tuple[T | None, SamestepError | None]:
    try:
        return action(), None
    except TOLD as error:
        return None, error
