"""The configuration of a step: precision, strategy, clipping, what happens to a gradient that is not finite.

Precision: autocast for the forward, the loss scale of float16, and the check that a step's numbers are finite.

Names as in Lightning: `32-true`, `bf16-mixed`, `16-mixed`. Parameters, gradients and optimizer state stay float32.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.checks import check_choice, check_number
from samestep.engine.losses import LossFn, describe, wide_dtype
from samestep.errors import UsageError

PRECISIONS: dict[str, torch.dtype | None] = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
INITIAL_SCALE = 2.0**16  # of the mean over the global batch, as in torch.amp.GradScaler
MIN_SCALE, MAX_SCALE = 2.0**-10, 2.0**127
GROWTH_INTERVAL = 2000
OnNonFinite = Literal["raise", "skip"]
AuditAction = Literal["warn", "exclude", "stop"]


def check_precision(name: str) -> torch.dtype | None:
    """The dtype of autocast; None for full precision."""
    if name not in PRECISIONS:
        raise UsageError(f"got precision={name!r}; it is one of {', '.join(PRECISIONS)} (--precision)")
    return PRECISIONS[name]


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """The context of a forward; without a dtype it switches the script's own autocast off."""
    # Inside an autocast of the script, torch would keep the narrow copies of the weights beyond an update.
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            yield
    finally:
        torch.clear_autocast_cache()


class LossScale:
    """The dynamic scale of float16 training (Micikevicius et al. 2018, arXiv:1710.03740, §3.2); 1 unless enabled."""

    # A step whose gradient overflowed halves it and does not update; `GROWTH_INTERVAL` good steps in a row double it.
    # What the gradients are sums over is counted by the first steps alone (tokens): an overflow at the scale of the
    # beginning, which was chosen for samples, sets it to what it is for that count, in place of a dozen that halve it.
    # Powers of two change no bit of a gradient that neither over- nor underflows. It lies on the device, where a late
    # check decides: reading it there would make the host wait.

    def __init__(self, device: torch.device, enabled: bool, num_summed: int = 1) -> None:
        self.enabled = enabled
        # A microbatch's backward begins with the sum over its samples, of `num_summed` in the global batch.
        initial = max(INITIAL_SCALE / 2 ** (num_summed - 1).bit_length(), 2 * MIN_SCALE)
        self._initial = initial
        self._wanted = torch.full((), INITIAL_SCALE, dtype=wide_dtype(device), device=device)
        self.scale = torch.full((), initial if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), device=device)

    def apply(self, initial: Tensor) -> Tensor:
        """The gradient that a backward begins with, scaled."""
        return initial * self.scale.to(initial.dtype) if self.enabled else initial

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divides flat gradients by the scale, in place."""
        if self.enabled:
            for gradient in gradients:
                gradient.div_(self.scale.to(gradient.device))

    def update(self, overflowed: Tensor | bool, active: Tensor | bool, count: Tensor | float = 1.0) -> None:
        """Adapts the scale to a step whose gradient is a sum over a count, if `active`; 0-d tensors, or numbers.

        The count is finite and not 0, as a `divisor` is.
        """
        if not self.enabled:
            return
        # Each line is a kernel or two, in each step: what the host knows by itself is left out.
        good = self._good_steps + 1
        grows = good >= GROWTH_INTERVAL
        adapted = (self.scale * (grows + 1.0)).clamp(max=MAX_SCALE)
        if overflowed is not False:
            overflowed = torch.as_tensor(overflowed, device=self.scale.device)
            lowered = self.scale * 0.5
            if isinstance(count, Tensor) or count != 1:  # for a mean the scale of the beginning is that of its count
                is_first = self.scale == self._initial
                lowered = torch.minimum(lowered, self._start(count) / is_first)  # infinity if it is false
            adapted = torch.where(overflowed, lowered, adapted)
            good = good.masked_fill(overflowed, 0)
        active = torch.as_tensor(active, device=self.scale.device)
        torch.where(active, adapted, self.scale, out=self.scale)
        torch.where(active, good.masked_fill(grows, 0), self._good_steps, out=self._good_steps)

    def _start(self, count: Tensor | float) -> Tensor:
        """The largest power of two that is `INITIAL_SCALE` by the count at most."""
        scale = self._wanted / count
        # Its exponent alone, of IEEE 754.
        as_int, exponent = (torch.int64, 0x7FF << 52) if scale.dtype == torch.float64 else (torch.int32, 0xFF << 23)
        power = scale.view(as_int).bitwise_and_(exponent).view(scale.dtype)
        return power.clamp(min=2 * MIN_SCALE).to(self.scale.dtype)

    def state_dict(self) -> dict[str, float]:
        """The scale and the number of good steps in a row; empty unless enabled."""
        return {"scale": float(self.scale), "good_steps": float(self._good_steps)} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores a saved scale."""
        if self.enabled and state:
            self.scale.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])


class FiniteCheck:
    """Allows an update only if the loss and the gradient are finite, and no step before has failed."""

    # The host reads the numbers of a step before its update, unless every optimizer is a fused Adam or AdamW, which can
    # skip an update on the device: then (`is_late`) the outcome is a flag on the device, which the host reads when it
    # reads the loss. The numbers are 0-d tensors on a GPU and where the check is late (`on_device`), else floats; the
    # bits of the update are the same in all these cases.

    def __init__(
        self,
        device: torch.device,
        optimizers: Sequence[Optimizer],
        scale: LossScale,
        on_nonfinite: OnNonFinite,
        late: bool | None,
        is_offloaded: bool = False,
    ) -> None:
        can_be_late = all(_honours_found_inf(optimizer) for optimizer in optimizers)
        # Not by default where the update is one of the CPU, for which the flag would have to be read.
        updates_on_cpu = device.type == "cpu" or is_offloaded
        self.is_late = (not updates_on_cpu and can_be_late) if late is None else late
        if self.is_late and not can_be_late:
            raise UsageError(
                "late_check=True needs Adam or AdamW with fused=True, which can skip an update on the device"
            )
        if self.is_late and is_offloaded and device.type != "cpu":
            raise UsageError(
                "late_check=True lets the device skip an update, and Sharded(cpu_offload=True) updates in host memory: "
                "leave one of them out"
            )
        # MPS has no float64, in which floats and tensors have the same bits.
        self.on_device = self.is_late or device.type not in ("cpu", "mps")
        self._scale = scale
        self._skips = on_nonfinite == "skip"
        # Whether no step has failed.
        self._is_good: Any = torch.ones((), dtype=torch.bool, device=device) if self.on_device else True

    def judge(self, total: Any, count: Any, norm: Any, divided_by: Any = 1.0) -> tuple[Any, Any]:
        """Whether to update, and whether this step is the first that failed; adapts the loss scale.

        `divided_by` is the divisor of a gradient that was one of the sum over the count, and not of the mean.
        """
        # By operators that bools and tensors have alike, so that it is written once; few, since each is a kernel.
        finite_loss, finite_gradient = _is_mean_finite(total, count), _is_finite(norm)
        before = self._is_good
        ok = finite_loss & finite_gradient & before
        if self._skips:
            first = before ^ before
        elif self._scale.enabled:  # an overflow is no failure while the scale can still be lowered
            at_the_end: Any = self._scale.scale <= MIN_SCALE
            at_the_end = at_the_end if self.on_device else bool(at_the_end)
            first = before & ((finite_loss ^ True) | ((finite_gradient ^ True) & at_the_end))
        else:
            first = before ^ ok
        # Later steps do not update until the host has read the failure: it goes back to the state before this step.
        self._is_good = before ^ first
        if self._scale.enabled:
            self._scale.update(finite_gradient ^ True, self._is_good, divided_by)
        return ok, first

    def reset(self) -> None:
        """Allows updates again, after the failure was raised."""
        self._is_good = self._is_good | True


@contextmanager
def left_out_if(skipped: Tensor, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Makes the optimizers skip their update on the device if `skipped`, by the attribute that GradScaler uses."""
    found_inf = skipped.to(torch.float32)
    for optimizer in optimizers:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    yield
    for optimizer in optimizers:
        del optimizer.found_inf  # type: ignore[attr-defined]


def divisor(count: Any) -> Any:
    """The divisor of the gradient: the count, or 1 if the mean loss is not finite because of it."""
    if isinstance(count, Tensor):
        return torch.where(count / count == 1, count, 1)  # false for 0, infinity and NaN
    return count if _is_finite(count) and count else 1.0


def _is_mean_finite(total: Any, count: Any) -> Any:
    return (isinstance(count, Tensor) or bool(count)) and _is_finite(total / count)


def _is_finite(value: Any) -> Any:
    return value - value == 0  # two kernels; torch.isfinite is four


def _honours_found_inf(optimizer: Optimizer) -> bool:
    """Whether an optimizer leaves its whole state alone if `found_inf` is set: fused Adam and AdamW."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.Adam) and fused


PARAM_DTYPES = ("bf16", "fp16")
SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole state. Tier `bitwise`.

    Attributes:
        shard_optimizer: ZeRO-1: each rank keeps and updates the optimizer's state of its part of the parameters only,
            and the updated parts are gathered: 1/D of the optimizer's memory and time, with as many bytes sent.
    """

    name: ClassVar[str] = "replicate"
    axis: ClassVar[None] = None
    shard_optimizer: bool = False


@dataclass(frozen=True)
class Sharded:
    """Every rank holds 1/D of parameters, gradients and optimizer state, by PyTorch's FSDP2. Tier `bitwise`.

    The model's parameters become DTensors; the optimizer holds this rank's local shards of them.

    Attributes:
        wrap: the modules that are unsharded and resharded as one each: a function of a module, or the most parameters
            that one may have; by default an eighth of the model's.
        reshard_after_forward: reshard a module's parameters after its forward, and gather them again for its backward.
            False costs the memory of the unsharded parameters, and saves a third of the traffic.
        activation_checkpointing: recompute the activations inside the modules that `wrap` names in the backward,
            instead of keeping them. The bits stay the same.
        cpu_offload: keep parameters and optimizer state in host memory; no difference on a CPU.
        param_dtype: "bf16" or "fp16": FSDP2's own mixed precision: parameters travel in half the bytes, and modules
            compute in that type. The bits are equal on all numbers of devices, and differ from those of `precision`,
            which is the tier `allclose` to it. None leaves it to `precision`.
    """

    name: ClassVar[str] = "sharded"
    axis: ClassVar[None] = None
    wrap: Callable[[nn.Module], bool] | int | None = None
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    param_dtype: str | None = None

    def __post_init__(self) -> None:
        is_size = isinstance(self.wrap, int) and not isinstance(self.wrap, bool) and self.wrap >= 1
        if self.wrap is not None and not callable(self.wrap) and not is_size:
            raise UsageError(f"got wrap={self.wrap!r}; it is a function of a module, or a number of parameters")
        if self.param_dtype is not None and self.param_dtype not in PARAM_DTYPES:
            raise UsageError(
                f"got param_dtype={self.param_dtype!r}; it is {' or '.join(map(repr, PARAM_DTYPES))}, or None"
            )


@dataclass(frozen=True)
class Pipeline:
    """The model is cut into stages, of which each rank has one. Tier `bitwise`.

    The ranks are those along the axis "pipe" of the run's mesh: `Run(…, mesh={"data": -1, "pipe": 4})`. The model is an
    `nn.Sequential`, or lists by a method `pipeline_stages()` the modules that it applies one after another.

    Attributes:
        split: the names of the modules at which a new stage begins. None minimises the largest stage: by the time of
            forward and backward of each module, if there is an `example`, else by the number of parameters.
        schedule: the order of forwards and backwards of a rank: "gpipe" or "1f1b"; see docs/pipeline.md. The bits do
            not depend on it.
        example: the model's argument for one microbatch; used to measure the time of the modules only.
    """

    name: ClassVar[str] = "pipeline"
    axis: ClassVar[str] = "pipe"
    split: Sequence[str] | None = None
    schedule: str = "1f1b"
    example: Any = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UsageError(f"got schedule={self.schedule!r}; it is {' or '.join(map(repr, SCHEDULES))}")
        if self.split is not None:
            is_names = not isinstance(self.split, str) and all(isinstance(name, str) for name in self.split)
            if not is_names or len(set(self.split)) < len(self.split):
                raise UsageError(f'got split={self.split!r}; it is a list of different names, such as ["blocks.4"]')


StrategyOptions = Replicate | Sharded | Pipeline
REPLICATE = Replicate()
STRATEGIES: dict[str, type[StrategyOptions]] = {each.name: each for each in (Replicate, Sharded, Pipeline)}


def as_strategy(value: str | StrategyOptions, shard_optimizer: bool = False) -> StrategyOptions:
    """The options of a strategy given by its name; options as they are."""
    if isinstance(value, str):
        if value == "tensor":
            raise UsageError(
                "got strategy='tensor'; samestep takes models that PyTorch has divided: call "
                'torch.distributed.tensor.parallel.parallelize_module(model, run.mesh["tensor"], plan), make the '
                "optimizer afterwards, and leave strategy out (see docs/tensor.md)"
            )
        if value not in STRATEGIES:
            names = ", ".join(map(repr, STRATEGIES))
            raise UsageError(f"got strategy={value!r}; it is {names}, or one with options: samestep.Sharded(…)")
        value = STRATEGIES[value]()
    if not isinstance(value, StrategyOptions):
        raise UsageError(
            f"got strategy={value!r}; it is a name, or samestep.Replicate(…), samestep.Sharded(…) or "
            "samestep.Pipeline(…)"
        )
    if shard_optimizer and not isinstance(value, Replicate):
        how = {"sharded": "does so already", "pipeline": "keeps it by stages"}
        raise UsageError(
            f"shard_optimizer shards the optimizer's state, and strategy={value.name!r} {how[value.name]}: leave "
            "shard_optimizer out"
        )
    return Replicate(shard_optimizer=True) if shard_optimizer else value


BUCKET_BYTES, CUDA_BUCKET_BYTES = 8 * 2**20, 32 * 2**20
# What a scheduler changes by itself: not a setting, but part of its state.
PROGRESS = frozenset(("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "verbose"))


@dataclass(frozen=True)
class StepConfig:
    """The arguments of `samestep.Run.train_step` other than model, optimizers and scheduler; see there."""

    # Checked here, before a device or another rank is involved.

    seed: int
    stream: int  # separates the randomness of this training step from that of the run's other ones
    loss_fn: LossFn
    counts_fn: Callable[[Any], Any] | None = None
    max_grad_norm: float | None = None
    precision: str = "32-true"
    on_nonfinite: OnNonFinite = "raise"
    late_check: bool | None = None
    overlap: bool = True
    bucket_bytes: int | None = None
    compile: bool = False
    strategy: StrategyOptions = REPLICATE
    global_batch_size: int = 1
    audit: int | None = None
    audit_action: AuditAction = "exclude"

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise UsageError(f"got {describe(self.loss_fn)} as loss_fn; it must be a function loss_fn(model, batch)")
        limit = self.max_grad_norm
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise UsageError(
                f"got max_grad_norm={limit!r}; it must be above 0 (--max-grad-norm), or None for no clipping"
            )
        if self.on_nonfinite not in ("raise", "skip"):
            raise UsageError(f"got on_nonfinite={self.on_nonfinite!r}; it is 'raise' or 'skip'")
        if self.audit is not None:
            check_number("audit", self.audit, 1)
            if not isinstance(self.strategy, Replicate):
                raise UsageError(
                    f"got audit={self.audit} with strategy='{self.strategy.name}', where a device has a part of the "
                    "model, and no other can compute its work again: leave audit (--audit) out, or use "
                    "strategy='replicate' (--strategy replicate)"
                )
        check_choice("audit_action", self.audit_action, get_args(AuditAction))
        check_precision(self.precision)


@dataclass(frozen=True)
class Settings:
    """The plain values (numbers, strings, None, and tuples, lists and dicts of them) of optimizers and scheduler."""

    optimizers: list[tuple[str, list[dict[str, Any]]]]  # the class of each, and the values of its parameter groups
    scheduler: dict[str, Any] | None  # class, values, and those of the schedulers in it

    def as_json(self) -> dict[str, Any]:
        """For the contract: {"optimizer": {"class": "SGD", "lr": 0.1, …}, "scheduler": …}."""
        fields = {}
        for number, (name, groups) in enumerate(self.optimizers):
            entry: dict[str, Any] = {"class": name}
            for index, group in enumerate(groups):
                entry.update(group if len(groups) == 1 else {f"group_{index}": group})
            fields[str(number)] = entry
        optimizer = fields["0"] if len(fields) == 1 else fields
        return {"optimizer": optimizer, "scheduler": self.scheduler}


def default_bucket_bytes(is_cuda: bool) -> int:
    """The size of a message of gradients."""
    # A GPU sends at once what a CPU takes a millisecond for: messages are larger by as much, and their launches fewer.
    return CUDA_BUCKET_BYTES if is_cuda else BUCKET_BYTES


def settings_of(optimizers: Sequence[Optimizer], scheduler: LRScheduler | None) -> Settings:
    """The settings as they are now: called when the step is made, before a schedule has moved them."""
    of_optimizers = [
        (type(optimizer).__name__, [dict(_plain(group)) for group in optimizer.param_groups])
        for optimizer in optimizers
    ]
    return Settings(of_optimizers, None if scheduler is None else _of_scheduler(scheduler))


def apply_new_settings(
    optimizers: Sequence[Optimizer], scheduler: LRScheduler | None, old: Settings, new: Settings
) -> None:
    """Changes optimizers and a scheduler whose state was loaded to the settings that they are made with now."""
    for optimizer, (_, before), (_, now) in zip(optimizers, old.optimizers, new.optimizers, strict=True):
        for group, was, is_now in zip(optimizer.param_groups, before, now, strict=False):  # some were added in training
            for key in _changed(was, is_now):
                _put(group, key, was[key], is_now[key])
    if scheduler is not None and old.scheduler is not None and new.scheduler is not None:
        _change_scheduler(scheduler, old.scheduler, new.scheduler)


def _of_scheduler(scheduler: Any) -> dict[str, Any]:
    # Copied, since a scheduler goes on changing its lists in place.
    values = {key: copy.copy(value) for key, value in _plain(vars(scheduler)) if key not in PROGRESS}
    parts = {str(number): _of_scheduler(part) for number, part in enumerate(vars(scheduler).get("_schedulers", ()))}
    return {"class": type(scheduler).__name__, **values, **({"schedulers": parts} if parts else {})}


def _change_scheduler(scheduler: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in _changed(before, now):
        if key not in ("class", "schedulers"):
            setattr(scheduler, key, copy.copy(now[key]))
    parts = zip(before.get("schedulers", {}).values(), now.get("schedulers", {}).values(), strict=True)
    for part, (was, is_now) in zip(vars(scheduler).get("_schedulers", ()), parts, strict=True):
        _change_scheduler(part, was, is_now)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The entries that both have and that differ."""
    return [key for key, value in now.items() if key in before and before[key] != value]


def _put(group: dict[str, Any], key: str, before: Any, now: Any) -> None:
    if key == "lr" and before and float(group[key]) != before:
        now = float(group[key]) * (now / before)  # in proportion, since a schedule has moved it
    if isinstance(group[key], Tensor):
        group[key].fill_(now)
    else:
        group[key] = now


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries that are plain values; a tensor of one element counts as a number."""
    # Tensors of one element: learning rates of capturable optimizers are such.
    for key, value in values.items():
        taken = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if key not in ("params", "param_names") and _is_plain(taken):
            yield key, taken


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
