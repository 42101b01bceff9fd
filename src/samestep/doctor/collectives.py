"""The collectives that training uses: each is tried against plain arithmetic, to the bit, and set up to be timed.

Every rank knows what every other sends, so it can tell a wrong element, and often whose it was, without asking. Sums
that no order of ours fixes (the backend's own) are of small whole numbers, which every order adds up exactly.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.comm.group import GroupTransport
from samestep.comm.reduction import ALIGNMENT_ELEMENTS, tree_sum_rows
from samestep.comm.transport import gather_parts
from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import Block, TreeSum, rank_blocks

MOVED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
ADDED_DTYPES = (torch.float32, torch.float64)
SIZES = (1, 1003, 65_537)
MANY_ELEMENTS = 262_144
LATE_SECONDS = 0.05
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Ranks:
    """The ranks whose collectives are tried, seen from one of them.

    Attributes:
        communicator: its communicator, over the transport that is tried.
        store: another way to talk, which does not depend on that transport.
    """

    communicator: Communicator
    store: dist.Store

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """How many there are."""
        return self.communicator.world_size

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.communicator.device


Operation = Callable[[], object]


@dataclass(frozen=True)
class Collective:
    """A collective.

    Attributes:
        name: what it is called.
        cases: tries it; yields, a case, what is wrong with what this rank got: nothing, if all is right.
        operation: makes what is timed, for so many bytes; None where there is nothing to time.
        bus_factor: bus bandwidth by algorithm bandwidth, on so many ranks.
        is_torch: whether torch.distributed's own is called, which only transports over process groups have.
    """

    name: str
    cases: Callable[[Ranks], Iterator[str]]
    operation: Callable[[Ranks, int], Operation] | None
    bus_factor: Callable[[int], float]
    is_torch: bool = False

    def is_possible(self, communicator: Communicator) -> bool:
        """Whether the communicator's transport has it."""
        return not self.is_torch or isinstance(communicator.transport, GroupTransport)


def difference(got: Tensor, expected: Tensor) -> str:
    """The first element in which two flat tensors differ in a bit; empty if they are the same bits."""
    got = got.detach().cpu()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.numel()} elements of {got.dtype} arrived, should be {expected.numel()} of {expected.dtype}"
    if got.numel() == 0:
        return ""
    width = expected.element_size()
    wrong = (got.view(torch.uint8) != expected.view(torch.uint8)).view(-1, width).any(1).nonzero()
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return (
        f"element {first} of {got.numel():,} is {got[first].item()}, should be {expected[first].item()} "
        f"({len(wrong):,} wrong)"
    )


def pattern(source: int, target: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What one rank sends another: whole numbers that every dtype holds, and that tell place, source and target."""
    numbers = (7 * torch.arange(numel) + 31 * source + 17 * target) % 127
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


def _about(dtype: torch.dtype, numel: int, wrong: str) -> str:
    """What is wrong, with the case that shows it."""
    return f"{str(dtype).removeprefix('torch.')}, about {numel:,} elements: {wrong}" if wrong else ""


def _parts_differ(got: Tensor, parts: Sequence[Tensor]) -> str:
    """What is wrong with parts from rank 0, 1, …, naming the first rank whose part it is."""
    if got.numel() != sum(part.numel() for part in parts):
        return difference(got, torch.cat(list(parts)))
    for source, (ours, part) in enumerate(zip(got.split([len(part) for part in parts]), parts, strict=True)):
        if wrong := difference(ours, part):
            return f"{wrong} in what rank {source} sent"
    return ""


def _ragged(size: int, source: int, target: int) -> int:
    """How many elements one rank sends another: uneven, and none at times."""
    return 0 if size == 1 and (source + target) % 2 else size + (3 * source + 5 * target) % 7


def exchange_cases(ranks: Ranks) -> Iterator[str]:
    """All-to-all of ragged parts."""
    rank, everyone = ranks.rank, range(ranks.world_size)
    for dtype in MOVED_DTYPES:
        for size in SIZES:
            sizes = [_ragged(size, rank, target) for target in everyone]
            expected = [pattern(source, rank, _ragged(size, source, rank), dtype) for source in everyone]
            parts = torch.cat([pattern(rank, target, sizes[target], dtype) for target in everyone]).to(ranks.device)
            pending = ranks.communicator.transport.exchange(parts, sizes, [len(part) for part in expected])
            yield _about(dtype, size, _parts_differ(pending.wait(), expected))


def gather_cases(ranks: Ranks) -> Iterator[str]:
    """All-gather of equal parts, then of ragged ones."""
    rank, everyone = ranks.rank, range(ranks.world_size)
    for dtype in MOVED_DTYPES:
        for size in SIZES:
            expected = [pattern(source, 0, size, dtype) for source in everyone]
            got = ranks.communicator.transport.gather(expected[rank].to(ranks.device)).wait()
            yield _about(dtype, size, _parts_differ(got, expected))
    for size in SIZES:
        expected = [pattern(source, 0, _ragged(size, source, 0), torch.float32) for source in everyone]
        sizes = [len(part) for part in expected]
        got = gather_parts(ranks.communicator.transport, expected[rank].to(ranks.device), sizes).wait()
        yield _about(torch.float32, size, _parts_differ(got, expected))


def word_cases(ranks: Ranks) -> Iterator[str]:
    """64-bit integers of all ranks, through host memory."""
    for extreme in (0, -1, 2**62):
        got = ranks.communicator.gather_words([ranks.rank, extreme])
        wrong = [source for source, row in enumerate(got) if row != [source, extreme]]
        yield f"rank {wrong[0]} seems to say {got[wrong[0]]}" if wrong else ""


def ordered_cases(ranks: Ranks) -> Iterator[str]:
    """The ordered reduction of random numbers, whose bits depend on the order, for several numbers of microbatches."""
    unit = ALIGNMENT_ELEMENTS * ranks.world_size
    for num_microbatches in (ranks.world_size, max(8, ranks.world_size), ranks.world_size + 3):
        for dtype in ADDED_DTYPES:
            for numel in (unit, unit * -(-MANY_ELEMENTS // unit)):
                leaves = [_leaf(microbatch, numel, dtype) for microbatch in range(num_microbatches)]
                got = _reduced(ranks, leaves)
                wrong = difference(got, tree_sum_rows(torch.stack(leaves)))
                yield _about(dtype, numel, f"{num_microbatches} microbatches, {wrong}" if wrong else "")


def _leaf(microbatch: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A microbatch's numbers."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(microbatch + 1), dtype=torch.float64).to(dtype)


def _reduced(ranks: Ranks, leaves: Sequence[Tensor]) -> Tensor:
    """The ordered reduction of a leaf a microbatch."""
    ranges = microbatch_ranges(len(leaves), ranks.world_size)
    counter: TreeSum[Tensor] = TreeSum(torch.add)
    for microbatch in ranges[ranks.rank]:
        counter.push(Block(microbatch, 1), leaves[microbatch].to(ranks.device))
    like = torch.empty_like(leaves[0], device=ranks.device)
    reduction = ranks.communicator.reduce(rank_blocks(ranges, len(leaves)), counter.sums, like)
    for _ in range(reduction.num_folds):
        reduction.fold()
    return reduction.finish()


def native_cases(ranks: Ranks) -> Iterator[str]:
    """The backend's own all-reduce."""
    for dtype in ADDED_DTYPES:
        for size in SIZES:
            addends = [pattern(source, 0, size, dtype) for source in range(ranks.world_size)]
            got = ranks.communicator.transport.add(addends[ranks.rank].to(ranks.device, copy=True)).wait()
            yield _about(dtype, size, difference(got, torch.stack(addends).sum(0)))


def broadcast_cases(ranks: Ranks) -> Iterator[str]:
    """Broadcast from the first and from the last rank."""
    for dtype in MOVED_DTYPES:
        for source in (0, ranks.world_size - 1):
            for size in SIZES:
                expected = pattern(source, 1, size, dtype)
                ours = expected if ranks.rank == source else torch.zeros_like(expected)
                moved = ours.to(ranks.device, copy=True)
                ranks.communicator.broadcast(moved, source)
                wrong = difference(moved, expected)
                yield _about(dtype, size, f"{wrong} in what rank {source} sent" if wrong else "")


def _torch_device() -> torch.device:
    """Where torch.distributed's own collectives take tensors from; gloo knows few of them for accelerators."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def reduce_scatter_cases(ranks: Ranks) -> Iterator[str]:
    """torch's reduce-scatter."""
    device = _torch_device()
    for dtype in ADDED_DTYPES:
        for size in SIZES:
            addends = [pattern(source, 2, size * ranks.world_size, dtype) for source in range(ranks.world_size)]
            got = torch.empty(size, dtype=dtype, device=device)
            _reduce_scatter(got, addends[ranks.rank].to(device, copy=True))
            yield _about(dtype, size, difference(got, torch.stack(addends).sum(0).split(size)[ranks.rank]))


def _reduce_scatter(got: Tensor, tensor: Tensor) -> None:
    """torch's reduce-scatter by the name that the installed torch has for it; newer ones warn of the old name."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(got, tensor)


def send_cases(ranks: Ranks) -> Iterator[str]:
    """Each rank sends to the next and receives from the one before."""
    rank, before, device = ranks.rank, (ranks.rank - 1) % ranks.world_size, _torch_device()
    for dtype in MOVED_DTYPES[:-1]:
        for size in SIZES:
            got = torch.empty(size, dtype=dtype, device=device)
            _send_on(ranks, pattern(rank, 3, size, dtype).to(device), got)
            wrong = difference(got, pattern(before, 3, size, dtype))
            yield _about(dtype, size, f"{wrong} in what rank {before} sent" if wrong else "")


def _send_on(ranks: Ranks, sent: Tensor, received: Tensor) -> None:
    """Sends to the next rank, receives from the one before."""
    rank, size = ranks.rank, ranks.world_size
    there = dist.P2POp(dist.isend, sent, (rank + 1) % size)
    back = dist.P2POp(dist.irecv, received, (rank - 1) % size)
    for work in dist.batch_isend_irecv([there, back]):
        work.wait()


def barrier_cases(ranks: Ranks) -> Iterator[str]:
    """Nobody leaves a barrier before all have come: each rank is late once, the first and the last."""
    for late in sorted({0, ranks.world_size - 1}):
        if ranks.rank == late:
            time.sleep(LATE_SECONDS)
        ranks.store.set(f"came {late}/{ranks.rank}", "here")
        ranks.communicator.barrier()
        missing = [rank for rank in range(ranks.world_size) if not ranks.store.check([f"came {late}/{rank}"])]
        yield f"left it before rank {missing[0]} came" if missing else ""


def _floats(ranks: Ranks, num_bytes: int) -> Tensor:
    """Zeros of about so many bytes, that can be cut into a part a rank."""
    unit = ALIGNMENT_ELEMENTS * ranks.world_size
    return torch.zeros(unit * max(1, num_bytes // (FLOAT_BYTES * unit)), device=ranks.device)


def time_exchange(ranks: Ranks, num_bytes: int) -> Operation:
    """An all-to-all of equal parts, all of which together have so many bytes."""
    tensor = _floats(ranks, num_bytes)
    sizes = [tensor.numel() // ranks.world_size] * ranks.world_size
    return lambda: ranks.communicator.transport.exchange(tensor, sizes, sizes).wait()


def time_gather(ranks: Ranks, num_bytes: int) -> Operation:
    """An all-gather, of so many bytes together."""
    part = _floats(ranks, num_bytes).chunk(ranks.world_size)[0]
    return lambda: ranks.communicator.transport.gather(part).wait()


def time_ordered(ranks: Ranks, num_bytes: int) -> Operation:
    """An ordered reduction of a tensor of so many bytes, one microbatch a rank."""
    tensor = _floats(ranks, num_bytes)
    blocks = tuple((Block(rank, 1),) for rank in range(ranks.world_size))

    def reduce() -> Tensor:
        reduction = ranks.communicator.reduce(blocks, [tensor], tensor)
        for _ in range(reduction.num_folds):
            reduction.fold()
        return reduction.finish()

    return reduce


def time_native(ranks: Ranks, num_bytes: int) -> Operation:
    """An all-reduce of a tensor of so many bytes."""
    tensor = _floats(ranks, num_bytes)
    return lambda: ranks.communicator.transport.add(tensor).wait()


def time_broadcast(ranks: Ranks, num_bytes: int) -> Operation:
    """A broadcast of so many bytes from rank 0; the next one begins when all have it."""
    tensor = _floats(ranks, num_bytes)
    return lambda: ranks.communicator.transport.broadcast(tensor, 0)


def time_reduce_scatter(ranks: Ranks, num_bytes: int) -> Operation:
    """A reduce-scatter of a tensor of so many bytes."""
    tensor = _floats(ranks, num_bytes).to(_torch_device())
    got = torch.empty_like(tensor.chunk(ranks.world_size)[0])
    return partial(_reduce_scatter, got, tensor)


def time_send(ranks: Ranks, num_bytes: int) -> Operation:
    """So many bytes sent on in a ring."""
    tensor = _floats(ranks, num_bytes).to(_torch_device())
    got = torch.empty_like(tensor)
    return lambda: _send_on(ranks, tensor, got)


def time_barrier(ranks: Ranks, num_bytes: int) -> Operation:
    """A barrier, which has no bytes."""
    return ranks.communicator.barrier


def _shared_out(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _twice(num_ranks: int) -> float:
    return 2 * _shared_out(num_ranks)


def _once(num_ranks: int) -> float:
    return 1.0


COLLECTIVES = (
    Collective("exchange (all-to-all)", exchange_cases, time_exchange, _shared_out),
    Collective("gather (all-gather)", gather_cases, time_gather, _shared_out),
    Collective("gather of words", word_cases, None, _once),
    Collective("ordered reduction", ordered_cases, time_ordered, _twice),
    Collective("native all-reduce", native_cases, time_native, _twice),
    Collective("broadcast", broadcast_cases, time_broadcast, _once),
    Collective("reduce-scatter", reduce_scatter_cases, time_reduce_scatter, _shared_out, is_torch=True),
    Collective("send and receive", send_cases, time_send, _once, is_torch=True),
    Collective("barrier", barrier_cases, time_barrier, _once),
)
"""All that is tried. The factors are those of nccl-tests (doc/PERFORMANCE.md, "Bus bandwidth")."""
