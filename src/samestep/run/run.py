"""The run: the contract and the topology, built once and passed down. The training loop is the user's.

The constructor has an order: what can be refused is refused before a device or another rank is touched; switches of
kernels come before anything is computed; then the ranks connect, and last come the seeds, by which all ranks build the
same model. What a `Run` makes holds its `Membership`, which keeps its identity when ranks are lost, while communicators
and ranges of microbatches are others then: nothing may remember these from one step to the next.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Unpack
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint.contract import Contract, check_contract, check_same_gpus
from samestep.checkpoint.contract_diff import check_contract_kept, differences
from samestep.checks import check_counts, check_number, check_type
from samestep.comm.communicator import DTYPES, Communicator, make_communicator
from samestep.comm.environment import Environment, chosen_audit, read_environment
from samestep.comm.heartbeat import LEAVES_EARLY, READY_TO_JOIN, Heartbeat, HeartbeatPage
from samestep.comm.membership import Membership
from samestep.comm.transport import Connection, close_at_exit
from samestep.core.microbatches import active_shares, microbatch_ranges
from samestep.data.loader import Loader
from samestep.data.randomness import seed_process
from samestep.data.tensors import TensorData
from samestep.devices.device import keep_freed_memory
from samestep.devices.portable import asks_for_portable
from samestep.devices.selection import describe_unused_cores
from samestep.engine.config import StepConfig, StepOptions
from samestep.engine.determinism import make_deterministic
from samestep.engine.drawn_before import DrawnBefore, DrawnParameters
from samestep.engine.generator_states import generator_states, restore_generators
from samestep.engine.kernel_flags import ENFORCED, check_flags
from samestep.engine.losses import LossFn
from samestep.engine.portable_kernels import describe_late_caps, make_portable, portable_form
from samestep.engine.rank_device import make_current, own_device
from samestep.engine.step import TrainStep
from samestep.engine.strategy import Strategy
from samestep.engine.strategy_options import Sharded
from samestep.errors import SamestepError, UsageError
from samestep.files import retrying
from samestep.run.arguments import answers_unknown
from samestep.run.replay_protocol import current_rerun
from samestep.run.signals import stopping_on_request
from samestep.text import describe, show

DEFAULT_TIMEOUT_SECONDS = 600.0
MAX_TIMEOUT_SECONDS = 366 * 86_400.0


class Run:
    """The contract of a run, and this process's rank in it.

    Build it first: it seeds every random generator alike on all ranks, so that models built after it are equal. Under
    `python script.py` it is a run on one device; under `samestep run`, torchrun, srun or mpirun on all of them. Tier
    `bitwise`: for equal arguments, code and data the results are the same bits on 1 to `num_microbatches` devices of
    one kind.

    Args:
        global_batch_size: samples of one optimizer step over all devices.
        num_microbatches: number of slices of a global batch, the unit of computation and of reproducibility; 8 by
            default (the global batch, if that is smaller). At least as many as there are devices.
        seed: of every random generator and of the order of the data.
        shares: the relative amount of work of each device, one number a device; equal by default. The bits do not
            depend on it.
        spares: number of devices, the last ones, that stand by: they hold the state and take over at once when another
            is lost. Devices beyond `num_microbatches` can only be spares.
        device: this rank's device, which becomes the current one; chosen by the launcher, else the first accelerator,
            else the CPU. "cuda" without an index is the GPU with the local rank.
        num_threads: CPU threads of a rank, part of the contract since reductions split by it, in data loading and
            initialisation on GPU ranks too; 1 by default, whatever the cores and devices.
        timeout_seconds: time to wait for other ranks before an error names the missing ones; while rank 0 alone works
            (`main_first`, files) they wait for as long as it lives.
        communicator: this rank's communicator, instead of one from the environment; for tests and special transports.

    Raises:
        UsageError: an invalid argument, or more devices than microbatches.
        PeerLostError: not all ranks connected within the timeout.
    """

    @answers_unknown("Run")
    def __init__(
        self,
        global_batch_size: int,
        num_microbatches: int | None = None,
        seed: int = 0,
        *,
        shares: Sequence[float] | None = None,
        spares: int = 0,
        device: str | torch.device | None = None,
        num_threads: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        communicator: Communicator | None = None,
    ) -> None:
        if (rerun := current_rerun()) is not None:
            device, shares, spares, communicator = rerun.device, None, 0, None
            num_threads = rerun.num_threads if num_threads is None else num_threads
        count = check_contract(global_batch_size, num_microbatches, seed)
        check_counts(num_threads=num_threads)
        check_number("timeout_seconds", timeout_seconds, above=0, high=MAX_TIMEOUT_SECONDS, whole=False, option="")
        is_script = device is None and communicator is None  # a rerun has a device
        environment = read_environment() if communicator is None else Environment()
        world_size = environment.world_size if communicator is None else communicator.world_size
        check_number("spares", spares, 0, world_size - 1, option="")  # one at least is left to work
        # For its errors alone: more devices than microbatches, or shares that cannot be.
        microbatch_ranges(count, world_size - spares, active_shares(shares, world_size, spares))
        self.device = own_device(device, environment) if communicator is None else communicator.device
        make_current(self.device)
        threads = num_threads or environment.settings.num_threads or 1
        if rerun is None and asks_for_portable():  # a replay decides it before it reads a checkpoint
            make_portable(self.device.type)
        self.contract = Contract(global_batch_size, count, seed, self.device.type, threads, portable_form())
        make_deterministic(threads)
        keep_freed_memory()
        heartbeat, slots, healing_store, is_late = Heartbeat(), None, None, False
        timeout = timedelta(seconds=timeout_seconds)
        if communicator is None:
            if (watched := HeartbeatPage.from_environment()) is not None:
                heartbeat = Heartbeat(*watched)
            own, slots, healing_store, is_late = _ranks_now(environment, heartbeat, timeout)
            communicator = make_communicator(own, self.device, timeout)
            if self.device.type == "cuda" and isinstance(communicator.control, Connection):
                check_same_gpus(communicator.control, self.device)
        self.membership = Membership(
            communicator,
            count,
            slots=slots,
            num_active=world_size - spares if spares else None,
            shares=shares,
            heartbeat=heartbeat,
            timeout_seconds=timeout_seconds,
            healing_store=healing_store,
            is_late=is_late,
        )
        self._close = close_at_exit(self.membership.close)
        self._give_signals_back: Callable[[], object] | None = None
        self._num_streams = 0
        self._sharded: dict[nn.Module, Strategy] = {}  # the strategies of models with sharded parameters
        self._has_steps = False
        self._program: dict[str, Any] = {}  # for its checkpoints
        self._folders: set[Path] = set()  # of checkpoints that are this run's
        self._drawn_before = DrawnBefore()
        self.membership.notice(describe_late_caps())
        if is_script and self.device.type == "cpu" and environment.launcher == "none" and threads == 1:
            self.membership.notice(describe_unused_cores(count))
        # Last: nothing above moves the generators by which the script makes its model.
        seed_process(seed)

    @property
    def communicator(self) -> Communicator:
        """This rank's communicator; another one after a rank was lost."""
        return self.membership.communicator

    @property
    def ranges(self) -> tuple[range, ...]:
        """The microbatches that each rank executes, by rank."""
        return self.membership.ranges

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop (Ctrl-C, SIGTERM): true on all ranks after the same step.

        A loop of your own checks it after each step, saves its state and ends; `Trainer` does so by itself. After the
        first access the first request does not end the process any more, the second does.
        """
        if self._give_signals_back is None:
            until_end = ExitStack()
            until_end.enter_context(stopping_on_request(self.membership))
            # Before the interpreter drops its modules.
            self._give_signals_back = finalize(self, until_end.close)
        if self.membership.requests.stop == 0:
            return False
        self.membership.heartbeat.set_flags(self.membership.heartbeat.flags | LEAVES_EARLY)
        return True

    @property
    def rank(self) -> int:
        """This process's rank, 0 … world_size - 1."""
        self._note_asked("run.rank")
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """The number of ranks, one a device."""
        self._note_asked("run.world_size")
        return self.communicator.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes. A worker that waits to join is not."""
        self._note_asked("run.is_main")
        return self._is_main

    @property
    def _is_main(self) -> bool:
        # Without `_note_asked`: a question of samestep's own is none of the script's.
        return self.membership.rank == 0 and not self.membership.is_late

    def _note_asked(self, name: str) -> None:
        """Reports to the step under way that one of its microbatches reads the rank."""
        if self.membership.on_rank_asked is not None:
            self.membership.on_rank_asked(name)

    def print(self, *values: Any) -> None:
        """Prints on rank 0 only. In hooks `Trainer.say` prints above the progress bar."""
        if self._is_main:
            show(" ".join(map(str, values)), sys.stdout)

    def barrier(self) -> None:
        """Waits until all ranks call it."""
        self.membership.perform(lambda: self.communicator.barrier())

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, by rank; all ranks call it. They may differ in shape and dtype.

        For what belongs to ranks, such as their times: there are as many as devices, and what is made of them depends
        on the devices. A metric over samples is `evaluate`'s, and outputs are `predict`'s.
        """

        if not isinstance(tensor, Tensor):
            raise UsageError(f"gather takes a tensor, got {describe(tensor)}; torch.tensor(…) makes one of numbers")
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
            raise UsageError(f"gather takes a dense tensor, got {describe(tensor)} of layout {tensor.layout}")

        def gather() -> list[Tensor]:
            ranks = range(self.communicator.world_size)
            return [self.communicator.share(tensor if rank == self.communicator.rank else None, rank) for rank in ranks]

        return self.membership.perform(gather)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs a block on rank 0 first, for example to download or unpack data; then on the other ranks.

            with run.main_first():
                dataset = load_dataset("…")

        If it fails on rank 0, the other ranks raise that error, too. If rank 0 is lost in it, the next rank begins it
        anew. The others wait for as long as rank 0 lives, with no time limit.
        """
        from samestep.comm.exceptions import raise_together

        def is_any(value: bool) -> bool:
            return any(done for (done,) in self.communicator.gather_words([value]))

        def is_done(here: bool, error: Exception | None = None) -> bool:
            def share() -> bool:
                raise_together(self.communicator, error)
                return is_any(here)

            done = self.membership.perform(share)
            # Again: the word of a rank that is lost in between may have reached some of the others only.
            return self.membership.perform(lambda: is_any(done))

        goes_first = self._is_main
        # After each loss anew: this rank may be rank 0 by then. A late worker joins others that have gone through the
        # block.
        while not (goes_first or self.membership.is_late or is_done(False)):
            goes_first = self._is_main
        heartbeat = self.membership.heartbeat
        before = heartbeat.enter("files") if goes_first else heartbeat.phase
        try:
            yield
        except Exception as error:
            if goes_first:
                is_done(True, error)
            raise
        if goes_first:
            is_done(True)
            heartbeat.enter(before)

    def __repr__(self) -> str:
        """The contract and the place of this process in the run."""
        contract = ", ".join(f"{name}={value!r}" for name, value in asdict(self.contract).items())
        return (
            f"<samestep.Run: {contract}; rank {self.membership.rank} of {self.communicator.world_size}, {self.device}>"
        )

    @answers_unknown("Run.train_step")
    def train_step(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: LossFn,
        **options: Unpack[StepOptions],
    ) -> TrainStep:
        """Makes a training step; several may share a model (a GAN has two). Tier `bitwise`.

        The model is moved to this rank's device, in place. Parameters that the optimizer does not hold are left alone.

        Args:
            model: whose parameters the optimizer holds.
            optimizer: one or several, all stepped together.
            loss_fn: `loss_fn(model, batch)` returns a 0-d tensor (a mean over the microbatch's samples), a 1-d tensor
                (a loss a sample) or `samestep.Mean(total, count)`; or a pair of one of these and a dict of scalars by
                name, each of them a number or one of these, for `StepResult.scalars`. It is called once a microbatch.
            counts_fn: for losses with several denominators: `counts_fn(batch)` returns numbers, which are summed over
                the global batch and handed over as `loss_fn(model, batch, counts)`; the loss then returns the
                microbatch's 0-d share of the loss, which is summed and not divided again.
            scheduler: stepped after every step, if given; leave out one that counts epochs, and step it yourself.
            max_grad_norm: clip the gradient of the global batch to this 2-norm; no clipping by default.
            precision: "32-true", the default, "bf16-mixed" or "16-mixed" (autocast; with a power-of-two loss scale for
                the last).
            on_nonfinite: "raise", the default, when the loss or gradient is not finite, or "skip" that update.
            late_check: let the device skip a non-finite update, and raise when its scalars are read; the default on
                accelerators with fused Adam or AdamW, which support it. Else the host checks before each update.
            overlap: sends a bucket while backward goes on; the default.
            bucket_bytes: size of a message; 32 MiB on CUDA devices, else 8 MiB. The bits depend on neither.
            compile: runs forward and loss through `torch.compile`, with deterministic settings. Bits are equal on
                all numbers of devices, and differ from those without it.
            strategy: the placement of the state on the ranks: "replicate" (the default: each has all of it), "zero1"
                (each has 1/D of the optimizer's), "sharded" (each has 1/D), or `samestep.Sharded` with options. Equal
                bits; see docs/parallel-layouts.md#strategies.
            audit: in every so many steps another device computes one microbatch again, and the ranks compare their
                states, which finds devices that compute wrong bits; see docs/wrong-bits.md. It costs
                1/(audit * num_microbatches) of a step. If one does, it is left out as a lost one: audit=10 is
                "10:exclude"; "10:warn" repeats the step, and "10:stop" ends the run. None for never.
            observers: get the events of each step; see `samestep.engine.observer`.

        Raises:
            UsageError: an invalid argument, SyncBatchNorm, LBFGS, or an optimizer of another model.
            DeterminismError: the ranks built different models.

        A step that is audited raises an `AuditError` on the rank that is left out, or on all ranks if the run ends.
        """
        optimizers = _checked_optimizers(optimizer)
        if any(each in self._sharded for each in model.modules()):
            raise UsageError("a step has sharded this model already; several over one need strategy='replicate'")
        if options.get("audit") is None:
            options["audit"] = chosen_audit()
        contract, scheduler = self.contract, options.get("scheduler")
        drawn = self._drawn_before.parameters(model)
        if drawn:
            options["observers"] = (*options.get("observers", ()), DrawnParameters(drawn))
        config = StepConfig(loss_fn, contract.seed, self._num_streams, contract.global_batch_size, **options)
        # By their groups, which a wrapper of an optimizer shares with it.
        groups = {id(group) for each in optimizers for group in each.param_groups}
        if scheduler is not None and groups.isdisjoint(map(id, scheduler.optimizer.param_groups)):
            raise UsageError(f"the {type(scheduler).__name__} is of another optimizer; make it of the step's optimizer")
        check_flags(ENFORCED, self.device.type, "where samestep.Run needs")
        if self._has_steps and isinstance(config.placement, Sharded) != self.membership.plan.is_dealt:
            raise UsageError("strategy='sharded' holds for all training steps of a run: give it to all or to none")
        self._num_streams += 1
        step = TrainStep(self.membership, model, optimizers, config)
        self._has_steps = True
        if step.sharded_state is not None and not step.sharded_state.has_whole_parameters:
            self._sharded[model] = step.strategy
        return step

    @answers_unknown("Run.loader")
    def loader(
        self,
        dataset: Any = None,
        *,
        streams: Callable[[int, int], Any] | None = None,
        exact_states: bool = False,
        shuffle: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        multiprocessing_context: str | None = None,
        cache: str | None = None,
    ) -> Loader:
        """Makes a loader of this rank's microbatches of each global batch, on its device. Tier `bitwise`.

        Args:
            dataset: tensors (also nested in tuples and dicts), a map-style or an iterable dataset. An iterable one is
                read by every rank, which keeps its microbatches.
            streams: instead of a dataset, `streams(index, count)` returns the stream of samples of microbatch `index`:
                any iterable, opened anew for each epoch, and read by the rank that executes the microbatch alone. It
                must depend on its arguments only. `count` is num_microbatches.
            exact_states: streams go on from their own `state_dict`, if they have one, when a run is resumed or healed,
                instead of being read again up to their place. Only for streams that then give exactly the samples that
                they would have given: what shuffles in a buffer, or draws in a worker, often does not.
            shuffle: a new order each epoch, a function of (seed, epoch).
            drop_last: skip a shorter last batch. By default it is split over the microbatches like any other. With
                streams: end the epoch when one of them cannot fill its microbatch; by default the others go on.
            num_workers: number of processes that fetch samples; the bits do not depend on it.
            collate_fn: makes a batch of a list of samples; torch's by default.
            multiprocessing_context: how workers start; by default in Python's way, on CPUs under Linux by a fork.
            cache: "device" keeps a dataset of tensors in the device's memory.

        Raises:
            DataError: it is no dataset, or empty.
            UsageError: an invalid argument.
            OutOfMemoryError: a dataset to be cached does not fit in the device's memory.
        """
        loader = Loader(
            dataset,
            membership=self.membership,
            device=self.device,
            seed=self.contract.seed,
            global_batch_size=self.contract.global_batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=num_workers,
            collate_fn=collate_fn,
            multiprocessing_context=multiprocessing_context,
            cache=cache,
            streams=streams,
            exact_states=exact_states,
        )
        if type(loader.dataset) is TensorData:
            self.membership.notice(self._drawn_before.describe_data(loader.dataset.tensors))
        return loader

    @answers_unknown("Run.evaluate")
    def evaluate(
        self,
        model: nn.Module,
        data: Any,
        metrics: Mapping[str, Any],
        *,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        precision: str = "32-true",
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Measures a model on every sample of a dataset, once, in evaluation mode and without gradients.

        Random generators are seeded for each microbatch, for the forward and the metrics, and restored afterwards. Tier
        `bitwise`.

        Args:
            model: restored to its mode and buffers afterwards.
            data: anything `loader` takes, or a loader of this run: read from the beginning of its epoch in the order of
                the data; it keeps its place.
            metrics: name to metric: one of `samestep.metrics`, one of torchmetrics, or a function of (output, batch).
            forward: `forward(model, batch)` returns the output; by default `model` is called with a batch's first
                entry.
            precision: as in `train_step`.
            num_workers: as in `loader`.
            collate_fn: as in `loader`.

        Raises:
            UsageError: no metric, or one that returns neither a value a sample nor a `samestep.Mean`, or whose states
                cannot be merged.
            DeterminismError: the ranks have datasets of different sizes.
        """
        # Not loaded by programs that only train.
        from samestep.run.evaluation import evaluate

        loader = data if isinstance(data, Loader) else self.loader(data, num_workers=num_workers, collate_fn=collate_fn)
        with self._placed(model) as placed:
            return evaluate(self.membership, placed, loader, metrics, forward=forward, precision=precision)

    @answers_unknown("Run.predict")
    def predict(
        self,
        model: nn.Module,
        data: Any,
        *,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        precision: str = "32-true",
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """The model's outputs for every sample of a dataset, in its order, in host memory, on every rank.

        Outputs are tensors with the samples along dim 0, also nested in dicts, lists and tuples; or lists with an
        entry a sample, which are joined into one: a detector's list of dicts, or texts. Arguments and errors are
        as in `evaluate`. Tier `bitwise`.
        """
        from samestep.run.evaluation import predict

        loader = data if isinstance(data, Loader) else self.loader(data, num_workers=num_workers, collate_fn=collate_fn)
        with self._placed(model) as placed:
            return predict(self.membership, placed, loader, forward=forward, precision=precision)

    @contextmanager
    def _placed(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yields the callable for evaluation; its errors are translated as in training."""
        strategy = self._sharded.get(model)
        if strategy is None:
            yield model
            return
        try:
            yield model
        except SamestepError:
            raise
        except RuntimeError as error:
            if (explained := strategy.explain(error)) is not None:
                raise explained from error
            raise

    def save_checkpoint(
        self,
        folder: str | Path,
        step: TrainStep | Sequence[TrainStep],
        loader: Loader | None = None,
        rest: Any = None,
        keep: int = 3,
    ) -> Path:
        """Writes the whole state, from which a run goes on exactly, on any number of devices.

        The state is model, optimizers, scheduler, loss scale, random generators, the place in the data, and the
        contract. All ranks call it, after the same step. No pickle is involved. Tier `bitwise`.

        Args:
            folder: of this run's checkpoints; each is a folder in it, `step-00000120`, by the number of steps taken.
            step: one, or several that belong together, such as a GAN's two.
            loader: of this run, in the middle of an epoch too: the batches yielded so far count as done.
            rest: further state: tensors, arrays of numbers, numbers, strings, None in dicts, lists, tuples.
            keep: number of checkpoints that are kept.

        Returns:
            The checkpoint.

        Raises:
            UsageError: the folder holds another run's checkpoints, or a value in `rest` is neither a tensor nor JSON.
            RunFolderError: it cannot be written, nor after 1, 2 and 4 seconds; no good checkpoint is lost.
            DeterminismError: the ranks' states differ; the message names the difference and the rank.
        """
        from samestep.run.loop_checkpoints import captured, save  # loads what reads and writes checkpoints
        from samestep.runs.recorder import relaunch

        contract = self.contract.as_json()
        if (rerun := current_rerun()) is not None:
            known = rerun.at_save(Path(folder), lambda: captured(contract, step, loader, rest))
            if known is not None:
                return known
        is_ours = Path(folder).resolve() in self._folders
        self._program = self._program or relaunch()
        attempts = partial(retrying, tell=self.print)
        path = save(self.membership, contract, folder, step, loader, rest, keep, is_ours, attempts, self._program)
        self._folders.add(path.parent.resolve())
        return path

    def load_checkpoint(
        self,
        place: str | Path,
        step: TrainStep | Sequence[TrainStep],
        loader: Loader | None = None,
        *,
        allow_contract_change: bool = False,
    ) -> Any:
        """Goes on from a checkpoint that `save_checkpoint` wrote; all ranks call it, and rank 0 reads. Tier `bitwise`.

        Call it last, when everything is built as it was, since the random generators are restored too.

        Args:
            place: a folder, whose newest good checkpoint is taken, or one checkpoint.
            step: one or several, in the order in which they were saved.
            loader: goes on from its place in the checkpoint.
            allow_contract_change: go on although a part of the contract changed.

        Returns:
            The `rest` that was saved, an empty dict if there was none; None if the folder has no checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model, optimizer or scheduler; nothing is changed then.
            ContractError: the run was made under another contract; the message lists the fields.
            UsageError: a folder in which no checkpoint is good.
        """
        from samestep.run.loop_checkpoints import load

        contract = self.contract.as_json()
        if (rerun := current_rerun()) is not None:
            at = rerun.at_load(Path(place))
            if at is None:
                return None
            place = at
        found = load(self.membership, contract, place, step, loader, allow_contract_change, self.print)
        if found is None:
            return None
        self._folders.add(found[0].resolve())
        return {} if found[1] is None else found[1]

    def state_dict(self) -> dict[str, Any]:
        """The contract and the states of the random generators; model, optimizer, step and loader have their own."""
        return {"contract": self.contract.as_json(), "generators": generator_states(self.device)}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_contract_change: bool = False) -> None:
        """Restores the random generators, from which the script draws.

        Raises:
            ContractError: the state is of a run with another contract; the message lists the fields.
        """
        check_contract_kept(differences(state["contract"], self.contract.as_json()), allow_contract_change)
        restore_generators(state["generators"], self.device)

    def close(self) -> None:
        """Closes the connections, and gives signals back; without a call this happens when the process ends."""
        if self._give_signals_back is not None:
            self._give_signals_back()
        self._close()


def _ranks_now(
    environment: Environment, heartbeat: Heartbeat, timeout: timedelta
) -> tuple[Environment, Sequence[int], dist.Store | None, bool]:
    """This worker's place among the ranks that there are, their slots, its own store, and whether it is late.

    One that is late joins at the store, and one that is alone is joined there by the workers of other machines.

    In an earlier run of the program workers may have been lost, and others have joined.
    """
    joins = environment.settings.joins
    if (page := heartbeat.page) is not None:
        quorum = page.quorum()
        heartbeat.quorum, joins = quorum.number, joins and heartbeat.slot not in quorum.slots
        members = [slot for slot in quorum.slots if not page.beat(slot).flags & READY_TO_JOIN]
        if not joins and members != list(range(environment.world_size)):
            return environment.among(members, heartbeat.slot), members, None, False
    is_alone = environment.world_size == 1 and environment.settings.machine is not None and environment.settings.heals
    if not joins and not is_alone:
        return environment, range(environment.world_size), None, False
    from samestep.comm.rendezvous import join_store  # which imports what other workers have no need of

    return Environment(), (0,), join_store(environment, timeout), joins


def _checked_optimizers(value: Any) -> tuple[Optimizer, ...]:
    """One or several optimizers as a tuple."""
    optimizers = tuple(value) if isinstance(value, Sequence) else (value,)
    for optimizer in optimizers:
        check_type("optimizer", optimizer, isinstance(optimizer, Optimizer), "a torch.optim.Optimizer, or several")
    return optimizers
