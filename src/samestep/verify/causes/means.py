"""Causes in losses and metrics: means over devices of means over unequal shares, and factors that devices leave."""

import inspect
import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from inspect import Signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.comm.environment import read_environment
from samestep.text import listed
from samestep.verify.causes.evidence import Cause, Evidence, Facts, by_step, first_rows, on_devices
from samestep.verify.recording import Recording
from samestep.verify.wraps import DISTRIBUTED, Wrap, around_roots, wrapped

LABELLED = ("cross_entropy", "nll_loss")
DENSE = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
    *("binary_cross_entropy_with_logits", "multilabel_soft_margin_loss", "gaussian_nll_loss", "poisson_nll_loss"),
)
OWN = "the program's own mean"
MAX_NODES = 16
NEAR = 0.1
PASSED = ("Neg", "Squeeze", "Unsqueeze", "View", "Reshape", "ToCopy", "Clone", "Alias", "Mul")
# As it is before it is wrapped: the exchanges of counterfactuals are not the program's.
_reduce: Callable[..., Any] = dist.all_reduce if dist.is_available() else lambda *args: None


def fact_wraps(facts: Facts) -> list[Wrap]:
    """Records over how many elements the means of torch's losses run, and by how much the program divides its loss."""

    def loss(name: str, signature: Signature, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = _mean_arguments(signature, args, kwargs)
        if given:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                columns = given["input"].shape[1] if name in LABELLED and given["input"].ndim == 2 else 0
                facts.add("mean", function=f"F.{name}", count=_num_terms(name, given), columns=columns)
        return inner(*args, **kwargs)

    def backward(inner: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        found = divisor(tensors)
        if found is not None:
            facts.add("mean", function=OWN, count=found[1])
        return inner(tensors, *args, **kwargs)

    def evaluate(inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not facts.calls.stack and not torch.is_grad_enabled():
            facts.count("evaluation", samples=first_rows([args, kwargs]))
        return inner(module, *args, **kwargs)

    wraps = [Wrap(torch.autograd, "backward", backward), Wrap(nn.Module, "__call__", evaluate)]
    return [*_wraps_of_losses(loss), *wraps]


def _wraps_of_losses(around: Callable[..., Tensor]) -> list[Wrap]:
    """Wraps of torch's losses; `around` gets the name and the signature of the function first."""
    names = (*LABELLED, *DENSE)
    return [Wrap(F, name, partial(around, name, inspect.signature(getattr(F, name)))) for name in names]


def _mean_arguments(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loss by name, with the defaults, if it takes a mean and gradients are recorded; else none."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    is_mean = torch.is_grad_enabled() and bound.arguments.get("reduction") in ("mean", "batchmean")
    return bound.arguments if is_mean else {}


def _num_terms(name: str, given: dict[str, Any]) -> float:
    """The number that a loss divides its sum by."""
    target: Tensor = given["target"]
    if name in LABELLED and not target.is_floating_point():
        valid = target[target != given["ignore_index"]]
        weight = given.get("weight")
        return float(valid.numel() if weight is None else weight[valid].sum())
    if name in LABELLED or given["reduction"] == "batchmean":
        return float(given["input"].shape[0])
    return float(max(given["input"].numel(), target.numel()))


def divisor(loss: Any) -> tuple[str, float] | None:
    """The operations by which a scalar loss was divided at last, by autograd's names, and by how much in all.

    `x.mean()` divides by its elements, `(x * w).sum() / w.sum()` by `w.sum()`, `0.25 * x.sum()` by 4. None for torch's
    own losses and for sums of several terms.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    node: Any = loss.grad_fn
    output = loss.output_nr
    path, count = [], 1.0
    for _ in range(MAX_NODES):
        if node is None:
            break
        # Autograd numbers the forms of an operation: MeanBackward0 is of all elements, MeanBackward1 of some
        # dimensions.
        kind = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if kind == "Mean":
            path.append(kind)
            count *= int(node._saved_self_sym_numel)
            break
        # DistributedDataParallel passes the outputs of its module through, one by one.
        if kind == "_DDPSink":
            node, output = node.next_functions[output]
            continue
        following = [edge for edge in node.next_functions if edge[0] is not None]
        if kind not in ("Div", *PASSED) or len(following) != 1:
            break
        factor = _constant(node) if kind in ("Div", "Mul") else None
        if kind == "Div" and factor is None:
            break
        if factor is not None and (kind == "Div" or 0 < factor < 1):
            path.append(kind)
            count *= factor if kind == "Div" else 1 / factor
        node, output = following[0]
    return (".".join(path), count) if path and count > 0 else None


def _constant(node: Any) -> float | None:
    """The number that a loss was divided by or multiplied with; None if it is none."""
    other = node._saved_other
    if not isinstance(other, Tensor):
        other = getattr(node, "_saved_self", None)
    if not isinstance(other, Tensor) or other.numel() != 1:
        return None
    with torch.no_grad():
        return float(other.detach())


def _suspect_mean(evidence: Evidence) -> str | None:
    for run in evidence.shared if evidence.is_ddp else ():
        for step, ranks in by_step(run, "mean", lambda fact: (str(fact["function"]), float(fact["count"]))).items():
            for calls in zip(*ranks, strict=False):
                function, counts = calls[0][0], [count for _, count in calls]
                if len(set(counts)) > 1:
                    seen = f"{function} took the mean over {listed(counts, 8)} elements"
                    if function == OWN:
                        seen = f"the program divided its loss by {listed(counts, 8)}"
                    where = f"on ranks 0 to {run.world_size - 1} in step {step + 1}"
                    return f"{seen} {where}; the mean of the ranks' means takes these for equal"
    return None


def _with_one_denominator() -> AbstractContextManager[None]:
    """Means become sums over one number, the same on every rank: the sum of the ranks' counts in the first call.

    For torch's losses that is the samples of a DataLoader's batch, which no padding changes, and which the batches of
    several devices add up to; the terms of the loss if there is no DataLoader.
    """
    world_size = read_environment().world_size
    denominators: dict[str, float] = {}
    batch_size = 0

    def next_index(inner: Callable[..., Any], batches: Any) -> Any:
        nonlocal batch_size
        index = inner(batches)
        batch_size = len(index) if isinstance(index, list) else 1
        return index

    def denominator(key: str, count: float, device: torch.device) -> float:
        if key not in denominators:
            total = torch.tensor([count], device=device)
            if world_size > 1 and dist.is_initialized():
                _reduce(total)
            denominators[key] = float(total)
        return denominators[key]

    def backward(inner: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        found = divisor(tensors)
        if found is not None:
            path, count = found
            tensors = tensors * (count * world_size / denominator(f"{OWN}: {path}", count, tensors.device))
        return inner(tensors, *args, **kwargs)

    def loss(name: str, signature: Signature, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = _mean_arguments(signature, args, kwargs)
        if not given:
            return inner(*args, **kwargs)
        whole = denominator(name, batch_size or _num_terms(name, given), given["input"].device)
        given["reduction"] = "sum"
        given.update((key, None) for key in ("size_average", "reduce") if key in given)
        return inner(**given) * (world_size / whole)

    return wrapped(
        *_wraps_of_losses(loss),
        Wrap(torch.autograd, "backward", backward),
        Wrap(_BaseDataLoaderIter, "_next_index", next_index),
    )


def _suspect_pairs(evidence: Evidence) -> str | None:
    runs = evidence.firsts if evidence.is_ddp else ()
    for counts in zip(*([int(fact.get("columns", 0)) for fact in run.facts("mean", 0)] for run in runs), strict=False):
        if len(set(counts)) > 1:
            parts = (f"{count} columns on {on_devices(run)}" for count, run in zip(counts, runs, strict=True))
            return f"the logits of a cross entropy had {', '.join(parts)}, which follow the samples of a device"
    return None


def _without_other_samples() -> AbstractContextManager[None]:
    """Cross entropies are the negative logits of the targets, in which no other sample of the batch has a part."""

    def loss(inner: Callable[..., Tensor], input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if target.is_floating_point():
            return inner(input, target, *args, **kwargs)
        kwargs.pop("label_smoothing", None)
        return F.nll_loss(input, target, *args[:5], **kwargs)

    return wrapped(Wrap(F, "cross_entropy", loss))


def _suspect_factor(evidence: Evidence) -> str | None:
    if not evidence.is_ddp:
        return None
    first, *others = evidence.firsts
    for run in others:
        losses, gradients = ([size(one) for one in (first, run)] for size in (_mean_loss, _gradient_norm))
        if not all(losses) or not all(gradients):
            continue
        more, ratio = run.world_size / first.world_size, losses[1] / losses[0]
        # Not all add gradients up.
        is_sum = abs(ratio * more - 1) < NEAR and gradients[1] < gradients[0] * (1 - NEAR)
        if is_sum or abs(ratio / more - 1) < NEAR:
            sizes = (f"{loss:.6g} on {on_devices(one)}" for loss, one in zip(losses, (first, run), strict=True))
            return f"the mean over the ranks of the first losses was {' and '.join(sizes)}: {ratio:.3g} times as much"
    return None


def _mean_loss(run: Recording) -> float:
    """The mean over the ranks of what backward began with in the first step."""
    return sum(sum(rank[0]["loss"]) for rank in run.steps) / run.world_size if run.num_steps else 0.0


def _gradient_norm(run: Recording) -> float:
    """The 2-norm of all gradients of rank 0 in the first step."""
    return math.hypot(*(norm or 0.0 for group in run.steps[0][0]["gradients"] for norm in group["norm"]))


def _with_one_factor() -> AbstractContextManager[None]:
    """Losses are divided by the mean over the ranks of the first one, and with it by any factor that they all have."""
    world_size = read_environment().world_size
    factor = 0.0

    def backward(inner: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal factor
        if isinstance(tensors, Tensor) and tensors.numel() == 1:
            if not factor:
                mean = tensors.detach().clone()
                if world_size > 1 and dist.is_initialized():
                    _reduce(mean)
                factor = abs(float(mean)) / world_size or 1.0
            tensors = tensors / factor
        return inner(tensors, *args, **kwargs)

    return wrapped(Wrap(torch.autograd, "backward", backward))


def _evaluated(run: Recording) -> list[Counter[int]]:
    """How many batches of each size each rank evaluated."""
    facts = [list(run.facts("evaluation", rank)) for rank in range(run.world_size)]
    return [Counter(size for fact in rank for size in [fact["samples"]] * fact["times"]) for rank in facts]


def _totals(ranks: list[Counter[int]]) -> str:
    return listed([sum(size * times for size, times in sizes.items()) for sizes in ranks])


def _suspect_metrics(evidence: Evidence) -> str | None:
    if not evidence.is_ddp:
        return None
    first, *others = evidence.firsts
    for run in others:
        ours, theirs = _evaluated(first), _evaluated(run)
        if any(ours) and all(one == theirs[0] for one in theirs) and sum(ours, Counter()) == sum(theirs, Counter()):
            # In equal batches, as many on every rank: the mean over ranks of means is the mean.
            continue
        for number, (one, many) in enumerate(zip(first.lines("metric"), run.lines("metric"), strict=False)):
            for alone, together in zip(one["after"], many["after"], strict=False):
                alone, mean = alone / first.world_size, together / run.world_size
                off = abs(mean - alone)
                is_sum = abs(together - alone * first.world_size) <= 1e-6 * abs(together)
                if not is_sum and 1e-6 * abs(alone) < off < 0.5 * abs(alone):
                    return (
                        f"reduction number {number} of the program came to {alone:.6g} a device on "
                        f"{on_devices(first)}, and to {mean:.6g} on {on_devices(run)}: a mean over ranks of means; "
                        f"they evaluated {_totals(ours)} and {_totals(theirs)} samples"
                    )
    return None


def _with_constant_metrics() -> AbstractContextManager[None]:
    """A fraction that is reduced after an evaluation, before the next forward in training, is 1 on every rank.

    Counts stay as they are. How the program came by the fraction, in means over its batches say, cannot be seen.
    """
    is_evaluation = False

    def before(_: nn.Module) -> None:
        nonlocal is_evaluation
        is_evaluation = not torch.is_grad_enabled()

    def backward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_evaluation
        is_evaluation = False
        return inner(*args, **kwargs)

    def all_reduce(
        inner: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        plain = tensor.numel() == 1 and tensor.is_floating_point() and not async_op
        plain = plain and group in (None, dist.group.WORLD)
        if is_evaluation and plain and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            is_fraction = (tensor != tensor.round()).float()
            _reduce(is_fraction)
            tensor.masked_fill_(is_fraction.bool(), 1.0)
        return inner(tensor, op, group, async_op)

    return wrapped(
        around_roots(before),
        Wrap(torch.autograd, "backward", backward),
        Wrap(dist, "all_reduce", all_reduce, DISTRIBUTED),
    )


LOSS_FACTOR = Cause(
    "loss_factor",
    "the loss, or its gradient, has the number of devices as a factor",
    "Call backward on the mean over the device's samples, or on their sum * world_size / count over all ranks. "
    "The devices' gradients are averaged: of a plain sum, or of a mean times world_size, a factor remains.",
    _suspect_factor,
    _with_one_factor,
)
MEAN_OF_MEANS = Cause(
    "mean_of_means",
    "the loss is a mean over devices of means over unequal counts",
    "Sum the loss, sum the counts over all ranks (torch.distributed.all_reduce), and divide once; or return "
    "samestep.Mean(total, count) from the loss of a samestep.Run.",
    _suspect_mean,
    _with_one_denominator,
)
PAIRS = Cause(
    "pairs",
    "the loss of a sample depends on the other samples of its device's batch",
    "Compute it over the batch of all devices: torch.distributed.nn.functional.all_gather, which passes gradients on, "
    "of the embeddings, and of the targets the positions in the whole batch.",
    _suspect_pairs,
    _without_other_samples,
)
METRICS = Cause(
    "metrics",
    "a metric is a mean of means, over devices or batches of unequal numbers of samples",
    "Reduce sums and counts, and divide once; leave out samples that a sampler repeats. run.evaluate does both.",
    _suspect_metrics,
    _with_constant_metrics,
)
