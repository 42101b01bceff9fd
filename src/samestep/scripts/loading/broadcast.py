"""Broadcast of a batch that one rank loaded, or of its error, to all ranks at the same point of the script."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import torch

from samestep.errors import DeterminismError
from samestep.scripts.adoption import Adoption
from samestep.scripts.loading.packing import Packed, Parcel, pack
from samestep.train.exceptions import blamed, packed, portable, unpacked


class Kind(IntEnum):
    """The result of an attempt."""

    NOTHING = 0
    VALUE = 1
    ERROR = 2
    END = 3
    REPEAT = 4  # all ranks have to repeat it: it drew random numbers, or its value does not pickle


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt to load."""

    kind: Kind
    value: Any = None  # the result to return, or the exception to raise
    extra: Any = None  # sent along
    packed: Packed | None = None  # value and extra, on the rank that made the attempt

    @property
    def words(self) -> list[int]:
        """Kind and number of large pieces, for the header."""
        return [self.kind, 0 if self.packed is None else len(self.packed.large)]

    @property
    def flat(self) -> torch.Tensor:
        """The packed bytes without the large pieces, [n] uint8."""
        return torch.empty(0, dtype=torch.uint8, device="cpu") if self.packed is None else self.packed.flat


def attempt(action: Callable[[], Any], extra: Callable[[], Any] = lambda: None) -> Outcome:
    """Runs a function that returns a value, raises or ends by StopIteration; `extra()` is packed with the outcome."""
    try:
        value = action()
    except StopIteration:
        return packed_outcome(Kind.END, None, extra())
    except (Exception, SystemExit) as error:
        return packed_outcome(Kind.ERROR, portable(error), extra())
    return packed_outcome(Kind.VALUE, value, extra())


def packed_outcome(kind: Kind, value: Any, extra: Any = None) -> Outcome:
    """An outcome ready to be sent; `REPEAT` if its value cannot be."""
    try:
        return Outcome(kind, value, extra, pack((packed(value) if kind is Kind.ERROR else value, extra)))
    except Exception:
        return Outcome(Kind.REPEAT, value, extra, pack((None, extra)))


def broadcast(adoption: Adoption, what: str, outcome: Outcome | None, source: int) -> Outcome:
    """Gives every rank the outcome of rank `source`; not read on other ranks."""
    ours = outcome if outcome is not None and adoption.rank == source else Outcome(Kind.NOTHING)
    rows, flats = adoption.gather(what, ours.words, ours.flat)
    return receive_outcome(adoption, ours, Kind(rows[source][0]), flats[source], source)


def receive_outcome(adoption: Adoption, ours: Outcome, kind: Kind, flat: torch.Tensor, source: int) -> Outcome:
    """The outcome of rank `source`, whose flat bytes have arrived; the large pieces are sent now."""
    control = adoption.communicator.control
    if adoption.rank == source:
        assert ours.packed is not None, "an outcome is packed before it is broadcast"
        for piece in ours.packed.large:
            control.broadcast(piece, source)
        return ours
    parcel = Parcel(flat)
    for room in parcel.rooms():
        control.broadcast(room, source)
    value, extra = parcel.value()
    return Outcome(kind, unpacked(value) if kind is Kind.ERROR else value, extra)


def raise_error(adoption: Adoption, error: BaseException, source: int) -> NoReturn:
    """Raises the error of rank `source` on this rank too, there with a note of the rank."""
    if adoption.rank == source:
        raise error
    raise blamed(error, source, f"rank {source} met it while it loaded a batch for all ranks")


def check_place(adoption: Adoption) -> None:
    """Raises a `DeterminismError` if not all ranks are sure to ask for the next batch here."""
    if not adoption.may_meet():
        raise DeterminismError(
            "an iterator that the script made of a DataLoader is asked for a batch on another thread, in another "
            "process or inside a wrapped forward, where the ranks cannot share it; call iter(loader) there too"
        )
