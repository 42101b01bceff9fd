"""Rank zero: actions that rank 0 does alone, such as reading and writing files, and whose errors all ranks raise."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.errors import CheckpointError, ContractError, RunFolderError, SamestepError, UsageError
from samestep.train.exceptions import packed, unpacked

T = TypeVar("T")

SHARED_ERRORS = (UsageError, CheckpointError, ContractError, RunFolderError)
NOTHING = b"\0"
"""The message if nothing was raised."""


def on_main(communicator: Communicator, action: Callable[[], T]) -> T | None:
    """Calls `action` on rank 0, for which the others wait; its value there, None on the others."""
    value, error = None, None
    if communicator.rank == 0:
        try:
            value = action()
        except SHARED_ERRORS as raised:
            error = raised
    if communicator.world_size > 1:
        theirs = share_bytes(communicator, NOTHING if error is None else packed(error))
        if theirs != NOTHING and error is None:
            raise unpacked(theirs)
    if error is not None:
        raise error
    return value


def raise_together(communicator: Communicator, error: SamestepError | None) -> None:
    """Raises, on all ranks, the error of the first rank that has one."""
    failed = [rank for rank, (has,) in enumerate(communicator.gather_words([error is not None])) if has]
    if not failed:
        return
    theirs = share_bytes(communicator, NOTHING if error is None else packed(error), failed[0])
    raise unpacked(theirs) if error is None or failed[0] != communicator.rank else error


def share_text(communicator: Communicator, text: str, source: int = 0) -> str:
    """Gives every rank the text of rank `source`."""
    return share_bytes(communicator, text.encode(), source).decode()


def share_bytes(communicator: Communicator, data: bytes, source: int = 0) -> bytes:
    """Gives every rank the bytes of rank `source`, at least one."""
    ours: Tensor | None = None
    if communicator.rank == source:
        ours = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(communicator.device)
    return communicator.share(ours, source).cpu().numpy().tobytes()
