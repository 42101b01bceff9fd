"""Causes in rounding: sums that another number of devices adds up in another order. They change bits only.

Their counterfactuals keep parameters in float64, round every gradient to float32 before the update, and let float32 in
only at the causes that keep their effect: in the model's kernels, after each backward, in the exchange. Sums of float32
numbers are all but exact in float64, so the order in which they are added no longer shows.
"""

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from samestep.data.nested import map_tensors
from samestep.patch import Patch, applied
from samestep.run.run import Run
from samestep.text import listed
from samestep.verify.causes.evidence import Cause, Evidence, Facts, by_step, on_devices
from samestep.verify.causes.means import DENSE, LABELLED
from samestep.verify.causes.updates import before_updates, to_parameters
from samestep.verify.wraps import DISTRIBUTED, Wrap, wrapped

exact: frozenset[str] = frozenset()
"""The parts that compute in float64: "kernels", "accumulation", "exchange"; patched while a counterfactual runs."""


def fact_wraps(facts: Facts) -> list[Wrap]:
    """Records backwards between steps, large reductions, and the reduction of a `samestep.Run`."""

    def backward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        facts.count("backward")
        return inner(*args, **kwargs)

    def all_reduce(inner: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
            facts.add_once("exchange", by="torch.distributed.all_reduce")
        return inner(tensor, *args, **kwargs)

    def make_ddp(inner: Callable[..., None], self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner(self, module, *args, **kwargs)
        facts.add_once("exchange", by="DistributedDataParallel")

    def make_run(inner: Callable[..., None], self: Run, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        facts.add_once("run", reduction=self.contract.reduction)

    found = [Wrap(torch.autograd, "backward", backward), Wrap(Run, "__init__", make_run)]
    if dist.is_available():
        found.append(Wrap(dist, "all_reduce", all_reduce, DISTRIBUTED))
        found.append(Wrap(DistributedDataParallel, "__init__", make_ddp))
    return found


@contextmanager
def _exactly(part: str) -> Iterator[None]:
    """A context in which one more part is exact; the first to be entered puts the promotion in place."""
    with applied([Patch(sys.modules[__name__], "exact", exact | {part})]):
        if exact == {part}:
            with before_updates(to_parameters(_round_gradient)), wrapped(*_Promotion().wraps()):
                yield
        else:
            yield


class _Promotion:
    """Keeps float32 parameters in float64, and lets float32 in where a part is not to be exact."""

    def __init__(self) -> None:
        self._promoted: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()
        self._is_inside = False
        self._reduce = dist.all_reduce if dist.is_available() else None

    def wraps(self) -> list[Wrap]:
        """The wraps of optimizers, modules, backward, losses and the exchange."""
        places = [
            Wrap(Optimizer, "__init__", self._make_optimizer),
            Wrap(nn.Module, "__call__", self._call),
            Wrap(torch.autograd, "backward", self._backward),
            *(Wrap(F, name, _loss) for name in (*DENSE, *LABELLED)),
        ]
        if dist.is_available():
            places.append(Wrap(DistributedDataParallel, "__init__", self._make_ddp))
            places.append(Wrap(dist, "all_reduce", self._all_reduce, DISTRIBUTED))
        return places

    def _promote(self, module: nn.Module) -> None:
        buffers = module.buffers() if "kernels" in exact else ()
        for tensor in (*module.parameters(), *buffers):
            self._promote_tensor(tensor)

    def _promote_tensor(self, tensor: Tensor) -> None:
        if tensor.dtype == torch.float32 and tensor.grad is None:
            tensor.data = tensor.data.double()
            self._promoted[tensor] = True

    def _make_optimizer(self, inner: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        inner(optimizer, *args, **kwargs)
        to_parameters(self._promote_tensor)(optimizer)

    def _make_ddp(self, inner: Callable[..., None], ddp: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        def exchange(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            """Averages gradients over the ranks: in float64, or in float32 if the exchange is not to be exact."""
            assert self._reduce is not None, "a bucket comes from torch.distributed"
            buffer: Tensor = bucket.buffer()
            sent = (buffer if "exchange" in exact else buffer.float()) / dist.get_world_size()
            future: torch.futures.Future[Any] = self._reduce(sent, async_op=True).get_future()
            return future.then(lambda done: done.value()[0].to(buffer.dtype))

        self._promote(module)
        inner(ddp, module, *args, **kwargs)
        ddp.register_comm_hook(None, exchange)
        ddp.register_comm_hook = lambda *_, **__: None  # the script's own would be refused

    def _all_reduce(self, inner: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype != torch.float64 or "exchange" in exact or tensor.numel() < 2:
            return inner(tensor, *args, **kwargs)
        sent = tensor.float()
        work = inner(sent, *args, **kwargs)
        if work is not None:
            work.wait()
        tensor.copy_(sent)
        return work

    def _backward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Rounds the gradients after every backward if accumulation is not exact."""
        result = inner(*args, **kwargs)
        if "accumulation" not in exact:
            for parameter in self._promoted:
                _round_gradient(parameter)
        return result

    def _call(self, inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Calls models in float64; if kernels are not to be exact, with parameters rounded to float32."""
        is_wrapper = isinstance(module, DataParallel | DistributedDataParallel)
        if torch.compiler.is_compiling() or self._is_inside or is_wrapper:
            return inner(module, *args, **kwargs)
        if not any(parameter in self._promoted for parameter in module.parameters()):
            return inner(module, *args, **kwargs)
        self._is_inside = True
        default = torch.get_default_dtype()
        try:
            if "kernels" not in exact:
                rounded = {name: one.float() for name, one in module.named_parameters() if one in self._promoted}
                return torch.func.functional_call(module, rounded, args, kwargs)
            self._promote(module)
            torch.set_default_dtype(torch.float64)
            return inner(module, *map_tensors(_widened, args), **map_tensors(_widened, kwargs))
        finally:
            torch.set_default_dtype(default)
            self._is_inside = False


def _round_gradient(parameter: Tensor) -> None:
    """Rounds a float64 gradient to the nearest that float32 can hold."""
    if parameter.grad is not None and parameter.grad.dtype == torch.float64:
        parameter.grad.copy_(parameter.grad.float())


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def _loss(inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Gives a loss all its arguments in float64 if one of them is."""
    if any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in (*args, *kwargs.values())):
        args, kwargs = map_tensors(_widened, args), map_tensors(_widened, kwargs)
    return inner(*args, **kwargs)


def _suspect_kernels(evidence: Evidence) -> str | None:
    if not evidence.is_ddp:
        return None
    sizes = {}
    for run in evidence.firsts:
        rows = {fact["rows"] for rank in range(run.world_size) for fact in run.facts("forward", rank)}
        sizes[on_devices(run)] = sorted(rows, reverse=True)
    if len({tuple(rows) for rows in sizes.values()}) < 2:
        return None
    seen = ", ".join(f"{listed(rows)} on {devices}" for devices, rows in sizes.items())
    return f"the model was given this many samples at a time: {seen}; kernels add up other numbers of terms"


def _suspect_accumulation(evidence: Evidence) -> str | None:
    counts: dict[str, int] = {}
    for run in evidence.firsts if evidence.is_ddp else ():
        steps = by_step(run, "backward", lambda fact: int(fact["times"]))
        counts[on_devices(run)] = max((sum(ranks[0]) for ranks in steps.values()), default=0)
    if max(counts.values(), default=0) < 2:
        return None
    seen = ", ".join(f"{count} on {devices}" for devices, count in counts.items())
    return f"a device added up the gradients of this many backwards one after another: {seen}"


def _suspect_exchange(evidence: Evidence) -> str | None:
    for run, _, fact in evidence.facts("exchange"):
        if evidence.is_ddp and run.world_size > 1:
            return f"gradients of {on_devices(run)} were added up by {fact['by']} in the backend's own order"
    return None


def _suspect_native(evidence: Evidence) -> str | None:
    found = [fact for _, _, fact in evidence.facts("run") if fact["reduction"] == "native"]
    if not found or not evidence.shared:
        return None
    return f"the run was built with reduction='native', and {on_devices(evidence.shared[-1])} exchanged gradients"


def _with_ordered_reduction() -> AbstractContextManager[None]:
    """Every `samestep.Run` adds along its tree."""

    def init(inner: Callable[..., None], self: Run, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **{**kwargs, "reduction": "ordered"})

    return wrapped(Wrap(Run, "__init__", init))


KERNELS = Cause(
    "kernels",
    "kernels choose how they add by the shape of the local batch",
    "Compute on microbatches of a fixed size, as samestep.Run and samestep run do; else hold such runs to rounding "
    "error.",
    _suspect_kernels,
    partial(_exactly, "kernels"),
    bits_only=True,
)
ACCUMULATION = Cause(
    "accumulation",
    "gradients are accumulated one after another, in groups that depend on the number of devices",
    "Add the gradients of micro-batches along a fixed tree, as samestep.Run does with its microbatches.",
    _suspect_accumulation,
    partial(_exactly, "accumulation"),
    bits_only=True,
)
EXCHANGE = Cause(
    "reduction_order",
    "the backend adds up gradients in an order of its own",
    "Use samestep.Run(reduction='ordered') or samestep run, which add along a fixed tree on any number of devices.",
    _suspect_exchange,
    partial(_exactly, "exchange"),
    bits_only=True,
)
NATIVE = Cause(
    "native",
    "the run leaves the order of its sums to the backend: reduction='native'",
    "Build the run with reduction='ordered', the default.",
    _suspect_native,
    _with_ordered_reduction,
)
