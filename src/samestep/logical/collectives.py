"""The collectives of a process group over any transport: flat host tensors, and sums along the tree over the ranks.

Every operation but a copy is a fold of the ranks' tensors, element by element, along the tree with one leaf a rank
(`core.tree`). So the result depends neither on the transport, nor on how tensors are cut into pieces or buckets, nor on
where the ranks run. A large tensor goes in pieces: the next pieces are under way while one is added.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from samestep.comm.reduction import ALIGNMENT_ELEMENTS, takes_one_message
from samestep.comm.shared_memory import SharedParts
from samestep.comm.transport import Pending, Transport, gather_parts
from samestep.core.tree import Block, tree_sum
from samestep.engine.gradients import divide
from samestep.errors import UsageError


class CallError(UsageError, RuntimeError):
    """A collective whose arguments make no sense: for torch's callers a `RuntimeError`, as torch raises."""


PIECE_BYTES = 4 << 20
"""Of a large tensor, at a time: measured (benchmarks/collectives.py). More leaves the caches, less waits more often."""


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Multiplies; the result may be one of the factors."""
    if not left.is_complex():
        torch.mul(left, right, out=out)
        return
    # By parts: torch's kernel for complex numbers rounds differently in a vector and in the rest behind the last one,
    # so that the bits would depend on where a tensor is cut.
    real = left.real * right.real - left.imag * right.imag
    imaginary = left.real * right.imag + left.imag * right.real
    out.copy_(torch.complex(real, imaginary))


def _extreme(is_largest: bool, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Picks the larger or the smaller one, 0 being above -0; a NaN comes before all else, and of two the left one."""
    # Not by torch.maximum, whose zeros and NaN are the device's choice, and the CPU's by their place in a vector.
    low, high = (right, left) if is_largest else (left, right)
    torch.where((low < high) | ((low == high) & low.signbit()) | left.isnan(), left, right, out=out)


_FOLDS: dict[str, Callable[..., Any]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": _multiply,
    "MIN": partial(_extreme, False),
    "MAX": partial(_extreme, True),
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
# torch does not calculate with these. Sums, products and bits are as for signed integers.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FLOATING_REFUSED = {"BAND", "BOR", "BXOR"}
_COMPLEX_REFUSED = {"MIN", "MAX", *_FLOATING_REFUSED}
_BOOL_REFUSED = {"AVG", "PREMUL_SUM"}


@dataclass(frozen=True)
class Operation:
    """A reduction: the name of a `torch.distributed.ReduceOp`, and the factor of `PREMUL_SUM`."""

    name: str = "SUM"
    factor: float | Tensor = 1.0

    @classmethod
    def of(cls, op: Any) -> "Operation":
        """The operation of a `ReduceOp`, or of one of its names."""
        kind = getattr(op, "op", op)  # a ReduceOp wraps one of its names
        if kind.name == "PREMUL_SUM":
            # The state that is pickled: torch has no other way to read the factor.
            return cls(kind.name, op.__getstate__()[1])
        return cls(kind.name)

    def check(self, dtype: torch.dtype) -> None:
        """Raises `CallError` if values of a dtype cannot be reduced so: before anything is sent."""
        refused = (
            self.name not in _FOLDS
            or (dtype.is_floating_point and self.name in _FLOATING_REFUSED)
            or (dtype.is_complex and self.name in _COMPLEX_REFUSED)
            or (dtype == torch.bool and self.name in _BOOL_REFUSED)
            or (dtype in _SIGNED and self.name in ("AVG", "PREMUL_SUM"))
            or (dtype.is_floating_point and dtype.itemsize == 1)
        )
        if refused:
            raise CallError(f"got a reduction {self.name} of {dtype} values, which is undefined: use another dtype")

    def prepared(self, ours: Tensor) -> Tensor:
        """This rank's operand: multiplied by the factor, if there is one; in memory of its own then."""
        if self.name != "PREMUL_SUM":
            return ours
        factor = self.factor.to(ours.device) if isinstance(self.factor, Tensor) else self.factor
        return torch.view_as_complex(torch.view_as_real(ours) * factor) if ours.is_complex() else ours * factor

    def fold(self, parts: Sequence[Tensor], into: Tensor) -> None:
        """Writes the fold of the ranks' tensors along the tree, which are only read; one of them may be `into`."""
        if not into.numel():
            return
        world_size, total = len(parts), into
        if into.dtype in _SIGNED:
            parts, total = self._signed(parts), into.view(_SIGNED[into.dtype])
        combine = _FOLDS[self.name]
        # A sum takes the memory of one of its terms, unless that is a rank's tensor. The root is written at last.
        spare: list[Tensor] = []
        pushed = 0

        def add(left: tuple[Tensor, bool], right: tuple[Tensor, bool]) -> tuple[Tensor, bool]:
            nonlocal pushed
            pushed += 1
            if pushed == world_size - 1:
                target = total
            elif left[1]:
                target = left[0]
            elif right[1]:
                target = right[0]
            else:
                target = spare.pop() if spare else torch.empty_like(total)
            combine(left[0], right[0], out=target)
            if left[1] and right[1]:
                spare.append(right[0])
            return target, True

        root = tree_sum([(part, False) for part in parts], add)
        assert root is not None, "a group has a rank"
        if world_size == 1:
            total.copy_(root[0])
        if self.name == "AVG":
            numbers = torch.view_as_real(total) if total.is_complex() else total
            if numbers.is_floating_point():
                divide([numbers], world_size)
            else:  # as in C: towards zero
                numbers.div_(world_size, rounding_mode="trunc")
        if self._turns(into.dtype):
            total.bitwise_xor_(torch.iinfo(total.dtype).min)

    def _signed(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Unsigned integers as signed ones."""
        dtype = _SIGNED[parts[0].dtype]
        values = [part.view(dtype) for part in parts]
        # With the highest bit turned over, unsigned order is signed order.
        return [value ^ torch.iinfo(dtype).min for value in values] if self._turns(parts[0].dtype) else values

    def _turns(self, dtype: torch.dtype) -> bool:
        return dtype in _SIGNED and self.name in ("MIN", "MAX")


@contextmanager
def _arrived(pending: Pending, sizes: Sequence[int]) -> Iterator[Sequence[Tensor]]:
    """The parts of all ranks, for reading: where they lie if they are in shared memory."""
    if isinstance(pending, SharedParts):
        with pending.views() as parts:
            yield parts
    else:
        yield pending.wait().split(list(sizes))


def all_reduce(transport: Transport, tensor: Tensor, operation: Operation) -> None:
    """Overwrites a tensor with the fold over all ranks."""
    ours = operation.prepared(tensor)
    step = _piece(tensor)
    pieces = [
        _Piece(transport, ours[start : start + step], tensor[start : start + step], operation)
        for start in range(0, max(tensor.numel(), 1), step)
    ]
    # All ranks make the same calls in the same order: the first message of a piece, then the second of the one before.
    pieces[0].send()
    for index, piece in enumerate(pieces):
        if index + 1 < len(pieces):
            pieces[index + 1].send()
        piece.fold()
        piece.finish()


def _piece(tensor: Tensor) -> int:
    """The number of elements at a time; all of a GPU's tensor, whose sums take no time of the host."""
    return max(1, tensor.numel() if tensor.is_cuda else PIECE_BYTES // tensor.element_size())


@cache
def _leaves(ranks: int) -> tuple[tuple[Block, ...], ...]:
    """The blocks of every rank: a leaf each."""
    return tuple((Block(rank, 1),) for rank in range(ranks))


class _Piece:
    """An all-reduce of a piece of a tensor: all to all and fold, or scatter, fold and gather (`comm.reduction`)."""

    # Of small pieces every rank gets all and adds them up: one message. Of others rank r adds up the r-th part alone,
    # and sends the sum: fewer bytes, and two messages. The fold is the same one, and so are the bits.

    def __init__(self, transport: Transport, ours: Tensor, into: Tensor, operation: Operation) -> None:
        self._transport = transport
        self._ours = ours
        self._into = into
        self._operation = operation
        ranks, length = transport.world_size, ours.numel()
        self._is_one_message = ranks == 1 or takes_one_message(transport, _leaves(ranks), ours)
        self._sizes = [length] * ranks
        if not self._is_one_message:
            part = -(-length // (ranks * ALIGNMENT_ELEMENTS)) * ALIGNMENT_ELEMENTS
            self._sizes = [max(0, min(part, length - rank * part)) for rank in range(ranks)]
        self._pending: Pending

    def send(self) -> None:
        """Sends rank r the r-th part, or everything."""
        if self._is_one_message:
            self._pending = self._transport.gather(self._ours)
        else:
            own = self._sizes[self._transport.rank]
            self._pending = self._transport.exchange(self._ours, self._sizes, [own] * len(self._sizes))

    def fold(self) -> None:
        """Adds up what the ranks have sent."""
        ranks, rank = self._transport.world_size, self._transport.rank
        if self._is_one_message:
            with _arrived(self._pending, self._sizes) as parts:
                self._operation.fold(parts, self._into)
            return
        total = self._into.split(self._sizes)[rank]
        with _arrived(self._pending, [self._sizes[rank]] * ranks) as parts:
            self._operation.fold(parts, total)
        self._pending = gather_parts(self._transport, total, self._sizes)

    def finish(self) -> None:
        """Writes the sums of the other ranks."""
        if not self._is_one_message:
            with _arrived(self._pending, self._sizes) as parts:
                for rank, part in enumerate(parts):
                    if rank != self._transport.rank:
                        self._into.split(self._sizes)[rank].copy_(part)


def reduce_scatter(transport: Transport, parts: Tensor, sizes: Sequence[int], into: Tensor, op: Operation) -> None:
    """Writes the fold of the ranks' parts for this rank; parts of those sizes for rank 0, 1, …, concatenated."""
    ranks, length = transport.world_size, sizes[transport.rank]
    pending = transport.exchange(op.prepared(parts), sizes, [length] * ranks)
    with _arrived(pending, [length] * ranks) as received:
        op.fold(received, into)


def reduce(transport: Transport, tensor: Tensor, root: int, operation: Operation) -> None:
    """Overwrites the root's tensor with the fold over all ranks; the others' are left as they are."""
    ours = operation.prepared(tensor)
    step = _piece(tensor)
    for start in range(0, tensor.numel(), step):
        piece = ours[start : start + step]
        received = gather(transport, piece, root)
        if received is not None:
            operation.fold(received.split(piece.numel()), tensor[start : start + step])


def gather(transport: Transport, part: Tensor, root: int) -> Tensor | None:
    """The parts of all ranks, equally long, concatenated; None on all ranks but the root."""
    ranks, length = transport.world_size, part.numel()
    if ranks == 1:
        return part.clone()
    sizes = [length if rank == root else 0 for rank in range(ranks)]
    ours = transport.rank == root
    received = transport.exchange(part, sizes, [length if ours else 0] * ranks).wait()
    return received if ours else None


def scatter(transport: Transport, parts: Tensor | None, root: int, into: Tensor) -> None:
    """Writes this rank's of the root's parts, which are equally long and concatenated; None on the other ranks."""
    ranks, length = transport.world_size, into.numel()
    sent = into.new_empty(0) if parts is None else parts
    sizes = [0 if parts is None else length] * ranks
    received = transport.exchange(sent, sizes, [length if rank == root else 0 for rank in range(ranks)])
    into.copy_(received.wait())


def barrier(transport: Transport) -> None:
    """Returns when every rank has called it."""
    transport.gather(torch.zeros(1, dtype=torch.uint8)).wait()


def all_reduce_sparse(transport: Transport, tensor: Tensor, operation: Operation) -> Tensor:
    """The sum of sparse tensors (COO) along the tree: of those values that a rank has at an index."""
    ours = tensor.coalesce()
    counts = transport.gather(torch.tensor([ours.values().shape[0]])).wait().tolist()
    indices = _all_of_uneven(transport, ours.indices().t().contiguous(), counts)
    values = _all_of_uneven(transport, ours.values().contiguous(), counts)
    parts = [
        torch.sparse_coo_tensor(index.t(), value, tensor.shape, is_coalesced=True)
        for index, value in zip(indices, values, strict=True)
    ]
    total = tree_sum(parts, lambda left, right: (left + right).coalesce())
    assert total is not None, "a group has a rank"
    return total / total.values().new_tensor(transport.world_size) if operation.name == "AVG" else total


def _all_of_uneven(transport: Transport, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The rows of every rank; `counts` says how many."""
    sizes = [count * math.prod(rows.shape[1:]) for count in counts]
    received = gather_parts(transport, rows.reshape(-1), sizes).wait()
    return [part.view(count, *rows.shape[1:]) for part, count in zip(received.split(sizes), counts, strict=True)]
