"""Failures: what one rank raised in a wrapped forward or its backward is raised on all of them."""

import contextlib
import pickle
from typing import Any, NoReturn

from samestep.adopt.adoption import Adoption
from samestep.errors import PeerLostError


def raise_together(adoption: Adoption, error: BaseException | None, rank: int, where: str) -> NoReturn:
    """Raises on every rank what rank `rank` raised; all ranks call it at the same point.

    Args:
        adoption: of this process.
        error: what this rank raised, if it did.
        rank: whose exception it is to be.
        where: in which part of the script, in words.

    Raises:
        BaseException: the exception itself on its own rank; elsewhere a copy, raised from a `PeerLostError`, so that
            nobody blames the wrong rank.
    """
    own = error if adoption.rank == rank else None
    if adoption.world_size > 1:
        data = adoption.share("the failure of a wrapped forward", None if own is None else _packed(own), rank)
        if own is None:
            raise _unpacked(data) from PeerLostError(f"rank {rank} raised it in {where}", (rank,))
    assert own is not None, "the rank that raises has something to raise"
    adoption.own_failure = own
    raise own


def _packed(error: BaseException) -> bytes:
    """An exception as bytes: whole, or as its class and what it holds, or as a RuntimeError with its text."""
    with contextlib.suppress(Exception):  # whatever pickling raises, there is another way
        data = pickle.dumps(error)
        if _is_copy(_unpacked(data), error):
            return data
    with contextlib.suppress(Exception):
        data = pickle.dumps((type(error), error.args, error.__dict__))
        if _is_copy(_unpacked(data), error):
            return data
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _unpacked(data: bytes) -> BaseException:
    value: Any = pickle.loads(data)
    if isinstance(value, BaseException):
        return value
    cls, args, attributes = value
    copy: BaseException = cls.__new__(cls, *args)
    copy.args = args
    copy.__dict__.update(attributes)
    return copy


def _is_copy(copy: BaseException, error: BaseException) -> bool:
    return type(copy) is type(error) and str(copy) == str(error)
