"""The progress of a trainer: the records of epochs, the state of the one under way, and its remaining batches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from samestep.checkpoint.local_shards import whole_tensors
from samestep.checkpoint.packing import as_bad_checkpoint
from samestep.comm.communicator import Communicator
from samestep.data.loader import Loader
from samestep.engine.generator_states import check_alike, generator_states, restore_generators
from samestep.engine.step import TrainStep
from samestep.errors import CheckpointError, UsageError
from samestep.run.run import Run
from samestep.runs.history import BestMetric, EpochRecord, EpochSoFar
from samestep.text import counted

if TYPE_CHECKING:
    from samestep.checkpoint.resume import Resumed
    from samestep.checkpoint.storage import Snapshot

Collate = Callable[[list[Any]], Any]


def num_batches(loader: Loader | DataLoader[Any]) -> int | None:
    """Batches of an epoch, if the loader has a length."""
    try:
        return len(loader)
    except TypeError:
        return None


def make_loader(
    run: Run, dataset: Any, epoch: int, num_workers: int, collate_fn: Collate | None, shuffle: bool
) -> Loader | DataLoader[Any]:
    """The given loader, or a new one over a dataset, at the beginning of this epoch."""
    if isinstance(dataset, DataLoader) and dataset.batch_size not in (None, run.contract.global_batch_size):
        raise UsageError(
            f"got a DataLoader with batch_size={dataset.batch_size} and a run with global_batch_size="
            f"{run.contract.global_batch_size}; its batches are the global batches, of all devices together: give both "
            "the same number"
        )
    if isinstance(dataset, Loader | DataLoader):
        return dataset
    is_stream = isinstance(dataset, IterableDataset)  # which may have a length
    loader = run.loader(dataset, shuffle=shuffle and not is_stream, num_workers=num_workers, collate_fn=collate_fn)
    loader.load_state_dict({"epoch": epoch, "position": 0})
    return loader


def enter_training_mode(model: nn.Module) -> str:
    """Puts a model into training mode, except parts of it that are in evaluation mode; returns a line about these."""
    kept, all_names = in_evaluation_mode(model), [name for name, _ in model.named_modules()]
    model.train()  # may be the model's own method, which leaves a part in evaluation mode
    # As an evaluation of the script's, or `from_pretrained`, leaves it: no part was chosen.
    if kept == all_names:
        return "the model was in evaluation mode as a whole: it is put into training mode"
    kept = sorted({*kept} - {*in_evaluation_mode(model)})
    for name in kept:
        model.get_submodule(name).training = False
    which = f"{len(kept)} of {counted(len(all_names), 'module')}, from {''.join(kept[:1]) or 'the model itself'} on"
    return f"in evaluation mode, as before: {which}; to train all in training mode call model.train()" if kept else ""


def in_evaluation_mode(model: nn.Module) -> list[str]:
    """The names of the modules in evaluation mode."""
    return [name for name, module in model.named_modules() if not module.training]


class Progress:
    """The epochs of a trainer: the records of those that are done, and the one under way.

    A state is captured between two steps, anywhere in an epoch, and restored in two parts. `restore` writes model,
    optimizers and records when a call of `fit` opens the run. `go_on` follows when training begins: it sets the loader
    to its place and the generators to their states, since the program may draw until then. A loader of the run has a
    cursor. One of the user's own has none: its states are taken between two epochs, with the generators by which it
    draws the next order.
    """

    def __init__(self, run: Run, step: TrainStep, metric: BestMetric | None) -> None:
        self.history: list[EpochRecord] = []
        self.epoch = EpochSoFar()
        self._run, self._step, self._metric = run, step, metric
        self._waiting: dict[str, Any] | None = None
        self._before_epoch: dict[str, Any] = {}  # generators, before a loader of the user's own drew its order

    @property
    def best(self) -> EpochRecord | None:
        """The record of the best epoch so far, if there is a metric."""
        return None if self._metric is None else self._metric.best(self.history)

    def begin_epoch(self, loader: Loader | DataLoader[Any]) -> None:
        """Begins an epoch."""
        self.epoch = EpochSoFar(has_begun=True, of_loader=loader_state(loader))

    def batches(self, loader: Loader | DataLoader[Any]) -> Iterator[Any]:
        """The batches of the epoch under way; of a loader of the run those that are left of it."""
        if not isinstance(loader, Loader):
            # When the first batch is asked for: the loader then draws its order, and a seed for its workers.
            self._before_epoch = generator_states(self._run.device)
        yield from loader

    def can_save(self, loader: Loader | DataLoader[Any]) -> bool:
        """Whether a run can go on from here: a loader of the user's own begins each epoch at its first batch."""
        return isinstance(loader, Loader) or self.epoch.num_batches == 0

    def is_complete(self, loader: Loader | DataLoader[Any]) -> bool:
        """Whether all batches of the epoch under way, which has no record yet, are done."""
        return 0 < self.epoch.num_batches == num_batches(loader)

    def capture(
        self, loader: Loader | DataLoader[Any], cursor: Mapping[str, Any] | None, contract: Mapping[str, Any]
    ) -> "Snapshot":
        """The whole state: the step's, history, epoch, place in the data (None for a `DataLoader`), contract."""
        from samestep.checkpoint.state import capture  # loaded with the first checkpoint

        rest = {
            "history": [record.as_json() for record in self.history],
            "best": self.best and self.best.epoch,
            "epoch": asdict(self.epoch),
            "cursor": cursor,
            "loader": loader_state(loader),
            "evaluating": in_evaluation_mode(self._step.model),
            "contract": contract,
        }
        if self._step.extra_state:
            rest["state"] = {name: value.state_dict() for name, value in self._step.extra_state.items()}
        return capture(self._step, rest)

    def give(
        self,
        communicator: Communicator,
        source: int,
        loader: Loader | DataLoader[Any],
        batch: Any,
        contract: Mapping[str, Any],
    ) -> None:
        """Sends the state of rank `source` before the step on this batch to ranks that join."""
        from samestep.checkpoint.async_save import to_host_copy
        from samestep.checkpoint.resume import Resumed, broadcast_state

        state = None
        if communicator.rank == source:
            cursor = loader.state_before(batch) if isinstance(loader, Loader) else None
            now = generator_states(self._run.device)
            # The rank that joins draws the batch under way itself, with a loader of the user's own the first one.
            restore_generators(now if isinstance(loader, Loader) else self._before_epoch, self._run.device)
            captured = self.capture(loader, cursor, contract)
            restore_generators(now, self._run.device)
            copied = replace(captured, files=to_host_copy(whole_tensors(captured.files)))
            state = Resumed(f"rank {source}", copied)
        broadcast_state(communicator, state, source)

    def restore(self, resumed: "Resumed") -> None:
        """Restores a state; loaders and generators follow by `go_on`."""
        from samestep.checkpoint.state import NOT_OURS, restore

        device = self._run.device
        with as_bad_checkpoint(NOT_OURS):
            rest = resumed.rest
            history = [EpochRecord(**record) for record in rest["history"]]
            epoch = EpochSoFar(**rest["epoch"])
            for record in history:
                own = EpochRecord(0, 0.0, 0.0, 0.0, *(dict.fromkeys(n, 0.0) for n in (record.eval, record.scalars)))
                check_alike("epochs", record.as_json(), own.as_json())
            own_epoch = {**asdict(EpochSoFar()), "of_loader": epoch.of_loader}
            own_epoch["scalars"] = dict.fromkeys(epoch.scalars, (0.0, 0.0))
            check_alike("epoch", rest["epoch"], own_epoch)
            check_alike("modules in evaluation mode", rest["evaluating"], [""] * len(rest["evaluating"]))
        # The generators of the state wait for `go_on`, as the loader does: the program may draw until then.
        generators = generator_states(device)
        self._waiting = restore(self._step, resumed.snapshot)
        self._waiting["generators"] = generator_states(device)
        restore_generators(generators, device)
        self.history, self.epoch = history, epoch
        with as_bad_checkpoint(NOT_OURS):
            for name, state in rest.get("state", {}).items():
                # The state of an object that is gone is left out: the change of the contract was allowed.
                if name in self._step.extra_state:
                    self._step.extra_state[name].load_state_dict(state)

    def go_on(self, loader: Loader | DataLoader[Any]) -> None:
        """Restores cursor, generators and epoch, if a state is waiting; else begins an epoch.

        Not before: the program may have called `fit` for epochs that are done, and drawn in between.
        """
        state, self._waiting = self._waiting, None
        if state is None:
            self.epoch = EpochSoFar()
            return
        from samestep.checkpoint.state import NOT_OURS

        with as_bad_checkpoint(NOT_OURS):
            if not isinstance(loader, Loader):
                if self.epoch.num_batches:
                    self._run.membership.notice(
                        f"training ended after {counted(self.epoch.num_batches, 'batch')} of epoch "
                        f"{len(self.history) + 1}; a DataLoader of your own begins it again, run.loader goes on there"
                    )
                    self.epoch = EpochSoFar()
                restore_loader(loader, self.epoch.of_loader or state["loader"])
            elif state["cursor"] is not None:
                check_place(state["cursor"], loader)
                loader.load_state_dict(state["cursor"])
            else:
                raise CheckpointError("the checkpoint is of a run with a DataLoader of its own; give fit that again")
            for name, module in self._step.model.named_modules() if "evaluating" in state else ():
                module.training = name not in state["evaluating"]
            if state["generators"] is not None:
                restore_generators(state["generators"], self._run.device)

    def pause(self, loader: Loader | DataLoader[Any]) -> None:
        """Has the next `go_on` go on with the epoch under way, as training has ended in the middle of it."""
        self._waiting = {
            "cursor": loader.state_dict() if isinstance(loader, Loader) else None,
            "loader": loader_state(loader),
            "generators": None,  # the script may have drawn since, and changed modes
        }

    def add(self, record: EpochRecord) -> None:
        """Ends the epoch under way."""
        self.history.append(record)
        self.epoch = EpochSoFar()


def check_place(cursor: Mapping[str, Any], loader: Loader) -> None:
    """Raises a `CheckpointError` unless a loader's saved state has the form of this loader's."""
    own = loader.state_dict()
    check_alike("place in the data", {**cursor, "sizes": None}, {**own, "sizes": None})


def loader_state(loader: Loader | DataLoader[Any]) -> list[Any]:
    """The states by which a loader of the user's own draws its order."""
    return [part.get_state() if isinstance(part, torch.Generator) else part.state_dict() for part in _parts(loader)]


def restore_loader(loader: DataLoader[Any], states: list[Any]) -> None:
    """Restores `loader_state`."""
    for part, state in zip(_parts(loader), states, strict=False):
        part.set_state(state) if isinstance(part, torch.Generator) else part.load_state_dict(state)


def _parts(loader: Loader | DataLoader[Any]) -> list[Any]:
    """The generators of a loader of the user's own and its samplers with a `state_dict`, each once."""
    if isinstance(loader, Loader):
        return []
    owners: list[Any] = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found: list[Any] = [
        each for owner in owners if isinstance(each := getattr(owner, "generator", None), torch.Generator)
    ]
    found += [owner for owner in owners if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")]
    return list({id(part): part for part in found}.values())
