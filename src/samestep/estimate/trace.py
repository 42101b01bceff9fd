"""The trace of a step: forward, backward and update of one microbatch, run with tensors that have no memory.

The operations are those that PyTorch dispatches, without their arithmetic (`FakeTensorMode`). So an estimate holds for
any model, and a model of any size is traced in the memory of this process.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from samestep.comm.buckets import round_up
from samestep.comm.reduction import ALIGNMENT_ELEMENTS
from samestep.engine.losses import read_loss
from samestep.engine.precision import check_precision
from samestep.errors import LossError, UsageError
from samestep.estimate.gpu_kernels import GpuKernels
from samestep.estimate.op_tracker import OpTracker, tensor_bytes
from samestep.estimate.workload import OPTIMIZERS, Workload, repeated_blocks

FEW, MORE = 2, 4  # samples; not 1, since a size of 1 is broadcast and may take other code paths
GPU_ROUNDING = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize
CPU_ROUNDING = 64  # c10/core/alignment.h, gAlignment
PARAMETERS, GRADIENT, STATE = range(3)

Array = Any  # numpy's own annotations would name the dtype in every line


@dataclass(frozen=True)
class Trace:
    """Memory and work of one microbatch on one device; sizes in bytes.

    Sections of the model: 0 is before the repeated blocks, 1 … n are the blocks, n + 1 is after them.
    """

    num_parameters: int
    weights: Array  # [sections, 3]: parameters, gradients, optimizer state
    buffers: int
    batch: float  # the microbatch's samples
    moments: Array  # [moments, 3]: alive activations, copies of parameters, gradients, in forward and backward
    saved: Array  # [sections]: saved by the forward for the backward
    operations: Array  # [operations, 2]: flops, bytes moved
    boundary: float  # passed from one block to the next
    update_temporary: float  # allocated by the update for a while
    update: Array  # [operations, 2] of the update: flops, bytes moved

    @property
    def num_blocks(self) -> int:
        """Repeated layers; 0 if there are none."""
        return len(self.weights) - 2


class Traces:
    """The traces of a workload; any microbatch size is interpolated, since all quantities grow linearly with it."""

    def __init__(self, workload: Workload, is_gpu: bool, precision: str) -> None:
        self.workload = workload
        self._trace = partial(trace, workload, is_gpu=is_gpu, precision=precision)
        self._ends: Callable[[bool], tuple[Trace, Trace]] = cache(self._traced)
        self.at: Callable[[int, bool], Trace] = cache(self._interpolated)

    def num_blocks(self, checkpointing: bool = False) -> int:
        """Repeated layers of the model."""
        return self._ends(checkpointing)[0].num_blocks

    def _traced(self, checkpointing: bool) -> tuple[Trace, Trace]:
        few = self._trace(FEW, checkpointing=checkpointing)
        more = self._trace(MORE, checkpointing=checkpointing)
        if few.moments.shape != more.moments.shape or few.operations.shape != more.operations.shape:
            raise UsageError(
                f"{self.workload.name} runs other operations on {MORE} samples than on {FEW}: an estimate needs a "
                "model whose operations do not depend on the batch size"
            )
        return few, more

    def _interpolated(self, num_samples: int, checkpointing: bool = False) -> Trace:
        few, more = self._ends(checkpointing)
        part = (num_samples - FEW) / (MORE - FEW)
        linear = {
            name: getattr(few, name) + (getattr(more, name) - getattr(few, name)) * part
            for name in ("batch", "moments", "saved", "operations", "boundary")
        }
        return replace(few, **linear)


def trace(
    workload: Workload, num_samples: int, is_gpu: bool, precision: str = "32-true", checkpointing: bool = False
) -> Trace:
    """Traces a step of so many samples; with checkpointing the backward recomputes the blocks.

    Raises `UsageError` if the model fails, or its operations depend on values.
    """
    dtype = check_precision(precision)
    tracker = OpTracker(GPU_ROUNDING if is_gpu else CPU_ROUNDING)
    with FakeTensorMode(allow_non_fake_inputs=True), _explained(workload, num_samples):
        model = workload.build()
        model.train()
        batch = workload.make_batch(num_samples)
        blocks = repeated_blocks(model)
        if checkpointing:
            checkpoint_blocks(workload.name, blocks)
        boundaries = _follow(model, blocks, tracker)
        with tracker, GpuKernels() if is_gpu else nullcontext():
            given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
            for tensor in (*model.parameters(), *model.buffers(), *given):
                tracker.exclude(tensor)
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                value = read_loss(workload.loss(model, batch), num_samples).value
            saved = tracker.saved_bytes()
            value.backward()
            del value
        moments, operations = tracker.moments, tracker.operations
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = OPTIMIZERS[workload.optimizer](trainable, foreach=is_gpu, **workload.settings)
        temporary, updates = _update(optimizer, tracker)
    weights = _weigh(model, blocks, optimizer)
    return Trace(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=weights,
        buffers=sum(map(tensor_bytes, model.buffers())),
        batch=sum(map(tensor_bytes, given)),
        moments=numpy.array(moments, dtype=float),
        saved=numpy.array([saved.get(section, 0) for section in range(len(weights))], dtype=float),
        operations=numpy.array(operations, dtype=float),
        boundary=max(boundaries, default=0),
        update_temporary=temporary,
        update=numpy.array(updates, dtype=float).reshape(-1, 2),
    )


def checkpoint_blocks(name: str, blocks: list[nn.Module]) -> None:
    """Turns on activation checkpointing of blocks, in place; raises `UsageError` if there are none."""
    if not blocks:
        raise UsageError(
            f"{name} has no repeated layers (an nn.ModuleList or nn.Sequential of one class) whose activations "
            "could be recomputed; leave --checkpointing out"
        )
    for block in blocks:
        # The state of the generators is host memory.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def _follow(model: nn.Module, blocks: list[nn.Module], tracker: OpTracker) -> list[int]:
    """Keeps the tracker's section and gradients up to date; the list fills with the bytes of each block's outputs."""
    boundaries: list[int] = []

    def enter(section: int, module: nn.Module, inputs: Any) -> None:
        tracker.section = section

    def leave(section: int, module: nn.Module, inputs: Any, output: Any) -> None:
        boundaries.append(sum(tensor_bytes(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))
        tracker.section = section + (section == len(blocks))

    for section, block in enumerate(blocks, 1):
        block.register_forward_pre_hook(partial(enter, section))
        block.register_forward_hook(partial(leave, section))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(tracker.count_as_gradient)
    return boundaries


def _update(optimizer: torch.optim.Optimizer, tracker: OpTracker) -> tuple[float, list[tuple[int, int]]]:
    """Temporary bytes of an update, and its operations."""
    tracker.moments, tracker.operations = [], []
    with tracker:
        optimizer.step()  # makes the state
        tracker.moments, tracker.operations = [], []
        before = sum(tracker.alive)
        optimizer.step()
    peak = max((sum(moment) for moment in tracker.moments), default=before)
    return peak - before, tracker.operations


def _weigh(model: nn.Module, blocks: list[nn.Module], optimizer: torch.optim.Optimizer) -> Array:
    """Bytes `[sections, 3]` of parameters, gradients and optimizer state."""
    block_of = {id(p): number for number, block in enumerate(blocks, 1) for p in block.parameters()}
    found = numpy.zeros((len(blocks) + 2, 3))
    outside = 0
    for parameter in model.parameters():
        outside = len(blocks) + 1 if id(parameter) in block_of else outside
        state = optimizer.state.get(parameter, {}).values()
        # Gradients lie at multiples of 64 elements in their buckets.
        gradient = round_up(parameter.numel(), ALIGNMENT_ELEMENTS) * parameter.element_size()
        found[block_of.get(id(parameter), outside)] += (
            tensor_bytes(parameter),
            gradient if parameter.requires_grad else 0,
            sum(tensor_bytes(value) for value in state if isinstance(value, Tensor)),
        )
    return found


@contextmanager
def _explained(workload: Workload, num_samples: int) -> Iterator[None]:
    """Turns the failure of a model into a `UsageError` with the operation and the line."""
    name = workload.name
    try:
        with warnings.catch_warnings():
            # copy.deepcopy of a module asks each tensor for its address, and gets none.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    except (UsageError, LossError):
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"{name} cannot be traced: {error.func} in {_line(error)} needs a tensor's values, and there are none; "
            "needed: operations that depend on shapes alone (torch.where instead of if, no .item(), .nonzero() or "
            "masks as indices)"
        ) from error
    except UnsupportedOperatorException as error:
        raise UsageError(
            f"{name} cannot be traced: {error.func} in {_line(error)} has no implementation for shapes without data; "
            "register a fake one (torch.library.register_fake)"
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0] or 'no message'}"
        raise UsageError(f"{name} failed on a batch of {num_samples} samples, in {_line(error)}: {reason}") from error


def _line(error: BaseException) -> str:
    """The last line of the traceback that is neither PyTorch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/torch/" not in frame.filename and "/samestep/estimate/" not in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
