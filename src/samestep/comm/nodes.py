"""The nodes: the same ranks seen as so many on each machine, with transports within a node and between nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from samestep.comm.group import GroupTransport
from samestep.comm.shm.transport import SharedTransport
from samestep.comm.transport import Pending, Transport, peers_lost
from samestep.errors import PeerLostError


class Part:
    """A transport between some of the ranks, which names a lost one by its number among all.

    Args:
        inner: the transport; moves the tensors.
        ranks: the number among all of its rank 0, 1, ….
        num_ranks: of all.
        timeout: of its transfers.
    """

    def __init__(self, inner: Transport, ranks: Sequence[int], num_ranks: int, timeout: timedelta) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self._ranks = tuple(ranks)
        self._num_ranks = num_ranks
        self._timeout = timeout

    def exchange(self, parts: Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        """All-to-all of the parts."""
        try:
            return PartPending(self, self.inner.exchange(parts, sizes, receive_sizes))
        except PeerLostError as error:
            raise self.renamed(error) from error

    def gather(self, part: Tensor) -> Pending:
        """All-gather."""
        try:
            return PartPending(self, self.inner.gather(part))
        except PeerLostError as error:
            raise self.renamed(error) from error

    def renamed(self, error: PeerLostError) -> PeerLostError:
        """The error, with the numbers that ranks have among all."""
        if not error.ranks:
            return error
        missing = tuple(self._ranks[rank] for rank in error.ranks)
        return peers_lost(self._ranks[self.rank], self._num_ranks, missing, self._timeout.total_seconds())

    def close(self) -> None:
        """Gives back connections."""
        self.inner.close()

    def abandon(self) -> None:
        """Drops connections after a transfer failed."""
        if isinstance(self.inner, GroupTransport | SharedTransport):
            self.inner.abandon()


class PartPending:
    """A transfer under way between some of the ranks."""

    def __init__(self, part: Part, pending: Pending) -> None:
        self._part = part
        self._pending = pending

    def wait(self) -> Tensor:
        """What the transport gives."""
        try:
            return self._pending.wait()
        except PeerLostError as error:
            raise self._part.renamed(error) from error


@dataclass(frozen=True)
class Nodes:
    """The same ranks, by the nodes they are on: equally many on each, contiguous.

    Attributes:
        node: between the ranks of this node; a rank's number there is its local rank.
        rail: between the ranks of all nodes that have the same local rank; a rank's number there is that of its node.
    """

    node: Part
    rail: Part

    def close(self) -> None:
        """Gives back connections."""
        self.node.close()
        self.rail.close()

    def abandon(self) -> None:
        """Drops connections after a transfer failed."""
        self.node.abandon()
        self.rail.abandon()


def node_size(places: Sequence[tuple[int, int]]) -> int | None:
    """How many ranks each node has, if sums can go by nodes; else None.

    They can where there are at least two nodes of at least two ranks, equally many on each, and contiguous.
    """
    size = places[0][1]
    if not 2 <= size < len(places) or len(places) % size:
        return None
    return size if list(places) == [(rank % size, size) for rank in range(len(places))] else None
