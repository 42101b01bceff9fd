"""Reruns: a recorded program is run again by `samestep replay`, and its Run and Trainer ask here what differs then."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from samestep.train.arguments import StepOptions

if TYPE_CHECKING:
    import torch


class Rerun(Protocol):
    """A program that is run again on one device, without a run folder, from a checkpoint of its earlier run."""

    device: "torch.device"
    num_threads: int

    def change_options(self, trainer: Any, run_dir: str | Path | None, options: StepOptions) -> StepOptions:
        """The options of the training step of a trainer that is being made, in place of its own."""
        ...

    def checkpoint(self, trainer: Any) -> Path | None:
        """The checkpoint that a trainer which begins to fit resumes from; None for the beginning."""
        ...


_CURRENT: ContextVar[Rerun | None] = ContextVar("rerun", default=None)


@contextmanager
def rerunning(rerun: Rerun) -> Iterator[None]:
    """Makes a rerun the current one."""
    token = _CURRENT.set(rerun)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_rerun() -> Rerun | None:
    """The rerun that this program is part of; None for a run of its own."""
    return _CURRENT.get()
