"""The rerun: a recorded run's own program, taken up at a checkpoint, held to the ledger, and ended after one step.

The program is run as it is. What is changed around it, while it runs: its `Run` takes one device, its `Trainer` writes
nothing and begins at the checkpoint, and an observer looks at the steps of that trainer.
"""

import math
from bdb import BdbQuit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from samestep.data.batch import Batch
from samestep.engine.losses import MicrobatchLoss
from samestep.engine.observer import StepObserver, observed_by
from samestep.engine.result import StepResult
from samestep.engine.step import TrainStep
from samestep.errors import NonFiniteError, RunFolderError, SamestepError, UsageError, WorkerError
from samestep.replay.observed_step import ObservedStep, Wanted, chosen_by, described
from samestep.replay.saving import Saver
from samestep.replay.views import StepView
from samestep.scripts.patch import Patch, applied
from samestep.train.digest import as_hex, state_checksum
from samestep.train.paths import holds_run
from samestep.train.run import Run
from samestep.train.runlog.ledger import learning_rates, ledger_entry
from samestep.train.trainer import Trainer
from samestep.verify.ledger import FieldDifference, Ledger, differing_fields, number


class Finished(BaseException):
    """Ends the program; no `Exception`, so that a program which catches its own failures lets it pass."""


@dataclass(frozen=True)
class Order:
    """What is to be replayed.

    Attributes:
        run: the folder of the recorded run.
        record: what is in its `run.json`.
        ledger: what it recorded of its steps; None if that is lost.
        step: the number of the step.
        checkpoint: to begin with; None for the beginning of the run.
        device: to use.
        num_threads: of a CPU.
        any_trainer: whether the program's first `Trainer` made the run, wherever it writes to.
        microbatch: the microbatch to be shown; None for all.
        module: the module to be shown; None for all.
        debug: open the debugger in the step's forward.
        saver: keeps the step's tensors; None for nothing.
    """

    run: Path
    record: Mapping[str, Any]
    ledger: Ledger | None
    step: int
    checkpoint: Path | None
    device: torch.device
    num_threads: int
    any_trainer: bool
    microbatch: int | None
    module: str | None
    debug: bool
    saver: Saver | None


@dataclass(frozen=True)
class Compared:
    """A step beside its line in the ledger.

    Attributes:
        step: its number.
        fields: what is not the same bits.
        relative: the larger relative difference of loss and gradient norm.
        has_digest: whether the checksums of the state were compared.
    """

    step: int
    fields: tuple[FieldDifference, ...]
    relative: float
    has_digest: bool


@dataclass
class Rerun(StepObserver):
    """Runs a program again, and watches its steps.

    Args:
        order: what is to be replayed.

    Attributes:
        trainer: the one that made the run, once it is known.
        first: the first step that was taken.
        compared: the steps that the ledger knows, in order.
        view: the step that was asked for, once it was taken.
    """

    order: Order
    trainer: Trainer | None = None
    first: int | None = None
    compared: list[Compared] = field(default_factory=list)
    view: StepView | None = None
    was_debugged: bool = False
    _places: dict[int, Path | None] = field(default_factory=dict)
    _wanted: Wanted | None = None
    _is_ours: bool = False
    _batch: Any = None
    _rates: list[float] = field(default_factory=list)
    _taken: int = 0
    _scene: ObservedStep | None = None
    needs_modules: ClassVar[bool] = True

    def run(self, program: Callable[[], object]) -> StepView:
        """Runs the program until the step is done."""
        try:
            with applied(self._patches()), observed_by(self):
                program()
        except Finished:
            pass
        except (SamestepError, BdbQuit):
            raise
        except SystemExit as stop:
            if isinstance(stop.code, int) and stop.code > 128:
                raise
            raise UsageError(self._never(f"ended with the exit code {stop.code}")) from stop
        except Exception as error:
            raise WorkerError(f"{self._never('failed')}\n{described(error)}") from error
        if self.view is None:
            raise UsageError(self._never("ended"))
        return self.view

    @property
    def knows_samples(self) -> bool:
        """Whether it is known which samples the step took."""
        return self.view is not None and self.view.samples is not None

    def _never(self, what: str) -> str:
        """Why the step was not reached."""
        if self.trainer is None:
            return (
                f"the program of {self.order.run} {what} before a Trainer of its own began to fit; a replay needs the "
                "samestep.Trainer with run_dir=… that made the run, in this very process"
            )
        return (
            f"the program of {self.order.run} {what} before step {self.order.step}, after "
            f"{self.trainer.step.num_steps} steps; it must train as far as it did when it was recorded"
        )

    def _patches(self) -> list[Patch]:
        make_run, make_trainer, fit = Run.__init__, Trainer.__init__, Trainer.fit
        order = self.order

        def run_on_one_device(this: Run, *args: Any, **options: Any) -> None:
            if options.get("num_threads") is None:
                options["num_threads"] = order.num_threads
            own = {"device": order.device, "shares": None, "spares": 0, "communicator": None}
            make_run(this, *args, **{**options, **own})

        def trainer_that_writes_nothing(this: Trainer, *args: Any, **options: Any) -> None:
            run_dir = options.pop("run_dir", None)
            self._places[id(this)] = None if run_dir is None else Path(run_dir).resolve()
            run: Run = args[0] if args else options["run"]
            if run.device.type != "cuda":  # another kind of device, of other bits in any case
                options.pop("cuda_graphs", None)
            if getattr(options.get("strategy"), "param_dtype", None) is None:  # others have the same bits
                options = {**options, "strategy": "replicate", "shard_optimizer": False}
            make_trainer(this, *args, **{**options, "loggers": (), "run_dir": None})

        def fit_from_the_checkpoint(this: Trainer, *args: Any, **options: Any) -> Any:
            resume = None
            if self.trainer is None and self._made_the_run(this):
                self.trainer, resume = this, order.checkpoint
                self._wanted = self._what_is_wanted(this)
            return fit(this, *args, **{**options, "resume": resume, "allow_contract_change": True})

        return [
            Patch(Run, "__init__", run_on_one_device),
            Patch(Trainer, "__init__", trainer_that_writes_nothing),
            Patch(Trainer, "fit", fit_from_the_checkpoint),
        ]

    def _made_the_run(self, trainer: Trainer) -> bool:
        """Whether it is this trainer that made the run: by its folder, else by the form of its model."""
        if self.order.any_trainer:
            return True
        place = self._places.get(id(trainer))
        if place is None:
            return False
        if place == self.order.run.resolve():
            return True
        return not holds_run(place) and trainer._contract.get("model") == self.order.record.get("model")

    def _what_is_wanted(self, trainer: Trainer) -> Wanted:
        """What is to be shown, as far as it can be checked before a step is taken."""
        microbatch, num_microbatches = self.order.microbatch, trainer.run.contract.num_microbatches
        if microbatch is not None and not 0 <= microbatch < num_microbatches:
            raise UsageError(f"got --microbatch {microbatch}; the run has microbatches 0 to {num_microbatches - 1}")
        return Wanted(microbatch, chosen_by(self.order.module, trainer.model), self.order.debug, self.order.saver)

    def on_step(self, step: TrainStep, batch: Any) -> None:
        """A step of the program: one on the way, the one that was asked for, or none of ours."""
        self._is_ours = self.trainer is not None and step is self.trainer.step
        if not self._is_ours:
            return
        self._batch, self._rates, self._taken = batch, learning_rates(step.optimizers), step.num_steps
        if self.first is None:
            self.first = step.num_steps
        if step.num_steps >= self.order.step:
            assert self._wanted is not None, "it was settled when fit began"
            self._scene = ObservedStep(step, self._wanted)
            self._scene.begin()

    def on_batch(self, batch: Batch) -> None:
        """Shown, in the step that was asked for."""
        if self._scene is not None:
            self._scene.on_batch(batch)

    def on_microbatch(self, step: int, index: int, value: Any) -> None:
        """Shown, in the step that was asked for."""
        if self._scene is not None:
            self._scene.on_microbatch(step, index, value)

    def on_loss(self, index: int, loss: MicrobatchLoss) -> None:
        """Shown, in the step that was asked for."""
        if self._scene is not None:
            self._scene.on_loss(index, loss)

    def on_gradients(self, index: int | None) -> None:
        """Shown, in the step that was asked for."""
        if self._scene is not None:
            self._scene.on_gradients(index)

    def on_update(self, step: TrainStep, result: StepResult) -> None:
        """Holds the step to the ledger; after the one that was asked for, the program ends."""
        if not self._is_ours:
            return
        try:
            result.check()
        except NonFiniteError as error:
            self.on_failure(error)
            raise
        if self._scene is not None:
            self._show(result, None)
        self._compare(result, self._batch, self._rates)
        if self._scene is not None:
            raise Finished

    def on_failure(self, error: BaseException) -> None:
        """Shows what the step that was asked for raised, and ends the program; says of others how to look at them."""
        if not self._is_ours:
            return
        if self._scene is None and isinstance(error, NonFiniteError):
            raise NonFiniteError(
                f"on the way to step {self.order.step}: {error}. To look at it: --step {self._taken}"
            ) from error
        if self._scene is None or not isinstance(error, Exception):
            return
        self._scene.on_failure(error)
        if not isinstance(error, (UsageError, RunFolderError, BdbQuit)):
            self._show(None, described(error))
            raise Finished from error

    def _show(self, result: StepResult | None, error: str | None) -> None:
        assert self._scene is not None, "the step was under observation"
        self.view, self.was_debugged = self._scene.end(result, error), self._scene.was_debugged

    def _compare(self, result: StepResult, batch: Any, rates: list[float]) -> None:
        """Puts a step beside its line in the ledger, if it has one."""
        recorded = None if self.order.ledger is None else self.order.ledger.steps.get(result.step)
        if recorded is None or self.trainer is None:
            return
        digest = None
        if recorded.get("digest") is not None:
            digest = as_hex(int(state_checksum(self.trainer.step)))
        entry = ledger_entry(result, batch if isinstance(batch, Batch) else None, rates, 1, digest)
        relative = max(_relative(recorded.get(name), entry[name]) for name in ("loss", "grad_norm"))
        fields = differing_fields(recorded, entry)
        self.compared.append(Compared(result.step, fields, relative, digest is not None))


def _relative(recorded: Any, now: Any) -> float:
    """How far apart two numbers of the ledger are, relative to the larger; inf where only one is finite."""
    one, other = number(recorded), number(now)
    if one is None or other is None or recorded == now:
        return 0.0
    if not math.isfinite(one) or not math.isfinite(other):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))
