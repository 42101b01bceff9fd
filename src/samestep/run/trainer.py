"""The trainer: a ready-made loop over epochs."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from samestep.checkpoint.contract import loader_contract, step_contract
from samestep.checkpoint.contract_diff import ContractChange
from samestep.checkpoint.digest import state_digest
from samestep.checkpoint.local_shards import is_sharded
from samestep.checkpoint.run_folder import CHECKPOINT_FOLDER, WEIGHTS_FILE
from samestep.checks import check_counts
from samestep.comm.communicator import Communicator
from samestep.comm.exceptions import on_main
from samestep.comm.requests import END_OF_FIT
from samestep.data.loader import Loader
from samestep.engine.config import StepOptions
from samestep.engine.losses import LossFn
from samestep.errors import CheckpointError, UsageError
from samestep.run.arguments import answers_unknown
from samestep.run.hooks import Hooks
from samestep.run.progress import Progress, enter_training_mode, make_loader, num_batches
from samestep.run.replay_protocol import current_rerun
from samestep.run.run import Run
from samestep.run.signals import stopping_on_request
from samestep.runs.history import BestMetric, EpochRecord, mean_of
from samestep.runs.ledger import learning_rates
from samestep.runs.recorder import Logger
from samestep.runs.run_log import RunLog
from samestep.text import counted, visible

if TYPE_CHECKING:
    from samestep.checkpoint.resume import Resumed
    from samestep.checkpoint.storage import Snapshot

DIGEST_EVERY = 100
CHECKPOINT_MINUTES = 5.0


class Trainer:
    """Trains a model: steps, evaluation, logging, checkpoints, and a run folder if one is named.

    Args:
        run: the contract and the topology.
        model: trained in place.
        optimizer: one or several, over the model's parameters.
        loss_fn: see `Run.train_step`.
        run_dir: where rank 0 writes contract, ledger, metrics, TensorBoard events, checkpoints, picture and weights;
            None writes nothing.
        loggers: further loggers, any objects with `log(step, scalars)` and `close()`. Only rank 0 calls them; their
            draws leave the global generators as they are.
        contract: further fields of the contract.
        checkpoint_steps: write a checkpoint after every so many steps; None for by time alone.
        checkpoint_minutes: write one when the last is that old, by rank 0's clock; None for by steps alone. One is
            written at the end in any case. One that cannot be written is tried again after 1, 2 and 4 seconds; training
            goes on meanwhile, unless its state is sharded over the ranks. Then the run ends.
        keep: how many checkpoints are kept.
        digest_every: the ledger has a checksum of the whole state every so many steps. The ranks compare theirs then,
            before each checkpoint and at the end: if one differs the run ends with an error that names the difference.
        hooks: objects that are called at fixed points, such as `samestep.EMA()`; see `samestep.Hook`.
        state: further objects by name with `state_dict()` and `load_state_dict(state)`, alike on all ranks: saved in
            checkpoints, restored on resume, sent to ranks that join, and part of `digest`. Their state has tensors,
            arrays of numbers, numbers, strings and None in dicts, lists and tuples.
        best: a metric of `fit`, or its name and "min" or "max"; "max" by default, "min" for names that end in loss,
            error, perplexity or cross_entropy. After each evaluation that is the best so far a checkpoint is written,
            which is kept beside `keep` others and named by the file `checkpoints/best`.
        patience: ends `fit` after so many evaluations in a row that are no better than the best before them.
        step_options: options of `Run.train_step`: max_grad_norm, precision, scheduler, strategy, compile, …

    Raises:
        UsageError: an argument that cannot be.
    """

    @answers_unknown("Trainer")
    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: LossFn,
        *,
        run_dir: str | Path | None = None,
        loggers: Iterable[Logger] = (),
        contract: Mapping[str, Any] | None = None,
        checkpoint_steps: int | None = None,
        checkpoint_minutes: float | None = CHECKPOINT_MINUTES,
        keep: int = 3,
        digest_every: int = DIGEST_EVERY,
        hooks: Iterable[Any] = (),
        state: Mapping[str, Any] | None = None,
        best: str | tuple[str, str] | None = None,
        patience: int | None = None,
        **step_options: Unpack[StepOptions],
    ) -> None:
        if checkpoint_steps is not None and run_dir is None and current_rerun() is None:
            run.membership.notice("checkpoint_steps has no effect without a run folder; name one by run_dir=…")
        if (rerun := current_rerun()) is not None:
            step_options = rerun.change_options(self, run_dir, step_options)
            run_dir, loggers = None, ()
        self.run = run
        self.model = model
        self._hooks = Hooks(self, hooks, state)
        watching = self._hooks.watching(loss_fn, run_dir is not None)
        step_options["observers"] = (*step_options.get("observers", ()), *watching)
        self.step = run.train_step(model, optimizer, loss_fn, **step_options)
        self.step.extra_state = self._hooks.state
        self._precision = step_options.get("precision", "32-true")
        self._contract = {
            **run.contract.as_json(),
            **step_contract(self.step),
            **self._hooks.contract(),
            **(contract or {}),
        }
        check_counts(patience=patience)
        self._best_metric = BestMetric.of(best, patience)
        self._progress = Progress(run, self.step, self._best_metric)
        self._log = RunLog(
            run.membership,
            self.step,
            folder=Path(run_dir) if run_dir is not None else None,
            loggers=list(loggers),
            keep=keep,
            digest_every=digest_every,
            checkpoint_steps=checkpoint_steps,
            checkpoint_minutes=checkpoint_minutes,
        )
        self._resume: str | Path | None = None  # of the last call
        self._done_before = 0  # epochs of earlier calls
        self._planned: int | None = 0  # epochs of all calls so far; None if steps alone are planned
        self._max_steps: int | None = None
        self._ended_at = -1
        self._is_owed = False  # whether a checkpoint was due inside the epoch of a `DataLoader`
        # The step of the last checkpoint for which hooks were called, on all ranks.
        self._checkpointed_at = 0

    @property
    def history(self) -> list[EpochRecord]:
        """A record of each epoch so far."""
        return self._progress.history

    @property
    def best(self) -> EpochRecord | None:
        """The record of the best epoch so far by the metric `best`."""
        return self._progress.best

    @contextmanager
    def best_weights(self) -> Iterator[nn.Module]:
        """Writes the weights and buffers of the best checkpoint to the model within the block, its own back after it.

            with trainer.best_weights():
                scores = trainer.evaluate(test_set, metrics)

        All ranks enter it. In a hook's `on_epoch_end` the best one is of the epochs before.

        Raises:
            UsageError: there is no such checkpoint: the trainer has no `best` or no `run_dir`, no evaluation yet, or
                the folder's is of another metric or epoch, from before a resume.
            CheckpointError: it is not good.
        """
        folder, best = self._log.folder, self.best
        if folder is None or best is None:
            raise UsageError("there are no best weights: Trainer(run_dir=…, best=…) keeps them after an evaluation")
        from samestep.checkpoint.resume import weights_applied

        self._perform_on_main(self._log.finish_checkpoints)
        with weights_applied(self.run.membership, self.step, folder / CHECKPOINT_FOLDER, best.epoch):
            yield self.model

    def __repr__(self) -> str:
        """The state of training."""
        folder = "" if self._log.folder is None else f" in {self._log.folder}"
        done = f"{counted(len(self.history), 'epoch')}, {counted(self.step.num_steps, 'step')}"
        return f"<samestep.Trainer: {done}{folder}; {type(self.model).__name__}, {self.run!r}>"

    @property
    def digest(self) -> str:
        """SHA-256 over the whole state; see `state_digest`, also for when all ranks ask."""
        return state_digest(self.step)

    @answers_unknown("Trainer.fit")
    def fit(
        self,
        dataset: Any,
        epochs: int | None = None,
        *,
        max_steps: int | None = None,
        eval_data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        eval_every: int = 1,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        resume: str | Path | None = None,
        allow_contract_change: bool = False,
    ) -> list[EpochRecord]:
        """Trains for some epochs or steps, and evaluates after epochs. Tier `bitwise`.

        A run folder takes one call. Without one, calls go on where the one before ended: `fit(data, 1)` in a loop of n
        turns ends in the bits of `fit(data, n)`, apart from hooks, whose `on_fit_start` and `on_fit_end` are called in
        each turn.
        Parts of the model in evaluation mode, such as a frozen backbone, stay in it; a model that is in it as a whole,
        as after `model.eval()`, is put into training mode.
        Ctrl-C, SIGTERM and SIGHUP let the step under way end; then a checkpoint is written and the program ends with
        the exit code 128 + signal. A second one ends it at once.

        Args:
            dataset: anything `Run.loader` takes, a loader of the run, or a `torch.utils.data.DataLoader` of your own
                whose batches are the global batches. A run goes on anywhere with a loader of the run, and at the
                beginning of an epoch with a `DataLoader`: its checkpoints are written between epochs.
            epochs: how many more; as many as `max_steps` needs if None. A resumed program passes the same number as at
                first: epochs that the checkpoint has are not run again.
            max_steps: ends the call after this step of the run, counted from its beginning. An epoch that it ends in
                has no record yet; a later call goes on with it.
            eval_data: evaluated after each epoch, if given.
            metrics: name to metric; needed with `eval_data`.
            forward: of the evaluation, as in `Run.evaluate`; for batches that are dicts, or models of several inputs.
            eval_every: evaluate after every so many epochs of the run.
            num_workers: processes that fetch samples.
            collate_fn: as in `Run.loader`, for both datasets.
            shuffle: a new order each epoch.
            resume: goes on from the newest good checkpoint of this run folder, or from this checkpoint, in the middle
                of an epoch too and on any number of devices; "auto" for the trainer's own `run_dir` if it has one, and
                from the beginning if not. Later calls of `fit` take the same, on which it has no effect.
            allow_contract_change: go on although a part of the contract changed.

        Returns:
            A record an epoch, of this call and those before it.

        Raises:
            NonFiniteError: a loss or gradient was not finite.
            DeterminismError: the ranks' states have come to differ, or see `TrainStep`.
            RunFolderError: the run folder cannot be written.
            UsageError: an argument that cannot be, a run folder that is taken or that another run is writing to, or
                nothing to resume from.
            ContractError: the run to resume was made under another contract; the message lists the fields.
            SystemExit: the run was asked to stop; its code is 128 + signal.
        """
        if self._log.has_begun and self._log.folder is not None:
            raise UsageError(
                f"fit was called before with the run folder {self._log.folder}, which takes one call: give that one "
                "all epochs, and what is done between them to hooks; or go on by a new Trainer's fit(…, resume='auto')"
            )
        if epochs is None and max_steps is None:
            raise UsageError("got neither epochs nor max_steps; needed: one of them (--epochs, --max-steps)")
        check_counts(epochs=epochs, max_steps=max_steps, eval_every=eval_every)
        if eval_data is not None and not metrics:
            raise UsageError("eval_data needs metrics, for example metrics={'accuracy': samestep.metrics.accuracy}")
        if self._best_metric is not None:
            self._best_metric.check(metrics, eval_data is not None)
        if eval_data is None and (metrics or forward is not None):
            raise UsageError(f"{'metrics' if metrics else 'forward'} needs eval_data, which is evaluated after epochs")
        if (rerun := current_rerun()) is not None:
            resume, allow_contract_change = rerun.checkpoint(self), True
        elif self._log.has_begun and resume not in (None, "auto", self._resume):
            raise UsageError(f"got resume={str(resume)!r} in a later call of fit; give it to the first one too")
        progress, self._resume = self._progress, resume
        loader = make_loader(self.run, dataset, len(self.history), num_workers, collate_fn, shuffle)
        if self._log.folder is not None and isinstance(loader, DataLoader) and loader.persistent_workers:
            raise UsageError(
                "got a DataLoader with persistent_workers=True and a run folder: torch draws a seed for workers when "
                "they start, so a resumed run would have another order; leave it out, or use run.loader(num_workers=…)"
            )
        if eval_data is not None:
            # Loaded by runs that evaluate.
            from samestep.run.evaluation import check_forward

            if not isinstance(eval_data, Loader):
                eval_data = self.run.loader(eval_data, num_workers=num_workers, collate_fn=collate_fn)
            check_forward(eval_data, forward)
        # The folder is opened by the first call that has something to do with it, since only a loader tells the
        # contract which samples make a step.
        log, joins = self._log, self.run.membership.is_late
        if not log.has_begun:
            self._contract = {**loader_contract(loader), **self._contract}
            if not joins:
                self._open(resume, allow_contract_change)
        # A resumed program passes the number of the first one: epochs that the state has are among them.
        self._planned, self._max_steps = None if epochs is None else self._done_before + epochs, max_steps
        membership = self.run.membership
        membership.requests.asks_end = False
        with stopping_on_request(membership):
            # Within: a worker that waits to join is in the others' quorum, and stops with them.
            if joins:
                self._join()
            try:
                if text := enter_training_mode(self.model):
                    self.say(text)
                # The others are in a step: an evaluation in a hook would wait for them.
                if not joins:
                    self._hooks.call("on_fit_start")
                # Until here the program and its hooks may draw: now the generators take the state's values.
                progress.go_on(loader)
                if self._is_over() and not progress.is_complete(loader):
                    self._say_over()
                # An epoch may be complete and have no record: the state was captured between its last step and its end.
                while progress.is_complete(loader) or not self._is_over():
                    record = self._train_epoch(loader)
                    if record is None:
                        break
                    if eval_data is not None and metrics and record.epoch % eval_every == 0:
                        record = replace(record, eval=self.evaluate(eval_data, metrics, forward=forward))
                        if self._best_metric is not None:
                            self._best_metric.check_measured(record.eval)
                        self._hooks.call("on_evaluation_end", record.eval)
                    self._end_epoch(loader, record)
                if progress.epoch.num_batches > 0:
                    progress.pause(loader)
                self._end_fit(loader)
                self._hooks.call("on_fit_end")
            except KeyboardInterrupt:
                log.draw(self.history)
                raise
            except Exception as error:
                # An audit that has raised it has ended no step, after which its findings would be recorded.
                log.record_audits()
                self._hooks.call("on_failure", error)
                raise
            finally:
                self._done_before = len(self.history)
                if membership.requests.stop == END_OF_FIT:
                    membership.requests.stop = 0
        return self.history

    def stop(self) -> None:
        """Ends the call of `fit` under way, on all ranks alike; for hooks. A checkpoint is written as at any end.

        One rank's request holds for all ranks. Made when an epoch ends, it ends the call with that epoch. Made after a
        step, it travels with the messages of the next step, and ends the call after that one.
        """
        self.run.membership.requests.asks_end = True

    def evaluate(self, data: Any, metrics: Mapping[str, Any], **options: Any) -> dict[str, float]:
        """Measures the model; see `Run.evaluate`."""
        return self.run.evaluate(self.model, data, metrics, precision=self._precision, **options)

    def predict(self, data: Any, **options: Any) -> Any:
        """The model's outputs; see `Run.predict`."""
        return self.run.predict(self.model, data, precision=self._precision, **options)

    def say(self, text: str) -> None:
        """Shows a line on rank 0, above the progress bar."""
        self._log.display.line(text)

    def close(self) -> None:
        """Waits for the last checkpoint, closes the ledger and the loggers, and unlocks the run folder."""
        self._log.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, resume: str | Path | None, allow_change: bool) -> None:
        """Restores a state, if there is one to resume from, and opens the log; see `fit`."""
        log, membership = self._log, self.run.membership
        resumed: Resumed | None = None
        changes: list[ContractChange] = []
        goes_on = False
        try:
            if resume is not None:
                from samestep.checkpoint.resume import check_state, find_state, is_same_run, name_best, receive_state

                # Locked first: another process that writes there may be about to leave another checkpoint.
                self._perform_on_main(log.lock)
                say = lambda text: log.display.line(visible(text))  # noqa: E731 - what a checkpoint holds
                resumed = receive_state(membership, self.step, lambda: find_state(resume, log.folder, say))
                if resumed is not None:
                    if "history" not in resumed.rest:
                        raise CheckpointError(f"{resumed.name} is one of run.save_checkpoint: use run.load_checkpoint")
                    folder = None if log.folder is None else log.folder / CHECKPOINT_FOLDER
                    changes = check_state(self.step, resumed, self._contract, allow_change, folder, say)
                goes_on = is_same_run(resume, resumed, log.folder)
            if log.folder is not None and not goes_on:
                self._perform_on_main(log.make_folder)
            if resumed is not None:
                self._restore(resumed)
                is_end = self.history and not self._progress.epoch.num_batches
                if goes_on and is_end and self.best is self.history[-1]:
                    self._perform_on_main(partial(name_best, resumed))
        except BaseException:
            log.unlock()
            raise
        log.has_begun = True
        source = None if resumed is None else resumed.name
        # Done by another rank, if rank 0 is lost meanwhile.
        self._perform_on_main(lambda: log.record_start(self._contract, goes_on, source, changes))

    def _join(self) -> None:
        """Receives the state of a run under way, in a worker that was started late."""
        from samestep.checkpoint.resume import broadcast_state

        resumed = self.run.membership.join(lambda communicator, source: broadcast_state(communicator, None, source))
        assert resumed is not None, "the rank that takes in a late worker has a state"
        self._restore(resumed)
        self._log.join()

    def _restore(self, resumed: "Resumed") -> None:
        self._progress.restore(resumed)
        self._log.count_checkpoint()
        self._checkpointed_at = self.step.num_steps
        epoch, within = len(self.history), self._progress.epoch.num_batches
        where = f"in epoch {epoch + 1}" if within else f"after epoch {epoch}"
        self.say(f"resumed from {resumed.name}, {where}, step {self.step.num_steps}")

    def _perform_on_main(self, action: Callable[[], None]) -> None:
        """Calls `action`, which uses files, on rank 0 while all wait; again if a rank is lost meanwhile."""
        membership = self.run.membership
        write = partial(membership.heartbeat.call, "files", action)
        membership.perform(lambda: on_main(membership.communicator, write))

    def _is_over(self) -> bool:
        """Whether the call of `fit` is to end now; the same on all ranks."""
        if self._max_steps is not None and self.step.num_steps >= self._max_steps:
            return True
        if self._best_metric is not None and self._best_metric.is_given_up(self.history):
            return True
        is_planned = self._planned is not None and len(self.history) >= self._planned
        return is_planned or self.run.membership.requests.stop == END_OF_FIT

    def _say_over(self) -> None:
        """Says why a call of `fit` has nothing to do."""
        is_given_up = self._best_metric is not None and self._best_metric.is_given_up(self.history)
        how = "patience has ended the run" if is_given_up else "more by epochs or max_steps (--epochs, --max-steps)"
        done = f"{counted(len(self.history), 'epoch')} and {counted(self.step.num_steps, 'step')}"
        self.say(f"nothing to train: {done} are done; {how}")

    def _train_epoch(self, loader: Loader | DataLoader[Any]) -> EpochRecord | None:
        """Runs through the loader once, or through the rest of an epoch that was begun; None if the call ends in it."""
        membership, log, progress = self.run.membership, self._log, self._progress
        number, is_cut = len(self.history) + 1, False
        log.forget_unread()
        # Else it was begun before the program was resumed, or before this rank joined.
        if not progress.epoch.has_begun:
            enter_training_mode(self.model)
            self._hooks.call("on_epoch_start", number)
            progress.begin_epoch(loader)
        epoch, steps = progress.epoch, num_batches(loader)
        first, before, start = epoch.num_samples, epoch.seconds, time.perf_counter()

        def give(communicator: Communicator, source: int) -> None:
            if communicator.rank == source:
                log.record_arrived(progress.epoch, wait=True)
            progress.give(communicator, source, loader, batch, self._contract)

        for batch in progress.batches(loader):
            rates = learning_rates(self.step.optimizers)
            # A rank that joins within this step gets the state from before it, and takes the step too.
            if membership.can_heal and self._admits(loader):
                membership.send_state = give
            result = self.step(batch)
            membership.send_state = None
            log.remember_step(result, batch, rates)
            epoch.num_samples += result.num_samples
            epoch.num_batches += 1
            epoch.seconds = before + time.perf_counter() - start
            log.record_arrived(epoch, wait=False)
            self._attend(loader)
            if log.display.is_due():
                speed = (epoch.num_samples - first) / (time.perf_counter() - start)
                done = {"epoch": number, "epochs": self._planned, "step": epoch.num_batches, "steps": steps}
                log.display.progress(**done, loss=log.last_loss, samples_per_second=speed)
            # With its last batch an epoch ends as any other, and has a record.
            if is_cut := self._is_over() and epoch.num_batches != steps:
                break
        if epoch.num_batches == 0:
            raise UsageError("the loader gave no batch: a dataset smaller than a batch with drop_last=True?")
        log.record_arrived(epoch, wait=True)
        self.step.check()
        if is_cut:
            return None
        seconds = before + time.perf_counter() - start
        loss = mean_of(epoch.total, epoch.count)
        scalars = {name: mean_of(*sums) for name, sums in epoch.scalars.items()}
        return EpochRecord(number, seconds, epoch.num_samples / seconds, loss, {}, scalars)

    def _admits(self, loader: Loader | DataLoader[Any]) -> bool:
        """Whether the loader of a rank that joins now would give it the batches of the others."""
        is_alike = isinstance(loader, Loader) or not loader.persistent_workers or not self.history
        return is_alike and self._progress.can_save(loader)

    def _attend(self, loader: Loader | DataLoader[Any]) -> None:
        """Between two steps: records healed failures, handles finished checkpoints, due ones and requests to stop."""
        # Healings first: by them a rank becomes the writer, which the rest goes by. A stop before a checkpoint that is
        # due: it writes one itself, and waits for it.
        log = self._log
        log.record_healings(self._progress.epoch)
        log.record_audits()
        log.poll()
        self._offer_state(loader)
        if self.run.membership.requests.stop not in (0, END_OF_FIT):
            self._stop(loader)
        if log.is_checkpoint_due():
            self._take_checkpoint(loader)

    def _take_checkpoint(self, loader: Loader | DataLoader[Any]) -> None:
        """Has a checkpoint that is due written, or notes that it is to be at the end of the epoch."""
        self._is_owed = not self._progress.can_save(loader)
        if not self._is_owed:
            self._log.compare()
            self._checkpoint(loader)
            self._tell_checkpoint()

    def _tell_checkpoint(self) -> None:
        """Tells the hooks of a checkpoint, on all ranks and once a step."""
        if self._log.folder is not None and self._checkpointed_at != self.step.num_steps:
            self._checkpointed_at = self.step.num_steps
            # The rank that writes may have waited for an earlier checkpoint to be complete, for any time.
            self.run.membership.perform(lambda: self.run.communicator.meet())
            self._hooks.call("on_checkpoint", self.step.num_steps)

    def _checkpoint(self, loader: Loader | DataLoader[Any], is_best: bool = False) -> None:
        """Has the state written, on the rank that writes; if it is sharded, by all ranks."""
        self._log.checkpoint(self._progress.epoch, lambda: replace(self._captured(loader), is_best=is_best))

    def _captured(self, loader: Loader | DataLoader[Any]) -> "Snapshot":
        cursor = loader.state_dict() if isinstance(loader, Loader) else None
        return self._progress.capture(loader, cursor, self._contract)

    def _offer_state(self, loader: Loader | DataLoader[Any]) -> None:
        """Offers a rerun the state that a checkpoint would have here."""
        if (rerun := current_rerun()) is not None:

            def capture() -> "Snapshot":
                self._log.record_arrived(self._progress.epoch, wait=True)
                return self._captured(loader)

            rerun.at_boundary(self, capture)

    def _complete_checkpoint(self, loader: Loader | DataLoader[Any], is_best: bool = False) -> None:
        """Has the state written while all ranks wait; by the next writer if one is lost before it is complete."""
        log = self._log

        def write() -> None:
            if not log.is_writer:
                log.take_over()
            if not is_sharded(self.step):
                self._checkpoint(loader, is_best)
            log.finish_checkpoints()

        if is_sharded(self.step):
            self._checkpoint(loader, is_best)
        self._perform_on_main(write)

    def _stop(self, loader: Loader | DataLoader[Any]) -> NoReturn:
        """Exits after the checkpoint is complete on all ranks; otherwise a launcher would kill the rest."""
        log, signum = self._log, self.run.membership.requests.stop
        log.compare()
        if self._progress.can_save(loader):
            self._complete_checkpoint(loader)
            self._tell_checkpoint()
        log.event("stop", signal=signum)
        again = f"the same command, whose resume='auto' finds {log.folder}"
        how = again if self._resume == "auto" else f"fit(…, resume={str(log.folder)!r}) (--resume {log.folder})"
        kept = f"; to go on: {how}" if log.folder is not None else ", and nothing was kept: it has no run_dir"
        self.say(f"stopped after step {self.step.num_steps}{kept}")
        self._say_kept(loader)
        log.draw(self.history)
        self.close()
        raise SystemExit(128 + signum)

    def _say_kept(self, loader: Loader | DataLoader[Any]) -> None:
        """Says in a line from where a run goes on that has ended inside an epoch of a loader of the user's own."""
        if self._log.folder is not None and not self._progress.can_save(loader):
            self.say(
                f"it ended inside epoch {len(self.history) + 1}, and a DataLoader of your own begins at an epoch's "
                f"start: a resumed run goes on from step {self._log.checkpoint_step}, with run.loader from anywhere"
            )

    def _end_epoch(self, loader: Loader | DataLoader[Any], record: EpochRecord) -> None:
        """Records and shows an epoch, keeps the best, and agrees on whether it is the last one."""
        log, membership = self._log, self.run.membership
        log.record_healings(self._progress.epoch)
        self._progress.add(record)
        shown = [(name, f"test {name}") for name in record.eval]
        log.epoch(record, record.describe(shown))
        self._hooks.call("on_epoch_end", record)
        self._offer_state(loader)
        if self.best is record and log.folder is not None:
            log.compare()
            # Where others would go on without the writer, none goes on before it is complete: the next step overwrites
            # the only state from which they could write it.
            has_heirs = membership.can_heal and membership.world_size > 1
            (self._complete_checkpoint if has_heirs else self._checkpoint)(loader, is_best=True)
            self._tell_checkpoint()
        elif self._is_owed:
            self._take_checkpoint(loader)
        self._is_owed = False
        membership.agree_on_end()
        log.epochs_agreed(self._progress.epoch)

    def _end_fit(self, loader: Loader | DataLoader[Any]) -> None:
        """Writes a checkpoint, the weights and the loss curve; all ranks wait until they are complete."""
        log, membership = self._log, self.run.membership
        log.compare()
        if log.folder is None:
            self._offer_state(loader)
            return
        from samestep.checkpoint.export import write_weights  # needed once, at the end

        weights, is_kept = log.folder / WEIGHTS_FILE, self._progress.can_save(loader)

        def record_end(digest: str) -> None:
            if log.is_writer:
                log.finish_checkpoints()
                log.draw(self.history)
                log.event("end", digest=digest)  # after all else is written

        def end_on_main() -> None:
            if not log.is_writer or self._ended_at == self.step.num_steps:
                # All was written; the attempt is repeated since another rank was lost after that.
                return
            if is_kept and (not log.has_checkpoint or not self.history):
                self._checkpoint(loader)
            write_weights(weights, self.step)
            record_end(self.digest)
            self._ended_at = self.step.num_steps

        # Repeated as a whole if a rank is lost in it: the next writer finds what is written, and writes the rest.
        def attempt() -> None:
            log.record_healings(self._progress.epoch)
            if not is_sharded(self.step):
                on_main(self.run.communicator, end_on_main)
                return
            if is_kept and (not log.has_checkpoint or not self.history):
                self._checkpoint(loader)
            digest = self.digest
            write_weights(weights, self.step)
            on_main(self.run.communicator, lambda: record_end(digest))

        membership.perform(attempt, "files")
        membership.perform(lambda: self.run.communicator.barrier())
        if is_kept:
            self._tell_checkpoint()
        self._say_kept(loader)
