"""Causes in the update: gradients that are not exchanged, and rates, clipping, loss scales and absences by device."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.optim.lr_scheduler import LRScheduler

from samestep.comm.communicator import Communicator, make_communicator
from samestep.comm.environment import read_environment
from samestep.text import listed
from samestep.verify.causes.evidence import Cause, Evidence, Facts, by_step, forwards, on_devices
from samestep.verify.comparison import losses_of, ranks_apart
from samestep.verify.recording import Recording
from samestep.verify.summaries import norm as norm_of
from samestep.verify.summaries import unsharded
from samestep.verify.watching import with_gradients
from samestep.verify.wraps import Wrap, by_script, wrapped

RATE = 0.01
near = partial(math.isclose, rel_tol=1e-4)
EXCHANGE_TIMEOUT = timedelta(seconds=60)
CLIP_ALIASES = ("torch.nn.utils.clip_grad",)


def fact_wraps(facts: Facts) -> list[Wrap]:
    """Records whether there is a process group, norms of clipping, decisions of GradScalers, steps of schedulers."""

    def observe_group() -> None:
        if not (dist.is_available() and dist.is_initialized()):
            facts.add_once("no_group")

    def zero_grad(inner: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        # A backward since the last update: its gradients are thrown away.
        if facts.has_counted("backward"):
            facts.count("skipped")
        inner(*args, **kwargs)

    def clip(inner: Callable[..., Tensor], parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        norm = inner(parameters, max_norm, *args, **kwargs)
        facts.add("clip", norm=float(norm), max_norm=float(max_norm))
        return norm

    def maybe_step(inner: Callable[..., Any], self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        found = sum(float(value) for value in state["found_inf_per_device"].values())
        facts.add("scaler", scale=float(self.get_scale()), skips=found > 0)
        return inner(self, optimizer, state, *args, **kwargs)

    def schedule(inner: Callable[..., None], self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        facts.count("schedule", type=type(self).__name__)
        inner(self, *args, **kwargs)

    def make_ddp(inner: Callable[..., None], self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner(self, module, *args, **kwargs)
        facts.add_once("ddp", frozen=[name for name, one in module.named_parameters() if not one.requires_grad])

    def call_ddp(inner: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        facts.count("ddp_forward", sync=self.require_backward_grad_sync)
        return inner(self, *args, **kwargs)

    facts.at_step.append(observe_group)
    ddp = [Wrap(DistributedDataParallel, "__init__", make_ddp), Wrap(DistributedDataParallel, "forward", call_ddp)]
    return [
        *(ddp if dist.is_available() else ()),
        Wrap(utils, "clip_grad_norm_", clip, CLIP_ALIASES),
        Wrap(GradScaler, "_maybe_opt_step", maybe_step),
        Wrap(LRScheduler, "step", schedule),
        *(Wrap(owner, "zero_grad", zero_grad) for owner in (Optimizer, nn.Module)),
    ]


@contextmanager
def before_updates(act: Callable[[Optimizer], None]) -> Iterator[None]:
    """Calls something before every update, with the gradients there, and before the hooks that observe it."""
    handle = optimizers.register_optimizer_step_pre_hook(with_gradients(act))
    hooks: Any = optimizers._global_optimizer_pre_hooks
    # An antidote acts before the probe looks: what is recorded is what the optimizer gets.
    hooks.move_to_end(handle.id, last=False)
    try:
        yield
    finally:
        handle.remove()


def to_parameters(act: Callable[[nn.Parameter], None]) -> Callable[[Optimizer], None]:
    """A function that acts on every parameter of an optimizer."""

    def act_on_all(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                act(parameter)

    return act_on_all


def _suspect_alone(evidence: Evidence) -> str | None:
    for run in evidence.shared if evidence.is_ddp else ():
        if any(run.facts("no_group", 0)):
            return f"on {on_devices(run)} no process group was started when the first step was taken"
        apart = ranks_apart(run, ("gradients",))
        if apart is not None:
            calls = {
                fact["sync"]: fact["times"] for fact in run.facts("ddp_forward", 0) if fact["step"] == apart.step - 1
            }
            frozen = [fact["frozen"] for fact in run.facts("ddp", 0)]
            reason = "nothing exchanged it"
            if any(apart.name in names for names in frozen):
                reason = "it required no gradient when DistributedDataParallel wrapped the model"
            elif frozen and not calls:
                reason = "DistributedDataParallel was not called in that step, but a module within it (.module)"
            elif False in calls:
                reason = f"{calls[False]} of {sum(calls.values())} forwards were in no_sync"
            return f"in step {apart.step} {apart.text}; {reason}"
    return None


def _with_exchange() -> AbstractContextManager[None]:
    """Every update is made with the mean of the ranks' gradients."""
    place = read_environment()
    joined: list[Communicator] = []

    def exchange(parameter: nn.Parameter) -> None:
        if not parameter.requires_grad or place.world_size == 1 or hasattr(parameter, "full_tensor"):
            return  # a distributed tensor's gradient is exchanged by its placements
        if not joined:
            joined.append(make_communicator(place, torch.device("cpu"), EXCHANGE_TIMEOUT))
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        row = torch.cat([grad.cpu().reshape(-1), torch.tensor([parameter.grad is not None], dtype=grad.dtype)])
        mean = joined[0].gather_rows(row[None], [1] * place.world_size).mean(0)
        if mean[-1] > 0:  # some rank has a gradient
            parameter.grad = grad.copy_(mean[:-1].view_as(grad))

    return before_updates(to_parameters(exchange))


def _suspect_rate(evidence: Evidence) -> str | None:
    first, *others = evidence.firsts
    for other in others:
        for step in range(min(first.num_steps, other.num_steps)):
            rates = [[rate for state in run.steps[0][step]["states"] for rate in state["lr"]] for run in (first, other)]
            if rates[0] != rates[1]:
                differing = ((a, b) for a, b in zip(*rates, strict=False) if a != b)
                one, many = next(differing, (float("nan"), float("nan")))
                counts = [_num_scheduled(run, step) for run in (first, other)]
                stepped = (
                    f"; schedulers had stepped {counts[0]} and {counts[1]} times" if counts[0] != counts[1] else ""
                )
                return (
                    f"the learning rate of step {step + 1} was {one:g} on {on_devices(first)} and {many:g} on "
                    f"{on_devices(other)}{stepped}"
                )
    return None


def _num_scheduled(run: Recording, step: int) -> int:
    return sum(int(fact["times"]) for fact in run.facts("schedule", 0) if fact["step"] <= step)


def _with_one_rate() -> AbstractContextManager[None]:
    """Every update is made with the same learning rate."""

    def set_rate(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(RATE)
            elif "lr" in group:
                group["lr"] = RATE

    return before_updates(set_rate)


def _suspect_clip(evidence: Evidence) -> str | None:
    for run in evidence.shared:
        for step, ranks in by_step(run, "clip", lambda fact: (float(fact["norm"]), float(fact["max_norm"]))).items():
            for calls in zip(*ranks, strict=False):
                norms, bound = [norm for norm, _ in calls], calls[0][1]
                if max(norms) > bound and max(norms) - min(norms) > 1e-5 * max(norms):
                    return (
                        f"in step {step + 1} on {on_devices(run)} the ranks clipped to {bound:g} by norms of their "
                        f"own: {listed(norms, 8)}"
                    )
    return None


def _without_clipping() -> AbstractContextManager[None]:
    """Norms are measured and nothing is clipped."""

    def clip(inner: Callable[..., Tensor], parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        return inner(parameters, float("inf"), *args, **kwargs)

    return wrapped(
        Wrap(utils, "clip_grad_norm_", clip, CLIP_ALIASES),
        Wrap(utils, "clip_grad_value_", lambda *args, **kwargs: None, CLIP_ALIASES),
    )


def _suspect_rescaled(evidence: Evidence) -> str | None:
    first, *others = evidence.firsts
    for other in others if evidence.is_ddp else ():
        for step in range(min(first.num_steps, other.num_steps)):
            norms = [[n for group in run.steps[0][step]["gradients"] for n in group["norm"]] for run in (first, other)]
            ratios = [many / one for one, many in zip(*norms, strict=False) if one and many] or [1.0]
            pairs = product(losses_of(first, step), losses_of(other, step))
            if not near(ratios[0], 1) and near(min(ratios), max(ratios)) and any(near(*pair) for pair in pairs):
                runs = f"on {on_devices(other)} as on {on_devices(first)}"
                return f"all gradients of step {step + 1} were {ratios[0]:.6g} times as large {runs}, at the same loss"
    return None


def _with_unit_norm() -> AbstractContextManager[None]:
    """Every update is made with gradients whose norm is 1."""

    def rescale(optimizer: Optimizer) -> None:
        grads = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        total = math.hypot(*(norm_of(unsharded(grad)) for grad in grads))
        if 0 < total < math.inf:
            for grad in grads:
                grad.div_(total)

    return before_updates(rescale)


def _suspect_skips(evidence: Evidence) -> str | None:
    for run in evidence.shared:
        ranks = range(run.world_size)
        seen = [[(fact["scale"], fact["skips"]) for fact in run.facts("scaler", rank)] for rank in ranks]
        for number, decisions in enumerate(zip(*seen, strict=False)):
            if len(set(decisions)) > 1:
                skipping = [rank for rank, (_, skips) in enumerate(decisions) if skips]
                scales = listed([float(scale) for scale, _ in decisions], 8)
                skipped = f"rank {listed(skipping)} alone skipped" if skipping else "none skipped"
                return f"at update {number} on {on_devices(run)} the ranks' loss scales were {scales}, and {skipped} it"
    late = {on_devices(run): [fact["step"] + 1 for fact in run.facts("skipped", 0)] for run in evidence.firsts}
    totals = ", ".join(f"{listed(steps) or 'none'} on {devices}" for devices, steps in late.items())
    return f"before these steps an update was skipped: {totals}" if len(set(map(tuple, late.values()))) > 1 else None


def _suspect_left_out(evidence: Evidence) -> str | None:
    for run in evidence.shared if evidence.is_ddp else ():
        for step, ranks in sorted(forwards(run).items()):
            most = max(ranks)
            if min(ranks) < most:
                more = listed([rank for rank, count in enumerate(ranks) if count == most])
                return (
                    f"on {on_devices(run)} rank {more} ran {most} forwards up to its update {step}, others "
                    f"{min(ranks)}: it left a step out, and its gradients were added to gradients of another step"
                )
    return None


@contextmanager
def _without_skips() -> Iterator[None]:
    """GradScalers are switched off, the program finds all numbers finite, and gradients that are not are zero."""

    def init(inner: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        self._enabled = False

    def find(is_finite: bool, inner: Callable[..., Any], value: Any) -> Any:
        if not by_script():
            return inner(value)
        return torch.full_like(value, is_finite, dtype=torch.bool) if isinstance(value, Tensor) else is_finite

    def fill_in(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(0, 0, 0)

    places = [(owner, name) for owner in (torch, Tensor, math) for name in ("isnan", "isinf", "isfinite")]
    finds = [Wrap(owner, name, partial(find, name == "isfinite")) for owner, name in places]
    with before_updates(to_parameters(fill_in)), wrapped(Wrap(GradScaler, "__init__", init), *finds):
        yield


def _suspect_unused(evidence: Evidence) -> str | None:
    """Compares which gradients are absent between all ranks and runs."""
    for step in range(min(run.num_steps for run in evidence.firsts)):
        absent: dict[str, str] = {}
        there: dict[str, str] = {}
        for run in evidence.firsts:
            for rank, steps in enumerate(run.steps):
                names = {line["optimizer"]: line["names"] for line in run.lines("parameters", rank)}
                for group in steps[step]["gradients"]:
                    for name, norm in zip(names.get(group["optimizer"], ()), group["norm"], strict=False):
                        found = absent if norm is None else there
                        found.setdefault(name, f"on rank {rank} of {run.world_size}")
        for name in absent:
            if name in there:
                return (
                    f"in step {step + 1} parameter {name} had no gradient {absent[name]}, so that it was left alone, "
                    f"and had one {there[name]}, which decays and moves it even if it is zero"
                )
    return None


def _with_zero_gradients() -> AbstractContextManager[None]:
    """A gradient that is absent counts as zero."""

    def fill_in(parameter: nn.Parameter) -> None:
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)

    return before_updates(to_parameters(fill_in))


LEARNING_RATE = Cause(
    "learning_rate",
    "the learning rate is scaled by, or stepped per, device",
    "Make the schedule a function of the step and of the global batch, which stay the same when devices are added.",
    _suspect_rate,
    _with_one_rate,
)
ALONE = Cause(
    "alone",
    "gradients are not exchanged: each device updates by its own",
    "Have the program start a process group: Trainer(strategy='ddp', devices=N) in Lightning, "
    "DistributedDataParallel in a loop of your own; or, if it is written for one process, run it as one: "
    "--single-process. Call the model that DistributedDataParallel returns, not its .module; wrap it once all that is "
    "ever trained requires its gradient; and run the last backward before an update outside of no_sync.",
    _suspect_alone,
    _with_exchange,
)
LOCAL_CLIP = Cause(
    "local_clip",
    "each device clips by the norm of its own gradient",
    "Clip after the gradients have been reduced over the ranks; train_step(max_grad_norm=…) does so.",
    _suspect_clip,
    _without_clipping,
)
RESCALED = Cause(
    "rescaled",
    "the program scales its gradients by a number that depends on the devices",
    "After DistributedDataParallel's backward every rank holds the same gradients: clip by their norm as it is "
    "(torch.nn.utils.clip_grad_norm_), which is not to be added up, or averaged, over the ranks once more.",
    _suspect_rescaled,
    _with_unit_norm,
)
LOSS_SCALE = Cause(
    "loss_scale",
    "each device decides by itself to skip an update or to change its loss scale",
    "Reduce the gradients before scaler.unscale_ and scaler.step look at them, so that every rank finds the same "
    "infinities (precision='16-mixed' does so), and skip an update by a number that is reduced over all ranks too.",
    _suspect_skips,
    _without_skips,
)
LEFT_OUT = Cause(
    "left_out",
    "a rank leaves a step out by itself",
    "Decide together, before anything is left out: dist.all_reduce(is_bad, dist.ReduceOp.MAX), and then all ranks "
    "`continue`, or none.",
    _suspect_left_out,
    _without_skips,
)
UNUSED = Cause(
    "unused",
    "a parameter without a gradient is left alone on some devices and moved on others",
    "Leave the gradient None if no device has one, instead of filling in zeros, or use every parameter every step.",
    _suspect_unused,
    _with_zero_gradients,
)
