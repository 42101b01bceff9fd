"""Diagnosis of failed steps: a microbatch that does not fit in memory, operations that are not deterministic.

Imported only once something has failed.
"""

import gc
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.data.nested import leaves, take_rows
from samestep.devices.device import gib
from samestep.errors import DeterminismError, UsageError

NOTHING_FITS, FAILS = 0, -1
# In a plain RuntimeError: of torch's allocator on a CPU; of CUDA, NCCL and MPS; of cuBLAS and cuDNN for handles and
# workspaces, which do not come from torch's allocator.
SHORT_OF_MEMORY = re.compile(
    "can't allocate memory|not enough memory|cannot allocate memory|std::bad_alloc|out of memory|"
    "CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|ALLOCATION_FAILED",
    re.IGNORECASE,
)
LONE_SAMPLE = "Expected more than 1 value per channel when training"
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
NONDETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")
LONE_ADVICE = {  # besides smaller microbatches, by strategy
    "sharded": "more devices, smaller `wrap`, or Sharded(activation_checkpointing=True)",
    "pipeline": 'more stages (ranks along "pipe"), or activation checkpointing (torch.utils.checkpoint)',
    "tensor": 'more ranks along "tensor", or SequenceParallel() for the norms and dropout between divided layers',
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports that memory ran out, on an accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and SHORT_OF_MEMORY.search(str(error)) is not None


def free_memory(device: torch.device) -> None:
    """Frees garbage, and returns the allocator's cache to the device."""
    gc.collect()  # a failed forward leaves cycles: frames, exceptions and the tensors in them
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


@dataclass(frozen=True)
class Shortage:
    """A microbatch for which memory ran out, in the phase "forward" or "backward"; `counts` are the global ones."""

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
        """The first number that fits of twice, four times … as many microbatches; NOTHING_FITS or FAILS if none does.

        `needed_beside` gives, for a number of microbatches, the bytes of the tensors that exist while one runs, and of
        those that its backward adds.
        """
        count, size = num_microbatches, self.num_samples
        while size > 1:
            count *= 2
            size = -(-length // count)
            held: list[Tensor] = []  # dropped before memory is freed for the next attempt
            free_memory(device)
            try:
                beside, after = needed_beside(count)
                held += [torch.empty(number, dtype=torch.uint8, device=device) for number in beside]
                run(take_rows(self.value, 0, size, self.num_samples), size, self.counts)
                held += [torch.empty(number, dtype=torch.uint8, device=device) for number in after]
            except Exception as error:  # of whatever kind: the other ranks wait for the result
                if not is_out_of_memory(error):
                    return FAILS
            else:
                return min(count, length)
        return NOTHING_FITS


def missing_state_bytes(optimizer: Optimizer) -> list[int]:
    """Bytes of each tensor that an optimizer will make in its first step; none after it, or if it cannot be tried."""
    if optimizer.state:
        return []
    # A twin steps on parameters without memory (device "meta"), on which the plain loop runs everywhere.
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


def describe_shortage(rows: Sequence[Sequence[int]], length: int, num_microbatches: int, device: torch.device) -> str:
    """The message, from the measurements of all ranks: microbatch, samples, fitting number, whether memory ran out."""
    short = [(rank, row) for rank, row in enumerate(rows) if row[3]]
    rank, (microbatch, num_samples, _, _) = short[0]
    which = f"microbatch {microbatch} of {num_microbatches} ({num_samples} samples)"
    where = f"{which} does not fit in the memory of rank {rank}"
    if len(short) > 1:
        where += f" (nor do others on ranks {', '.join(str(other) for other, _ in short[1:])})"
    where += _memory_of(device)
    # One rank for which nothing fits decides; else the rank that needs most microbatches.
    worst = min(row[2] for _, row in short)
    if worst in (NOTHING_FITS, FAILS):
        why = "with smaller microbatches the model fails otherwise"
        if worst == NOTHING_FITS:
            why = "not even one sample does"
        return (
            f"out of memory: {where}, and {why}, as measured: use a smaller model, precision='bf16-mixed' "
            "(--precision bf16-mixed), or activation checkpointing (torch.utils.checkpoint)"
        )
    fitting = max(row[2] for _, row in short)
    return (
        f"out of memory: {where}; microbatches of {-(-length // fitting)} do, as measured: use "
        f"num_microbatches={fitting} (--num-microbatches {fitting}; it is part of the contract: the bits of another "
        "number of microbatches are others)"
    )


def describe_lone_shortage(microbatch: int, num_samples: int, rank: int, strategy: str) -> str:
    """The message if nothing can be measured, since no rank alone has the whole model."""
    return (
        f"out of memory: microbatch {microbatch} ({num_samples} samples) does not fit in the memory of rank {rank} "
        "beside its part of the model: use a larger num_microbatches, for smaller ones (--num-microbatches; it is "
        f"part of the contract), {LONE_ADVICE[strategy]}"
    )


def describe_model_shortage(model: nn.Module, rank: int, device: torch.device) -> str:
    """The message if the model does not fit before the first step."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in chain(model.parameters(), model.buffers()))
    return (
        f"out of memory: the model, {gib(size)} of parameters and buffers, or its comparison with those of other ranks "
        f"does not fit in the memory of rank {rank}{_memory_of(device)}: use a smaller model, more devices with "
        'strategy="sharded" (--strategy sharded: 1/D of it on each), or devices with more memory'
    )


def _memory_of(device: torch.device) -> str:
    """The memory of a GPU, as part of a sentence; empty for a CPU."""
    return f", {gib(torch.cuda.get_device_properties(device).total_memory)}" if device.type == "cuda" else ""


def describe_update_shortage(optimizer: str, step: int, rank: int) -> str:
    """The message if the update of step number `step` does not fit."""
    state = "the state that it makes in its first step" if step == 0 else "what it computes on the way"
    return (
        f"out of memory: the update of step {step} by {optimizer}, {state}, does not fit in the memory of rank {rank}, "
        "and the model may be half updated: go on from a checkpoint. More microbatches do not help here; use an "
        "optimizer with less state (SGD, Adafactor), foreach=False, a smaller model, or a device with more memory"
    )


def explain_nondeterminism(error: RuntimeError, model: nn.Module) -> DeterminismError | None:
    """The error that names the module, for torch's error about an operation without a deterministic form."""
    if CUBLAS_VARIABLE in str(error):
        got = os.environ.get(CUBLAS_VARIABLE)
        return DeterminismError(
            f"torch refuses matrix products on this GPU: {CUBLAS_VARIABLE} is {got!r} now, and was not :4096:8 or "
            ":16:8 at the first of them, when torch reads it. Import samestep before the first one, or set the "
            "variable to :4096:8 before the program starts"
        )
    match = NONDETERMINISTIC.search(str(error))
    if match is None:
        return None
    # Autograd runs a backward outside of any module's Python frames; torch's name of the operation ends in _backward.
    where = _module_in_traceback(error.__traceback__, model) or "the loss function or a backward"
    return DeterminismError(
        f"{match.group(1)} has no deterministic form on this device, and was called in {where}; replace it, or give up "
        'equal bits with samestep.Run(reduction="native") (--reduction native)'
    )


def explain_lone_sample(error: BaseException, model: nn.Module, where: str, advice: str) -> UsageError | None:
    """The error that names module and batch, for torch's error about BatchNorm in training on one sample."""
    if LONE_SAMPLE not in str(error):
        return None
    module = _module_in_traceback(error.__traceback__, model) or "BatchNorm"
    return UsageError(
        f"{module} needs two samples or more in training, and {where} has one: leave out a shorter last batch "
        f"(drop_last=True), or {advice}"
    )


def _module_in_traceback(traceback: TracebackType | None, model: nn.Module) -> str | None:
    """The innermost module of the model whose forward is on the stack."""
    # By the variable `self` of each frame, from the outermost to the innermost.
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = f"module {names[id(owner)] or type(owner).__name__} ({type(owner).__name__})"
        traceback = traceback.tb_next
    return found
