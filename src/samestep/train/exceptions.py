"""Exceptions and actions that ranks share: an error of rank 0 is raised on all ranks.

Exceptions travel pickled between processes of one run only; none is ever read from a file.
"""

import pickle
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from samestep import errors
from samestep.comm.communicator import Communicator
from samestep.errors import (
    CheckpointError,
    ContractError,
    PeerLostError,
    RunFolderError,
    UsageError,
)

T = TypeVar("T")

SHARED_ERRORS = (UsageError, CheckpointError, ContractError, RunFolderError)
NOTHING = b"\0"
"""The message if nothing was raised."""


def on_main(communicator: Communicator, action: Callable[[], T]) -> T | None:
    """Calls `action` on rank 0 while the others wait; its value there, None on the others. All raise its error.

    It may take its time: the others wait for as long as rank 0 lives.
    """
    value, error = None, None
    if communicator.rank == 0:
        try:
            value = action()
        except SHARED_ERRORS as raised:
            error = raised
    if communicator.world_size > 1:
        communicator.meet()
        theirs = share_bytes(communicator, NOTHING if error is None else packed(error))
        if theirs != NOTHING and error is None:
            raise unpacked(theirs)
    if error is not None:
        raise error
    return value


def raise_together(communicator: Communicator, error: Exception | None) -> None:
    """Raises, on all ranks, the error of the first rank that has one; they wait for each other without a limit."""
    communicator.meet()
    failed = [rank for rank, (has,) in enumerate(communicator.gather_words([error is not None])) if has]
    if not failed:
        return
    theirs = share_bytes(communicator, NOTHING if error is None else packed(error), failed[0])
    raise unpacked(theirs) if error is None or failed[0] != communicator.rank else error


def share_text(communicator: Communicator, text: str, source: int = 0) -> str:
    """The text of rank `source`, on every rank."""
    return share_bytes(communicator, text.encode(), source).decode()


def share_bytes(communicator: Communicator, data: bytes, source: int = 0) -> bytes:
    """The bytes of rank `source`, at least one, on every rank."""
    ours: Tensor | None = None
    if communicator.rank == source:
        ours = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(communicator.device)
    return communicator.share(ours, source).cpu().numpy().tobytes()


def packed(error: BaseException) -> bytes:
    """An exception as bytes, with its notes and causes; see `portable` for those that cannot be rebuilt."""
    links, seen = [], set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        links.append((_form(current) or pickle.dumps(_plain(current)), _notes(current)))
        current = current.__cause__
    return pickle.dumps(links)


def unpacked(data: bytes) -> BaseException:
    """The exception that was packed, with its type, text, notes and cause, and without its traceback."""
    links = [_rebuilt(form, notes) for form, notes in pickle.loads(data)]
    for error, cause in pairwise(links):
        error.__cause__ = cause
    return links[0]


def portable(error: BaseException) -> BaseException:
    """The exception itself if it can be rebuilt elsewhere, else a plain one with its text, raised from it.

    The plain one is of the nearest base class among Python's and ours that takes a text alone, at worst RuntimeError.
    """
    if _form(error) is not None:
        return error
    plain = _plain(error)
    _annotate(plain, _notes(error))
    plain.__cause__ = error
    return plain


def blamed(error: BaseException, rank: int, where: str) -> BaseException:
    """An exception of another rank, raised from a `PeerLostError`, so that this rank does not count as failed."""
    peer = PeerLostError(where, (rank,))
    peer.__cause__ = error.__cause__
    error.__cause__ = peer
    return error


def _form(error: BaseException) -> bytes | None:
    """An exception pickled, or its class and attributes; None if neither brings back the same type and text."""
    for content in (error, (type(error), error.args, error.__dict__)):
        with suppress(Exception):  # pickling may raise anything; the next form may work
            data = pickle.dumps(content)
            copy = _rebuilt(data, [])
            if type(copy) is type(error) and str(copy) == str(error):
                return data
    return None


def _rebuilt(form: bytes, notes: list[str]) -> BaseException:
    value: Any = pickle.loads(form)
    if isinstance(value, BaseException):
        error = value
    else:
        cls, args, attributes = value
        error = cls.__new__(cls, *args)
        error.args = args
        error.__dict__.update(attributes)
    _annotate(error, notes)
    return error


def _plain(error: BaseException) -> BaseException:
    """A similar exception that is made of its text alone."""
    text = type(error).__name__
    with suppress(Exception):
        text = str(error) if type(error).__module__ == "builtins" else f"{text}: {error}"
    for kind in type(error).__mro__:
        if kind.__module__ in ("builtins", errors.__name__) and kind not in (Exception, BaseException, object):
            with suppress(Exception):
                plain: BaseException = kind(text)
                if str(plain) == text:
                    return plain
    return RuntimeError(text)


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _annotate(error: BaseException, notes: list[str]) -> None:
    if notes:
        error.__notes__ = list(notes)
