"""The progress of a trainer: the records of epochs, the state of the one under way, and its remaining batches."""

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from samestep.checkpoint.local_shards import whole_tensors
from samestep.checkpoint.packing import as_bad_checkpoint
from samestep.comm.communicator import Communicator
from samestep.data.loader import Loader
from samestep.data.randomness import GENERATORS, Generators
from samestep.engine.determinism import check_alike, generator_states, restore_generators, restore_state, state_of
from samestep.engine.step import TrainStep
from samestep.errors import CheckpointError, UsageError
from samestep.run.data_hash import DataHash
from samestep.run.run import Run
from samestep.runs.history import BestMetric, EpochRecord, EpochSoFar
from samestep.text import counted

if TYPE_CHECKING:
    from samestep.checkpoint.resume import Resumed
    from samestep.checkpoint.storage import Snapshot

Collate = Callable[[list[Any]], Any]


STATE = "state_dict"  # of a sampler that has one


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
    cursor. One of the user's own has none: it gets the generators, and what its samplers hold, as they were when the
    epoch began, draws the same order again, and the batches that are done are skipped (`batches`).
    """

    def __init__(self, run: Run, step: TrainStep, data: DataHash, metric: BestMetric | None) -> None:
        self.history: list[EpochRecord] = []
        self.epoch = EpochSoFar()
        self.data = data
        self._run, self._step, self._metric = run, step, metric
        self._waiting: dict[str, Any] | None = None
        self._before_batch: dict[str, Any] = {}  # generators, before a loader of the user's own made the last batch
        # Samplers of the user's own, what they held, and the checksums of what they held that is not saved.
        self._at_first: list[tuple[Any, dict[str, Any], dict[str, int]]] = []
        # The epochs and max_steps of each call of `fit` that has ended, with the epochs that were done, or planned.
        self._calls: list[list[int | None]] = []
        self._num_calls = 0  # begun by this program

    @property
    def best(self) -> EpochRecord | None:
        """The record of the best epoch so far, if there is a metric."""
        return None if self._metric is None else self._metric.best(self.history)

    def begin_call(self, epochs: int | None, max_steps: int | None) -> tuple[bool, int | None]:
        """Whether this call of `fit` had ended in the run that was resumed, where another followed; and where it ended.

        A program with other calls than those of the state is left to what its arguments say.
        """
        # A call is known by its arguments: `fit(data, 1)` in a loop by its number alone, and a program that was
        # changed in between begins to differ at the first call that is not the recorded one.
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if self._calls[number : number + 1] and self._calls[number][:2] == [epochs, max_steps]:
            return True, self._calls[number][2]
        self._calls[number:] = [[epochs, max_steps, None]]
        return False, None

    def end_call(self, done: int | None) -> None:
        """Ends the call of `fit` under way."""
        self._calls[self._num_calls - 1][2] = done

    def begin_epoch(self, loader: Loader | DataLoader[Any]) -> None:
        """Begins an epoch."""
        self.epoch = EpochSoFar(generators=generator_states(self._run.device), of_loader=self.loader_state(loader))

    def batches(self, loader: Loader | DataLoader[Any]) -> Iterator[Any]:
        """The batches of the epoch under way, or those that are left of it.

        A loader of the run has a cursor. One of the user's own shuffles and augments by the generators of the script or
        by its own: it draws again from where they were, and the batches that are done are skipped.
        """
        if isinstance(loader, Loader):
            yield from loader
            return
        device = self._run.device
        self._before_batch = generator_states(device)
        if self.epoch.num_batches:
            restore_generators(self.epoch.generators, device)
            restore_loader(loader, self.epoch.of_loader)
        batches = iter(loader)
        if self.epoch.num_batches:
            for _ in range(self.epoch.num_batches):
                next(batches, None)
            restore_generators(self._before_batch, device)
        for batch in batches:
            yield batch
            self._before_batch = generator_states(device) if self._run.membership.can_heal else {}

    def is_complete(self, loader: Loader | DataLoader[Any]) -> bool:
        """Whether all batches of the epoch under way are done, of which there is no record yet."""
        return 0 < self.epoch.num_batches == num_batches(loader)

    def capture(
        self, loader: Loader | DataLoader[Any], cursor: Mapping[str, Any] | None, contract: Mapping[str, Any]
    ) -> "Snapshot":
        """The whole state: the step's, history, epoch, place in the data (None for a `DataLoader`), contract."""
        from samestep.checkpoint.state import capture  # loaded with the first checkpoint

        for sampler, _, unsaved in self._at_first:
            for name in [name for name, checksum in _unsaved(sampler).items() if unsaved.get(name) != checksum]:
                self._run.membership.notice(
                    f"the sampler {type(sampler).__name__} has {name}, which changes in training and is in no "
                    "checkpoint: a resumed run would begin it anew; give the sampler state_dict and load_state_dict"
                )
        rest = {
            "calls": [list(call) for call in self._calls[: self._num_calls - 1]],
            "history": [record.as_json() for record in self.history],
            "best": self.best and self.best.epoch,
            "epoch": asdict(self.epoch),
            "cursor": cursor,
            "loader": self.loader_state(loader),
            "evaluating": in_evaluation_mode(self._step.model),
            "contract": contract,
        }
        if self._step.extra_state:
            rest["state"] = {name: value.state_dict() for name, value in self._step.extra_state.items()}
        if (hashes := self.data.state()) is not None:
            rest["data"] = hashes
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
            # The rank that joins draws the batch under way itself.
            restore_generators(self._before_batch or now, self._run.device)
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
            own_epoch = {**asdict(EpochSoFar()), "generators": epoch.generators, "of_loader": epoch.of_loader}
            own_epoch["scalars"] = dict.fromkeys(epoch.scalars, (0.0, 0.0))
            check_alike("epoch", rest["epoch"], own_epoch)
            calls = [[epochs, max_steps, done] for epochs, max_steps, done in rest["calls"]]
            check_alike("calls of fit", calls, [[0, 0, 0] for _ in calls])
            check_alike("modules in evaluation mode", rest["evaluating"], [""] * len(rest["evaluating"]))
        # The generators of the state wait for `go_on`, as the loader does: the program may draw until then.
        generators = generator_states(device)
        self._waiting = restore(self._step, resumed.snapshot)
        self._waiting["generators"] = generator_states(device)
        restore_generators(generators, device)
        self.history, self.epoch, self._calls = history, epoch, calls
        with as_bad_checkpoint(NOT_OURS):
            for name, state in rest.get("state", {}).items():
                # The state of an object that is gone is left out: the change of the contract was allowed.
                if name in self._step.extra_state:
                    self._step.extra_state[name].load_state_dict(state)
            self.data.load(rest.get("data"), has_begun=bool(history or epoch.num_batches))

    def go_on(self, loader: Loader | DataLoader[Any]) -> None:
        """Restores cursor, generators and epoch, if a state is waiting; else begins an epoch.

        Not before: the program may have called `fit` for epochs that are done, and drawn in between.
        """
        state, self._waiting = self._waiting, None
        known = [sampler for sampler, *_ in self._at_first]
        new = [one for one in _samplers(loader) if not any(one is other for other in known)]
        self._at_first += [(one, _held(one), _unsaved(one)) for one in new]
        if state is None:
            self.epoch = EpochSoFar()
            return
        from samestep.checkpoint.state import NOT_OURS

        with as_bad_checkpoint(NOT_OURS):
            if not isinstance(loader, Loader):
                restore_loader(loader, self.epoch.of_loader or state["loader"])
            elif state["cursor"] is not None:
                check_place(state["cursor"], loader)
                loader.load_state_dict(state["cursor"])
            else:
                raise CheckpointError(
                    "the checkpoint is of a run with a DataLoader of its own, whose place in the data a dataset has "
                    "not; give fit the DataLoader again"
                )
            for name, module in self._step.model.named_modules() if "evaluating" in state else ():
                module.training = name not in state["evaluating"]
            if state["generators"] is not None:
                restore_generators(state["generators"], self._run.device)

    def pause(self, loader: Loader | DataLoader[Any]) -> None:
        """Has the next `go_on` go on with the epoch under way, in the middle of which training has ended."""
        self._waiting = {
            "cursor": loader.state_dict() if isinstance(loader, Loader) else None,
            "loader": self.loader_state(loader),
            "generators": None,  # the script may have drawn since, and changed modes
        }

    def loader_state(self, loader: Loader | DataLoader[Any]) -> dict[str, Any]:
        """The state of a loader of the user's own: of its generators and samplers, and whether workers live."""
        has_workers = isinstance(loader, DataLoader) and loader._iterator is not None
        samplers = []
        for sampler in _samplers(loader):
            first = next((held for known, held, _ in self._at_first if known is sampler), {})
            # What training has not changed is the program's: a resumed one may have another length, or rank.
            held = _held(sampler)
            samplers.append({name: held[name] for name in held if held[name] is not first.get(name, held)})
        generators = [generator.get_state() for generator in _generators(loader)]
        return {"generators": generators, "has_workers": has_workers, "samplers": samplers}

    def add(self, record: EpochRecord) -> None:
        """Ends the epoch under way."""
        self.data.end_epoch()
        self.history.append(record)
        self.epoch = EpochSoFar()


def check_place(cursor: Mapping[str, Any], loader: Loader) -> None:
    """Raises a `CheckpointError` unless a loader's saved state has the form of this loader's."""
    own = loader.state_dict()
    check_alike("place in the data", {**cursor, "sizes": None}, {**own, "sizes": None})


def restore_loader(loader: Loader | DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Restores the state of a loader of the user's own."""
    # Torch draws a seed when it starts workers. Persistent ones are started once, so that in later epochs the order is
    # drawn from another place of the generator than in the first.
    has_workers = isinstance(loader, DataLoader) and loader._iterator is not None
    if isinstance(loader, DataLoader) and loader.persistent_workers and has_workers != state["has_workers"]:
        with Generators(torch.device("cpu")).preserved():
            loader._iterator = None if has_workers else _waiting_workers(loader)
    for generator, its_state in zip(_generators(loader), state["generators"], strict=False):
        generator.set_state(its_state)
    for sampler, its in zip(_samplers(loader), state["samplers"], strict=False):
        for name, value in its.items():
            own = getattr(sampler, name, None)
            if name == STATE:
                sampler.load_state_dict(value)
            elif isinstance(own, GENERATORS):
                restore_state(own, value)
            else:
                check_alike(f"sampler's {name}", value, own)
                setattr(sampler, name, value)


def _waiting_workers(loader: DataLoader[Any]) -> Any:
    """An iterator of a loader whose workers live and have read nothing."""
    # Torch starts workers when an iterator is made. Over an empty sampler they get their seed and wait; then it has the
    # sampler of the loader.
    empty = copy(loader)
    vars(empty)["sampler" if loader.batch_sampler is None else "batch_sampler"] = ()
    iterator = empty._get_iterator()
    iterator._index_sampler = loader._index_sampler
    return iterator


def _samplers(loader: Loader | DataLoader[Any]) -> list[Any]:
    """The samplers of a loader of the user's own, each once."""
    if isinstance(loader, Loader):
        return []
    owners = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return list({id(owner): owner for owner in owners if owner is not None}.values())


def _held(sampler: Any) -> dict[str, Any]:
    """What a sampler keeps: its `state_dict`, else its attributes that are generators, numbers or strings."""
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        return {STATE: sampler.state_dict()}
    own = getattr(sampler, "__dict__", {})
    found = {name: state_of(value) for name, value in own.items() if isinstance(value, GENERATORS)}
    return found | {name: value for name, value in own.items() if isinstance(value, int | float | str)}


def _unsaved(sampler: Any) -> dict[str, int]:
    """Checksums of a sampler's containers, tensors and arrays, which are not saved."""
    found = {}
    own = {} if hasattr(sampler, STATE) else getattr(sampler, "__dict__", {})
    for name, value in own.items():
        if isinstance(value, list | tuple | dict | set | deque | torch.Tensor | np.ndarray):
            with suppress(Exception):  # of what it holds
                found[name] = crc32(pickle.dumps(value))
    return found


def _generators(loader: Loader | DataLoader[Any]) -> list[torch.Generator]:
    owners = [] if isinstance(loader, Loader) else [loader, *_samplers(loader)]
    found = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())
