"""Profiling of an adopted script: what it does is seen where it passes through torch and through adoption."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.comm.environment import Environment, chosen_profile
from samestep.comm.heartbeat import Heartbeat
from samestep.scripts import parallel
from samestep.scripts.adoption import Adoption
from samestep.scripts.loading.rank0_loader import SoloIterator
from samestep.scripts.patch import Patch, applied
from samestep.scripts.wrapped import exchange, forward
from samestep.train.profile.keeping import keep_profile

NOT_SEEN = (
    "an adopted script: seen are DataLoaders, wrapped forwards, backward, exchange and optimizers, a step ending with "
    "every optimizer.step(); all else, a forward that is not wrapped among it, is the script"
)


@contextmanager
def profiled(adoption: Adoption, environment: Environment) -> Iterator[None]:
    """The time in which an adopted script is profiled, if the environment asks for that.

    Args:
        adoption: of this process.
        environment: this rank's place.
    """
    folder = chosen_profile()
    if folder is None:
        yield
        return
    heartbeat = Heartbeat()
    facts = {"adopted": True, "notes": [NOT_SEEN]}
    keep_profile(heartbeat, Path(folder), environment, adoption.communicator.device, facts)
    heartbeat.enter("script")

    def begin_update(*_: Any) -> None:
        heartbeat.enter("update")

    def end_update(*_: Any) -> None:
        heartbeat.enter("script")
        heartbeat.step += 1

    hooks = (register_optimizer_step_pre_hook(begin_update), register_optimizer_step_post_hook(end_update))
    try:
        with applied(_patches(heartbeat)):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _patches(heartbeat: Heartbeat) -> list[Patch]:
    """Where the phases of a script begin and end."""

    def seen(owner: Any, name: str, phase: str, aliases: tuple[str, ...] = ()) -> Patch:
        return Patch(owner, name, _within(heartbeat, phase, getattr(owner, name)), aliases)

    wrapped = "samestep.scripts.wrapped"
    return [
        seen(_BaseDataLoaderIter, "__next__", "data"),
        seen(SoloIterator, "__next__", "data"),
        seen(forward, "chunked_forward", "forward", (parallel.__name__,)),
        seen(torch.autograd, "backward", "backward"),
        seen(torch.autograd, "grad", "backward"),
        seen(Adoption, "hand_out", "exchange"),
        seen(exchange, "sum_pieces", "exchange", (f"{wrapped}.regions", "samestep.scripts.tutorial_api")),
        seen(exchange, "join_pieces", "exchange", (f"{wrapped}.regions", f"{wrapped}.results")),
    ]


def _within(heartbeat: Heartbeat, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, during which the script is in a phase."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = heartbeat.enter(phase)
        try:
            return function(*args, **kwargs)
        finally:
            heartbeat.enter(before)

    return call
