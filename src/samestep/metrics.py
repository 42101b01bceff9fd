"""Metrics of a model's output, as sums and counts that add up exactly over microbatches.

A metric is never averaged over microbatches or ranks. Each microbatch gives a sum and a count; both are added up along
the tree and divided once, so every sample (or token) weighs the same on any devices. A metric of your own is a function
of the model's output and the batch:

    def absolute_error(output, batch):
        _, y = batch
        return (output - y).abs()            # a value a sample

    run.evaluate(model, test_set, {"mae": absolute_error, "accuracy": samestep.metrics.accuracy})

Metrics of the library torchmetrics that are more than a sum are taken as they are: see `from_torchmetrics`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from samestep.checks import check_number, check_type
from samestep.core.tree import Block, TreeSum
from samestep.data.nested import map_tensors
from samestep.engine.losses import Mean, wide_dtype
from samestep.errors import UsageError
from samestep.text import describe

TARGET_KEYS = ("label", "labels", "target", "targets", "y")

Measure = Callable[[Any, Any], Tensor | Mean]


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Metric:
    """A metric of an evaluation; tier `bitwise`, since only sums and counts cross devices.

    Attributes:
        measure: called as `measure(output, batch)` on one microbatch. It returns a 1-d tensor (a value a sample; of any
            dtype, also bool) or `samestep.Mean(total, count)` for ragged things such as tokens.
        finish: applied once to the global mean, for example `math.sqrt` for a root mean squared error.
        name: for messages; the name of `measure` if empty.
    """

    measure: Measure
    finish: Callable[[float], float] = float  # the mean as it is
    name: str = ""


class StateMetric:
    """A metric with states, such as counts of classes or all scores, merged over microbatches; tier `bitwise`.

    Made by `from_torchmetrics`.
    """

    def __init__(self, metric: Any, update: Callable[[Any, Any, Any], object]) -> None:
        self._metric = metric
        metric.distributed_available_fn = _never  # else `compute` would add up over the ranks what is merged already
        self._update = update
        self._parts: dict[str, list[Any]] = {}
        self._sums: dict[str, TreeSum[Tensor]] = {}
        self._count = 0

    def begin(self, device: torch.device) -> None:
        """Begins an evaluation whose outputs are on this device."""
        self._metric.to(device)
        self._count, self._parts, self._sums = 0, {}, {}

    def states(self, output: Any, batch: Any) -> dict[str, Any]:
        """The states of one microbatch alone, in host memory."""
        metric = self._metric
        metric.reset()
        self._update(metric, output, batch)
        return {name: map_tensors(Tensor.cpu, getattr(metric, name)) for name in metric._reductions}

    def push(self, states: Mapping[str, Any]) -> None:
        """Merges the states of a microbatch with the states of all before it, in the order of the samples."""
        for name, reduction in self._metric._reductions.items():
            if _named(reduction) == "dim_zero_sum":
                # One after another, since a table of counts by class may be large.
                self._sums.setdefault(name, TreeSum(torch.add)).push(Block(self._count, 1), states[name])
            else:
                self._parts.setdefault(name, []).append(states[name])
        self._count += 1

    def values(self, name: str) -> dict[str, float]:
        """The values: one by this name, or one for each entry of a result with several, as `name/entry`."""
        metric = self._metric.cpu()
        metric.reset()
        metric._update_count = self._count  # else `compute` warns that nothing was measured
        for state, total in self._sums.items():
            setattr(metric, state, total.root())
        for state, parts in self._parts.items():
            setattr(metric, state, _merged(parts, metric._reductions[state]))
        try:
            return _named_values(name, metric.compute())
        except Exception as error:
            raise UsageError(
                f"the metric {name} ({type(metric).__name__}) cannot be computed from its states, merged over "
                f"microbatches: {type(error).__name__}: {error}"
            ) from error


def from_torchmetrics(metric: Any, update: Callable[[Any, Any, Any], object] | None = None) -> StateMetric:
    """A metric of torchmetrics: updated by each microbatch alone, merged in the order of the samples.

    So F1, AUROC or a mean average precision have the same bits on any number of devices, and are those over all samples
    at once. Sums are added along the tree, states that collect samples are joined in their order. `evaluate` takes
    metrics of torchmetrics as they are; this function is for another `update`. Tier `bitwise`.

    Args:
        metric: a `torchmetrics.Metric`. A copy is used.
        update: called as `update(metric, output, batch)`; by default `metric.update(output, target)`, with the last
            entry of a batch, or the one of a dict's `label`, `labels`, `target`, `targets` or `y`.

    Raises:
        UsageError: the metric's states cannot be merged: it averages them, or holds other metrics.
    """
    name = type(metric).__name__
    check_type("metric", metric, _is_of_torchmetrics(metric), "a metric of torchmetrics")
    inner = [module for module in metric.modules() if module is not metric and _is_of_torchmetrics(module)]
    if inner or not metric._reductions:
        raise UsageError(f"{name} holds other metrics, or no state that can be merged: pass each metric by a name")
    own = metric.clone()
    own.reset()  # to its defaults
    for state, reduction in own._reductions.items():
        if _named(reduction) == "dim_zero_mean":
            raise UsageError(f"{name} averages its state {state!r} over updates: use a metric that sums and counts")
        if _named(reduction) == "dim_zero_sum" and getattr(own, state).count_nonzero():
            raise UsageError(f"{name} sums its state {state!r} from a default that is not 0: each update counts it")
    return StateMetric(own, _update if update is None else update)


def _never() -> bool:
    return False


def _update(metric: Any, output: Any, batch: Any) -> None:
    metric.update(output, _target_entry(batch))


def _is_of_torchmetrics(value: Any) -> bool:
    """Whether a value is a metric, or a collection of metrics, of torchmetrics, which need not be installed."""
    homes = {(cls.__module__, cls.__name__) for cls in type(value).__mro__}
    return bool(homes & {("torchmetrics.metric", "Metric"), ("torchmetrics.collections", "MetricCollection")})


def _named(reduction: Any) -> str:
    return getattr(reduction, "__name__", "")


def _merged(parts: list[Any], reduction: Any) -> Any:
    """A state of all microbatches, as torchmetrics reduces one over ranks."""
    if isinstance(parts[0], list):
        return [entry for part in parts for entry in part]
    if _named(reduction) == "dim_zero_cat":
        return torch.cat([part.reshape(-1) if part.ndim == 0 else part for part in parts])
    stacked = torch.stack(parts)
    return stacked if reduction is None else reduction(stacked)


def _named_values(name: str, value: Any) -> dict[str, float]:
    """Numbers by name, however nested."""
    if isinstance(value, Mapping):
        entries = [_named_values(f"{name}/{key}", entry) for key, entry in value.items()]
    elif isinstance(value, list | tuple):
        entries = [_named_values(f"{name}/{key}", entry) for key, entry in enumerate(value)]
    elif isinstance(value, Tensor) and value.ndim > 0:
        return _named_values(name, value.tolist())
    else:
        return {name: float(value)}
    return {key: number for entry in entries for key, number in entry.items()}


def as_metric(value: Any) -> Metric | StateMetric:
    """A metric as it is, or made of one of torchmetrics or of a callable `(output, batch) -> Tensor | Mean`."""
    if isinstance(value, Metric | StateMetric):
        return value
    if _is_of_torchmetrics(value):
        return from_torchmetrics(value)
    fits = callable(value) and not isinstance(value, type)
    check_type("a metric", value, fits, "a samestep metric or a function of (output, batch)")
    return Metric(value)


def sums(
    metric: Metric, output: Any, batch: Any, *, name: str | None = None, num_samples: int | None = None
) -> tuple[Tensor, Tensor]:
    """A metric's total and count of one microbatch, without waiting for the device.

    Both are 0-d, float64 (float32 on MPS), on the output's device, detached. Raises a `UsageError` if the metric
    returns neither a 1-d tensor, of `num_samples` elements if that is known, nor a `Mean`.
    """
    title = name or metric.name or getattr(metric.measure, "__name__", "metric")
    measured: Any = metric.measure(output, batch)
    if isinstance(measured, Mean):
        total, count = measured.total, measured.count
        found = f"a Mean of {describe(total)} and {describe(count)}"
        is_right = (
            isinstance(total, Tensor) and total.ndim == 0 and (not isinstance(count, Tensor) or count.numel() == 1)
        )
    else:
        total, found = measured, describe(measured)
        is_right = isinstance(total, Tensor) and total.ndim == 1 and num_samples in (None, len(total))
        count = total.numel() if is_right else 0
    if not is_right:
        values = "a value a sample" if num_samples is None else f"{num_samples} values, one a sample"
        raise UsageError(
            f"metric {title!r} returned {found}; needed: a 1-d tensor ({values}) or samestep.Mean(total, count) of two "
            "numbers. A mean over the microbatch could not be weighted rightly"
        )
    device = output.device if isinstance(output, Tensor) else total.device
    wide = wide_dtype(device)
    total = total.detach().to(device=device, dtype=wide).sum()
    if isinstance(count, Tensor):
        return total, count.detach().reshape(()).to(device=device, dtype=wide)
    return total, torch.full((), count, dtype=wide, device=device)


def result(metric: Metric, total: float, count: float) -> float:
    """The metric's value from its global total and count; NaN if nothing was counted."""
    return metric.finish(total / count) if count else math.nan


def target_of(batch: Any) -> Tensor:
    """The target in a batch: the last entry of a tuple or list, or the one of a dict's `TARGET_KEYS`."""
    target = _target_entry(batch)
    if not isinstance(target, Tensor):
        raise UsageError(f"the metric needs a tensor as target, the batch holds {describe(target)}")
    return target


def _target_entry(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        found = [key for key in TARGET_KEYS if key in batch]
        if len(found) != 1:
            wanted = ", ".join(map(repr, TARGET_KEYS))
            got = f"has {' and '.join(map(repr, found))}" if found else f"has the keys {', '.join(map(repr, batch))}"
            raise UsageError(
                f"the metric needs one target and the batch {got}; needed: exactly one of {wanted}, "
                "or a metric of your own, a function of (output, batch)"
            )
        return batch[found[0]]
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return batch[-1]
    size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise UsageError(
        f"the metric finds no target in a batch that is {describe(batch)}{size}; needed: a tuple (x, y), a dict "
        "with 'label' or 'target', or a metric of your own, a function of (output, batch)"
    )


def top_k(k: int) -> Metric:
    """The fraction of samples whose class is among the k highest scores.

    The output is `[N, C]` (scores, C ≥ 2), the target `[N]` (integers in 0…C−1). Of equal scores the lower class
    ranks first; NaN ranks above every number, and a sample whose own score is NaN is wrong: a model that diverged
    is not right by accident.

    Raises:
        UsageError: k is not a positive integer; when measured, k is more than C or a shape is not as above.
    """
    name = "accuracy" if k == 1 else f"top_{k}"
    check_number("k", k, 1, option="")

    def measure(output: Any, batch: Any) -> Tensor:
        target = target_of(batch)
        _check(name, target.ndim == 1, "a class a sample (token_accuracy: a token or pixel)", output, target)
        scores, classes = _scores_and_classes(name, output, target, class_dim=1)
        _check(name, k <= scores.shape[1], f"at least {k} classes", output, target)
        return _rank(scores, classes) < k

    return Metric(measure, name=name)


def cross_entropy_with(class_dim: int | None = None, ignore_index: int = -100) -> Metric:
    """The mean cross-entropy in nats over all targets that are not `ignore_index`.

    The target is of integers, `[N]` or `[N, …]`; the output has one dim more, the classes.

    Args:
        class_dim: the output's dim of classes: 1 as in `torch.nn.CrossEntropyLoss`, −1 for `[N, tokens, C]`. None
            takes the one that fits the target's shape; if both do, measuring raises `UsageError`.
        ignore_index: targets of this value are neither summed nor counted.

    Raises:
        UsageError: `class_dim` is another one; when measured, the shapes are not as above.
    """
    return _cross_entropy("cross_entropy", class_dim, ignore_index)


def perplexity_with(class_dim: int | None = None, ignore_index: int = -100) -> Metric:
    """exp of the global mean cross-entropy (not a mean of exps); arguments as in `cross_entropy_with`."""
    return replace(_cross_entropy("perplexity", class_dim, ignore_index), finish=_exp)


def token_accuracy_with(class_dim: int | None = None, ignore_index: int = -100) -> Metric:
    """The fraction of targets (tokens, pixels) whose class has the highest score, `ignore_index` left out.

    Shapes and arguments are as in `cross_entropy_with`, ties and NaN are treated as in `top_k`.
    """
    name = "token_accuracy"
    _check_class_dim(name, class_dim)

    def measure(output: Any, batch: Any) -> Mean:
        scores, target = _scores_and_classes(name, output, target_of(batch), class_dim)
        counted = target != ignore_index
        right = (_rank(scores, target.where(counted, 0)) == 0) & counted
        return Mean(right.sum(), counted.sum())

    return Metric(measure, name=name)


def _cross_entropy(name: str, class_dim: int | None, ignore_index: int) -> Metric:
    _check_class_dim(name, class_dim)

    def measure(output: Any, batch: Any) -> Mean:
        scores, target = _scores_and_classes(name, output, target_of(batch), class_dim)
        # Flattened: the form for images, [N, C, H, W], has no deterministic kernel on CUDA.
        losses = functional.cross_entropy(
            scores.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction="none"
        )
        return Mean(losses.to(wide_dtype(losses.device)).sum(), (target != ignore_index).sum())

    return Metric(measure, name=name)


def _check_class_dim(name: str, class_dim: int | None) -> None:
    if class_dim not in (None, 1, -1):
        raise UsageError(f"got class_dim={class_dim!r} for {name}_with; it is one of 1, -1 and None (what fits)")


def _squared_error(output: Any, batch: Any) -> Tensor:
    return _mean_a_sample(_difference("mean_squared_error", output, target_of(batch)).square())


def _absolute_error(output: Any, batch: Any) -> Tensor:
    return _mean_a_sample(_difference("mean_absolute_error", output, target_of(batch)).abs())


accuracy = top_k(1)
"""The fraction of samples whose class has the highest score; shapes as in `top_k`."""

mean_squared_error = Metric(_squared_error, name="mean_squared_error")
"""The mean of (output - target)²; the shapes are equal, but for dims of size one."""

root_mean_squared_error = Metric(_squared_error, math.sqrt, "root_mean_squared_error")
"""The square root of the global `mean_squared_error` (not a mean of roots)."""

mean_absolute_error = Metric(_absolute_error, name="mean_absolute_error")
"""The mean of |output - target|; shapes as in `mean_squared_error`."""

cross_entropy = cross_entropy_with()
"""The mean cross-entropy in nats, targets of -100 left out; see `cross_entropy_with`."""

token_accuracy = token_accuracy_with(class_dim=-1)
"""The fraction of tokens predicted rightly: output `[N, tokens, C]`, target `[N, tokens]`, -100 left out."""

perplexity = perplexity_with(class_dim=-1)
"""exp of the global mean cross-entropy a token: output `[N, tokens, C]`, target `[N, tokens]`, -100 left out."""


def _check(metric: str, is_right: bool, needed: str, output: Any, target: Any) -> None:
    """Raises a `UsageError` with what a metric needs and what it got."""
    if not is_right:
        raise UsageError(
            f"metric {metric!r} needs {needed}, got {describe(output)} as output and {describe(target)} as target; "
            "or write one of your own, a function of (output, batch)"
        )


def _scores_and_classes(name: str, output: Any, target: Tensor, class_dim: int | None) -> tuple[Tensor, Tensor]:
    """The scores as `[*target.shape, C]` in float32 or wider, and the target as int64."""
    got = output, target
    _check(name, isinstance(output, Tensor), "a tensor as output", *got)
    _check(name, not target.is_floating_point() and not target.is_complex(), "classes as integers", *got)
    allowed = (1, -1) if class_dim is None else (class_dim,)
    has_one_more = target.ndim > 0 and output.ndim == target.ndim + 1
    dims = {dim % output.ndim for dim in allowed} if has_one_more else ()
    fitting = [dim for dim in dims if _without(output.shape, dim) == tuple(target.shape)]
    where = " or ".join(map(str, allowed))
    _check(name, bool(fitting), f"an output of the target's shape and one dim more, the classes (dim {where})", *got)
    use = f"metrics.{name}_with(class_dim=1), or class_dim=-1, where both dims could hold the classes"
    _check(name, len(fitting) == 1, use, *got)
    scores = output.movedim(fitting[0], -1)
    _check(name, scores.shape[-1] > 1, "a score a class for at least 2 classes", *got)
    return _at_least_float32(scores), target.long()


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _rank(scores: Tensor, classes: Tensor) -> Tensor:
    """How many classes rank before the given one: scores `[…, C]`, classes `[…]` -> int64 `[…]`.

    Written out, since `argmax` and `topk` leave open which of equal scores comes first.
    """
    index = classes.unsqueeze(-1)
    own = scores.gather(-1, index)
    before = torch.arange(scores.shape[-1], device=scores.device) < index
    return ((~(scores <= own)) | ((scores == own) & before)).sum(-1)


def _difference(name: str, output: Any, target: Tensor) -> Tensor:
    """Output - target without broadcasting: `[N, 1]` against `[N]` is a difference a sample, not an N×N table."""
    is_same = isinstance(output, Tensor) and output.ndim > 0 and output.shape[:1] == target.shape[:1]
    sizes = [[size for size in each.shape[1:] if size != 1] for each in (output, target)] if is_same else [0, 1]
    _check(name, sizes[0] == sizes[1], "output and target of one shape", output, target)
    return _at_least_float32(output) - _at_least_float32(target.reshape(output.shape))


def _mean_a_sample(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.ndim > 1 else values
