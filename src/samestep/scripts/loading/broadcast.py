"""Handing over: what one rank loaded, or the error that it met, given to all ranks at the same point of the script."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import torch

from samestep.errors import DeterminismError
from samestep.scripts.adoption import Adoption
from samestep.scripts.loading.packing import Packed, Parcel, pack
from samestep.train.exceptions import blamed, packed, portable, unpacked


class Kind(IntEnum):
    """What became of an attempt."""

    NOTHING = 0
    VALUE = 1
    ERROR = 2
    END = 3
    TOGETHER = 4  # it has to be repeated by all ranks: it drew random numbers, or does not pickle


@dataclass(frozen=True)
class Outcome:
    """What became of an attempt.

    Attributes:
        kind: what it is.
        value: what there is to return, or the exception to raise.
        extra: what travels with it.
        packed: both, on the rank that made the attempt.
    """

    kind: Kind
    value: Any = None
    extra: Any = None
    packed: Packed | None = None

    @property
    def words(self) -> list[int]:
        """What the others have to know before it is sent."""
        return (
            [self.kind, 0, 0] if self.packed is None else [self.kind, self.packed.flat.numel(), len(self.packed.large)]
        )


@contextmanager
def alone(adoption: Adoption) -> Iterator[None]:
    """The time while this rank runs code of the script that other ranks do not run: nothing in it may meet."""
    before = adoption.in_chunk
    adoption.in_chunk = True
    try:
        yield
    finally:
        adoption.in_chunk = before


def attempt(action: Callable[[], Any], extra: Callable[[], Any] = lambda: None) -> Outcome:
    """Runs something that gives a value, raises, or ends by StopIteration, and packs what came of it.

    Args:
        action: what to run; a KeyboardInterrupt goes through.
        extra: gives what is to travel with it; called afterwards.
    """
    try:
        value = action()
    except StopIteration:
        return packed_outcome(Kind.END, None, extra())
    except (Exception, SystemExit) as error:
        return packed_outcome(Kind.ERROR, portable(error), extra())
    return packed_outcome(Kind.VALUE, value, extra())


def packed_outcome(kind: Kind, value: Any, extra: Any = None) -> Outcome:
    """An outcome that can travel; `TOGETHER` if its value cannot."""
    try:
        return Outcome(kind, value, extra, pack((packed(value) if kind is Kind.ERROR else value, extra)))
    except Exception:
        return Outcome(Kind.TOGETHER, value, extra, pack((None, extra)))


def hand_over(adoption: Adoption, what: str, outcome: Outcome | None, source: int) -> Outcome:
    """Gives every rank the outcome of rank `source`.

    Args:
        adoption: of this process.
        what: what is handed over, in words.
        outcome: on rank `source`, one that can travel; not read on others.
        source: who has it.
    """
    ours = outcome if adoption.rank == source else None
    kind, size = adoption.meet(what, [] if ours is None else ours.words)[source][:2]
    control = adoption.communicator.control
    if ours is not None:
        assert ours.packed is not None, "it was packed to be handed over"
        control.broadcast(ours.packed.flat, source)
        send_large(adoption, ours.packed)
        return ours
    flat = torch.empty(size, dtype=torch.uint8)
    control.broadcast(flat, source)
    return receive_outcome(adoption, Kind(kind), flat, source)


def send_large(adoption: Adoption, packed: Packed) -> None:
    """Sends the large pieces of a packed value to all ranks."""
    for piece in packed.large:
        adoption.communicator.control.broadcast(piece, adoption.rank)


def receive_outcome(adoption: Adoption, kind: Kind, flat: torch.Tensor, source: int) -> Outcome:
    """The outcome whose flat part has arrived, with the large pieces that rank `source` sends now."""
    parcel = Parcel(flat)
    for room in parcel.rooms():
        adoption.communicator.control.broadcast(room, source)
    value, extra = parcel.value()
    return Outcome(kind, unpacked(value) if kind is Kind.ERROR else value, extra)


def raise_error(adoption: Adoption, error: BaseException, source: int) -> NoReturn:
    """Raises what rank `source` met, here too; on other ranks it says who is to blame."""
    if adoption.rank == source:
        raise error
    raise blamed(error, source, f"rank {source} met it while it loaded a batch for all ranks")


def check_place(adoption: Adoption) -> None:
    """Refuses to go on with an iterator where not all ranks are sure to do so.

    Raises:
        DeterminismError: on another thread, or inside a wrapped forward.
    """
    if not adoption.may_meet():
        raise DeterminismError(
            "an iterator that the script made of a DataLoader is asked for a batch on another thread, in another "
            "process or inside a wrapped forward, where the ranks cannot share it; call iter(loader) there too"
        )
