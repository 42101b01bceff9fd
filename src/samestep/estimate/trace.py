"""The trace of a step: forward, backward and update of one microbatch, run with tensors that have no memory.

The operations are those that PyTorch dispatches, without their arithmetic (`FakeTensorMode`). So an estimate holds for
any model, and a model of any size is traced in the memory of this process. A storage is counted from the operation
that allocates it until the last tensor on it is freed.

Fake tensors that claim to be on a GPU cannot run a backward where PyTorch has no GPU, so the step is traced on the CPU,
and each rule of `GpuKernels` replaces one function by the GPU's form. Functions without a rule save the same on both:
linear layers and convolutions their input, activations their input or output, norms two statistics a row, pooling its
indices.
"""

import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
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
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from samestep.comm.buckets import round_up
from samestep.comm.reduction import ALIGNMENT_ELEMENTS
from samestep.engine.config import check_precision
from samestep.engine.losses import read_loss
from samestep.errors import LossError, UsageError
from samestep.estimate.workload import OPTIMIZERS, Workload, repeated_blocks

WINOGRAD_TILES = 36 / 9  # F(4×4, 3×3) turns each filter of 3×3 into 6×6 (Lavin and Gray 2016)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Saves a mask of one byte an element; the CPU's form saves one of the input's size."""
    if not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """Saves query, key, value, the output and a float32 number a row; the backward draws dropout again."""
    attended: Tensor = functional.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **options)
    return attended


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose inputs autocast widens on GPUs but not on the CPU."""

    def widened(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        return function(*args, **kwargs)

    return widened


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


WIDENED = (
    *(functional.layer_norm, functional.group_norm, functional.softmax, functional.log_softmax),
    *(functional.cross_entropy, functional.nll_loss, functional.mse_loss),
    *(torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax),
)

GPU_RULES: Mapping[Any, Callable[..., Any]] = {
    # aten/src/ATen/native/Dropout.cpp: the fused form, for tensors of an accelerator alone, saves a bool mask
    functional.dropout: _dropout,
    # aten/src/ATen/native/transformers: both fused forms save logsumexp; the CPU's fused form has the same outputs
    functional.scaled_dot_product_attention: _attention,
    # aten/src/ATen/autocast_mode.h, AT_FORALL_FP32
    **{function: _in_float32(function) for function in WIDENED},
}


class GpuKernels(TorchFunctionMode):
    """While it is entered, functions of `GPU_RULES` save the tensors that they save on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return GPU_RULES.get(func, func)(*args, **(kwargs or {}))


def workspace_bytes(name: str, args: tuple[Any, ...]) -> float:
    """Temporary bytes of a kernel: the filters of a 3×3 convolution with stride 1, transformed by Winograd's algorithm.

    oneDNN does so on the CPU; cuDNN's workspace is not documented, and assumed to be the same.
    """
    if name not in ("aten::convolution", "aten::convolution_backward"):
        return 0.0
    first = 1 if name == "aten::convolution" else 2
    weight, stride = args[first], args[first + 2]
    if weight.ndim != 4 or tuple(weight.shape[2:]) != (3, 3) or set(stride) != {1}:
        return 0.0
    return float(WINOGRAD_TILES * weight.numel() * weight.element_size())


ACTIVATIONS, COPIES, GRADIENTS = range(3)
CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
CASTS = ("aten::_to_copy", "aten::clone")
GATHERS = ("aten::embedding", "aten::index_select", "aten::gather")
BACKWARD_OF_ATTENTION = 2.5  # five products of matrices instead of two (Dao 2023)


@dataclass(slots=True)
class _Storage:
    num_bytes: int
    category: int
    section: int
    is_counted: bool
    is_copy: bool  # of a parameter, in another precision


class OpTracker(TorchDispatchMode):
    """Records memory and work of the operations that run under it; `rounding` is the allocator's, in bytes.

    Memory belongs to storages, not to tensors: a view allocates nothing, and a storage lives until the last tensor on
    it is freed, which may be long after the operation that made it (autograd saves it) or at once (a temporary). So
    each storage is counted when an operation first returns a tensor on it, and taken off by a finalizer. The peak of a
    step is the largest sum after an operation, by category, since layouts divide some categories and not others.
    Parameters, buffers and the batch are known before (`exclude`): the caller counts them.
    """

    def __init__(self, rounding: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is not annotated
        self._rounding = rounding
        self._storages: dict[int, _Storage] = {}
        self.section = 0  # of the model, in the forward
        self.alive = [0, 0, 0]  # bytes by category
        self.moments: list[tuple[float, ...]] = []  # `alive` after each operation that allocated
        self.operations: list[tuple[int, int]] = []  # (flops, bytes moved)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation and records its outputs."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if outputs:
            self._record(func, args, kwargs, result, outputs)
        return result

    def exclude(self, tensor: Tensor) -> None:
        """Leaves a tensor out of the count that was there before the step."""
        self._add(tensor, ACTIVATIONS, is_counted=False)

    def count_as_gradient(self, parameter: Tensor) -> None:
        """Moves the memory of a parameter's gradient to its category."""
        storage = None if parameter.grad is None else self._find(parameter.grad)
        if storage is not None:
            self.alive[storage.category] -= storage.num_bytes
            storage.category = GRADIENTS
            self.alive[GRADIENTS] += storage.num_bytes

    def saved_bytes(self) -> dict[int, int]:
        """Bytes of activations that are alive now, by the section whose forward made them."""
        found: dict[int, int] = {}
        for storage in self._storages.values():
            if storage.is_counted and storage.category == ACTIVATIONS:
                found[storage.section] = found.get(storage.section, 0) + storage.num_bytes
        return found

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor]) -> None:
        name, inputs = func._schema.name, _tensors((args, kwargs))
        # An output on a known storage is a view, or the result of a write in place.
        allocated = [tensor for tensor in outputs if self._find(tensor) is None]
        known = [storage for tensor in inputs if (storage := self._find(tensor)) is not None]
        is_copy = name in CASTS and len(known) == 1 and (known[0].is_copy or isinstance(inputs[0], nn.Parameter))
        for tensor in allocated:
            self._add(tensor, COPIES if is_copy else ACTIVATIONS, is_copy=is_copy)
        if allocated:
            self.moments.append((self.alive[ACTIVATIONS] + workspace_bytes(name, args), *self.alive[1:]))
        # What neither allocates nor writes is a view, which takes no time on the device.
        if allocated or func._schema.is_mutable:
            moved = sum(map(tensor_bytes, outputs)) * (2 if name in GATHERS else 1)
            moved += 0 if name in GATHERS else sum(map(tensor_bytes, inputs))
            self.operations.append((_flops(func, name, args, kwargs, result), moved))

    def _find(self, tensor: Tensor) -> _Storage | None:
        return self._storages.get(tensor.untyped_storage()._cdata)

    def _add(self, tensor: Tensor, category: int, is_counted: bool = True, is_copy: bool = False) -> None:
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key in self._storages:
            return
        size = round_up(memory.nbytes(), self._rounding)
        self._storages[key] = _Storage(size, category, self.section, is_counted, is_copy)
        if is_counted:
            self.alive[category] += size
        # `_cdata` is the address of the storage: after `_free` it may be that of another one.
        weakref.finalize(memory, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        storage = self._storages.pop(key)
        if storage.is_counted:
            self.alive[storage.category] -= storage.num_bytes


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of products, convolutions and attention, as PyTorch's flop counter counts them."""
    if func._overloadpacket in flop_registry:
        return int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
    if not name.startswith(CPU_ATTENTION):
        return 0
    # The counter lacks the CPU's attention: two products a head, of which a causal one needs half (Dao 2023).
    is_backward = name.endswith("_backward")
    query, key = args[1:3] if is_backward else args[:2]
    is_causal = next((argument for argument in args[3:] if isinstance(argument, bool)), False)
    samples, heads, rows, width = query.shape
    whole = 4 * samples * heads * rows * key.shape[-2] * width
    return int(whole * (0.5 if is_causal else 1.0) * (BACKWARD_OF_ATTENTION if is_backward else 1.0))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


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


class StepTraces:
    """The traces of a workload; any microbatch size is interpolated, since all quantities grow linearly with it."""

    def __init__(self, workload: Workload, is_gpu: bool, precision: str) -> None:
        self.workload = workload
        self._trace = partial(trace, workload, is_gpu=is_gpu, precision=precision)
        self._ends: Callable[[bool], tuple[Trace, Trace]] = cache(self._traced)
        self.at: Callable[[int, bool], Trace] = cache(self._interpolated)

    def num_blocks(self, checkpointing: bool = False) -> int:
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
