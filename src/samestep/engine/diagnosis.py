"""Diagnosis of failed steps: a microbatch that does not fit in memory, operations that are not deterministic.

Imported only once something has failed.
"""

import os
import re
from itertools import chain
from types import TracebackType

import torch
from torch import nn

from samestep.devices.device import gib
from samestep.errors import DeterminismError, UsageError

# In a plain RuntimeError: of torch's allocator on a CPU; of CUDA, NCCL and MPS; of cuBLAS and cuDNN for handles and
# workspaces, which do not come from torch's allocator.
SHORT_OF_MEMORY = re.compile(
    "can't allocate memory|not enough memory|cannot allocate memory|std::bad_alloc|out of memory|"
    "CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|ALLOCATION_FAILED",
    re.IGNORECASE,
)
LONE_SAMPLE = "Expected more than 1 value per channel when training"
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
NONDETERMINISTIC = re.compile(r"(?m)^(.+?) does not have a deterministic implementation")
# Operations of CUDA that `deterministic_kernels` does not replace, by the beginning of torch's name: the modules that
# call them, and what a model can call instead.
REPLACEMENTS: dict[str, tuple[tuple[type[nn.Module], ...], str]] = {
    "avg_pool3d": ((nn.AvgPool3d,), "a Conv3d of one group a channel, whose weights are constant"),
    "adaptive_max_pool": ((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d), "MaxPool of a fixed size, or torch.amax"),
    "fractional_max_pool": ((nn.FractionalMaxPool2d, nn.FractionalMaxPool3d), "MaxPool"),
    "max_unpool": ((nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d), "Tensor.scatter by the flattened indices"),
    "ctc_loss": (
        (nn.CTCLoss,),
        "cuDNN's form: blank=0, inputs of full length, one int32 tensor of targets on the host",
    ),
    "embedding_bag": ((nn.EmbeddingBag,), 'mode="mean", or Embedding and torch.amax'),
    "kthvalue": ((), "torch.sort and Tensor.select"),
    "median": ((), "torch.sort and Tensor.select, or median without a dimension"),
    "_histc": ((), "torch.bucketize and torch.bincount"),
    "_bincount": ((), "Tensor.index_add of the weights"),
    "put_": ((), "Tensor.index_put_"),
    "scatter_reduce": ((), 'a product as the exponential of scatter_reduce(…, "sum") of logarithms'),
    "index_reduce": ((), 'Tensor.scatter_reduce of "sum" or "mean"'),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports that memory ran out, on an accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and SHORT_OF_MEMORY.search(str(error)) is not None


def describe_shortage(
    microbatch: int, num_samples: int, length: int, num_microbatches: int, rank: int, device: torch.device, advice: str
) -> str:
    """The message if a microbatch of a batch of `length` samples does not fit; `advice` is the strategy's."""
    size = "1 sample" if num_samples == 1 else f"{num_samples} samples"
    where = (
        f"out of memory: microbatch {microbatch} of {num_microbatches} ({size}) does not fit in the memory of rank "
        f"{rank}{_memory_of(device)}"
    )
    more = f", or {advice}" if advice else ""
    if num_samples == 1:
        ways = ["a smaller model", "precision='bf16-mixed' (--precision bf16-mixed)"]
        ways += ["activation checkpointing (torch.utils.checkpoint)", *([advice] if advice else [])]
        return f"{where}, and one sample is the least: use {', '.join(ways[:-1])}, or {ways[-1]}"
    twice = min(2 * num_microbatches, length)
    return (
        f"{where}: use num_microbatches={twice} (--num-microbatches {twice}), for microbatches about half as large, or "
        f"more of them if those do not fit either (another number gives other, equally valid results){more}"
    )


def describe_model_shortage(model: nn.Module, rank: int, device: torch.device) -> str:
    """The message if the model does not fit before the first step."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in chain(model.parameters(), model.buffers()))
    return (
        f"out of memory: the model, {gib(size)} of parameters and buffers, or its comparison with other ranks "
        f"does not fit in the memory of rank {rank}{_memory_of(device)}: use a smaller model, more devices with "
        'strategy="sharded" (--strategy sharded: 1/D of it on each), or devices with more memory'
    )


def _memory_of(device: torch.device) -> str:
    """The memory of a GPU, as part of a sentence; empty for a CPU."""
    return f", {gib(torch.cuda.get_device_properties(device).total_memory)}" if device.type == "cuda" else ""


def describe_update_shortage(optimizer: str, step: int, rank: int) -> str:
    """The message if the update of step number `step` does not fit."""
    state = "the state that it makes in its first step" if step == 1 else "what it computes on the way"
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
    operation = nondeterministic_operation(error)
    if operation is None:
        return None
    # Autograd runs a backward outside of any module's Python frames.
    where = _module_in_traceback(error.__traceback__, model) or _callers(operation, model)
    return DeterminismError(
        f"{operation} has no deterministic form on this device, and was called in "
        f"{where or 'the loss function or a backward'}; {advise_replacement(operation)}"
    )


def nondeterministic_operation(error: BaseException) -> str | None:
    """Torch's name of the operation without a deterministic form that an error is about; None for other errors."""
    match = NONDETERMINISTIC.search(str(error))
    return match and match.group(1)


def advise_replacement(operation: str) -> str:
    """What a model can call instead of an operation without a deterministic form, as the end of a sentence."""
    found = (instead for start, (_, instead) in REPLACEMENTS.items() if operation.startswith(start))
    return " by ".join(["replace it", *found])


def _callers(operation: str, model: nn.Module) -> str:
    """The modules of a model whose gradient is such an operation; empty if there are none."""
    kinds = tuple(kind for start, (of_it, _) in REPLACEMENTS.items() if operation.startswith(start) for kind in of_it)
    found = [
        f"module {name} ({type(each).__name__})" for name, each in model.named_modules() if isinstance(each, kinds)
    ]
    return "the backward of " + " or ".join(found[:3]) if found else ""


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
