"""Forward and backward of one microbatch: the same computation whichever rank runs it."""

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import set_multithreading_enabled

from samestep.comm.membership import Membership
from samestep.data.batch import Batch
from samestep.data.randomness import Generators
from samestep.engine.config import StepConfig
from samestep.engine.losses import LossFn, MicrobatchLoss, read_loss
from samestep.engine.observer import Observers
from samestep.engine.portable_kernels import is_portable
from samestep.engine.precision import LossScale, autocast, check_precision
from samestep.errors import LossError, OutOfMemoryError, UsageError

MOST_WEIGHTS = 64  # whose tensors are kept
MOST_SHAPES = 1024  # that torch.compile generates code for
COMPILING: dict[str, Any] = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}
COMPILING |= {"fail_on_recompile_limit_hit": True} | dict.fromkeys(
    ("recompile_limit", "accumulated_recompile_limit"), MOST_SHAPES
)
T = TypeVar("T")
_PLAIN: AbstractContextManager[Any] = nullcontext()


def backward_on_this_thread(device: torch.device) -> AbstractContextManager[Any]:
    """Runs the backward passes of a block on the calling thread, which autograd does by itself for CPUs only.

    Gradients that meet are added in the order of the numbers that their operations got when they ran, and every thread
    counts by itself. With autograd's own thread for a GPU, second derivatives would depend on how much ran before.
    Source: https://github.com/pytorch/pytorch/pull/52180 (the discussion of sequence numbers).
    """
    return _PLAIN if device.type == "cpu" else set_multithreading_enabled(False)


class ForwardBackward:
    """Computes the loss and the gradients of one microbatch; `explain` and `memory_advice` are the strategy's."""

    def __init__(
        self,
        membership: Membership,
        model: nn.Module,
        config: StepConfig,
        scale: LossScale,
        observers: Observers,
        explain: Callable[[RuntimeError], Exception | None],
        memory_advice: str,
    ) -> None:
        check_compiled(model, config.compile)
        self.membership = membership
        self.model = model
        self.config = config
        self.observers = observers
        self.loss_fn = compile_loss(config.loss_fn) if config.compile else config.loss_fn
        self.generators = Generators(membership.communicator.device)
        self._device = membership.communicator.device
        self._dtype = check_precision(config.precision)
        self._scale = scale
        self._explain, self._memory_advice = explain, memory_advice
        self._weights: dict[tuple[float, torch.dtype], Tensor] = {}
        self._alive: list[weakref.ref[Tensor]] | None = None  # leaves, found when they are needed

    def run(
        self,
        inputs: tuple[Tensor, ...],
        value: Any,
        num_samples: int,
        counts: Any,
        is_only: bool = False,
        microbatch: int | None = None,
    ) -> MicrobatchLoss:
        """Leaves the gradients of some leaves in their `.grad`, and the other leaves' as they were; returns the loss.

        A run that does not count, along with other ranks, has no microbatch number.
        """
        self.observers.on_phase("forward")
        try:
            with self._autocast():
                loss = self._forward(value, num_samples, counts)
            if not loss.value.requires_grad:
                raise LossError("the loss depends on no trainable parameter: check detach(), no_grad, requires_grad")
            # Not for a run that does not count: observers would see the microbatch twice.
            if microbatch is not None:
                self.observers.on_loss(microbatch, loss)
            self.observers.on_phase("backward")
            initial, others = self._initial_gradient(loss, is_only), self.keep_others([loss.value], inputs)
            with others or _PLAIN:
                # Looked up in its module, so that a replacement by the script or a library is called.
                torch.autograd.backward(loss.value, initial, inputs=None if others else inputs)
        except RuntimeError as error:
            if (explained := self._explain(error)) is not None:
                raise explained from error
            from samestep.engine.diagnosis import explain_nondeterminism  # not needed by a run that succeeds

            explained = explain_nondeterminism(error, self.model)
            if explained is None:
                raise
            raise explained from None
        return loss

    def keep_others(self, roots: Iterable[Tensor], own: Iterable[Tensor]) -> AbstractContextManager[None] | None:
        """Keeps the gradients of other leaves in a backward that must not be told its `inputs`; None for others."""
        # The backward of a Function may call backward itself, as reentrant checkpointing and reversible layers do. Told
        # its inputs, autograd leaves such a node out if it sees no path from it to one of them.
        nodes = _graph_nodes(roots)
        if not [node for node in nodes if isinstance(node, BackwardCFunction)]:
            return None
        if self._alive is None:  # what a nested backward reaches is in no graph yet
            tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
            self._alive = [weakref.ref(one) for one in tensors if one.requires_grad and one.is_leaf]
        ours = {id(leaf) for leaf in own}
        found = [*(reference() for reference in self._alive), *(getattr(node, "variable", None) for node in nodes)]
        return _gradients_kept({id(leaf): leaf for leaf in found if leaf is not None and id(leaf) not in ours}.values())

    def _forward(self, value: Any, num_samples: int, counts: Any) -> MicrobatchLoss:
        """The loss of a microbatch."""
        if counts is None:
            return read_loss(self.loss_fn(self.model, value), num_samples)
        loss = self.loss_fn(self.model, value, counts)
        share, *scalars = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss,)
        if not (isinstance(share, Tensor) and share.ndim == 0):
            raise LossError("with counts_fn the loss function must return a 0-d tensor: its share of the loss")
        found = read_loss(share, 1)
        if scalars:  # means over samples, other than the share
            beside = read_loss((share, scalars[0]), num_samples)
            found.names, found.scalars = beside.names, beside.scalars
        return found

    def _autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward."""
        # In full precision a script's own autocast around the step must be switched off; mostly there is none.
        if self._dtype is None and not torch.is_autocast_enabled(self._device.type):
            return _PLAIN
        return autocast(self._device, self._dtype)

    def is_only(self, batch: Batch) -> bool:
        """Whether the batch is one microbatch: then the mean itself is differentiated, to the bits of a plain loop."""
        return batch.num_leaves(self.membership.num_microbatches) == 1

    def _initial_gradient(self, loss: MicrobatchLoss, is_only: bool) -> Tensor:
        """The scaled gradient that a backward begins with: for the microbatch's sum, or the mean if it `is_only`."""
        weight = loss.weight
        if is_only and self.config.counts_fn is None:
            if isinstance(loss.count, Tensor):
                return self._scale.apply((loss.weight / loss.count).to(loss.value.dtype))
            weight = loss.weight / loss.count if loss.count else float("nan")
        # Kept, since making a tensor costs as much as a layer of a small model; few weights ever occur.
        dtype = loss.value.dtype
        if (weight, dtype) not in self._weights:
            if len(self._weights) >= MOST_WEIGHTS:
                self._weights.clear()
            self._weights[weight, dtype] = torch.full((), weight, dtype=dtype, device=self._device)
        return self._scale.apply(self._weights[weight, dtype])

    def refuse(self, error: Exception, microbatch: int, num_samples: int, batch: Batch, step: int) -> None:
        """Raises the error that explains why a microbatch failed, if memory ran out or BatchNorm got one sample."""
        from samestep.engine.diagnosis import describe_shortage, explain_lone_sample, is_out_of_memory

        number = self.membership.num_microbatches
        if is_out_of_memory(error):
            text = describe_shortage(
                microbatch, num_samples, batch.length, number, self.membership.rank, self._device, self._memory_advice
            )
            raise OutOfMemoryError(text) from error
        if num_samples > 1 or not isinstance(error, ValueError):
            return
        where = f"of the {batch.length} samples of step {step + 1} microbatch {microbatch} (of {number})"
        advice = "take a global_batch_size (--global-batch-size) that leaves more"
        if batch.length > 1:
            fewer = batch.length // 2
            advice = f"cut batches into fewer microbatches (num_microbatches={fewer} or less, --num-microbatches)"
        if batch.sizes is not None:
            advice = "let each stream end with two samples or more"
        if (explained := explain_lone_sample(error, self.model, where, advice)) is not None:
            raise explained from None


def _graph_nodes(roots: Iterable[Tensor]) -> list[Any]:
    """The nodes of the graph of some tensors, each once."""
    # Without recursion: a graph may be deeper than Python's stack.
    found: list[Any] = list(dict.fromkeys(root.grad_fn for root in roots if root.grad_fn))
    seen = {None, *found}
    for node in found:
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                found.append(following)
    return found


@contextmanager
def _gradients_kept(leaves: Collection[Tensor]) -> Iterator[None]:
    """Keeps the `.grad` of some leaves, to which autograd would add in place."""
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def compile_loss(loss_fn: LossFn) -> LossFn:
    """The loss function by torch.compile, with settings under which all ranks generate the same code."""
    import torch._inductor.config  # takes a second

    torch._inductor.config.deterministic = True
    compiled: LossFn = torch.compile(loss_fn, dynamic=False)
    return compiled


def check_compiled(model: nn.Module, compiles: bool) -> None:
    """Raises a `UsageError` if torch.compile generates code by the shapes that it met first, or portable by the CPU."""
    for name, module in model.named_modules():
        context = getattr(module, "dynamo_ctx", None)
        if is_portable() and (compiles or context is not None):
            raise UsageError(
                "torch.compile generates code for the CPU that it runs on, and the run is portable: leave compile "
                "or portable kernels (--no-portable, SAMESTEP_PORTABLE=0) out"
            )
        if getattr(context, "_dynamic", None):
            advice = "whose code depends on the shapes that a rank met before; use torch.compile(…, dynamic=False)"
            raise UsageError(f"module {name or 'model'} is compiled with dynamic=True, {advice}")


def without_gradients(compute: Callable[[], T]) -> T:
    """What a computation returns without gradients; with them where it differentiates, as the forward of a force field.

    It begins anew then, so it sets the state from which it begins.
    """
    try:
        with torch.no_grad():
            return compute()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return compute()


@contextmanager
def compiling_alike() -> Iterator[None]:
    """Has torch.compile generate code for each shape by itself, however many a rank meets: that depends on the ranks.

    By default it generates code for dynamic shapes at the second one, and after eight it goes on without compiling.
    """
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        yield
        return
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        with config.patch(COMPILING):
            yield
    except FailOnRecompileLimitHit as error:
        text = f"torch.compile met more than {MOST_SHAPES} shapes, and would go on uncompiled: pad to multiples of 64"
        raise UsageError(text) from error
