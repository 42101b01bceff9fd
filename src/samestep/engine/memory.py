"""Memory: a microbatch that does not fit, and the number of microbatches that would, found by trying."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.core.tree import Block, TreeSum
from samestep.data.nested import leaves, take_rows

NOTHING_FITS, FAILS = 0, -1
CPU_MESSAGES = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "std::bad_alloc")

LONE_ADVICE = {
    "sharded": "more devices, smaller `wrap`, or Sharded(activation_checkpointing=True)",
    "pipeline": 'more stages (ranks along "pipe"), or activation checkpointing (torch.utils.checkpoint)',
    "tensor": 'more ranks along "tensor", or SequenceParallel() for the norms and dropout between divided layers',
}
"""What helps beside smaller microbatches, by strategy."""


@dataclass(frozen=True)
class Shortage:
    """A microbatch for which memory ran out.

    Attributes:
        microbatch: its index.
        num_samples: how many samples it holds.
        value: the samples.
        phase: "forward" or "backward".
        counts: what `counts_fn` gave for the global batch.
    """

    microbatch: int
    num_samples: int
    value: Any
    phase: str
    counts: Any

    def measure(
        self,
        run: Callable[[Any, int, Any], None],
        needed_beside: Callable[[int], tuple[Sequence[int], Sequence[int]]],
        length: int,
        num_microbatches: int,
        device: torch.device,
    ) -> int:
        """Tries smaller and smaller microbatches."""
        count, size = num_microbatches, self.num_samples
        while size > 1:
            count *= 2
            size = -(-length // count)
            try:
                if self._fits(run, size, *needed_beside(count), device):
                    return min(count, length)
            except Exception:  # the other ranks wait for what we find
                return FAILS
        return NOTHING_FITS

    def _fits(
        self,
        run: Callable[[Any, int, Any], None],
        size: int,
        beside: Sequence[int],
        after: Sequence[int],
        device: torch.device,
    ) -> bool:
        free_memory(device)
        held = []
        try:
            held += [torch.empty(number, dtype=torch.uint8, device=device) for number in beside]
            run(take_rows(self.value, 0, size, self.num_samples), size, self.counts)
            held += [torch.empty(number, dtype=torch.uint8, device=device) for number in after]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True


def num_sums_alive(microbatches: range, at_once: int = 1) -> int:
    """How many gradients a rank holds at once while it sums those of its microbatches along the tree."""
    counter: TreeSum[None] = TreeSum(lambda left, right: None)
    most = 1
    for first in range(microbatches.start, microbatches.stop, at_once):
        arrived: TreeSum[None] = TreeSum(lambda left, right: None)
        for microbatch in range(first, min(first + at_once, microbatches.stop)):
            arrived.push(Block(microbatch, 1), None)
        for block in arrived.blocks:
            most = max(most, 1 + len(counter.blocks))
            counter.push(block, None)
    return most


def missing_state_bytes(optimizer: Optimizer) -> list[int]:
    """Bytes of each tensor that an optimizer will make in its first step, found by one on parameters without memory.

    None after its first step, and for one that cannot be asked like that.
    """
    if optimizer.state:
        return []
    groups = [{**group, "params": [_without_memory(p) for p in group["params"]]} for group in optimizer.param_groups]
    plain = {"fused": None, "foreach": False, "capturable": False}
    groups = [{key: plain.get(key, value) for key, value in group.items()} for group in groups]
    try:
        make: Callable[[Any], Optimizer] = type(optimizer)
        twin = make(groups)
        twin.step()
    except Exception:  # one of the user's own, which may do anything
        return []
    tensors = [leaf for leaf in leaves(list(twin.state.values())) if isinstance(leaf, Tensor)]
    return [tensor.numel() * tensor.element_size() for tensor in tensors]


def _without_memory(parameter: nn.Parameter) -> nn.Parameter:
    twin = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    if twin.requires_grad:
        twin.grad = torch.empty_like(twin)
    return twin


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


def describe_shortage(rows: Sequence[Sequence[int]], length: int, num_microbatches: int, device: torch.device) -> str:
    """The message, from what every rank measured."""
    short = [(rank, row) for rank, row in enumerate(rows) if row[3]]
    rank, (microbatch, num_samples, _, _) = short[0]
    which = f"microbatch {microbatch} of {num_microbatches} ({num_samples} samples)"
    where = f"{which} does not fit in the memory of rank {rank}"
    if len(short) > 1:
        where += f" (nor do others on ranks {', '.join(str(other) for other, _ in short[1:])})"
    if device.type == "cuda":
        where += f", {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
    worst = min(row[2] for _, row in short)
    if worst in (NOTHING_FITS, FAILS):
        why = (
            "not even one sample does"
            if worst == NOTHING_FITS
            else "with smaller microbatches the model fails otherwise"
        )
        return (
            f"out of memory: {where}, and {why}, as measured: use a smaller model, --precision bf16-mixed, or "
            "activation checkpointing (torch.utils.checkpoint)"
        )
    fitting = max(row[2] for _, row in short)
    return (
        f"out of memory: {where}; microbatches of {-(-length // fitting)} do, as measured: use "
        f"num_microbatches={fitting} "
        f"(--num-microbatches {fitting}; it is part of the contract: the bits of another number of microbatches are "
        "others)"
    )


def describe_lone_shortage(microbatch: int, num_samples: int, rank: int, strategy: str) -> str:
    """The message where nothing can be measured, since a rank alone has not the whole model."""
    return (
        f"out of memory: microbatch {microbatch} ({num_samples} samples) does not fit in the memory of rank {rank} "
        "beside its "
        "part of the model: use more microbatches, which are smaller (--num-microbatches; it is part of the contract), "
        f"{LONE_ADVICE[strategy]}"
    )


def describe_update_shortage(optimizer: str, step: int, rank: int) -> str:
    """The message when the update itself does not fit; `step` is its number."""
    state = "the state that it makes in its first step" if step == 0 else "what it computes on the way"
    return (
        f"out of memory: the update of step {step} by {optimizer}, {state}, does not fit in the memory of rank {rank}, "
        "and the model may be half updated: go on from a checkpoint. More microbatches do not help here; use an "
        "optimizer "
        "with less state (SGD, Adafactor), foreach=False, a smaller model, or a device with more memory"
    )
