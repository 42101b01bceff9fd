"""Causes in means: a loss or a metric that is the mean over devices of means over unequal shares."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.comm.environment import read_environment
from samestep.verify.causes.cause import Cause
from samestep.verify.causes.divisors import divisor
from samestep.verify.causes.evidence import Evidence, by_step, listed, on_devices
from samestep.verify.causes.notes import Notes, Wrap, num_rows, wrapped


def _nothing(*_: Any) -> None:
    """What a process without torch.distributed reduces."""


LABELLED = ("cross_entropy", "nll_loss")
DENSE = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
    *("binary_cross_entropy_with_logits", "multilabel_soft_margin_loss", "gaussian_nll_loss", "poisson_nll_loss"),
)

OWN = "the program's own mean"

_reduce = dist.all_reduce if dist.is_available() else _nothing
"""The reduction as it is before anybody listens at it: what counterfactuals exchange is not the program's."""


def listen(notes: Notes) -> list[Wrap]:
    """Over how many elements the means of torch's losses run, and by what the program divides its loss itself."""

    def watching(name: str) -> Callable[[Any], Any]:
        def make(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
            signature = inspect.signature(inner)

            def loss(*args: Any, **kwargs: Any) -> Tensor:
                given = _bound(signature, args, kwargs)
                if torch.is_grad_enabled() and given.get("reduction") in ("mean", "batchmean"):
                    with torch.no_grad(), torch._C.DisableTorchFunction():
                        notes.tell("mean", function=f"F.{name}", count=_count(name, given))
                return inner(*args, **kwargs)

            return loss

        return make

    def dividing(inner: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            found = divisor(tensors)
            if found is not None:
                notes.tell("mean", function=OWN, count=found[1])
            return inner(tensors, *args, **kwargs)

        return backward

    means = [Wrap(F, name, watching(name)) for name in (*LABELLED, *DENSE)]
    return [*means, Wrap(torch.autograd, "backward", dividing)]


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults; none if they do not fit."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    return bound.arguments


def _count(name: str, given: dict[str, Any]) -> float:
    """What a loss divides its sum by."""
    target: Tensor = given["target"]
    if name in LABELLED and not target.is_floating_point():
        valid = target[target != given["ignore_index"]]
        weight = given.get("weight")
        return float(valid.numel() if weight is None else weight[valid].sum())
    if name in LABELLED or given["reduction"] == "batchmean":
        return float(given["input"].shape[0])
    return float(max(given["input"].numel(), target.numel()))


def _suspect_mean(evidence: Evidence) -> str | None:
    if not evidence.is_ddp:
        return None
    for run in evidence.shared:
        for step, ranks in by_step(run, "mean", lambda fact: (str(fact["function"]), float(fact["count"]))).items():
            for calls in zip(*ranks, strict=False):
                counts = [count for _, count in calls]
                if len(set(counts)) > 1 and calls[0][0] == OWN:
                    return (
                        f"the program divided its loss by {listed(counts, 8)} on ranks 0 to {run.world_size - 1} in "
                        f"step {step}; the mean of the ranks' means takes these for equal"
                    )
                if len(set(counts)) > 1:
                    return (
                        f"{calls[0][0]} took the mean over {listed(counts, 8)} elements on ranks 0 to "
                        f"{run.world_size - 1} in step {step}; the mean of the ranks' means takes these for equal"
                    )
    return None


@contextmanager
def _with_one_denominator() -> Iterator[None]:
    """Means become sums over one number, the same on every rank: what the ranks divided by in the first call."""
    world_size = read_environment().world_size
    denominators: dict[str, float] = {}

    def whole(key: str, count: float, device: torch.device) -> float:
        if key not in denominators:
            total = torch.tensor([count], device=device)
            if world_size > 1 and dist.is_initialized():
                _reduce(total)
            denominators[key] = float(total)
        return denominators[key]

    def rescaling(inner: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            found = divisor(tensors)
            if found is not None:
                path, count = found
                tensors = tensors * (count * world_size / whole(f"{OWN}: {path}", count, tensors.device))
            return inner(tensors, *args, **kwargs)

        return backward

    def summing(name: str) -> Callable[[Any], Any]:
        def make(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
            signature = inspect.signature(inner)

            def loss(*args: Any, **kwargs: Any) -> Tensor:
                given = _bound(signature, args, kwargs)
                if not torch.is_grad_enabled() or given.get("reduction") not in ("mean", "batchmean"):
                    return inner(*args, **kwargs)
                denominator = whole(name, _elements(name, given), given["input"].device)
                given.update(reduction="sum", size_average=None, reduce=None)
                allowed = {key: value for key, value in given.items() if key in signature.parameters}
                return inner(**allowed) * (world_size / denominator)

            return loss

        return make

    means = [Wrap(F, name, summing(name)) for name in (*LABELLED, *DENSE)]
    with wrapped(*means, Wrap(torch.autograd, "backward", rescaling)):
        yield


def _elements(name: str, given: dict[str, Any]) -> float:
    """What a loss would divide by, were every element counted alike."""
    target: Tensor = given["target"]
    if name in LABELLED and not target.is_floating_point():
        return float(target.numel())
    if name in LABELLED or given["reduction"] == "batchmean":
        return float(given["input"].shape[0])
    return float(max(given["input"].numel(), target.numel()))


def _suspect_metrics(evidence: Evidence) -> str | None:
    if not evidence.is_ddp or not evidence.shared:
        return None
    first = evidence.firsts[0]
    for run in evidence.shared:
        if run is first:
            continue
        pairs = zip(first.lines("metric"), run.lines("metric"), strict=False)
        for number, (one, many) in enumerate(pairs):
            for alone, together in zip(one["after"], many["after"], strict=False):
                alone, mean = alone / first.world_size, together / run.world_size
                off = abs(mean - alone)
                is_sum = abs(together - alone * first.world_size) <= 1e-6 * abs(together)
                if not is_sum and 1e-6 * abs(alone) < off < 0.5 * abs(alone):
                    return (
                        f"reduction number {number} of the program came to {alone:.6g} a device on "
                        f"{on_devices(first)}, and to {mean:.6g} on {on_devices(run)}: a mean over ranks of means"
                    )
    return None


@contextmanager
def _with_weighted_metrics() -> Iterator[None]:
    """A single number that is reduced outside the exchange of gradients counts by the samples that its rank saw."""
    if not dist.is_available():
        yield
        return
    state = {"exchange": False, "seen": 0, "counted": 0, "depth": 0}

    def watching(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not state["depth"] and not torch.is_grad_enabled() and next(self.parameters(), None) is not None:
                state["seen"] += num_rows([args, kwargs])
            state["depth"] += 1
            try:
                return inner(self, *args, **kwargs)
            finally:
                state["depth"] -= 1

        return call

    def exchanging(inner: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            state["exchange"] = True
            return inner(*args, **kwargs)

        return backward

    def weighting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            plain = tensor.numel() == 1 and tensor.is_floating_point() and not async_op and group is None
            if state["exchange"] or not plain or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                return inner(tensor, op, group, async_op)
            if state["seen"]:
                state["counted"], state["seen"] = state["seen"], 0
            weight, value = state["counted"] or 1, float(tensor)
            sums = torch.tensor([value * weight, weight, value, value != round(value)], dtype=torch.float64)
            sums = sums.to(tensor.device)
            _reduce(sums)
            mean = sums[0] / sums[1] if float(sums[3]) else sums[2] / dist.get_world_size()
            tensor.fill_(float(mean))  # the same on every rank, so that the reduction that follows keeps it
            return inner(tensor, op, group, async_op)

        return all_reduce

    handle = register_optimizer_step_pre_hook(lambda *_: state.update(exchange=False))
    try:
        with wrapped(
            Wrap(nn.Module, "__call__", watching),
            Wrap(torch.autograd, "backward", exchanging),
            Wrap(dist, "all_reduce", weighting, ("torch.distributed.distributed_c10d",)),
        ):
            yield
    finally:
        handle.remove()


MEAN_OF_MEANS = Cause(
    "mean_of_means",
    "the loss is a mean over devices of means over unequal counts",
    "Sum the loss, sum the counts over all ranks (torch.distributed.all_reduce), and divide once; or return "
    "samestep.Mean(total, count) from the loss of a samestep.Run.",
    _suspect_mean,
    _with_one_denominator,
)
METRICS = Cause(
    "metrics",
    "a metric is averaged over devices that saw unequal numbers of samples",
    "Reduce sums and counts, and divide once; leave out samples that a sampler repeats. run.evaluate does both.",
    _suspect_metrics,
    _with_weighted_metrics,
)
