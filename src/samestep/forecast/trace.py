"""The trace: one microbatch's forward, backward and update, run with tensors that have no memory.

The operations are the real ones, as PyTorch dispatches them; only the arithmetic is left out (`FakeTensorMode`). So the
forecast holds whatever the model is made of, and a model of any size is traced in the memory of this process.
"""

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
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
from samestep.engine.update import FLAT_BYTES
from samestep.errors import LossError, UsageError
from samestep.forecast.kernels import AcceleratorKernels
from samestep.forecast.subject import OPTIMIZERS, Subject, find_blocks, sections, split_parameters, tensor_limit
from samestep.forecast.tally import Tally

FEW, MORE = 2, 4  # samples; one sample may take other paths, since a size of 1 is broadcast
ACCELERATOR_ROUNDING = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize
CPU_ROUNDING = 64  # c10/core/alignment.h, gAlignment
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)

Array = Any  # numpy's own annotations would name the dtype in every line


@dataclass(frozen=True)
class Trace:
    """What a step of one microbatch on one device takes.

    The first index of `weights`, and that of `saved`, is the section: 0 is before the blocks, the last after them.

    Attributes:
        num_samples: of the microbatch.
        weights: bytes `[sections, 3, 2]` of parameters, gradients and optimizer state, whole and split by tensor
            parallelism.
        buffers: bytes of the model's buffers.
        batch: bytes of the microbatch's own samples.
        moments: bytes alive `[moments, 5]` by kind (see `tally`), while forward and backward run.
        saved: bytes `[sections, 2]` that the forward leaves for the backward, whole and split.
        operations: `[operations, 4]`: kind, flops, bytes moved, whether split.
        sums: bytes of each of the forward's outputs that tensor-parallel devices add up.
        boundary: bytes that one block hands to the next.
        update_temporary: bytes that the update takes for a while.
        update_moved: bytes that the update reads and writes.
        num_parameters: elements.
        tensor_divisors: what a number of tensor-parallel devices must divide; empty where the model cannot be split.
    """

    num_samples: float
    weights: Array
    buffers: int
    batch: float
    moments: Array
    saved: Array
    operations: Array
    sums: Array
    boundary: float
    update_temporary: float
    update_moved: int
    num_parameters: int
    tensor_divisors: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Repeated layers; 0 where there are none."""
        return len(self.weights) - 2


@dataclass(frozen=True)
class TraceLine:
    """Traces of any number of samples: every quantity of a trace grows with it in a straight line.

    Attributes:
        few: of `FEW` samples.
        more: of `MORE`.
    """

    few: Trace
    more: Trace

    def at(self, num_samples: int) -> Trace:
        """The trace of so many samples."""
        part = (num_samples - FEW) / (MORE - FEW)

        def between(name: str) -> Any:
            low = getattr(self.few, name)
            return low + (getattr(self.more, name) - low) * part

        names = ("batch", "moments", "saved", "sums", "boundary")
        operations = between("operations")
        return replace(
            self.few, num_samples=num_samples, operations=operations, **{name: between(name) for name in names}
        )


def trace_line(subject: Subject, accelerator: bool, precision: str, checkpointing: bool = False) -> TraceLine:
    """Traces a model; the arguments are those of `trace`.

    Raises:
        UsageError: it cannot be traced without data.
    """
    few = trace(subject, FEW, accelerator, precision, checkpointing)
    more = trace(subject, MORE, accelerator, precision, checkpointing, with_update=False)
    if few.moments.shape != more.moments.shape or few.operations.shape != more.operations.shape:
        raise UsageError(
            f"{subject.name} runs other operations on {MORE} samples than on {FEW}: a forecast needs a model whose "
            "program does not depend on the size of the batch"
        )
    return TraceLine(few, more)


def trace(
    subject: Subject,
    num_samples: int,
    accelerator: bool,
    precision: str = "32-true",
    checkpointing: bool = False,
    with_update: bool = True,
) -> Trace:
    """Runs one step of so many samples without memory, and counts.

    Args:
        subject: what is trained.
        num_samples: of the microbatch.
        accelerator: with the kernels of an accelerator, else those of the CPU.
        precision: "32-true", "bf16-mixed" or "16-mixed".
        checkpointing: the blocks are computed a second time in the backward, instead of kept.
        with_update: the optimizer too; it does not depend on the samples.

    Raises:
        UsageError: the model cannot be traced: its program depends on values, or it fails.
    """
    dtype = check_precision(precision)
    tally = Tally(ACCELERATOR_ROUNDING if accelerator else CPU_ROUNDING)
    with FakeTensorMode(allow_non_fake_inputs=True), _explained(subject, num_samples):
        model = subject.build()
        model.train()
        batch = subject.make_batch(num_samples)
        make = partial(OPTIMIZERS[subject.optimizer], foreach=accelerator, **subject.settings)
        blocks = find_blocks(model)
        if checkpointing:
            recompute(subject.name, blocks)
        mixed = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
        kernels = AcceleratorKernels() if accelerator else nullcontext()
        boundaries, is_split = _follow(model, blocks, tally)
        with tally, kernels:
            splits = split_parameters(model, blocks)
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tally.give(tensor, name in splits)
            for tensor in tree_leaves(batch):
                if isinstance(tensor, Tensor):
                    tally.give(tensor)
            with mixed:
                value = read_loss(subject.loss(model, batch), num_samples).value
            saved = tally.saved()
            tally.is_forward = False
            value.backward()
            del value
        moments, operations = tally.moments, tally.operations
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = make(trainable)
        temporary, moved = _update(optimizer, tally) if with_update else (0, 0)
        if with_update and not accelerator and sum(map(_bytes, trainable)) <= FLAT_BYTES:
            temporary, moved = _update(make([_flat_twin(trainable)]), tally)
    weights = _weigh(model, blocks, splits, optimizer)
    is_splittable = bool(splits) and bool(tally.sums) and not any(is_split)
    return Trace(
        num_samples=num_samples,
        weights=weights,
        buffers=sum(map(_bytes, model.buffers())),
        batch=sum(_bytes(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)),
        moments=numpy.array(moments, dtype=float),
        saved=numpy.array([saved.get(number, (0, 0)) for number in range(len(weights))], dtype=float),
        operations=numpy.array(operations, dtype=float),
        sums=numpy.array(tally.sums, dtype=float),
        boundary=max(boundaries, default=0),
        update_temporary=temporary,
        update_moved=moved,
        num_parameters=sum(p.numel() for p in model.parameters()),
        tensor_divisors=tuple(tensor_limit(model, splits.values())) if is_splittable else (),
    )


def recompute(name: str, blocks: list[nn.Module]) -> None:
    """Lets the backward compute blocks a second time, in place.

    Raises:
        UsageError: there are none.
    """
    if not blocks:
        raise UsageError(
            f"{name} has no repeated layers (an nn.ModuleList or nn.Sequential of one class) whose activations "
            "could be computed anew; leave --checkpointing out"
        )
    for block in blocks:
        # The state of the generators is host memory.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def _follow(model: nn.Module, blocks: list[nn.Module], tally: Tally) -> tuple[list[int], list[bool]]:
    """Tells the tally which section runs and what is a gradient; gathers what the blocks hand on."""
    boundaries: list[int] = []
    is_split: list[bool] = []

    def enter(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if tally.is_forward:
                tally.section = number

        return hook

    def leave(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            boundaries.append(sum(map(_bytes, tensors)))
            is_split.extend(stored.is_split for tensor in tensors if (stored := tally.find(tensor)) is not None)
            if number == len(blocks) and tally.is_forward:
                tally.section = number + 1

        return hook

    for number, block in enumerate(blocks, 1):
        block.register_forward_pre_hook(enter(number))
        block.register_forward_hook(leave(number))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(tally.become_gradient)
    return boundaries, is_split


def _update(optimizer: torch.optim.Optimizer, tally: Tally) -> tuple[float, int]:
    """Steps once to make the state, and once to see what an update takes: bytes for a while, and bytes moved."""
    with tally:
        tally.moments, tally.operations = [], []
        optimizer.step()
        tally.moments, tally.operations = [], []
        before = sum(tally.alive)
        optimizer.step()
    peak = max((sum(moment) for moment in tally.moments), default=before)
    return peak - before, sum(operation[2] for operation in tally.operations)


def _flat_twin(parameters: list[nn.Parameter]) -> nn.Parameter:
    """One parameter of all their elements, with a gradient: small models are updated so (see `engine.update`)."""
    twin = nn.Parameter(torch.zeros(sum(p.numel() for p in parameters)))
    twin.grad = torch.zeros_like(twin)
    return twin


def _weigh(
    model: nn.Module, blocks: list[nn.Module], splits: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Array:
    """Bytes of parameters, gradients and optimizer state by section, whole and split."""
    found = numpy.zeros((len(blocks) + 2, 3, 2))
    for name, section in sections(model, blocks).items():
        parameter = model.get_parameter(name)
        state = sum(_bytes(value) for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor))
        # In buckets the members lie at multiples of 64 elements.
        gradient = round_up(parameter.numel(), ALIGNMENT_ELEMENTS) * parameter.element_size()
        sizes = (_bytes(parameter), gradient if parameter.requires_grad else 0, state)
        found[section, :, int(name in splits)] += sizes
    return found


@contextmanager
def _explained(subject: Subject, num_samples: int) -> Iterator[None]:
    """Turns what a model cannot do without data into a sentence with the operation and the line."""
    try:
        with warnings.catch_warnings():
            # copy.deepcopy of a module asks each tensor for its address, and gets none.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    except (UsageError, LossError):
        raise
    except NEEDS_DATA as error:
        raise UsageError(
            f"{subject.name} cannot be planned: {error.func} in {_line(error)} needs a tensor's values, and there are "
            "none; needed: a program that depends on shapes alone (torch.where in place of if, no .item(), .nonzero() "
            "or masks as indices)"
        ) from error
    except UnsupportedOperatorException as error:
        raise UsageError(
            f"{subject.name} cannot be planned: {error.func} in {_line(error)} says nothing of shapes without data; "
            "register a fake implementation (torch.library.register_fake)"
        ) from error
    except Exception as error:
        raise UsageError(
            f"{subject.name} failed on a batch of {num_samples} samples, in {_line(error)}: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a word'}"
        ) from error


def _line(error: BaseException) -> str:
    """The last line of the traceback that is neither PyTorch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/torch/" not in frame.filename and "/samestep/forecast/" not in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
