"""An epoch: its record, its state while it is under way, and its remaining batches."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from samestep.data.loader import Loader
from samestep.errors import CheckpointError
from samestep.train.checkpoint.state import check_alike, generator_states, restore_generators
from samestep.train.run import Run


@dataclass(frozen=True)
class EpochRecord:
    """The results of one epoch.

    Attributes:
        epoch: counted from 1, as it is shown.
        seconds: of training, without evaluation.
        samples_per_second: of training.
        train_loss: the sum of the loss over the epoch, over the sum of its counts.
        eval: metrics after the epoch; empty without evaluation data.
    """

    epoch: int
    seconds: float
    samples_per_second: float
    train_loss: float
    eval: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """The record as a JSON object."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """The scalars for loggers."""
        scalars = {"epoch": float(self.epoch), "loss/train_epoch": self.train_loss}
        scalars["samples_per_second"] = self.samples_per_second
        scalars.update({f"{name}/eval": value for name, value in self.eval.items()})
        return scalars

    def describe(self, shown: Iterable[tuple[str, str]]) -> str:
        """The line that is shown, with some of the metrics, each by its label: ("accuracy", "test acc")."""
        text = f"epoch {self.epoch}, time {self.seconds:.1f} s, train loss {self.train_loss:#.4g}"
        for name, label in shown:
            if name in self.eval:
                text += f", {label} {self.eval[name]:#.4g}"
        return f"{text}, {self.samples_per_second:,.0f} samples/s"


@dataclass
class EpochSoFar:
    """Part of a checkpoint, so that a resumed epoch ends as it would have.

    Attributes:
        num_batches: done.
        num_samples: done.
        total: the sum of the loss.
        count: what it is divided by.
        seconds: of training.
        generators: the states of the script's random generators when it began.
        of_loader: the states of the generators of a loader of the user's own when it began.
    """

    num_batches: int = 0
    num_samples: int = 0
    total: float = 0.0
    count: float = 0.0
    seconds: float = 0.0
    generators: dict[str, Any] = field(default_factory=dict)
    of_loader: list[torch.Tensor] = field(default_factory=list)


def begin_epoch(loader: Loader | DataLoader[Any], device: torch.device) -> EpochSoFar:
    """A new epoch."""
    return EpochSoFar(generators=generator_states(device), of_loader=loader_generator_states(loader))


def batches_left(loader: Loader | DataLoader[Any], epoch: EpochSoFar, device: torch.device) -> Iterator[Any]:
    """The batches of an epoch; of one that was begun those that are left.

    A loader of the run knows its place. One of the user's own shuffles and augments by the generators of the script or
    by its own: it draws again what it drew, and the batches that are done are left out.
    """
    if isinstance(loader, Loader) or epoch.num_batches == 0:
        yield from loader
        return
    now = generator_states(device)
    restore_generators(epoch.generators, device)
    restore_loader_generators(loader, epoch.of_loader)
    batches = iter(loader)
    for _ in range(epoch.num_batches):
        next(batches, None)
    restore_generators(now, device)
    yield from batches


def num_batches(loader: Loader | DataLoader[Any]) -> int | None:
    """Batches of an epoch, if the loader has a length."""
    try:
        return len(loader)
    except TypeError:
        return None


def make_loader(run: Run, dataset: Any, epoch: int, num_workers: int, shuffle: bool) -> Loader | DataLoader[Any]:
    """A loader to train with: the one given, or a new one over a dataset, from the beginning of this epoch on."""
    if isinstance(dataset, Loader | DataLoader):
        return dataset
    is_stream = not hasattr(dataset, "__len__")
    loader = run.loader(dataset, shuffle=shuffle and not is_stream, num_workers=num_workers)
    loader.load_state_dict({"epoch": epoch, "position": 0})
    return loader


def make_eval_loader(run: Run, data: Any, epoch: int, num_workers: int) -> Loader:
    """A loader to evaluate with: the one given, or a new one over a dataset, as it is after so many epochs."""
    if isinstance(data, Loader):
        return data
    loader = run.loader(data, num_workers=num_workers)
    loader.load_state_dict({"epoch": epoch, "position": 0})
    return loader


def put_in_place(
    state: Mapping[str, Any], loader: Loader | DataLoader[Any], eval_loader: Loader | None, device: torch.device
) -> None:
    """Puts loaders and generators where a state has them; a `CheckpointError` for one of another sort of loader."""
    if not isinstance(loader, Loader):
        restore_loader_generators(loader, state["loader_generators"])
    elif state["cursor"] is not None:
        check_alike("place in the data", state["cursor"], loader.state_dict())
        loader.load_state_dict(state["cursor"])
    else:
        raise CheckpointError(
            "the checkpoint is of a run with a DataLoader of its own, whose place in the data a dataset has not; "
            "give fit the DataLoader again"
        )
    if eval_loader is not None and state["eval_cursor"] is not None:
        eval_loader.load_state_dict(state["eval_cursor"])
    restore_generators(state["generators"], device)


def loader_generator_states(loader: Loader | DataLoader[Any]) -> list[torch.Tensor]:
    """The states of the generators that a loader of the user's own was given."""
    return [generator.get_state() for generator in _generators(loader)]


def restore_loader_generators(loader: Loader | DataLoader[Any], states: list[torch.Tensor]) -> None:
    """Puts them back."""
    for generator, state in zip(_generators(loader), states, strict=False):
        generator.set_state(state)


def _generators(loader: Loader | DataLoader[Any]) -> list[torch.Generator]:
    if isinstance(loader, Loader):
        return []
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())
