"""By nodes: the ordered reduction of ranks on several machines, within each node first, then between them.

Between nodes bandwidth is scarce, so sums go by nodes. With N nodes of L ranks each:

    1. *scatter within the node*: an all-to-all, after which each rank holds 1/L of every block of its node;
    2. *merge*: it adds siblings, which leaves the largest aligned blocks of the node's microbatches;
    3. *scatter between nodes*: an all-to-all between the ranks of equal local rank, one on each node;
    4. *fold* what arrived, up to the root;
    5. *gather* between nodes, then within the node.

A node's microbatches are contiguous as a rank's are, so its blocks are nodes of the one tree: the bits are those of the
flat form, whatever N, L and V are. A rank sends (P + 1)(N-1)/N · G/L bytes to other nodes, where G is the tensor's size
and P the number of blocks that the node's microbatches make up: one if N divides V into powers of two, else a few. In
the flat form it sends (P + 1)(N-1)/N · G, where P counts its own blocks: L times as much. `node_size` has
the condition on the nodes; SAMESTEP_NODES=flat turns the form off, and small tensors take one message all the same.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from samestep.comm.environment import Environment
from samestep.comm.group import GroupTransport, exchange_a_byte, nccl_tried, subgroup
from samestep.comm.reduction import fold_received, merge_blocks, merge_received, scatter
from samestep.comm.rendezvous import Rendezvous
from samestep.comm.segment import NoSegmentError, map_segment
from samestep.comm.shared_memory import SharedTransport
from samestep.comm.transport import Blocks, Connection, Stages, Transport
from samestep.core.tree import Block
from samestep.errors import PeerLostError


@dataclass(frozen=True)
class Nodes:
    """The same ranks by machine: equally many on each, contiguous."""

    within: Transport  # between the ranks of this node, numbered by local rank
    between: Transport  # between the ranks of all nodes with the same local rank, numbered by node

    def reduce(self, blocks_by_rank: Blocks, sums: Sequence[Tensor], like: Tensor, total: Tensor | None) -> Stages:
        """The reduction within nodes and between them."""
        size, num_nodes, number = self.within.world_size, self.between.world_size, self.between.rank
        by_node, merged_by_node = _blocks_by_node(tuple(map(tuple, blocks_by_rank)), size)
        ours = blocks_by_rank[number * size : (number + 1) * size]
        part = like[: like.numel() // size]  # the ranks of one local rank make the sum of such a part

        merged = merge_received(by_node[number], (yield scatter(self.within, ours, sums, like)), part.numel())
        received = yield scatter(self.between, merged_by_node, merged, part)
        del merged  # memory that is sent already must not be held while the rest arrives
        root = fold_received(list(chain.from_iterable(merged_by_node)), received, part.numel() // num_nodes)
        del received
        return (yield self.within.gather((yield self.between.gather(root)), into=total))

    def close(self) -> None:
        self.within.close()
        self.between.close()

    def abandon(self) -> None:
        """Drops the connections of both after a failure."""
        for transport in (self.within, self.between):
            if isinstance(transport, Connection):
                transport.abandon()

    def watch(self, check_lost: Callable[[], None] | None, names_missing: bool) -> None:
        for transport in (self.within, self.between):
            if isinstance(transport, Connection):
                transport.watch(check_lost, names_missing)


# Cached by the blocks, which change only with the ranks and with the number of microbatches that hold samples.
@cache
def _blocks_by_node(
    blocks_by_rank: tuple[tuple[Block, ...], ...], size: int
) -> tuple[tuple[tuple[Block, ...], ...], tuple[tuple[Block, ...], ...]]:
    """The blocks of the ranks of each node; and those that they make up."""
    firsts = range(0, len(blocks_by_rank), size)
    by_node = tuple(tuple(chain.from_iterable(blocks_by_rank[first : first + size])) for first in firsts)
    return by_node, tuple(merge_blocks(blocks) for blocks in by_node)


def node_size(places: Sequence[tuple[int, int]]) -> int | None:
    """The ranks of each node, given every rank's (local rank, local world size); None if sums cannot go by nodes.

    They can with at least two nodes of at least two ranks, equally many on each, and contiguous.
    """
    size = places[0][1]
    if not 2 <= size < len(places) or len(places) % size:
        return None
    return size if list(places) == [(rank % size, size) for rank in range(len(places))] else None


def connect_nodes(
    control: GroupTransport, met: Rendezvous, backend: str, device: torch.device, timeout: timedelta
) -> Nodes | None:
    """Connects ranks that have a process group within and between their nodes; None for a flat reduction."""
    rank, num_ranks = control.rank, control.world_size
    # All ranks decide by the words of all: a variable that is set on one node only must not split the ranks.
    words = [met.place.local_rank, met.place.local_world_size, int(met.place.nodes == "auto")]
    rows = control.gather(torch.tensor(words)).wait().view(num_ranks, 3).tolist()
    size = node_size([(local, count) for local, count, _ in rows])
    if size is None or not all(wants for _, _, wants in rows):
        return None
    nodes = [range(first, first + size) for first in range(0, num_ranks, size)]
    same_local_ranks = [range(first, num_ranks, size) for first in range(size)]
    within: Connection | None = None
    try:
        if backend == "gloo":
            within = _share_in_node(control, met, nodes[rank // size], timeout)
        tried = nccl_tried(control, device, timeout, control.abandon, met.check) if backend == "nccl" else None
        with tried or contextlib.nullcontext():
            within = within or subgroup(nodes, rank, backend, met.store, timeout)
            between = subgroup(same_local_ranks, rank, backend, met.store, timeout)
            if backend == "nccl":
                exchange_a_byte(within, device)
                exchange_a_byte(between, device)
        return Nodes(within, between)
    except (RuntimeError, PeerLostError) as error:
        if within is not None:
            within.abandon()
        raise PeerLostError(f"rank {rank} met all others, but could not connect to them by nodes: {error}") from error


def _share_in_node(
    control: GroupTransport, met: Rendezvous, ranks: range, timeout: timedelta
) -> SharedTransport | None:
    """The transport through the memory of this node; None, on all ranks of the run, if one node has none."""
    local, size = met.place.local_rank, met.place.local_world_size
    alone = Environment(local, size, local, size, store_is_kept=True, transport=met.place.transport)
    here = replace(met.part(f"node {ranks.start}"), place=alone)
    transport = None
    with contextlib.suppress(NoSegmentError):
        transport = SharedTransport(map_segment(here), local, timeout, here.store)
        transport.ranks, transport.run_size = ranks, control.world_size
    # All nodes alike, since all ranks must make the process groups that stand in for it.
    have = bool(control.gather(torch.tensor([transport is not None])).wait().all())
    if transport is not None and not have:
        transport.close()
    return transport if have else None
