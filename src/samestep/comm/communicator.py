"""The communicator: what ranks say to each other, over any transport."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from samestep.comm.connecting import connect
from samestep.comm.environment import Environment
from samestep.comm.hierarchy import HierarchicalReduction
from samestep.comm.letters import LetterBox, letter_sizes, pack_letter, read_letters
from samestep.comm.reduction import REDUCTIONS, PartReduction, Reduction, takes_one_message, tree_sum_rows
from samestep.comm.stream import StreamReduction
from samestep.comm.transport import LocalTransport, Transport, gather_parts
from samestep.core.microbatches import in_microbatch_order
from samestep.core.tree import Block

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


CARRIER_BYTES = 2**16  # what is larger would be copied once more to lie beside a letter


@dataclass(frozen=True)
class Communicator:
    """This rank's communicator.

    Attributes:
        device: the device whose tensors `transport` moves.
        transport: for tensors on the device.
        control: for small values in host memory; the same object where the device is a CPU.
        reduction: "ordered" (the tree, tier `bitwise`) or "native" (the backend's all-reduce, tier `allclose`).
    """

    device: torch.device
    transport: Transport
    control: Transport
    reduction: str = "ordered"

    @property
    def rank(self) -> int:
        """This rank, 0 … world_size - 1."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.transport.world_size

    @property
    def folds_beside(self) -> bool:
        """Whether folding never makes the host wait, so that it may be asked for while backward runs."""
        return self.transport.stream is not None

    def reduce(self, blocks_by_rank: Sequence[Sequence[Block]], sums: Sequence[Tensor], like: Tensor) -> Reduction:
        """Starts the reduction of a flat tensor; see `OrderedReduction`."""
        stream = self.transport.stream
        if stream is None:
            return self._reduce(blocks_by_rank, sums, like)
        return StreamReduction(stream, lambda: self._reduce(blocks_by_rank, sums, like), sums)

    def reduce_part(self, blocks_by_rank: Sequence[Sequence[Block]], sums: Sequence[Tensor], like: Tensor) -> Reduction:
        """Starts a reduction of which this rank gets its part; see `PartReduction`."""
        stream = self.transport.stream
        if stream is None:
            return PartReduction(self.transport, blocks_by_rank, sums, like)
        return StreamReduction(stream, lambda: PartReduction(self.transport, blocks_by_rank, sums, like), sums)

    def _reduce(self, blocks_by_rank: Sequence[Sequence[Block]], sums: Sequence[Tensor], like: Tensor) -> Reduction:
        transport = self.transport
        nodes = transport.nodes if self.reduction == "ordered" else None
        if nodes is None or takes_one_message(transport, blocks_by_rank, like):
            return REDUCTIONS[self.reduction](transport, blocks_by_rank, sums, like)
        return HierarchicalReduction(nodes, blocks_by_rank, sums, like)

    def carries_letters(self, blocks_by_rank: Sequence[Sequence[Block]], like: Tensor) -> bool:
        """Whether the one message in which a tensor is reduced may carry what the ranks have to say besides."""
        transport = self.transport
        return (
            transport.notices_sizes
            and like.numel() * like.element_size() <= CARRIER_BYTES
            and self.reduction == "ordered"
            and transport is self.control
            and takes_one_message(transport, blocks_by_rank, like)
        )

    def letter_box(self, blocks_by_rank: Sequence[Sequence[Block]], like: Tensor, sizes: Sequence[int]) -> LetterBox:
        """What reduces small tensors along with a letter of each rank; see `LetterBox`."""
        return LetterBox(self.transport, blocks_by_rank, like, sizes)

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Gives every rank the rows of all ranks.

        Args:
            rows: this rank's rows, [counts[rank], k], on the device or on the host.
            counts: how many rows each rank has.

        Returns:
            [sum(counts), k], by rank.
        """
        transport = self.transport if rows.device == self.device else self.control
        width = rows.shape[1]
        sizes = [count * width for count in counts]
        return gather_parts(transport, rows.reshape(-1), sizes).wait().view(sum(counts), width)

    def gather_words(self, words: Sequence[int]) -> list[list[int]]:
        """Gives every rank the equally many 64-bit integers of all ranks, through host memory."""
        sent = torch.tensor(words, dtype=torch.int64)
        received = self.control.gather(sent).wait().view(self.world_size, len(words))
        rows: list[list[int]] = received.tolist()
        return rows

    def gather_header(
        self, rows: Tensor, counts: Sequence[int], words: Sequence[int]
    ) -> tuple[Tensor, list[list[int]]]:
        """Gives every rank the rows and the words of all ranks: in one message where one transport carries both.

        Args:
            rows: this rank's rows, [counts[rank], k], on the device.
            counts: how many rows each rank has.
            words: equally many 64-bit integers on every rank.

        Returns:
            The rows of all ranks, [sum(counts), k], and the words of each.
        """
        if self.control is not self.transport or rows.dtype != torch.float64:
            return self.gather_rows(rows, counts), self.gather_words(words)
        width = rows.shape[1]
        padded = [*words, *[0] * (-len(words) % width)]
        as_rows = torch.tensor(padded, dtype=torch.int64).view(torch.float64).view(-1, width).to(rows.device)
        gathered = self.gather_rows(torch.cat([as_rows, rows]), [count + len(as_rows) for count in counts])
        by_rank = gathered.split([count + len(as_rows) for count in counts])
        all_rows = torch.cat([part[len(as_rows) :] for part in by_rank])
        heads = [part[: len(as_rows)].reshape(-1).view(torch.int64).tolist() for part in by_rank]
        return all_rows, [head[: len(words)] for head in heads]

    def gather_numbers(
        self, numbers: Sequence[float], counts: Sequence[int], words: Sequence[int]
    ) -> tuple[list[float], list[list[int]]]:
        """Gives every rank the 64-bit floats and integers of all ranks in one message, through host memory.

        Args:
            numbers: this rank's floats, counts[rank] of them.
            counts: how many floats each rank has.
            words: equally many 64-bit integers on every rank.

        Returns:
            The floats of all ranks in their order, and the words of each.
        """
        if self.world_size == 1:
            return list(numbers), [list(words)]
        sent = torch.frombuffer(bytearray(pack_letter(words, numbers)), dtype=torch.uint8)
        sizes = letter_sizes(len(words), counts)
        received = gather_parts(self.control, sent, sizes).wait().split(sizes)
        return read_letters([part.numpy().data for part in received], len(words), counts)

    def gather_microbatches(self, rows: Tensor, ranges: Sequence[range]) -> Tensor:
        """Gives every rank the rows of all microbatches, in their order.

        Args:
            rows: of this rank's microbatches, [len(ranges[rank]), k].
            ranges: the microbatches of each rank.

        Returns:
            [V, k].
        """
        gathered = self.gather_rows(rows, [len(microbatches) for microbatches in ranges])
        order = in_microbatch_order(ranges)
        return gathered if order is None else gathered[order]

    def sum_rows(self, rows: Tensor, ranges: Sequence[range]) -> Tensor:
        """Sums the rows of all microbatches along the tree; arguments as those of `gather_microbatches`."""
        return tree_sum_rows(self.gather_microbatches(rows, ranges))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites `tensor` on every rank with that of rank `source`."""
        transport = self.transport if tensor.device == self.device else self.control
        transport.broadcast(tensor, source)

    def share(self, tensor: Tensor | None, source: int = 0) -> Tensor:
        """Gives every rank the tensor of rank `source`, whose form the others need not know.

        Args:
            tensor: read on rank `source` only, on the device or in host memory; of at most 8 dimensions.
            source: the rank that has it.

        Returns:
            A copy: in host memory on every rank if the tensor of rank `source` is, else on the device.
        """
        form = [0] * 11
        if self.rank == source:
            assert tensor is not None, "the source has a tensor to share"
            form = [DTYPES.index(tensor.dtype), int(tensor.device.type == "cpu"), tensor.ndim, *tensor.shape]
            form += [0] * (11 - len(form))
        code, is_on_host, ndim, *shape = self.gather_words(form)[source]
        if self.rank != source:
            tensor = torch.empty(shape[:ndim], dtype=DTYPES[code], device=self.device)
        assert tensor is not None, "the form of the source's tensor has arrived"
        shared = tensor.detach().to(self.device, copy=True)  # by one way on all ranks, wherever the source has it
        self.transport.broadcast(shared, source)
        return shared.cpu() if is_on_host else shared

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.gather_words([self.rank])

    def close(self) -> None:
        """Gives back connections and threads."""
        if self.control is not self.transport:
            self.control.close()
        self.transport.close()


def make_communicator(
    environment: Environment, device: torch.device, timeout: timedelta, reduction: str = "ordered"
) -> Communicator:
    """Connects this rank to all others; alone, it needs no connection.

    Raises:
        PeerLostError: not all ranks came within the timeout.
        UsageError: the store cannot be reached.
    """
    if environment.world_size == 1:
        alone = LocalTransport()
        return Communicator(device, alone, alone, reduction)
    transport, control = connect(environment, device, timeout)
    return Communicator(device, transport, control, reduction)
