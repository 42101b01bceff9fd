"""The communicator: the collectives of the ranks of a run, over any transport."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from samestep.comm import reduction
from samestep.comm.environment import Environment
from samestep.comm.reduction import Reduction, ordered, scattered, tree_sum_rows
from samestep.comm.transport import Connection, LocalTransport, Transport, gather_parts
from samestep.core.microbatches import in_microbatch_order
from samestep.core.tree import Block

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
MAX_DIMS = 64  # of a tensor, as torch has it


@dataclass(frozen=True)
class Communicator:
    """The collectives of one rank. All ranks call the same ones in the same order.

    Attributes:
        device: the device whose tensors `transport` moves.
        transport: for tensors on the device.
        control: for small values in host memory; the same object if the device is a CPU.
    """

    device: torch.device
    transport: Transport
    control: Transport

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    @property
    def folds_beside(self) -> bool:
        """Whether folding never blocks the host, so that it can be enqueued while backward runs."""
        return self.transport.stream is not None

    def reduce(
        self,
        blocks_by_rank: Sequence[Sequence[Block]],
        sums: Sequence[Tensor],
        like: Tensor,
        scatter: bool = False,
        at_first: bool = False,
    ) -> Reduction:
        """Starts the reduction of a flat tensor over the ranks; arguments as in `reduction.ordered`.

        With `scatter` each rank gets the sum of its part only, [length / D]; with `at_first` rank 0 needs it alone.
        """
        form, stream, total = ordered, self.transport.stream, None
        if scatter or at_first:
            form = scattered if scatter else reduction.at_first
        if stream is not None:
            # Made here, on the caller's stream: of memory of the exchange's own stream, which the caller frees, that
            # stream would not know that it is still read. A sum that was sent is free once the first message is here.
            length = like.numel() // self.world_size if scatter else like.numel()
            total = sums[0] if sums and not scatter else like.new_empty(length)
        used = sums if total is None else (*sums, total)
        return Reduction(form(self.transport, blocks_by_rank, sums, like, total), used, stream)

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Gathers the rows of all ranks, [sum(counts), k], by rank.

        Args:
            rows: this rank's rows, [counts[rank], k], on the device or on the host.
            counts: the number of rows of each rank.
        """
        width = rows.shape[1]
        sizes = [count * width for count in counts]
        return gather_parts(self.carrier(rows), rows.reshape(-1), sizes).wait().view(sum(counts), width)

    def gather_words(self, words: Sequence[int]) -> list[list[int]]:
        """Gathers equally many 64-bit integers of each rank, through host memory."""
        sent = torch.tensor(words, dtype=torch.int64)
        # On the host: of values on an accelerator `tolist` would wait for all kernels under way.
        received = self.control.gather(sent).wait().view(self.world_size, len(words))
        rows: list[list[int]] = received.tolist()
        return rows

    def gather_values(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank: numbers, texts and tensors, however nested, which end in host memory."""
        ours = _as_bytes(value)
        sizes = [row[0] for row in self.gather_words([len(ours)])]
        return [_from_bytes(part) for part in self.gather_rows(ours.view(-1, 1), sizes).view(-1).split(sizes)]

    def gather_header(
        self, rows: Tensor, counts: Sequence[int], words: Sequence[int]
    ) -> tuple[Tensor, list[list[int]]]:
        """Gathers rows and words of all ranks: in one message if one transport carries both.

        Args:
            rows: this rank's rows, [counts[rank], k], on the device or on the host.
            counts: the number of rows of each rank.
            words: 64-bit integers, equally many on every rank.

        Returns:
            The rows of all ranks, [sum(counts), k], and the words of each.
        """
        is_on_host = self.control is self.transport or rows.device.type == "cpu"
        if not is_on_host or rows.dtype != torch.float64:
            return self.gather_rows(rows, counts), self.gather_words(words)
        # Integers travel as the bits of floats: nothing computes with them on the way.
        # In host memory, by which this message goes: of a device's words each reading would wait for it.
        sent = torch.cat([torch.tensor(words, dtype=torch.int64).view(torch.float64), rows.reshape(-1).cpu()])
        sizes = [len(words) + count * rows.shape[1] for count in counts]
        by_rank = gather_parts(self.control, sent, sizes).wait().split(sizes)
        heads = [part[: len(words)].view(torch.int64).tolist() for part in by_rank]
        gathered = torch.cat([part[len(words) :] for part in by_rank]).view(sum(counts), rows.shape[1])
        return gathered.to(rows.device), heads

    def sum_rows(self, rows: Tensor, ranges: Sequence[range]) -> Tensor:
        """Sums the rows of all microbatches along the tree.

        Args:
            rows: of this rank's microbatches, [len(ranges[rank]), k].
            ranges: the microbatches of each rank.
        """
        gathered = self.gather_rows(rows, [len(microbatches) for microbatches in ranges])
        order = in_microbatch_order(ranges)  # dealt in turn, the rows of a rank are not adjacent microbatches
        return tree_sum_rows(gathered if order is None else gathered[order])

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites `tensor` on every rank with rank `source`'s tensor."""
        self.carrier(tensor).broadcast(tensor, source)

    def share(self, tensor: Tensor | None, source: int = 0) -> Tensor:
        """Broadcasts the tensor of rank `source`, with its shape and dtype.

        Args:
            tensor: read on rank `source` only, on the device or in host memory; in memory of any form.
            source: the rank that has it.

        Returns:
            A copy: in host memory on every rank if the tensor of rank `source` is, else on the device.
        """
        form = [0] * (3 + MAX_DIMS)
        if self.rank == source:
            assert tensor is not None, "the source has a tensor to share"
            facts = [DTYPES.index(tensor.dtype), int(tensor.device.type == "cpu"), tensor.ndim, *tensor.shape]
            form[: len(facts)] = facts
        code, is_on_host, ndim, *shape = self.gather_words(form)[source]
        if self.rank != source:
            tensor = torch.empty(shape[:ndim], dtype=DTYPES[code], device=self.device)
        assert tensor is not None, "the form of the source's tensor has arrived"
        # All ranks must use one transport, though only the source knows on which side its tensor lies: the device's.
        shared = tensor.detach().to(self.device, copy=True)
        self.transport.broadcast(shared, source)
        return shared.cpu() if is_on_host else shared

    def share_value(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`, as `gather_values` takes it, on every rank; other ranks' values are not read."""
        return _from_bytes(self.share(_as_bytes(value) if self.rank == source else None, source))

    def meet(self) -> None:
        """Returns when every rank has called it; one may work alone before that for as long as its process lives."""
        if isinstance(self.control, Connection):  # where ranks take turns in one process no wait has a limit
            self.control.meet()

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.gather_words([self.rank])

    def carrier(self, tensor: Tensor) -> Transport:
        """The transport for a tensor: on the device, or in host memory."""
        return self.transport if tensor.device == self.device else self.control

    def close(self) -> None:
        """Closes connections and frees threads."""
        if self.control is not self.transport:
            self.control.close()
        self.transport.close()


def _as_bytes(value: Any) -> Tensor:
    buffer = BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    # weights_only: of what another process sends nothing is run.
    return torch.load(BytesIO(data.numpy().tobytes()), "cpu", weights_only=True)


def make_communicator(environment: Environment, device: torch.device, timeout: timedelta) -> Communicator:
    """Connects this rank to all others; a single rank needs no connection."""
    if environment.world_size == 1:
        alone = LocalTransport()
        return Communicator(device, alone, alone)
    from samestep.comm.connecting import connect  # with all transports between processes: one rank needs none

    transport, control = connect(environment, device, timeout)
    return Communicator(device, transport, control)
