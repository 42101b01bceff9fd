"""The trainer: the loop over epochs for those who do not want to write it."""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from samestep.data.batch import Batch
from samestep.data.loader import Loader
from samestep.engine.losses import LossFn
from samestep.engine.result import StepResult
from samestep.errors import NonFiniteError, UsageError
from samestep.train import folder as files
from samestep.train.digest import state_digest
from samestep.train.display import make_display
from samestep.train.ledger import LedgerWriter, learning_rates, ledger_entry
from samestep.train.loggers import JsonlLogger, Logger, TensorBoardLogger
from samestep.train.naming import CONTRACT_FILE
from samestep.train.run import Run


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
    """Trains a model: steps, evaluation, logging, and a run folder if one is named.

    Args:
        run: the contract and the topology.
        model: trained in place.
        optimizer: one or several, over the model's parameters.
        loss_fn: see `Run.train_step`.
        run_dir: where rank 0 writes contract, ledger, metrics, TensorBoard events, picture and weights; None writes
            nothing.
        loggers: more places to log to; anything with `log(step, scalars)` and `close()`.
        name: of the run, shown in the picture.
        contract: more to record in the contract.
        epoch_line: which metric the line of an epoch shows, and its label, for example ("accuracy", "test acc").
        step_options: further arguments of `Run.train_step`: max_grad_norm, precision, scheduler, …

    Raises:
        UsageError: an argument that cannot be, or a run folder that is taken.
        RunFolderError: the run folder cannot be written.
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
        **step_options: Any,
    ) -> None:
        self.run = run
        self.model = model
        self.step = run.train_step(model, optimizer, loss_fn, **step_options)
        self.history: list[EpochRecord] = []
        self._precision = step_options.get("precision", "32-true")
        self._epoch_line = epoch_line
        self._name = name
        self._folder = files.create_folder(Path(run_dir)) if run_dir is not None and run.is_main else None
        self._display = make_display(run.rank)
        self._loggers = list(loggers) if run.is_main else []
        self._ledger: LedgerWriter | None = None
        self._losses: list[tuple[int, float]] = []
        self._unread: deque[tuple[StepResult, Batch | None, list[float]]] = deque()
        self._last_loss: float | None = None
        self._total = self._count = 0.0
        if self._folder is not None:
            self._open_files(self._folder, {**run.contract.as_json(), "precision": self._precision, **(contract or {})})

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
    ) -> list[EpochRecord]:
        """Trains for some epochs, and evaluates after each. Tier `bitwise`.

        Args:
            dataset: anything `Run.loader` takes, a loader of the run, or a `torch.utils.data.DataLoader` of your own
                whose batches are the global batches.
            epochs: how many more.
            eval_data: evaluated after each epoch, if given.
            metrics: name to metric; needed with `eval_data`.
            num_workers: processes that fetch samples.
            shuffle: a new order each epoch.

        Returns:
            A record an epoch, of this call and those before it.

        Raises:
            NonFiniteError: a loss or gradient was not finite.
            RunFolderError: the run folder cannot be written.
        """
        if epochs < 1:
            raise UsageError(f"got epochs={epochs}; it must be 1 or more (--epochs)")
        if eval_data is not None and not metrics:
            raise UsageError("eval_data needs metrics, for example metrics={'accuracy': samestep.metrics.accuracy}")
        loader = dataset
        if not isinstance(dataset, Loader | DataLoader):
            is_stream = not hasattr(dataset, "__len__")
            loader = self.run.loader(dataset, shuffle=shuffle and not is_stream, num_workers=num_workers)
            loader.load_state_dict({"epoch": len(self.history), "position": 0})
        eval_loader = None
        if eval_data is not None:
            eval_loader = (
                eval_data if isinstance(eval_data, Loader) else self.run.loader(eval_data, num_workers=num_workers)
            )
        last = len(self.history) + epochs
        try:
            for number in range(len(self.history) + 1, last + 1):
                record = self._train_epoch(loader, number, last)
                if eval_loader is not None and metrics:
                    scores = self.run.evaluate(self.model, eval_loader, metrics, precision=self._precision)
                    record = EpochRecord(**{**asdict(record), "eval": scores})
                self.history.append(record)
                self._report(record)
            self._draw()
            self._write_weights()
        except KeyboardInterrupt:
            self._draw()
            raise
        finally:
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
        """Closes the ledger and the loggers."""
        if self._ledger is not None:
            self._ledger.close()
        for logger in self._loggers:
            logger.close()
        self._ledger, self._loggers = None, []

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_files(self, folder: Path, contract: Mapping[str, Any]) -> None:
        """Opens what is written to all along; the contract, which says that a run is here, comes last."""
        try:
            self._ledger = LedgerWriter(folder / files.LEDGER_FILE)
            self._loggers.append(JsonlLogger(folder / files.METRICS_FILE))
            self._loggers.append(TensorBoardLogger(folder / files.TENSORBOARD_FOLDER))
            files.write_json(folder / CONTRACT_FILE, contract)
        except BaseException:
            self.close()
            raise

    def _train_epoch(self, loader: Loader | DataLoader[Any], number: int, last: int) -> EpochRecord:
        """Runs through the loader once."""
        self.model.train()
        self._total = self._count = 0.0
        self._unread.clear()  # what followed a step that was not finite never happened
        num_samples, num_done = 0, 0
        steps = _length(loader)
        start = time.perf_counter()
        for batch in loader:
            rates = learning_rates(self.step.optimizers)
            result = self.step(batch)
            num_samples += result.num_samples
            num_done += 1
            self._unread.append((result, batch if isinstance(batch, Batch) else None, rates))
            self._settle(wait=False)
            if self._display.is_due():
                speed = num_samples / (time.perf_counter() - start)
                self._display.progress(number, last, num_done, steps, self._last_loss, speed)
        if num_done == 0:
            raise UsageError("the loader gave no batch: a dataset smaller than a batch with drop_last=True?")
        self._settle(wait=True)
        self.step.check()
        seconds = time.perf_counter() - start
        loss = self._total / self._count if self._count else float("nan")
        return EpochRecord(number, seconds, num_samples / seconds, loss, {})

    def _settle(self, wait: bool) -> None:
        """Records the steps whose scalars have arrived; all of them if told to wait."""
        while self._unread and (wait or self._unread[0][0].is_there):
            result, batch, rates = self._unread.popleft()
            try:
                result.check()
            except NonFiniteError:
                self.step.check()  # raises the same, and takes the step back to the state before
                raise
            if not result.skipped:
                self._total += result.total
                self._count += result.count
            self._last_loss = result.loss
            if self._ledger is not None:
                self._ledger.write(ledger_entry(result, batch, rates, self.run.world_size))
                self._losses.append((result.step + 1, result.loss))
            scalars = {"loss/train": result.loss, "grad_norm": result.grad_norm}
            if rates:
                scalars["lr"] = rates[0]
            for logger in self._loggers:
                logger.log(result.step + 1, scalars)

    def _report(self, record: EpochRecord) -> None:
        """Shows and logs an epoch."""
        scalars = {"epoch": float(record.epoch), "loss/train_epoch": record.train_loss}
        scalars["samples_per_second"] = record.samples_per_second
        scalars.update({f"{name}/eval": value for name, value in record.eval.items()})
        for logger in self._loggers:
            logger.log(self.step.num_steps, scalars)
        if self._ledger is not None:
            self._ledger.flush()
        text = f"epoch {record.epoch}, time {record.seconds:.1f} s, train loss {record.train_loss:#.4g}"
        shown = [self._epoch_line] if self._epoch_line else [(name, f"test {name}") for name in record.eval]
        for name, label in shown:
            if name in record.eval:
                text += f", {label} {record.eval[name]:#.4g}"
        self._display.line(f"{text}, {record.samples_per_second:,.0f} samples/s")

    def _draw(self) -> None:
        """Draws the losses so far."""
        if self._folder is None or not self._losses:
            return
        from samestep.train.picture import draw_losses

        per_epoch = max(1, self.step.num_steps // max(1, len(self.history)))
        evals = [(r.epoch * per_epoch, r.eval["loss"]) for r in self.history if "loss" in r.eval]
        draw_losses(self._folder / files.PICTURE_FILE, self._losses, evals, self._name)

    def _write_weights(self) -> None:
        if self._folder is not None:
            files.write_weights(self._folder / files.WEIGHTS_FILE, self.model)


def _length(loader: Loader | DataLoader[Any]) -> int | None:
    """Batches of an epoch, where somebody knows."""
    try:
        return len(loader)
    except TypeError:
        return None
