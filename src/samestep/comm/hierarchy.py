"""The reduction between ranks of several nodes: first within each node, then between nodes, along the same tree.

Between nodes bytes are dear, so they are sent as late, and as few, as can be. With N nodes of L ranks each:

    1. *scatter within the node*: an all-to-all, after which each rank holds 1/L of every block of its node;
    2. *merge*: it adds up what siblings there are, which leaves the largest aligned blocks of the node's microbatches;
    3. *scatter along the rail*: an all-to-all between the ranks of equal local rank, one on each node;
    4. *fold* what arrived, up to the root;
    5. *gather* along the rail, then within the node.

A node's microbatches are contiguous as a rank's are, so its blocks are nodes of the one tree: the bits are those of the
flat form, whatever N, L and V are. A rank sends (P + 1)(N-1)/N · G/L bytes to other nodes, where G are the tensor's and
P is the number of blocks that the node's microbatches make up: one where N divides V into powers of two, so 2(N-1)/N ·
G/L, a few else. In the flat form it sends (P + 1)(N-1)/N · G, where P counts its own blocks: L times as much.

The rule: this form is taken where there are at least two nodes of at least two ranks, equally many on each and
contiguous (`nodes.node_size`), for tensors that are too large for one message (`reduction.takes_one_message`);
SAMESTEP_NODES=flat forgoes it.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain

from torch import Tensor

from samestep.comm.nodes import Nodes
from samestep.comm.reduction import Stages, fold_received, merge_blocks, merge_received, scatter
from samestep.core.tree import Block


def hierarchical(
    nodes: Nodes, blocks_by_rank: Sequence[Sequence[Block]], sums: Sequence[Tensor], like: Tensor
) -> Stages:
    """The reduction of one flat tensor along the tree, within nodes and between them."""
    size, num_nodes, number = nodes.node.world_size, nodes.rail.world_size, nodes.rail.rank
    by_node, merged_by_node = _blocks_by_node(tuple(map(tuple, blocks_by_rank)), size)
    merged_blocks = [block for blocks in merged_by_node for block in blocks]
    ours = blocks_by_rank[number * size : (number + 1) * size]
    part = like[: like.numel() // size]  # of which a rail makes the sum

    merged = merge_received(by_node[number], (yield scatter(nodes.node, ours, sums, like)), part.numel())
    received = yield scatter(nodes.rail, merged_by_node, merged, part)
    del merged
    total = fold_received(merged_blocks, received, part.numel() // num_nodes)
    del received
    return (yield nodes.node.gather((yield nodes.rail.gather(total))))


@cache
def _blocks_by_node(
    blocks_by_rank: tuple[tuple[Block, ...], ...], size: int
) -> tuple[tuple[tuple[Block, ...], ...], tuple[tuple[Block, ...], ...]]:
    """The blocks that the ranks of each node have; and those that they make up."""
    firsts = range(0, len(blocks_by_rank), size)
    by_node = tuple(tuple(chain.from_iterable(blocks_by_rank[first : first + size])) for first in firsts)
    return by_node, tuple(merge_blocks(blocks) for blocks in by_node)
