"""Programs over the communicator that tests run on every rank of a world, or in processes that find each other."""

import os
import signal
import time
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from samestep.comm.communicator import make_communicator
from samestep.comm.environment import read_environment
from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import rank_blocks
from samestep.errors import SamestepError
from samestep.run.run import Run

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
]


def ranges_of(counts):
    """Contiguous microbatches, so many on each rank."""
    ends = list(accumulate(counts))
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def rows_of(rank, count, width, dtype):
    """Rows that tell who sent them."""
    return (torch.arange(count * width).view(count, width) + 100 * rank).remainder(120).to(dtype)


def value_of(rank):
    """A value of each kind that ranks may share; not of one length."""
    tensors = {rank: torch.full((rank, 2), 0.5, dtype=torch.bfloat16), "none": torch.empty(0, 3)}
    return ["ü\ud800" * rank, (None, True, -(2**70), float("inf"), b"\xff"), {"tensors": tensors, 1: torch.Size([3])}]


def talk(communicator, counts, width):
    """All that ranks say to each other, of every dtype; each rank holds `counts[rank]` rows."""
    rank, size = communicator.rank, communicator.world_size
    heard = {}
    for dtype in DTYPES:
        heard[f"rows {dtype}"] = communicator.gather_rows(rows_of(rank, counts[rank], width, dtype), counts)
        for source in range(size):
            value = rows_of(rank, 3, 2, dtype)
            communicator.broadcast(value, source)
            heard[f"broadcast {dtype} {source}"] = value
    words = [rank, -(2**63), 2**63 - 1, 0x7FF0_0000_0000_0001]  # the last one is a signalling NaN as a float64
    heard["words"] = communicator.gather_words(words)
    heard["no words"] = communicator.gather_words([])
    heard["values"] = communicator.gather_values(value_of(rank))
    heard["shared"] = [communicator.share_value(value_of(source), source) for source in range(size)]
    for dtype in (torch.float64, torch.float32):
        rows = rows_of(rank, counts[rank], width, dtype)
        for taken in (0, 1, 4):
            heard[f"header {dtype} {taken}"] = communicator.gather_header(rows, counts, words[:taken])
    if sum(counts):
        tiny = rows_of(rank, counts[rank], width, torch.float64) / 3 + 1e16 * (rank % 2)
        heard["sum"] = communicator.sum_rows(tiny, ranges_of(counts))
    communicator.barrier()
    return heard


def odd_broadcasts(communicator, source):
    """Broadcasts into what is no plain contiguous tensor."""
    rank = communicator.rank
    strided = torch.full((4, 6), float(rank))[:, ::2]
    scalar = torch.tensor(float(rank))
    empty = torch.empty(0, 3)
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    for tensor in (strided, scalar, empty, parameter):
        communicator.broadcast(tensor, source)
    return strided, scalar, empty.shape, parameter.detach(), parameter.requires_grad


def train_on_own_loader(communicator, seeds, lengths=(16, 16)):
    """Three steps on batches of a torch DataLoader that the script shuffles: losses and weight, or a step's error.

    The seeds of the samplers and the lengths of the batches are one a rank.
    """
    rank = communicator.rank
    run = Run(16, 4, communicator=communicator)
    model = torch.nn.Linear(5, 3)
    step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), entropy)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(50, 5, generator=generator), torch.randint(0, 3, (50,), generator=generator))
    sampler = torch.Generator().manual_seed(seeds[rank])
    loader = DataLoader(data, lengths[rank], shuffle=True, generator=sampler)
    losses = []
    try:
        for batch in loader:
            losses.append(step(batch).loss.hex())
            if len(losses) == 3:
                break
    except SamestepError as error:
        return type(error).__name__, str(error)
    return losses, model.weight.detach().clone()


def entropy(model, batch):
    """Cross-entropy."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def large_sum(communicator):
    """An element of the sum of a tensor that is too large for one message, one block a rank."""
    ranks = communicator.world_size
    blocks_by_rank = rank_blocks(microbatch_ranges(ranks, ranks), ranks)
    tensor = torch.full((64 * ranks * 4096,), 0.1 + communicator.rank, device=communicator.device)
    reduction = communicator.reduce(blocks_by_rank, [tensor], tensor)
    reduction.fold()
    return reduction.finish()[-1].item()


def join(variables, task, seconds, target, pipe):
    """One process of a group: joins it as the environment says, does its task, and sends a report.

    Tasks: "talk"; "again": leave and join again; "lose": rank `target` is killed; "late": it is too slow; "sum": sum a
    large tensor; "adopt and sum": by a process group that is there; "lose and sum": without rank `target`; "work
    alone": rank `target` comes to a meeting twice the timeout later; "work alone and die": it is killed instead.
    """
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch shows its stack when a peer goes
    timeout, report, device = timedelta(seconds=seconds), {}, torch.device("cpu")
    try:
        if task == "adopt and sum":
            dist.init_process_group("gloo")
        communicator = make_communicator(read_environment(), device, timeout)
        report["words"] = communicator.gather_words([communicator.rank, int(variables.get("MARK", 0))])
        for number in range(2 if task == "again" else 0):
            communicator.close()
            time.sleep(0.5 * communicator.rank)  # the others must not take what is left of the last time for this rank
            communicator = make_communicator(read_environment(), device, timeout)
            report["words again"] = communicator.gather_words([communicator.rank, number])
        if task in ("lose", "lose and sum") and communicator.rank == target:
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "late" and communicator.rank == target:
            time.sleep(100)
        if task in ("lose", "late"):
            communicator.barrier()
        if task.startswith("work alone"):
            if communicator.rank == target:
                time.sleep(2 * seconds)
                if task.endswith("die"):
                    os.kill(os.getpid(), signal.SIGKILL)
            communicator.meet()
            report["met"] = communicator.gather_words([communicator.rank])
        if "sum" in task:
            report["by nodes"] = communicator.transport.nodes is not None
            report["sum"] = large_sum(communicator)
        communicator.close()
    except SamestepError as error:
        report |= {"error": type(error).__name__, "message": str(error), "ranks": getattr(error, "ranks", ())}
    pipe.send(report)
    os._exit("error" in report)  # a broken group is left without a farewell
