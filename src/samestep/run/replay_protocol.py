"""What differs in a run that is replayed or audited: the protocol of the programs that run it again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from samestep.engine.config import StepOptions

if TYPE_CHECKING:
    import torch

    from samestep.checkpoint.storage import Snapshot


class Rerun(Protocol):
    """A program that is run again on one device, without a run folder, from a checkpoint of its earlier run."""

    device: "torch.device"
    num_threads: int

    def change_options(self, trainer: Any, run_dir: str | Path | None, options: StepOptions) -> StepOptions:
        """The options of the training step of a trainer that is being made, in place of its own."""

    def checkpoint(self, trainer: Any) -> Path | None:
        """The checkpoint that a trainer which begins to fit resumes from; None for the beginning."""

    def at_boundary(self, trainer: Any, capture: "Callable[[], Snapshot]") -> None:
        """A trainer is where it may write a checkpoint, and would capture this state."""

    def at_load(self, place: Path) -> Path | None:
        """The checkpoint to load in place of the one that a loop of the user's own names; None for the beginning."""

    def at_save(self, place: Path, capture: "Callable[[], Snapshot]") -> Path | None:
        """A loop of the user's own saves a state; the checkpoint that it takes for written, None to write it."""


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
