"""The trainer: the loop over epochs for those who do not want to write it."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from samestep.comm.communicator import Communicator
from samestep.data.batch import Batch
from samestep.data.loader import Loader
from samestep.engine.losses import LossFn
from samestep.engine.result import StepResult
from samestep.errors import NonFiniteError, UsageError
from samestep.train import folder as files
from samestep.train.agreement import Change
from samestep.train.checksum import StateChecksum
from samestep.train.contract import loader_contract, step_contract
from samestep.train.digest import state_digest
from samestep.train.display import make_display
from samestep.train.epoch import (
    EpochSoFar,
    batches_left,
    begin_epoch,
    loader_generator_states,
    make_eval_loader,
    make_loader,
    put_in_place,
)
from samestep.train.ledger import learning_rates
from samestep.train.loggers import Logger
from samestep.train.naming import CONTRACT_FILE, RESULT_FILE
from samestep.train.origin import origin
from samestep.train.recorder import REMEMBERED_STEPS, Recorder, StepNote
from samestep.train.resume import Resumed, find_run, hand_out, is_same_run, make_run_folder
from samestep.train.run import Run
from samestep.train.saving import to_host_copy
from samestep.train.state import capture, generator_states, restore, restore_generators
from samestep.train.stopping import stopping_on_request
from samestep.train.together import on_main

DIGEST_EVERY = 100
CHECKPOINT_MINUTES = 5.0


@dataclass(frozen=True)
class EpochRecord:
    """What came of one epoch.

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


class Trainer:
    """Trains a model: steps, evaluation, logging, checkpoints, and a run folder if one is named.

    Args:
        run: the contract and the topology.
        model: trained in place.
        optimizer: one or several, over the model's parameters.
        loss_fn: see `Run.train_step`.
        run_dir: where rank 0 writes contract, ledger, metrics, TensorBoard events, checkpoints, picture and weights;
            None writes nothing.
        loggers: more places to log to; anything with `log(step, scalars)` and `close()`.
        name: of the run, shown in the picture.
        contract: more to record in the contract.
        epoch_line: which metric the line of an epoch shows, and its label, for example ("accuracy", "test acc").
        checkpoint_steps: write a checkpoint after every so many steps; None for by time alone.
        checkpoint_minutes: write one when the last is that old, by rank 0's clock; None for by steps alone. One is
            written at the end in any case.
        keep: how many checkpoints are kept.
        digest_every: the ledger has a checksum of the whole state every so many steps.
        resume_command: the command that goes on with this run, shown when it is stopped.
        step_options: further arguments of `Run.train_step`: max_grad_norm, precision, scheduler, …

    Raises:
        UsageError: an argument that cannot be.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: LossFn,
        *,
        run_dir: str | Path | None = None,
        loggers: Iterable[Logger] = (),
        name: str = "run",
        contract: Mapping[str, Any] | None = None,
        epoch_line: tuple[str, str] | None = None,
        checkpoint_steps: int | None = None,
        checkpoint_minutes: float | None = CHECKPOINT_MINUTES,
        keep: int = 3,
        digest_every: int = DIGEST_EVERY,
        resume_command: str | None = None,
        **step_options: Any,
    ) -> None:
        _check_counts(checkpoint_steps, checkpoint_minutes, keep, digest_every)
        self.run = run
        self.model = model
        self.step = run.train_step(model, optimizer, loss_fn, **step_options)
        self.history: list[EpochRecord] = []
        self._precision = step_options.get("precision", "32-true")
        self._epoch_line = epoch_line
        self._name = name
        self._folder = Path(run_dir) if run_dir is not None else None
        self._loggers = list(loggers)
        self._checkpoint_steps = checkpoint_steps
        self._checkpoint_seconds = None if checkpoint_minutes is None else 60 * checkpoint_minutes
        self._keep = keep
        self._digest_every = digest_every
        self._resume_command = resume_command
        self._contract = {
            **run.contract.as_json(),
            **step_contract(self.step),
            **(contract or {}),
        }
        self._checksum = StateChecksum(model, self.step.optimizers)
        self._display = make_display(run.rank)
        self._recorder: Recorder | None = None
        self._is_open = False
        self._planned = 0
        self._epoch = EpochSoFar()
        self._waiting: dict[str, Any] | None = None
        self._eval_loader: Loader | None = None
        self._recent: deque[StepNote] = deque(maxlen=REMEMBERED_STEPS)
        self._unread: deque[StepNote] = deque()
        self._num_healed = 0
        self._last_loss: float | None = None
        self._last_checkpoint = (0, time.monotonic())
        self._left_at = -1

    @property
    def digest(self) -> str:
        """SHA-256 over parameters, buffers and optimizer state; see `state_digest`."""
        return state_digest(self.model, self.step.optimizers)

    def fit(
        self,
        dataset: Any,
        epochs: int,
        *,
        eval_data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        num_workers: int = 0,
        shuffle: bool = True,
        resume: str | Path | None = None,
        allow_contract_change: bool = False,
    ) -> list[EpochRecord]:
        """Trains for some epochs, and evaluates after each. Tier `bitwise`.

        Ctrl-C and SIGTERM let the step under way end; then a checkpoint is written and the program ends with the exit
        code 128 + signal. A second one ends it at once.

        Args:
            dataset: anything `Run.loader` takes, a loader of the run, or a `torch.utils.data.DataLoader` of your own
                whose batches are the global batches.
            epochs: how many more. A program that is resumed is given what it was given at first: epochs that the
                checkpoint has are not run again.
            eval_data: evaluated after each epoch, if given.
            metrics: name to metric; needed with `eval_data`.
            num_workers: processes that fetch samples.
            shuffle: a new order each epoch.
            resume: goes on from the newest good checkpoint of this run folder, or from this checkpoint, in the middle
                of an epoch too and on any number of devices; "auto" for the trainer's own `run_dir` if it has one, and
                from the beginning if not. In a later call of `fit` it has no effect.
            allow_contract_change: go on although something changed that the bits depend on.

        Returns:
            A record an epoch, of this call and those before it.

        Raises:
            NonFiniteError: a loss or gradient was not finite.
            RunFolderError: the run folder cannot be written.
            UsageError: an argument that cannot be, a run folder that is taken, or nothing to resume from.
            ContractError: the run to resume was made under another contract; the message lists the fields.
            SystemExit: the run was asked to stop; its code is 128 + signal.
        """
        if epochs < 1:
            raise UsageError(f"got epochs={epochs}; it must be 1 or more (--epochs)")
        if eval_data is not None and not metrics:
            raise UsageError("eval_data needs metrics, for example metrics={'accuracy': samestep.metrics.accuracy}")
        done = len(self.history)
        loader = make_loader(self.run, dataset, done, num_workers, shuffle)
        self._eval_loader = None if eval_data is None else make_eval_loader(self.run, eval_data, done, num_workers)
        if not self._is_open:
            self._open(loader, resume, allow_contract_change)
        self._planned += epochs
        if self._planned < len(self.history) or (self._planned == len(self.history) and self._epoch.num_batches > 0):
            return self.history  # a program that was resumed comes by here again: the state is past this
        self._go_on(loader)
        with stopping_on_request(self.run.team):
            try:
                for number in range(len(self.history) + 1, self._planned + 1):
                    record = self._train_epoch(loader, number)
                    if self._eval_loader is not None and metrics:
                        scores = self.run.evaluate(self.model, self._eval_loader, metrics, precision=self._precision)
                        record = EpochRecord(**{**asdict(record), "eval": scores})
                    self._end_epoch(record)
                self._end_fit(loader)
            except KeyboardInterrupt:
                self._draw()
                raise
            finally:
                self._planned = len(self.history)
                self._display.close()
        return self.history

    def evaluate(self, data: Any, metrics: Mapping[str, Any], **options: Any) -> dict[str, float]:
        """Measures the model; see `Run.evaluate`."""
        return self.run.evaluate(self.model, data, metrics, precision=self._precision, **options)

    def predict(self, data: Any, **options: Any) -> Any:
        """The model's outputs; see `Run.predict`."""
        return self.run.predict(self.model, data, precision=self._precision, **options)

    def say(self, text: str) -> None:
        """Shows a line on rank 0, above the progress bar."""
        self._display.line(text)

    def close(self) -> None:
        """Waits for the last checkpoint; closes the ledger and the loggers."""
        if self._recorder is not None:
            self._recorder.close()
        elif not self._is_open and self.run.is_main:
            for logger in self._loggers:
                logger.close()
        self._recorder = None

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, loader: Loader | DataLoader[Any], resume: str | Path | None, allow_change: bool) -> None:
        """Takes up a state, if there is one to take up, and opens what is written to all along."""
        run = self.run
        self._contract = {**loader_contract(loader), **self._contract}
        if run.team.is_late:
            self._join(loader)
            return
        resumed, changes = (None, []) if resume is None else self._find(resume, allow_change)
        goes_on = resume is not None and is_same_run(resume, resumed, self._folder)
        if self._folder is not None and not goes_on:
            make_run_folder(run.team, self._folder)
        if resumed is not None:
            self._take_up(resumed)
        self._is_open = True

        def begin() -> None:
            """Done by another rank, if rank 0 is lost meanwhile."""
            self._begin_record(goes_on, None if resumed is None else resumed.name, changes)

        run.team.perform(lambda: on_main(run.communicator, begin))

    def _begin_record(self, goes_on: bool, resumed_from: str | None, changes: Sequence[Change]) -> None:
        """Opens what is written to all along, and says how the run begins."""
        run, step = self.run, self.step.num_steps
        self._recorder = Recorder(run.team, self._folder, self._loggers, self._keep, step if goes_on else None)
        try:
            if self._folder is not None and goes_on:
                (self._folder / RESULT_FILE).unlink(missing_ok=True)  # it has not ended after all
            if self._folder is not None:
                record = {**origin(), **self._contract}
                files.write_json(self._folder / CONTRACT_FILE, record)  # last: it says that a run is here
            where = {"world_size": run.world_size, "device_kind": run.device.type}
            if resumed_from is None:
                self._recorder.event("start", 0, **where)
                return
            self._recorder.event("resume", step, **{"from": resumed_from}, **where)
            fields = [[change.field, change.before, change.after] for change in changes]
            if fields:
                self._recorder.event("contract_change", step, fields=fields)
        except BaseException:
            self.close()
            raise

    def _find(self, resume: str | Path, allow_change: bool) -> tuple[Resumed | None, list[Change]]:
        return find_run(self.run.team, self.step, resume, self._folder, self._contract, allow_change, self.say)

    def _join(self, loader: Loader | DataLoader[Any]) -> None:
        """Receives the state of a run that is under way."""
        resumed = self.run.team.join(lambda communicator, source: hand_out(communicator, None, source))
        assert resumed is not None, "whoever takes in a late worker has a state"
        self._take_up(resumed)
        self._num_healed = len(self.run.team.healed)
        self._display = make_display(self.run.rank)
        self._is_open = True

    def _give(self, batch: Any, loader: Loader | DataLoader[Any]) -> Callable[[Communicator, int], None]:
        """What hands out the state before the step on this batch."""

        def give(communicator: Communicator, source: int) -> None:
            state = None
            if communicator.rank == source:
                self._settle(wait=True)
                cursor = None
                if isinstance(loader, Loader):
                    cursor = {"epoch": batch.epoch, "position": batch.position}
                captured = capture(self.step, self._rest(loader, cursor))
                files = to_host_copy(captured.files)
                state = Resumed(f"rank {source}", self.step.num_steps, files, captured.facts)
            hand_out(communicator, state, source)

        return give

    def _rest(self, loader: Loader | DataLoader[Any], cursor: Mapping[str, int] | None) -> dict[str, Any]:
        """What belongs to the state besides the step's."""
        return {
            "history": [record.as_json() for record in self.history],
            "epoch": asdict(self._epoch),
            "cursor": cursor,
            "eval_cursor": None if self._eval_loader is None else self._eval_loader.state_dict(),
            "loader_generators": loader_generator_states(loader),
            "contract": self._contract,
        }

    def _take_up(self, resumed: Resumed) -> None:
        """Puts this trainer in the place of the one that wrote a checkpoint."""
        generators = generator_states(self.run.device)
        self._waiting = restore(self.step, resumed.files, resumed.state)
        self._waiting["generators"] = generator_states(self.run.device)
        restore_generators(generators, self.run.device)
        self.history = [EpochRecord(**record) for record in self._waiting["history"]]
        self._epoch = EpochSoFar(**self._waiting["epoch"])
        self._last_checkpoint = (self.step.num_steps, time.monotonic())
        self.say(f"resumed from {resumed.name}, epoch {len(self.history) + 1}, step {self.step.num_steps}")

    def _go_on(self, loader: Loader | DataLoader[Any]) -> None:
        """Begins where the state ends: its cursor, its generators, its epoch; those of a resumed run only now.

        A program that was resumed may have called `fit` before, and drawn, for what the state is past already.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            self._epoch = EpochSoFar()
            return
        put_in_place(waiting, loader, self._eval_loader, self.run.device)

    def _train_epoch(self, loader: Loader | DataLoader[Any], number: int) -> EpochRecord:
        """Runs through the loader once, or through the rest of an epoch that was begun."""
        self.model.train()
        self._unread.clear()  # what followed a step that was not finite never happened
        if self._epoch.num_batches == 0:
            self._epoch = begin_epoch(loader, self.run.device)
        epoch, steps = self._epoch, _length(loader)
        first, before, start = epoch.num_samples, epoch.seconds, time.perf_counter()
        for batch in batches_left(loader, epoch, self.run.device):
            rates = learning_rates(self.step.optimizers)
            self.run.team.give = self._give(batch, loader)
            result = self.step(batch)
            self.run.team.give = None
            self._note(result, batch, rates)
            epoch.num_samples += result.num_samples
            epoch.num_batches += 1
            epoch.seconds = before + time.perf_counter() - start
            self._settle(wait=False)
            self._attend(loader)
            if self._display.is_due():
                speed = (epoch.num_samples - first) / (time.perf_counter() - start)
                self._display.progress(number, self._planned, epoch.num_batches, steps, self._last_loss, speed)
        if epoch.num_batches == 0:
            raise UsageError("the loader gave no batch: a dataset smaller than a batch with drop_last=True?")
        self._settle(wait=True)
        self.step.check()
        seconds = before + time.perf_counter() - start
        loss = epoch.total / epoch.count if epoch.count else float("nan")
        return EpochRecord(number, seconds, epoch.num_samples / seconds, loss, {})

    def _note(self, result: StepResult, batch: Any, rates: list[float]) -> None:
        """Remembers a step until its scalars have arrived."""
        is_due = (result.step + 1) % self._digest_every == 0
        digest = self._checksum.compute() if is_due and self._folder is not None else None
        self._unread.append(
            StepNote(result, batch if isinstance(batch, Batch) else None, rates, self.run.world_size, digest)
        )

    def _settle(self, wait: bool) -> None:
        """Records the steps whose scalars have arrived; all of them if told to wait."""
        while self._unread and (wait or self._unread[0].result.is_there):
            note = self._unread.popleft()
            try:
                note.result.check()
            except NonFiniteError:
                self.step.check()  # raises the same, and takes the step back to the state before
                raise
            if not note.result.skipped:
                self._epoch.total += note.result.total
                self._epoch.count += note.result.count
            self._last_loss = note.result.loss
            light = None if note.batch is None else note.result.batch
            note = StepNote(note.result, light, note.rates, note.world_size, note.digest)
            if self.run.team.can_heal:
                self._recent.append(note)
            if self._recorder is not None:
                self._recorder.step(note)

    def _attend(self, loader: Loader | DataLoader[Any]) -> None:
        """What is to be seen to between two steps: losses that were healed, checkpoints, requests to stop."""
        self._note_losses()
        if self._recorder is not None:
            self._recorder.poll()
        if self.run.stopping:
            self._stop(loader)
        if self._is_checkpoint_due():
            self._checkpoint(loader)

    def _note_losses(self) -> None:
        """Writes down what was healed since the last call; takes over where rank 0 was lost."""
        healed = self.run.team.healed
        if len(healed) == self._num_healed:
            return
        self._settle(wait=True)
        if self.run.is_main and self._recorder is None:
            self._take_over()
        for view, seconds in healed[self._num_healed :]:
            if self._recorder is not None:
                self._recorder.healed(max(0, self.step.num_steps - 1), view, seconds)
        self._num_healed = len(healed)

    def _take_over(self) -> None:
        """Becomes the rank that writes, after the one before was lost."""
        self._display = make_display(self.run.rank)
        self._recorder = Recorder(self.run.team, self._folder, self._loggers, self._keep, self._first_remembered())
        self._recorder.catch_up(self._recent)

    def _first_remembered(self) -> int:
        return self._recent[0].result.step + 1 if self._recent else self.step.num_steps

    def _is_checkpoint_due(self) -> bool:
        if self._folder is None or not self.run.is_main:
            return False
        step, when = self._last_checkpoint
        if self._checkpoint_steps is not None and self.step.num_steps % self._checkpoint_steps == 0:
            return step != self.step.num_steps
        return self._checkpoint_seconds is not None and time.monotonic() - when >= self._checkpoint_seconds

    def _checkpoint(self, loader: Loader | DataLoader[Any]) -> None:
        """Has the state written, on the rank that writes."""
        if self._recorder is None or self._folder is None:
            return
        self._settle(wait=True)
        pulse = self.run.team.pulse
        before = pulse.enter("checkpoint")
        cursor = loader.state_dict() if isinstance(loader, Loader) else None
        self._recorder.flush()
        self._recorder.checkpoint(self.step.num_steps, capture(self.step, self._rest(loader, cursor)))
        self._last_checkpoint = (self.step.num_steps, time.monotonic())
        pulse.enter(before)

    def _stop(self, loader: Loader | DataLoader[Any]) -> NoReturn:
        """Leaves in good order: no rank goes before the checkpoint is complete, lest a launcher ends the others."""
        signum = self.run.team.stop

        def write() -> None:
            if self._recorder is None:
                self._take_over()
            self._checkpoint(loader)
            if self._recorder is not None:
                self._recorder.finish_checkpoints()

        self.run.team.perform(lambda: on_main(self.run.communicator, write))
        if self._recorder is not None:
            self._recorder.event("stop", self.step.num_steps, signal=signum)
        how = self._resume_command or f"fit(…, resume={str(self._folder)!r})"
        kept = f"; to go on: {how}" if self._folder is not None else ", and nothing was kept: it has no run_dir"
        self.say(f"stopped after step {self.step.num_steps}{kept}")
        self._draw()
        self.close()
        raise SystemExit(128 + signum)

    def _end_epoch(self, record: EpochRecord) -> None:
        """Files, shows and logs an epoch."""
        self._note_losses()
        self.history.append(record)
        self._epoch = EpochSoFar()
        scalars = {"epoch": float(record.epoch), "loss/train_epoch": record.train_loss}
        scalars["samples_per_second"] = record.samples_per_second
        scalars.update({f"{name}/eval": value for name, value in record.eval.items()})
        if self._recorder is not None:
            self._recorder.log(self.step.num_steps, scalars)
            self._recorder.flush()
        text = f"epoch {record.epoch}, time {record.seconds:.1f} s, train loss {record.train_loss:#.4g}"
        shown = [self._epoch_line] if self._epoch_line else [(name, f"test {name}") for name in record.eval]
        for name, label in shown:
            if name in record.eval:
                text += f", {label} {record.eval[name]:#.4g}"
        self._display.line(f"{text}, {record.samples_per_second:,.0f} samples/s")

    def _end_fit(self, loader: Loader | DataLoader[Any]) -> None:
        """Leaves a checkpoint, the weights and the picture; all ranks stay until they are there."""
        if self._folder is None:
            return
        team, folder = self.run.team, self._folder

        def leave() -> None:
            if self._recorder is None or self._left_at == self.step.num_steps:
                return  # it was written, and another rank was lost before it heard of that
            if self._last_checkpoint[0] != self.step.num_steps or not self.history:
                self._checkpoint(loader)
            self._recorder.finish_checkpoints()
            self._recorder.event("end", self.step.num_steps, digest=self.digest)
            self._draw()
            files.write_weights(folder / files.WEIGHTS_FILE, self.model)
            self._left_at = self.step.num_steps

        def attempt() -> None:
            self._note_losses()
            on_main(self.run.communicator, leave)

        team.perform(attempt)
        team.perform(lambda: self.run.communicator.barrier())
        team.pulse.enter("script")

    def _draw(self) -> None:
        """Draws the losses so far."""
        if self._folder is None or self._recorder is None:
            return
        from samestep.train.picture import draw_losses

        self._recorder.flush()
        losses = files.read_losses(self._folder)
        if not losses:
            return
        per_epoch = max(1, self.step.num_steps // max(1, len(self.history)))
        evals = [(r.epoch * per_epoch, r.eval["loss"]) for r in self.history if "loss" in r.eval]
        draw_losses(self._folder / files.PICTURE_FILE, losses, evals, self._name)


def _length(loader: Loader | DataLoader[Any]) -> int | None:
    """Batches of an epoch, where somebody knows."""
    try:
        return len(loader)
    except TypeError:
        return None


def _check_counts(steps: int | None, minutes: float | None, keep: int, digest_every: int) -> None:
    """Raises a `UsageError` for a number that cannot be."""
    for name, value in (("checkpoint_steps", steps), ("keep", keep), ("digest_every", digest_every)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"got {name}={value!r}; it must be 1 or more ({option})")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UsageError(f"got checkpoint_minutes={minutes!r}; it must be above 0 (--checkpoint-minutes)")
