"""The progress of a trainer: the epochs done and the one under way, which a checkpoint has besides the step's state."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch.utils.data import DataLoader

from samestep.data.loader import Loader
from samestep.engine.step import TrainStep
from samestep.train.checkpoint.packing import as_bad_checkpoint
from samestep.train.checkpoint.resume import Resumed
from samestep.train.checkpoint.state import (
    NOT_OURS,
    State,
    capture,
    check_alike,
    generator_states,
    restore,
    restore_generators,
)
from samestep.train.epoch import EpochRecord, EpochSoFar, loader_generator_states, put_in_place
from samestep.train.run import Run


class Progress:
    """How far a trainer is.

    Attributes:
        history: a record of each epoch that is done.
        epoch: the one under way.
        eval_loader: of the call of `fit` under way; None without evaluation.
    """

    def __init__(self, run: Run, step: TrainStep) -> None:
        self.history: list[EpochRecord] = []
        self.epoch = EpochSoFar()
        self.eval_loader: Loader | None = None
        self._run, self._step = run, step
        self._waiting: dict[str, Any] | None = None

    def capture(
        self, loader: Loader | DataLoader[Any], cursor: Mapping[str, int] | None, contract: Mapping[str, Any]
    ) -> State:
        """The whole state: the step's, history, epoch, place in the data (None for a `DataLoader`), contract."""
        rest = {
            "history": [record.as_json() for record in self.history],
            "epoch": asdict(self.epoch),
            "cursor": cursor,
            "eval_cursor": None if self.eval_loader is None else self.eval_loader.state_dict(),
            "loader_generators": loader_generator_states(loader),
            "contract": contract,
        }
        return capture(self._step, rest)

    def restore(self, resumed: Resumed) -> None:
        """Restores a state; loaders and generators follow by `go_on`."""
        device = self._run.device
        with as_bad_checkpoint(NOT_OURS):
            rest = resumed.rest
            history = [EpochRecord(**record) for record in rest["history"]]
            epoch = EpochSoFar(**rest["epoch"])
            for record in history:
                own = EpochRecord(0, 0.0, 0.0, 0.0, dict.fromkeys(record.eval, 0.0))
                check_alike("epochs", record.as_json(), own.as_json())
            own_epoch = {**asdict(EpochSoFar()), "generators": epoch.generators, "of_loader": epoch.of_loader}
            check_alike("epoch", rest["epoch"], own_epoch)
        generators = generator_states(device)
        self._waiting = restore(self._step, resumed.files, resumed.state)
        self._waiting["generators"] = generator_states(device)
        restore_generators(generators, device)
        self.history, self.epoch = history, epoch

    def go_on(self, loader: Loader | DataLoader[Any]) -> None:
        """Puts cursor, generators and epoch where the state has them.

        Those of a resumed run only now: the program may have called `fit` before, and drawn, for epochs that are done.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            self.epoch = EpochSoFar()
            return
        with as_bad_checkpoint(NOT_OURS):
            put_in_place(waiting, loader, self.eval_loader, self._run.device)

    def add(self, record: EpochRecord) -> None:
        """Ends the epoch under way."""
        self.history.append(record)
        self.epoch = EpochSoFar()
