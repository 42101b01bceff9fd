"""The sum of scattered rows where the ranks have different parts of the state: nobody sends a word of it.

A row's sum is Σ wᵢxᵢ modulo 2^64, and a word of 32 bits the sum of its bytes, each in its place (the highest bit counts
-2^31): so what all ranks get from their own bytes, with zeros for the others', adds up to the row's sum. Each rank adds
up and scatters an equal part of the rows; of that only one number a rank travels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.comm.pieces import Piece
from samestep.train.rowsums import (
    ROW_BYTES,
    ROW_WORDS,
    RowSums,
    carried,
    flat,
    main_device,
    places_of,
    random_words,
    rows_of,
    scattered,
)


@dataclass(frozen=True)
class _Part:
    """Where this rank's bytes of one tensor go.

    Attributes:
        rows: (first row, where they begin in the part in bytes, how many) of rows that the part fills; None for none.
        rest: (row, where in it, where in the part, how many bytes) of what fills no row: row by row.
    """

    rows: tuple[int, int, int] | None
    rest: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class _Own:
    """What of one device this rank adds up.

    Attributes:
        numbers: of the tensors, in the order of the state.
        parts: of each of them.
        index: the row of each that is filled, then of each in `stage`.
        stage: int32 [rows, ROW_WORDS]: those that are filled in part, elsewhere zero.
        slots: in `stage` for each rest of each tensor: bytes.
        weights: int64 [ROW_WORDS].
    """

    numbers: tuple[int, ...]
    parts: tuple[_Part, ...]
    index: Tensor
    stage: Tensor
    slots: list[Tensor]
    weights: Tensor


@dataclass(frozen=True)
class _Plan:
    """What this rank has of the rows.

    Attributes:
        own: by device.
        main: the device that the sum is computed on.
        keys: of this rank's equal part of the rows.
        share: how many rows that part has, but for the last ones.
    """

    own: dict[torch.device, _Own]
    main: torch.device
    keys: Tensor
    share: int


class SpreadSum:
    """Computes the sum, again and again for a state of the same form.

    Args:
        sums: of rows.
    """

    def __init__(self, sums: RowSums) -> None:
        self._sums = sums
        self._form: object = None
        self._plan: _Plan

    def of(self, tensors: Sequence[Tensor], pieces: Mapping[int, Piece], communicator: Communicator) -> Tensor:
        """The sum over all rows; all ranks call it.

        Args:
            tensors: of the state in its order: whole ones, the same on all ranks, or this rank's part.
            pieces: by number those that are spread.
            communicator: this rank's communicator.

        Returns:
            A 0-d int64 tensor.
        """
        form = [(t.dtype, t.shape, t.device, pieces[k].spread if k in pieces else None) for k, t in enumerate(tensors)]
        if self._form != form:
            self._plan, self._form = _make_plan(tensors, pieces, communicator), form
        plan, ranks = self._plan, communicator.world_size
        total = torch.zeros(plan.share * ranks, dtype=torch.int64, device=plan.main)
        for device, own in plan.own.items():
            flats = [flat(tensors[number]) for number in own.numbers]
            if own.slots:
                torch._foreach_copy_(own.slots, list(_rests(flats, own.parts)))
            matrices = [*_filled(flats, own.parts), *([own.stage] if own.slots else [])]
            if matrices:
                rows = torch.zeros(total.numel(), dtype=torch.int64, device=device)
                total += carried(rows.index_add_(0, own.index, self._sums.of(matrices, own.weights)), plan.main)
        at = communicator.transport if plan.main == communicator.device else communicator.control
        theirs = at.exchange(total, [plan.share] * ranks, [plan.share] * ranks).wait().view(ranks, plan.share).sum(0)
        part = scattered(theirs[: plan.keys.numel()] + plan.keys).sum().view(1)
        return at.gather(part).wait().sum()


def _filled(flats: Sequence[Tensor], parts: Sequence[_Part]) -> Iterator[Tensor]:
    """The words of the rows that are filled."""
    for elements, part in zip(flats, parts, strict=True):
        if part.rows is not None:
            size = elements.element_size()
            start, stop = part.rows[1] // size, (part.rows[1] + part.rows[2] * ROW_BYTES) // size
            yield rows_of(elements[start:stop])


def _rests(flats: Sequence[Tensor], parts: Sequence[_Part]) -> Iterator[Tensor]:
    """The bytes of what fills no row."""
    for elements, part in zip(flats, parts, strict=True):
        if part.rest:
            data = elements.view(torch.uint8)
            for _, _, start, size in part.rest:
                yield data[start : start + size]


def _make_plan(tensors: Sequence[Tensor], pieces: Mapping[int, Piece], communicator: Communicator) -> _Plan:
    """Gives every byte of this rank the place that it has in the whole state."""
    rank, ranks = communicator.rank, communicator.world_size
    devices, main = main_device(tensor.device for tensor in tensors)
    shapes = [pieces[k].shape if k in pieces else tensor.shape for k, tensor in enumerate(tensors)]
    sizes = [shape.numel() * tensor.dtype.itemsize for shape, tensor in zip(shapes, tensors, strict=True)]
    full, places, num_rest = places_of(sizes)
    firsts = list(accumulate(full, initial=num_rest))
    parts = []
    for k, tensor in enumerate(tensors):
        cuts = pieces[k].spread.cuts[rank : rank + 2] if k in pieces else (0, shapes[k].numel() if rank == 0 else 0)
        start, stop = (cut * tensor.dtype.itemsize for cut in cuts)
        parts.append(_place(start, stop, firsts[k], full[k], places[k][0]))
    num_rows = num_rest + sum(full)
    share = -(-num_rows // ranks)
    first, stop = min(rank * share, num_rows), min((rank + 1) * share, num_rows)
    numbers = {device: [k for k, t in enumerate(tensors) if t.device == device] for device in devices}
    return _Plan(
        own={device: _own(device, numbers[device], [parts[k] for k in numbers[device]]) for device in devices},
        main=main,
        keys=random_words(ROW_WORDS + first, stop - first).to(main),
        share=share,
    )


def _place(start: int, stop: int, first: int, full: int, rest: int) -> _Part:
    """Where the bytes start … stop - 1 of a tensor go.

    Args:
        start: of a tensor's bytes.
        stop: behind them.
        first: the row of the tensor's first bytes, if it fills one.
        full: how many rows the whole tensor fills.
        rest: where its other bytes begin among the rests, in bytes.
    """
    border = full * ROW_BYTES
    inside = min(stop, border)
    begin, end = -(-start // ROW_BYTES), inside // ROW_BYTES
    ranges = []
    if begin < end:
        ranges = [(start, begin * ROW_BYTES), (end * ROW_BYTES, inside)]
    elif start < inside:  # in one row, or in two that it does not fill
        ranges = [(start, min(inside, begin * ROW_BYTES)), (max(start, begin * ROW_BYTES), inside)]
    pieces = [(first + a // ROW_BYTES, a % ROW_BYTES, a - start, b - a) for a, b in ranges if a < b]
    at = max(start, border)
    while at < stop:
        place = rest + at - border
        size = min(stop - at, ROW_BYTES - place % ROW_BYTES)
        pieces.append((place // ROW_BYTES, place % ROW_BYTES, at - start, size))
        at += size
    rows = (first + begin, begin * ROW_BYTES - start, end - begin) if begin < end else None
    return _Part(rows, tuple(pieces))


def _own(device: torch.device, numbers: list[int], parts: list[_Part]) -> _Own:
    """The memory for the rows that this rank fills in part, and the numbers of all of its rows."""
    rests = [piece for part in parts for piece in part.rest]
    partial = {row: place for place, row in enumerate(dict.fromkeys(row for row, *_ in rests))}
    stage = torch.zeros(max(1, len(partial)) * ROW_BYTES, dtype=torch.uint8, device=device)
    slots = []
    for row, offset, _, size in rests:
        start = partial[row] * ROW_BYTES + offset
        slots.append(stage[start : start + size])
    filled = [torch.arange(part.rows[0], part.rows[0] + part.rows[2]) for part in parts if part.rows is not None]
    return _Own(
        numbers=tuple(numbers),
        parts=tuple(parts),
        index=torch.cat([*filled, torch.tensor(list(partial), dtype=torch.int64)]).to(device),
        stage=stage.view(torch.int32).view(-1, ROW_WORDS),
        slots=slots,
        weights=random_words(0, ROW_WORDS).to(device),
    )
