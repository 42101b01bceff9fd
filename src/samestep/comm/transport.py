"""The transport: the small seam between the ordered reduction and whatever moves bytes.

A transport exchanges; it adds only for the `native` reduction. Four implementations: `LocalTransport` here (one rank,
plain arithmetic on the same code path), `SharedTransport` (memory that the ranks of a host share), `GroupTransport`
(torch.distributed: gloo, NCCL) and `SequentialTransport` (ranks that take turns in one process).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from samestep.errors import DeterminismError, PeerLostError

if TYPE_CHECKING:
    from samestep.comm.nodes import Nodes


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> Tensor:
        """The received tensor; blocks the host, or the device's stream, until it has arrived.

        Raises:
            PeerLostError: a rank died or did not answer in time.
        """
        ...


class Transport(Protocol):
    """Moves flat (1-d, contiguous) tensors between ranks. Every rank calls the same methods in the same order.

    Attributes:
        rank: this rank, 0 … world_size - 1.
        world_size: the number of ranks.
        latency_bytes: how many bytes more may be received for one message less; the same on all ranks.
    """

    rank: int
    world_size: int
    latency_bytes: int

    @property
    def nodes(self) -> "Nodes | None":
        """The transports within the node and between nodes; None where the ranks take no account of nodes."""
        ...

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream kept for what the exchange computes, where waiting makes streams wait, not the host; else None."""
        ...

    def exchange(self, parts: Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        """Hands over parts, gets parts: an all-to-all.

        Args:
            parts: the parts for rank 0, 1, … one after another.
            sizes: elements of the part for each rank.
            receive_sizes: elements that each rank sends to this one.

        Returns:
            What will give the parts from rank 0, 1, … one after another. May alias `parts`.
        """
        ...

    def gather(self, part: Tensor) -> Pending:
        """Gives every rank the equally long parts of rank 0, 1, … one after another. May alias `part`."""
        ...

    def add(self, tensor: Tensor) -> Pending:
        """Sums equally long tensors over the ranks in whatever order the backend likes: tier `allclose`."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrites `tensor` on all ranks with that of rank `source`."""
        ...

    def close(self) -> None:
        """Gives back connections and threads."""
        ...


def gather_parts(transport: Transport, part: Tensor, sizes: Sequence[int]) -> Pending:
    """Gives every rank the parts of rank 0, 1, …, which may be of different lengths.

    Args:
        transport: moves them.
        part: this rank's, flat.
        sizes: elements of each rank's.
    """
    if len(set(sizes)) == 1:
        return transport.gather(part)
    return transport.exchange(part.repeat(transport.world_size), [part.numel()] * transport.world_size, sizes)


class Arrived:
    """A transfer that is there already."""

    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self) -> Tensor:
        """The received tensor."""
        return self._received


class LocalTransport:
    """One rank alone: every exchange is with itself."""

    rank = 0
    world_size = 1
    latency_bytes = 0
    nodes = None
    stream = None

    def exchange(self, parts: Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        """Returns the parts themselves."""
        return Arrived(parts)

    def gather(self, part: Tensor) -> Pending:
        """Returns the part itself."""
        return Arrived(part)

    def add(self, tensor: Tensor) -> Pending:
        """Returns the tensor itself."""
        return Arrived(tensor)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def peers_lost(rank: int, world_size: int, missing: tuple[int, ...], timeout_seconds: float) -> PeerLostError:
    """The error of a rank that waits in vain for others."""
    names = ", ".join(str(other) for other in missing)
    return PeerLostError(
        f"rank {rank} of {world_size} waits for rank {names}, which has died, has ended, or is late: "
        f"do all ranks take the same number of steps? A rank that needs more time than {timeout_seconds:g} s for its "
        "microbatches needs a larger timeout_seconds",
        missing,
    )


def unexpected_sizes(rank: int, got: str, expected: str) -> DeterminismError:
    """The error of a rank that is handed parts of another size than it expects."""
    return DeterminismError(
        f"rank {rank} got {got} in one exchange, and expected {expected}: the ranks take different steps; hand every "
        "rank the same batches, and let all call the same functions in the same order"
    )
