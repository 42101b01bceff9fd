"""Calls of a process group, each carried out by the ordered group and by gloo, on ranks that are threads.

Values are small whole numbers, whose sums and products are exact in every order: so both must give the same bits. Its
text is the head of each script of collectives that the simulator prints.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from samestep.comm.group import GroupTransport
from samestep.comm.process_group import OrderedProcessGroup

SECONDS = timedelta(seconds=60)


@dataclass(frozen=True)
class Call:
    """A collective on tensors of a shape; `waits` is by how many further calls its result is awaited later."""

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = (2,)
    op: str = "SUM"
    root: int = 0
    strided: bool = False
    waits: int = 0


def values(call, number, rank, shape=None):
    """A rank's values for the call with a number."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    shape = call.shape if shape is None else shape
    low, high = (0, 2) if call.dtype in ("bool", "uint8") else (-2, 3)
    drawn = torch.randint(low, high, shape, generator=generator).to(getattr(torch, call.dtype))
    return drawn.mT.contiguous().mT if call.strided and len(shape) > 1 else drawn


def begin(group, call, number, rank, ranks):
    """Begins a call on a group; its work and the tensors that it writes."""
    ours, root = values(call, number, rank), call.root % ranks
    several = [values(call, number, 10 * rank + other) for other in range(ranks)]

    def empty():
        return [torch.zeros_like(ours) for _ in range(ranks)]

    def options(kind, **entries):
        made = kind()
        for name, value in entries.items():
            setattr(made, name, value)
        return made

    op = getattr(dist.ReduceOp, call.op)
    if call.name == "all_reduce":
        return group.allreduce([ours], options(dist.AllreduceOptions, reduceOp=op)), [ours]
    if call.name == "reduce":
        work = group.reduce([ours], options(dist.ReduceOptions, reduceOp=op, rootRank=root))
        return work, [ours] if rank == root else []
    if call.name == "broadcast":
        return group.broadcast([ours], options(dist.BroadcastOptions, rootRank=root)), [ours]
    if call.name == "all_gather":
        outputs = empty()
        return group.allgather([outputs], [ours]), outputs
    if call.name == "gather":
        outputs = empty() if rank == root else []
        written = [outputs] if rank == root else []
        return group.gather(written, [ours], options(dist.GatherOptions, rootRank=root)), outputs
    if call.name == "scatter":
        into = torch.zeros_like(ours)
        parts = [several] if rank == root else []
        return group.scatter([into], parts, options(dist.ScatterOptions, rootRank=root)), [into]
    if call.name == "all_to_all":  # rows, of which each rank sends another number to each
        rows = [[(call.root + 2 * a + b) % 3 for b in range(ranks)] for a in range(ranks)]
        parts = values(call, number, rank, (sum(rows[rank]), 2)).contiguous()
        incoming = [rows[a][rank] for a in range(ranks)]
        into = torch.zeros((sum(incoming), 2), dtype=parts.dtype)
        return group.alltoall_base(into, parts, incoming, rows[rank], dist.AllToAllOptions()), [into]
    assert call.name == "barrier"
    return group.barrier(dist.BarrierOptions()), []


def carry_out(calls, ranks, is_ordered):
    """What the calls have written, by rank and call: on the ordered group or on gloo."""
    store = dist.HashStore()

    def rank_main(rank):
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, ranks, SECONDS)
        group = gloo
        if is_ordered:
            transport = GroupTransport(None, dist.PrefixStore("calls", store), SECONDS, gloo=gloo)
            peers = dist.ProcessGroupGloo(dist.PrefixStore("peers", store), rank, ranks, SECONDS)
            options = SimpleNamespace(store=store, timeout=SECONDS, group_id="simulated")
            group = OrderedProcessGroup(transport, peers, options, tuple(range(ranks)))
        under_way, found = [], [None] * len(calls)

        def finish(until):
            for due, number, work, outputs in [entry for entry in under_way if entry[0] <= until]:
                work.wait()
                found[number] = outputs
                under_way.remove((due, number, work, outputs))

        for number, call in enumerate(calls):
            work, outputs = begin(group, call, number, rank, ranks)
            under_way.append((number + call.waits, number, work, outputs))
            finish(number)
        finish(len(calls) + 100)
        meet.wait(SECONDS.total_seconds())  # no rank leaves while another still exchanges with it
        if is_ordered:
            group.shutdown()
        return found

    meet = threading.Barrier(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank_main, range(ranks)))


def check_calls(calls, ranks):
    """Fails at the first call of which the ordered group and gloo have written other bits."""
    ordered, gloo = (carry_out(calls, ranks, is_ordered) for is_ordered in (True, False))
    for rank in range(ranks):
        for number, call in enumerate(calls):
            for ours, theirs in zip(ordered[rank][number], gloo[rank][number], strict=True):
                same = torch.equal(ours.contiguous().view(-1), theirs.contiguous().view(-1))
                assert same, (call, rank, ours, theirs)
