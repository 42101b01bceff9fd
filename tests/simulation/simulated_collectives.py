"""Calls of process groups, carried out by the ordered group over gloo and through memory.

Ranks are threads. What is reduced must have the bits of a fold of the ranks' values along the tree, which depend on its
order; what is moved alone, those of gloo. Where a rank calls something else, all ranks must get an error that names the
calls. Its text is the head of each script of collectives that the simulator prints.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from samestep.comm.connecting import connect_process_group
from samestep.comm.group import GroupTransport
from samestep.core.tree import tree_sum
from samestep.errors import DeterminismError
from samestep.logical.process_group import OrderedProcessGroup

SECONDS = timedelta(seconds=20)


@dataclass(frozen=True)
class Call:
    """A collective on tensors of a shape; `waits` is by how many further calls its result is awaited later.

    The bits of `members` are the ranks that take part; all if there is none of them.
    """

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = (2,)
    op: str = "SUM"
    root: int = 0
    strided: bool = False
    waits: int = 0
    members: int = 0

    def ranks(self, count):
        """The ranks that take part, of so many."""
        return tuple(rank for rank in range(count) if self.members >> rank & 1) or tuple(range(count))


def values(call, number, rank, shape=None):
    """A rank's values for the call with a number."""
    generator, dtype = torch.Generator().manual_seed(100 * number + rank), getattr(torch, call.dtype)
    shape = call.shape if shape is None else shape
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.randn(shape, dtype=dtype if dtype.is_complex else None, generator=generator).to(dtype)
    else:
        drawn = torch.randint(*((0, 2) if call.dtype in ("bool", "uint8") else (-2, 3)), shape, generator=generator)
        drawn = drawn.to(dtype)
    return drawn.mT.contiguous().mT if call.strided and len(shape) > 1 else drawn


METHODS = {  # the method of a group and its options, its arguments, and the tensors that it writes
    "all_reduce": ("allreduce", c10d.AllreduceOptions, "[ours]", "[ours]"),
    "reduce": ("reduce", c10d.ReduceOptions, "[ours]", "[ours] * is_root"),
    "broadcast": ("broadcast", c10d.BroadcastOptions, "[ours]", "[ours]"),
    "all_gather": ("allgather", c10d.AllgatherOptions, "[outputs], [ours]", "outputs"),
    "gather": ("gather", c10d.GatherOptions, "[outputs] * is_root, [ours]", "outputs * is_root"),
    "scatter": ("scatter", c10d.ScatterOptions, "[into], [several] * is_root", "[into]"),
    "all_to_all": ("alltoall_base", c10d.AllToAllOptions, "rows, sent, incoming, counts[rank]", "[rows]"),
    "reduce_scatter": ("reduce_scatter", c10d.ReduceScatterOptions, "[into], [several]", "[into]"),
    "reduce_scatter_uneven": ("reduce_scatter", c10d.ReduceScatterOptions, "[fewer], [uneven]", "[fewer]"),
    "reduce_scatter_single": ("_reduce_scatter_base", c10d.ReduceScatterOptions, "flat, torch.cat(parts)", "[flat]"),
    "all_gather_single": ("_allgather_base", c10d.AllgatherOptions, "whole, parts[rank]", "[whole]"),
    "all_reduce_coalesced": ("allreduce_coalesced", c10d.AllreduceCoalescedOptions, "[ours, more]", "[ours, more]"),
    "all_gather_coalesced": ("allgather_coalesced", c10d.AllgatherOptions, "pairs, [ours, more]", "sum(pairs, [])"),
    "barrier": ("barrier", c10d.BarrierOptions, "", "[]"),
}
TERMS = {  # of those that reduce: what each rank has for the one whose rank is `to`
    "all_reduce": "[ours]",
    "reduce": "[ours] * (to == root)",
    "reduce_scatter": "[several[to]]",
    "reduce_scatter_uneven": "[uneven[to]]",
    "reduce_scatter_single": "[parts[to]]",
    "all_reduce_coalesced": "[ours, more]",
}
FOLDS = {"SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
         "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}  # fmt: skip


def tensors(call, number, rank, ranks):
    """What a rank has for a call, by the names of the tables."""
    root, ours, more = call.root % ranks, values(call, number, rank), values(call, number, rank + 50)
    several = [values(call, number, 10 * rank + other).contiguous() for other in range(ranks)]
    # Of rows each rank sends another number to each.
    counts = [[(call.root + 2 * a + b) % 3 for b in range(ranks)] for a in range(ranks)]
    incoming, parts = [each[rank] for each in counts], [part.view(-1) for part in several]
    uneven = [part[(call.root + other) % 3 :].clone() for other, part in enumerate(parts)]
    return {
        "root": root,
        "ours": ours,
        "more": more,
        "rank": rank,
        "is_root": rank == root,
        "several": several,
        "parts": parts,
        "uneven": uneven,
        "into": torch.zeros(call.shape, dtype=ours.dtype),
        "fewer": torch.zeros_like(uneven[rank]),
        "flat": torch.zeros(ours.numel(), dtype=ours.dtype),
        "whole": torch.zeros(ours.numel() * ranks, dtype=ours.dtype),
        "outputs": [torch.zeros_like(ours) for _ in range(ranks)],
        "pairs": [[torch.zeros_like(ours), torch.zeros_like(more)] for _ in range(ranks)],
        "counts": counts,
        "incoming": incoming,
        "sent": values(call, number, rank, (sum(counts[rank]), 2)).contiguous(),
        "rows": torch.zeros((sum(incoming), 2), dtype=ours.dtype),
        "torch": torch,
    }


def begin(group, call, number, rank, ranks):
    """Begins a call on a group; its work and the tensors that it writes."""
    names, (method, kind, given, written) = tensors(call, number, rank, ranks), METHODS[call.name]
    options = kind()
    for name, value in {"reduceOp": getattr(dist.ReduceOp, call.op), "rootRank": names["root"]}.items():
        if hasattr(options, name):
            setattr(options, name, value)
    return getattr(group, method)(*eval(f"[{given}]", names), options), eval(written, names)


def folded(call, number, rank, ranks):
    """What a call that reduces is to write: the ranks' terms, folded along the tree."""
    terms = [eval(TERMS[call.name], tensors(call, number, each, ranks) | {"to": rank}) for each in range(ranks)]
    totals = [tree_sum(each, FOLDS[call.op]) for each in zip(*terms, strict=True)]
    if call.op != "AVG":
        return totals
    is_whole = call.dtype in ("uint8", "int8", "int32", "int64")  # as in C: towards zero
    # Part by part: torch's division of a complex number rounds otherwise than that of its parts.
    numbers = [torch.view_as_real(total) if total.is_complex() else total for total in totals]
    means = [torch.div(each, ranks, rounding_mode="trunc" if is_whole else None) for each in numbers]
    return [
        torch.view_as_complex(each) if total.is_complex() else each for each, total in zip(means, totals, strict=True)
    ]


def carry_out(calls_by_rank, how):
    """What the calls have written, by rank and call: by the ordered group over "gloo" or "memory", or as is "right"."""
    store, ranks = dist.HashStore(), len(calls_by_rank)
    meet = threading.Barrier(ranks)

    def connect(members, rank):
        ours, rank, count = dist.PrefixStore(str(members), store), members.index(rank), len(members)
        if how == "right":
            return dist.ProcessGroupGloo(ours, rank, count, SECONDS)
        if how == "memory" and count > 1:
            ends = connect_process_group(dist.PrefixStore("memory", ours), rank, members, SECONDS)
        else:
            gloo, peers = (dist.ProcessGroupGloo(dist.PrefixStore(k, ours), rank, count, SECONDS) for k in "ab")
            ends = GroupTransport(None, dist.PrefixStore("calls", ours), SECONDS, backend=gloo), peers, ours
        return OrderedProcessGroup(*ends, SimpleNamespace(timeout=SECONDS, group_id="simulated"), members)

    def rank_main(rank):
        calls = calls_by_rank[rank]
        wanted = sorted({call.ranks(ranks) for call in calls})
        groups = {members: connect(members, rank) for members in wanted if rank in members}
        under_way, found = [], [[] for _ in calls]

        def finish(until):
            for due, number, work, outputs in [entry for entry in under_way if entry[0] <= until]:
                work.wait()
                found[number] = outputs
                under_way.remove((due, number, work, outputs))

        try:
            for number, call in enumerate(calls):
                members = call.ranks(ranks)
                if rank in members and how == "right" and call.name in TERMS:
                    found[number] = folded(call, number, members.index(rank), len(members))
                elif rank in members:
                    work, outputs = begin(groups[members], call, number, members.index(rank), len(members))
                    under_way.append((number + call.waits, number, work, outputs))
                finish(number)
            finish(len(calls) + 100)
        except DeterminismError as error:
            found = str(error)
        meet.wait(SECONDS.total_seconds())  # no rank leaves while another still exchanges with it
        for group in groups.values() if how != "right" else ():
            group.abort() if isinstance(found, str) else group.shutdown()
        return found

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank_main, range(ranks)))


def check_calls(calls, ranks, odd=None, at=0):
    """Fails at the first call of which the ordered group has written other bits than are right.

    If an `odd` call is given, the last rank makes it instead of another at a place, and the error of all must say so.
    """
    if odd is not None:
        theirs = [replace(call, members=0) for call in calls] + [Call("barrier"), Call("all_reduce", "float64", (3,))]
        ours = [*theirs[:at], replace(odd, members=0), *theirs[at + 1 :]]
        for text in carry_out([theirs] * (ranks - 1) + [ours], "memory"):
            assert str(text).startswith("the ranks are out of step"), (odd, at, text)
        return
    right = carry_out([calls] * ranks, "right")
    for how in ("gloo", "memory"):
        ordered = carry_out([calls] * ranks, how)
        for rank, number in product(range(ranks), range(len(calls))):
            for ours, theirs in zip(ordered[rank][number], right[rank][number], strict=True):
                same = torch.equal(ours.contiguous().view(-1), theirs.contiguous().view(-1))
                assert same, (how, calls[number], rank, ours, theirs)
