"""Memory: a shard that does not fit, and the number of shards that would, found by trying."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from samestep.comm.communicator import Communicator
from samestep.data.nested import take_rows

CPU_MESSAGES = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")


@dataclass(frozen=True)
class Shortage:
    """A shard for which memory ran out.

    Attributes:
        shard: its index.
        num_samples: how many samples it holds.
        value: the samples.
        phase: "forward" or "backward".
        counts: what `counts_fn` gave for the global batch.
    """

    shard: int
    num_samples: int
    value: Any
    phase: str
    counts: Any

    def measure(
        self, run: Callable[[Any, int, Any], None], length: int, num_shards: int, communicator: Communicator
    ) -> int:
        """Tries smaller and smaller shards.

        Args:
            run: `run(value, num_samples, counts)` does forward and backward as a step does.
            length: samples of the global batch.
            num_shards: V.
            communicator: whose device it is.

        Returns:
            The smallest number of shards, V times a power of two, whose largest shard fits; 0 if not even one sample
            does.
        """
        count, size = num_shards, self.num_samples
        while size > 1:
            count *= 2
            size = -(-length // count)
            if self._fits(run, size, communicator.device):
                return count
        return 0

    def _fits(self, run: Callable[[Any, int, Any], None], size: int, device: torch.device) -> bool:
        free_memory(device)
        try:
            run(take_rows(self.value, 0, size, self.num_samples), size, self.counts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on an accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CPU_MESSAGES)


def free_memory(device: torch.device) -> None:
    """Gives back what nobody uses any more."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def describe_shortage(rows: Sequence[Sequence[int]], length: int, num_shards: int, device: torch.device) -> str:
    """The message, from what every rank measured.

    Args:
        rows: (shard, samples, number of shards that fits, whether memory ran out) by rank.
        length: samples of the global batch.
        num_shards: V.
        device: this rank's.
    """
    short = [(rank, row) for rank, row in enumerate(rows) if row[3]]
    rank, (shard, num_samples, _, _) = short[0]
    where = f"shard {shard} of {num_shards} ({num_samples} samples) does not fit in the memory of rank {rank}"
    if len(short) > 1:
        where += f" (nor do others on ranks {', '.join(str(other) for other, _ in short[1:])})"
    if device.type == "cuda":
        where += f", {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
    if any(row[2] == 0 for _, row in short):
        return (
            f"out of memory: {where}, and not even one sample does, as measured: use a smaller model, "
            "--precision bf16-mixed, or activation checkpointing (torch.utils.checkpoint)"
        )
    fitting = max(row[2] for _, row in short)
    return (
        f"out of memory: {where}; shards of {-(-length // fitting)} do, as measured: use --num-shards {fitting} "
        "(it is part of the contract: the bits of another number of shards are others)"
    )
