"""Causes in the update: gradients that are not exchanged, and rates, clipping, loss scales and absences by device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import utils
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.optim.lr_scheduler import LRScheduler

from samestep.comm.communicator import Communicator, make_communicator
from samestep.comm.environment import read_environment
from samestep.verify.causes.cause import Cause
from samestep.verify.causes.evidence import Evidence, by_step, listed, on_devices
from samestep.verify.causes.notes import Notes, Wrap, wrapped
from samestep.verify.recording import Line, Recording
from samestep.verify.watching.steps import with_gradients

RATE = 0.01
EXCHANGE_TIMEOUT = timedelta(seconds=60)
CLIP_ALIASES = ("torch.nn.utils.clip_grad",)


def listen(notes: Notes) -> list[Wrap]:
    """Whether there is a process group, norms of clipping, what GradScalers decide, and how often schedulers step."""

    def look_for_group() -> None:
        if not (dist.is_available() and dist.is_initialized()):
            notes.tell_once("no_group")

    notes.at_step.append(look_for_group)

    def clipping(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
            norm = inner(parameters, max_norm, *args, **kwargs)
            notes.tell("clip", norm=float(norm), max_norm=float(max_norm))
            return norm

        return clip

    def stepping(inner: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            found = sum(float(value) for value in state["found_inf_per_device"].values())
            notes.tell("scaler", scale=float(self.get_scale()), skips=found > 0)
            return inner(self, optimizer, state, *args, **kwargs)

        return step

    def scheduling(inner: Callable[..., None]) -> Callable[..., None]:
        def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
            notes.count("schedule", type=type(self).__name__)
            inner(self, *args, **kwargs)

        return step

    return [
        Wrap(utils, "clip_grad_norm_", clipping, CLIP_ALIASES),
        Wrap(GradScaler, "_maybe_opt_step", stepping),
        Wrap(LRScheduler, "step", scheduling),
    ]


@contextmanager
def before_updates(prepare: Callable[[Optimizer], None]) -> Iterator[None]:
    """Calls something before every update, with the gradients there, and before those who watch it."""
    handle = optimizers.register_optimizer_step_pre_hook(with_gradients(prepare))
    hooks: Any = optimizers._global_optimizer_pre_hooks
    hooks.move_to_end(handle.id, last=False)
    try:
        yield
    finally:
        handle.remove()


def _suspect_alone(evidence: Evidence) -> str | None:
    alone = [run for run in evidence.shared if run.family == "ddp" and any(run.facts("no_group", 0))]
    if not alone:
        return None
    return f"on {on_devices(alone[0])} no process group was started when the first step was taken"


@contextmanager
def _with_exchange() -> Iterator[None]:
    """Every update is made with the mean of the ranks' gradients."""
    place = read_environment()
    joined: list[Communicator] = []

    def prepare(optimizer: Optimizer) -> None:
        if place.world_size == 1 or (dist.is_initialized() and not joined):
            return
        if not joined:
            joined.append(make_communicator(place, torch.device("cpu"), EXCHANGE_TIMEOUT))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    row = parameter.grad.detach().cpu().reshape(1, -1)
                    mean = joined[0].gather_rows(row, [1] * place.world_size).mean(0)
                    parameter.grad.copy_(mean.view_as(parameter.grad))

    with before_updates(prepare):
        yield


def _rates(run: Recording, step: int) -> list[float]:
    return [rate for state in run.steps[0][step]["states"] for rate in state["lr"]]


def _suspect_rate(evidence: Evidence) -> str | None:
    if len(evidence.firsts) < 2:
        return None
    first, *others = evidence.firsts
    for other in others:
        for step in range(min(first.num_steps, other.num_steps)):
            alone, together = _rates(first, step), _rates(other, step)
            if alone != together:
                pairs = zip(alone, together, strict=False)
                one, many = next(((a, b) for a, b in pairs if a != b), (float("nan"), float("nan")))
                counts = [_num_scheduled(run, step) for run in (first, other)]
                stepped = (
                    f"; schedulers had stepped {counts[0]} and {counts[1]} times" if counts[0] != counts[1] else ""
                )
                return (
                    f"the learning rate of step {step} was {one:g} on {on_devices(first)} and {many:g} on "
                    f"{on_devices(other)}{stepped}"
                )
    return None


def _num_scheduled(run: Recording, step: int) -> int:
    return sum(int(fact["times"]) for fact in run.facts("schedule", 0) if fact["step"] <= step)


@contextmanager
def _with_one_rate() -> Iterator[None]:
    """Every update is made with the same learning rate."""

    def prepare(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(RATE)
            elif "lr" in group:
                group["lr"] = RATE

    with before_updates(prepare):
        yield


def _suspect_clip(evidence: Evidence) -> str | None:
    for run in evidence.shared:
        for step, ranks in by_step(run, "clip", lambda fact: (float(fact["norm"]), float(fact["max_norm"]))).items():
            for calls in zip(*ranks, strict=False):
                norms, bound = [norm for norm, _ in calls], calls[0][1]
                if max(norms) > bound and max(norms) - min(norms) > 1e-5 * max(norms):
                    return (
                        f"in step {step} on {on_devices(run)} the ranks clipped to {bound:g} by norms of their own: "
                        f"{listed(norms, 8)}"
                    )
    return None


@contextmanager
def _without_clipping() -> Iterator[None]:
    """Norms are measured and nothing is clipped."""

    def make(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
            return inner(parameters, float("inf"), *args, **kwargs)

        return clip

    def make_value(_: Callable[..., None]) -> Callable[..., None]:
        def clip(*args: Any, **kwargs: Any) -> None:
            return None

        return clip

    with wrapped(
        Wrap(utils, "clip_grad_norm_", make, CLIP_ALIASES), Wrap(utils, "clip_grad_value_", make_value, CLIP_ALIASES)
    ):
        yield


def _suspect_scaler(evidence: Evidence) -> str | None:
    for run in evidence.shared:
        seen = [
            [(fact["scale"], fact["skips"]) for fact in run.facts("scaler", rank)] for rank in range(run.world_size)
        ]
        for number, decisions in enumerate(zip(*seen, strict=False)):
            if len(set(decisions)) > 1:
                skipping = [rank for rank, (_, skips) in enumerate(decisions) if skips]
                scales = listed([float(scale) for scale, _ in decisions], 8)
                skipped = f"rank {listed(skipping)} alone skipped" if skipping else "none skipped"
                return f"at update {number} on {on_devices(run)} the ranks' loss scales were {scales}, and {skipped} it"
    return None


@contextmanager
def _without_scaling() -> Iterator[None]:
    """GradScalers are switched off."""

    def make(inner: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            inner(self, *args, **kwargs)
            self._enabled = False

        return init

    with wrapped(Wrap(GradScaler, "__init__", make)):
        yield


def _suspect_unused(evidence: Evidence) -> str | None:
    """Compares which gradients are absent, and which are there and zero, between all ranks and runs."""
    for step in range(min((run.num_steps for run in evidence.firsts), default=0)):
        absent: dict[str, str] = {}
        zero: dict[str, str] = {}
        for run in evidence.firsts:
            for rank in range(run.world_size):
                where = f"on rank {rank} of {run.world_size}"
                for name, norm in _gradient_norms(run, rank, step):
                    if norm is None:
                        absent.setdefault(name, where)
                    else:
                        zero.setdefault(name, where)
        for name in absent:
            if name in zero:
                return (
                    f"in step {step} parameter {name} had no gradient {absent[name]}, so that it was left alone, and "
                    f"had one {zero[name]}, which decays and moves it even if it is zero"
                )
    return None


def _gradient_norms(run: Recording, rank: int, step: int) -> Iterator[tuple[str, float | None]]:
    """Each parameter with the norm of its gradient; None where it has none."""
    names: dict[int, Line] = {line["optimizer"]: line for line in run.lines("parameters", rank)}
    for entry in run.steps[rank][step]["gradients"]:
        if entry["optimizer"] in names:
            yield from zip(names[entry["optimizer"]]["names"], entry["norm"], strict=False)


@contextmanager
def _with_zero_gradients() -> Iterator[None]:
    """A gradient that is absent counts as zero."""

    def prepare(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)

    with before_updates(prepare):
        yield


LEARNING_RATE = Cause(
    "learning_rate",
    "the learning rate is scaled by, or stepped per, device",
    "Make the schedule a function of the step and of the global batch, which stay the same when devices are added.",
    _suspect_rate,
    _with_one_rate,
)
ALONE = Cause(
    "alone",
    "every process trains a model of its own: gradients are not exchanged",
    "Have the program start a process group: Trainer(strategy='ddp', devices=N) in Lightning, use_cpu=True for the "
    "Trainer of transformers on CPUs, DistributedDataParallel in a loop of your own; or, if it is written for one "
    "process, let samestep share it out: --adopt.",
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
LOSS_SCALE = Cause(
    "loss_scale",
    "each device decides by itself to skip an update or to change its loss scale",
    "Reduce the gradients before scaler.unscale_ and scaler.step look at them, so that every rank finds the same "
    "infinities; precision='16-mixed' does so.",
    _suspect_scaler,
    _without_scaling,
)
UNUSED = Cause(
    "unused",
    "a parameter without a gradient is left alone on some devices and moved on others",
    "Leave the gradient None where no device has one, instead of filling in zeros, or use every parameter every step.",
    _suspect_unused,
    _with_zero_gradients,
)
