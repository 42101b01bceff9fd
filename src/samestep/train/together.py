"""Together: what rank 0 does alone, such as reading and writing files, and all ranks hear of."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.errors import CheckpointError, ContractError, RunFolderError, SamestepError, UsageError
from samestep.train.exceptions import packed, unpacked

T = TypeVar("T")

TOLD = (UsageError, CheckpointError, ContractError, RunFolderError)
NOTHING = b"\0"
"""What is sent where nothing was raised."""


def on_main(communicator: Communicator, action: Callable[[], T]) -> T | None:
    """Does something on rank 0, for which the others wait.

    Args:
        communicator: this rank's communicator.
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
        theirs = share_bytes(communicator, NOTHING if error is None else packed(error))
        if theirs != NOTHING and error is None:
            raise unpacked(theirs)
    if error is not None:
        raise error
    return value


def raise_together(communicator: Communicator, error: SamestepError | None) -> None:
    """Raises, on all ranks, the error of the first that has one; each gives its own, if it has one."""
    failed = [rank for rank, (has,) in enumerate(communicator.gather_words([error is not None])) if has]
    if not failed:
        return
    theirs = share_bytes(communicator, NOTHING if error is None else packed(error), failed[0])
    raise unpacked(theirs) if error is None or failed[0] != communicator.rank else error


def share_text(communicator: Communicator, text: str, source: int = 0) -> str:
    """Gives every rank the text of one of them; that of the others is not looked at."""
    return share_bytes(communicator, text.encode(), source).decode()


def share_bytes(communicator: Communicator, data: bytes, source: int = 0) -> bytes:
    """Gives every rank the bytes of one of them, of which there is at least one; those of the others are not read."""
    ours: Tensor | None = None
    if communicator.rank == source:
        ours = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(communicator.device)
    return communicator.share(ours, source).cpu().numpy().tobytes()


def _attempt(action: Callable[[], T]) -> tuple[T | None, SamestepError | None]:
    try:
        return action(), None
    except TOLD as error:
        return None, error
