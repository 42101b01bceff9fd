"""Programs over ranks of several nodes that tests run on every rank of a world."""

from contextlib import contextmanager
from unittest import mock

from programs import reduce_leaves, train_small

from samestep.comm.communicator import Communicator
from samestep.comm.hierarchical_reduction import Nodes

NEVER_ONE_MESSAGE = -1


class Among:
    """Some of the ranks of a transport between all: the others get nothing. All of them call it at once."""

    def __init__(self, transport, ranks):
        self._transport, self._ranks = transport, list(ranks)
        self.rank, self.world_size = self._ranks.index(transport.rank), len(self._ranks)

    def exchange(self, parts, sizes, receive_sizes):
        def spread(by_member):
            sizes = [0] * self._transport.world_size
            for rank, size in zip(self._ranks, by_member, strict=True):
                sizes[rank] = size
            return sizes

        return self._transport.exchange(parts, spread(sizes), spread(receive_sizes))

    def gather(self, part, into=None):
        sizes = [part.numel()] * self.world_size
        return self.exchange(part.repeat(self.world_size), sizes, sizes)


class Counting:
    """A transport that counts the bytes it sends to others, and its operations."""

    def __init__(self, inner):
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.sent = self.operations = 0

    def exchange(self, parts, sizes, receive_sizes):
        self.operations += 1
        self.sent += (sum(sizes) - sizes[self.rank]) * parts.element_size()
        return self._inner.exchange(parts, sizes, receive_sizes)

    def gather(self, part, into=None):
        self.operations += 1
        self.sent += (self.world_size - 1) * part.numel() * part.element_size()
        return self._inner.gather(part, into=into)


@contextmanager
def by_nodes(transport, nodes):
    """Lets a transport go by these nodes, with every tensor; yields the counts, within the node and between nodes."""
    before = transport.nodes, transport.latency_bytes
    within, between = Counting(nodes.within), Counting(nodes.between)
    transport.nodes, transport.latency_bytes = Nodes(within, between), NEVER_ONE_MESSAGE
    try:
        yield within, between
    finally:
        transport.nodes, transport.latency_bytes = before


def make_nodes(transport, size):
    """Nodes of so many ranks each, by way of the transport between all."""
    rank, ranks = transport.rank, transport.world_size
    first = rank - rank % size
    within, between = range(first, first + size), range(rank % size, ranks, size)
    return Nodes(Among(transport, within), Among(transport, between))


def reduce_in_turns(communicator, size, leaves, numel, shares=None):
    """Sums one leaf a microbatch by nodes of so many ranks; the sum, and the bytes that left this rank's node."""
    transport = communicator.transport
    with by_nodes(transport, make_nodes(transport, size)) as (_, between):
        return reduce_leaves(communicator, leaves, numel, shares), between.sent


def reduce_by_nodes(communicator, leaves, numel):
    """Sums one leaf a microbatch by the nodes that the ranks believe to be on; the sum, and what was counted."""
    transport = communicator.transport
    with by_nodes(transport, transport.nodes) as (within, between):
        total = reduce_leaves(communicator, leaves, numel)
    return total, within.sent, between.sent


def what_there_is(communicator):
    """The kinds of transports: between all, within the node, between nodes."""
    transport = communicator.transport
    nodes = transport.nodes
    parts = () if nodes is None else (nodes.within, nodes.between)
    return [type(part).__name__ for part in (transport, *parts)]


def train_by_nodes(communicator, options, folds_beside=False):
    """Trains the small model; what that gives, and the number of operations between nodes.

    Args:
        communicator: this rank's communicator.
        options: as those of `train_small`.
        folds_beside: whether buckets are folded while backward runs, as between GPUs.
    """
    transport = communicator.transport
    early = mock.patch.object(Communicator, "folds_beside", folds_beside)
    with early, by_nodes(transport, transport.nodes) as (_, between):
        return train_small(communicator, options), between.operations


def small_and_large(communicator, leaves_by_numel):
    """Sums a small tensor and a large one; the number of operations between nodes after each."""
    transport = communicator.transport
    latency_bytes, counts = transport.latency_bytes, []
    with by_nodes(transport, transport.nodes) as (_, between):
        transport.latency_bytes = latency_bytes
        for numel, leaves in leaves_by_numel:
            reduce_leaves(communicator, leaves, numel)
            counts.append(between.operations)
    return counts
