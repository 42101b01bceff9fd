"""Failures: what one rank raised in a wrapped forward or its backward is raised on all of them."""

from typing import NoReturn

from samestep.scripts.adoption import Adoption
from samestep.train.exceptions import blamed, packed, unpacked


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
        data = adoption.share("the failure of a wrapped forward", None if own is None else packed(own), rank)
        if own is None:
            raise blamed(unpacked(data), rank, f"rank {rank} raised it in {where}")
    assert own is not None, "the rank that raises has something to raise"
    adoption.own_failure = own
    raise own
