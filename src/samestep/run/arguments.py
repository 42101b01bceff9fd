"""The arguments of a step; answers to arguments that do not exist; what differs in a run that is replayed."""

import difflib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar

from torch.optim.lr_scheduler import LRScheduler

from samestep.engine.config import AuditAction, OnNonFinite, StrategyOptions
from samestep.engine.observer import StepObserver
from samestep.errors import UsageError

if TYPE_CHECKING:
    import torch

    from samestep.checkpoint.storage import Snapshot

P = ParamSpec("P")
R = TypeVar("R")


class StepOptions(TypedDict, total=False):
    """The keyword arguments of `Run.train_step`, which explains them; `samestep.Trainer` takes them too."""

    counts_fn: Callable[[Any], Any] | None
    scheduler: LRScheduler | None
    max_grad_norm: float | None
    precision: str
    on_nonfinite: OnNonFinite
    late_check: bool | None
    overlap: bool
    bucket_bytes: int | None
    compile: bool
    strategy: str | StrategyOptions
    shard_optimizer: bool
    audit: int | None
    audit_action: AuditAction
    observers: Sequence[StepObserver]


# The commonest names that other libraries give to the same things; most of the others are like ours (`_answer`).
SYNONYMS = {
    "batch_size": "global_batch_size",
    "callbacks": "hooks",
    "criterion": "loss_fn",
    "gradient_accumulation_steps": "num_microbatches",
    "gradient_clip_val": "max_grad_norm",
    "lr_scheduler": "scheduler",
    "max_epochs": "epochs",
    "output_dir": "run_dir",
    "resume_from_checkpoint": "resume",
    "train_dataset": "dataset",
}
LAUNCHER = "the launcher chooses devices: `samestep run --devices 2 script.py`"
# Arguments of theirs for which no function here has one.
INSTEAD = {
    "accelerator": LAUNCHER,
    "devices": LAUNCHER,
    "num_nodes": "the launcher connects machines: `samestep run --nnodes 2 …`",
    "early_stopping": "here these are `best` and `patience` of Trainer",
    "early_stopping_patience": "here these are `best` and `patience` of Trainer",
    "sampler": "the loader deals samples itself, in a new order each epoch by shuffle=True",
    "pin_memory": "the loader pins memory itself where there is a GPU",
    "fast_dev_run": "max_steps of Trainer.fit ends a run after so many steps",
    "val_check_interval": "eval_every of Trainer.fit is a number of epochs",
}
_OWNERS: dict[str, tuple[str, ...]] = {}  # the arguments of each function that was decorated, by its public name
# Those of the trainer beside the step's: its module imports this one, and a program with a loop of its own not that.
TRAINER = {
    "Trainer": (
        *("self", "run", "model", "optimizer", "loss_fn", "run_dir", "loggers", "name", "contract", "epoch_line"),
        *("checkpoint_steps", "checkpoint_minutes", "checkpoint_retries", "keep", "digest_every", "hash_data"),
        *("resume_command", "hooks", "state", "best", "patience"),
    ),
    "Trainer.fit": (
        *("self", "dataset", "epochs", "max_steps", "eval_data", "metrics", "forward", "eval_every", "num_workers"),
        *("collate_fn", "shuffle", "resume", "allow_contract_change"),
    ),
}


def answers_unknown(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function, called `name` in messages, answer unknown keyword arguments with a `UsageError`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = tuple(inspect.signature(function).parameters)
        if "step_options" in names:
            names = (*names[:-1], *StepOptions.__annotations__)
        known = _OWNERS[name] = names

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            unknown = [each for each in kwargs if each not in known]
            if unknown:
                raise UsageError(_answer(name, unknown[0]))
            return function(*args, **kwargs)

        return checked

    return decorate


def _answer(name: str, unknown: str) -> str:
    """The sentence on an argument that a function does not have."""
    got = f"{name} has no argument {unknown!r}"
    known = _OWNERS[name][1:]  # without self
    wanted = SYNONYMS.get(unknown, unknown)
    if wanted in known:
        return f"{got}; here it is called {wanted!r}"
    if unknown in INSTEAD:
        return f"{got}; {INSTEAD[unknown]}"
    owners = [owner for owner, names in (_OWNERS | TRAINER).items() if wanted in names]
    if owners:
        called = "" if wanted == unknown else f", called {wanted!r} there"
        return f"{got}; it is one of {owners[0]}{called}"
    close = difflib.get_close_matches(unknown, known, n=1)
    return f"{got}; {f'did you mean {close[0]!r}?' if close else 'it takes ' + ', '.join(known)}"


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
