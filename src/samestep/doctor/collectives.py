"""The collectives that training uses: each compared to the bit with plain arithmetic, and timed.

Every rank knows the input of every other rank, so it can name a wrong element and its sender without asking. Sums in an
order that is not ours (the backend's own) are of small whole numbers: every order adds those up exactly.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.comm.reduction import ALIGNMENT_ELEMENTS, tree_sum_rows
from samestep.comm.transport import gather_parts
from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import Block, TreeSum, rank_blocks

MOVED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
ADDED_DTYPES = (torch.float32, torch.float64)
SIZES = (1, 1003, 65_537)
LATE_SECONDS = 0.05
NUM_TIMED, NUM_WARM = 20, 2

Operation = Callable[[], object]


@dataclass(frozen=True)
class Collective:
    """A collective; the store is a second channel, which does not depend on the transport under test."""

    name: str  # in the table
    cases: Callable[[Communicator, dist.Store], Iterator[str]]  # yields this rank's error for each case, "" for none
    operation: Callable[[Communicator, Tensor], Operation] | None  # the call that is timed on a small tensor
    is_torch: bool = False  # torch.distributed's own function, which only process groups have


def difference(got: Tensor, expected: Tensor) -> str:
    """The first element in which two flat tensors differ in a bit; empty if all bits are equal."""
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
    """The message of one rank to another: whole numbers that every dtype holds, different by position and ranks."""
    numbers = (7 * torch.arange(numel) + 31 * source + 17 * target) % 127
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


def each(
    check: Callable[[Communicator, torch.dtype, int], str], dtypes: Sequence[torch.dtype] = MOVED_DTYPES
) -> Callable[[Communicator, dist.Store], Iterator[str]]:
    """The cases of a check: every dtype in every size."""

    def cases(comm: Communicator, _: dist.Store) -> Iterator[str]:
        for dtype in dtypes:
            for size in SIZES:
                error = check(comm, dtype, size)
                yield f"{str(dtype).removeprefix('torch.')}, about {size:,} elements: {error}" if error else ""

    return cases


def _parts_differ(got: Tensor, parts: Sequence[Tensor]) -> str:
    """The first error in parts from rank 0, 1, …, with the rank that sent the part."""
    if got.numel() != sum(part.numel() for part in parts):
        return difference(got, torch.cat(list(parts)))
    for source, (ours, part) in enumerate(zip(got.split([len(part) for part in parts]), parts, strict=True)):
        if wrong := difference(ours, part):
            return f"{wrong} in what rank {source} sent"
    return ""


def _ragged(size: int, source: int, target: int) -> int:
    """The number of elements in the message of one rank to another: uneven, and sometimes 0."""
    return 0 if size == 1 and (source + target) % 2 else size + (3 * source + 5 * target) % 7


def check_exchange(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """All-to-all of ragged parts."""
    rank, everyone = comm.rank, range(comm.world_size)
    sizes = [_ragged(size, rank, target) for target in everyone]
    expected = [pattern(source, rank, _ragged(size, source, rank), dtype) for source in everyone]
    parts = torch.cat([pattern(rank, target, sizes[target], dtype) for target in everyone]).to(comm.device)
    got = comm.transport.exchange(parts, sizes, [len(part) for part in expected]).wait()
    return _parts_differ(got, expected)


def check_gather(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """All-gather of equal parts, then of ragged ones."""
    equal = [pattern(source, 0, size, dtype) for source in range(comm.world_size)]
    error = _parts_differ(comm.transport.gather(equal[comm.rank].to(comm.device)).wait(), equal)
    ragged = [pattern(source, 0, _ragged(size, source, 0), dtype) for source in range(comm.world_size)]
    sizes = [len(part) for part in ragged]
    got = gather_parts(comm.transport, ragged[comm.rank].to(comm.device), sizes).wait()
    return error or _parts_differ(got, ragged)


def word_cases(comm: Communicator, _: dist.Store) -> Iterator[str]:
    """Gather of 64-bit integers through host memory."""
    for extreme in (0, -1, 2**62):
        got = comm.gather_words([comm.rank, extreme])
        wrong = [source for source, row in enumerate(got) if row != [source, extreme]]
        yield f"{got[wrong[0]]} arrived from rank {wrong[0]}" if wrong else ""


def check_ordered(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """The ordered reduction of random numbers, whose sums depend on the order, for several numbers of microbatches."""
    unit = ALIGNMENT_ELEMENTS * comm.world_size
    numel = unit * -(-4 * size // unit)
    error = ""
    for num_microbatches in (comm.world_size, max(8, comm.world_size), comm.world_size + 3):
        generators = (torch.Generator().manual_seed(microbatch + 1) for microbatch in range(num_microbatches))
        leaves = [torch.randn(numel, generator=own, dtype=torch.float64).to(dtype) for own in generators]
        ranges = microbatch_ranges(num_microbatches, comm.world_size)
        counter: TreeSum[Tensor] = TreeSum(torch.add)
        for microbatch in ranges[comm.rank]:
            counter.push(Block(microbatch, 1), leaves[microbatch].to(comm.device))
        like = torch.empty_like(leaves[0], device=comm.device)
        got = comm.reduce(rank_blocks(ranges, num_microbatches), counter.sums, like).finish()
        wrong = difference(got, tree_sum_rows(torch.stack(leaves)))
        error = error or (f"{num_microbatches} microbatches, {wrong}" if wrong else "")
    return error


def check_native(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """The backend's own all-reduce."""
    addends = [pattern(source, 0, size, dtype) for source in range(comm.world_size)]
    got = comm.transport.add(addends[comm.rank].to(comm.device, copy=True)).wait()
    return difference(got, torch.stack(addends).sum(0))


def check_broadcast(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """Broadcast from the first and from the last rank."""
    error = ""
    for source in (0, comm.world_size - 1):
        expected = pattern(source, 1, size, dtype)
        ours = expected if comm.rank == source else torch.zeros_like(expected)
        moved = ours.to(comm.device, copy=True)
        comm.broadcast(moved, source)
        wrong = difference(moved, expected)
        error = error or (f"{wrong} in what rank {source} sent" if wrong else "")
    return error


def _torch_device() -> torch.device:
    """The device for torch.distributed's own collectives: gloo has few of them for accelerators."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def check_reduce_scatter(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """torch's reduce-scatter."""
    addends = [pattern(source, 2, size * comm.world_size, dtype) for source in range(comm.world_size)]
    got = torch.empty(size, dtype=dtype, device=_torch_device())
    _reduce_scatter(got, addends[comm.rank].to(_torch_device(), copy=True))
    return difference(got, torch.stack(addends).sum(0).split(size)[comm.rank])


def _reduce_scatter(got: Tensor, tensor: Tensor) -> None:
    """torch's reduce-scatter; newer releases warn of the old name."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(got, tensor)


def check_send(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """Each rank sends to the next and receives from the one before."""
    before = (comm.rank - 1) % comm.world_size
    got = torch.empty(size, dtype=dtype, device=_torch_device())
    _send_on(comm, pattern(comm.rank, 3, size, dtype).to(_torch_device()), got)
    wrong = difference(got, pattern(before, 3, size, dtype))
    return f"{wrong} in what rank {before} sent" if wrong else ""


def _send_on(comm: Communicator, sent: Tensor, received: Tensor) -> None:
    """Sends to the next rank and receives from the one before."""
    there = dist.P2POp(dist.isend, sent, (comm.rank + 1) % comm.world_size)
    back = dist.P2POp(dist.irecv, received, (comm.rank - 1) % comm.world_size)
    for work in dist.batch_isend_irecv([there, back]):
        work.wait()


def barrier_cases(comm: Communicator, store: dist.Store) -> Iterator[str]:
    """No rank leaves a barrier before all have entered it: first rank 0 is late, then the last rank."""
    for late in sorted({0, comm.world_size - 1}):
        if comm.rank == late:
            time.sleep(LATE_SECONDS)
        store.set(f"entered {late}/{comm.rank}", "here")
        comm.barrier()
        missing = [rank for rank in range(comm.world_size) if not store.check([f"entered {late}/{rank}"])]
        yield f"left it before rank {missing[0]} entered" if missing else ""


def _exchange(comm: Communicator, tensor: Tensor) -> Operation:
    """An all-to-all of equal parts of the tensor."""
    sizes = [tensor.numel() // comm.world_size] * comm.world_size
    return lambda: comm.transport.exchange(tensor, sizes, sizes).wait()


def _gather(comm: Communicator, tensor: Tensor) -> Operation:
    """An all-gather whose result is as large as the tensor."""
    part = tensor.chunk(comm.world_size)[0]
    return lambda: comm.transport.gather(part).wait()


def _ordered(comm: Communicator, tensor: Tensor) -> Operation:
    """An ordered reduction of the tensor, one microbatch per rank."""
    blocks = tuple((Block(rank, 1),) for rank in range(comm.world_size))
    return lambda: comm.reduce(blocks, [tensor], tensor).finish()


def _native(comm: Communicator, tensor: Tensor) -> Operation:
    return lambda: comm.transport.add(tensor).wait()


def _broadcast(comm: Communicator, tensor: Tensor) -> Operation:
    return lambda: comm.transport.broadcast(tensor, 0)


def _scatter(comm: Communicator, tensor: Tensor) -> Operation:
    return partial(_reduce_scatter, torch.empty_like(tensor.chunk(comm.world_size)[0]), tensor)


def _send(comm: Communicator, tensor: Tensor) -> Operation:
    return partial(_send_on, comm, tensor, torch.empty_like(tensor))


COLLECTIVES = (
    Collective("exchange (all-to-all)", each(check_exchange), _exchange),
    Collective("gather (all-gather)", each(check_gather), _gather),
    Collective("gather of words", word_cases, None),
    Collective("ordered reduction", each(check_ordered, ADDED_DTYPES), _ordered),
    Collective("native all-reduce", each(check_native, ADDED_DTYPES), _native),
    Collective("broadcast", each(check_broadcast), _broadcast),
    Collective("reduce-scatter", each(check_reduce_scatter, ADDED_DTYPES), _scatter, is_torch=True),
    Collective("send and receive", each(check_send, MOVED_DTYPES[:-1]), _send, is_torch=True),
    Collective("barrier", barrier_cases, lambda comm, tensor: comm.barrier),
)
"""All collectives."""


def latency(comm: Communicator, collective: Collective) -> float:
    """Seconds of a small message on this rank: the median of calls that all ranks start together; 0 if not timed."""
    if collective.operation is None:
        return 0.0
    device = _torch_device() if collective.is_torch else comm.device
    # each rank's part of the tensor must have a whole number of these elements
    tensor = torch.zeros(ALIGNMENT_ELEMENTS * comm.world_size, device=device)
    operation, seconds = collective.operation(comm, tensor), []
    for _ in range(NUM_WARM + NUM_TIMED):
        comm.barrier()
        start = time.perf_counter()
        operation()
        if comm.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[NUM_WARM:])
