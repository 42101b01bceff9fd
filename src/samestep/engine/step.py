"""One optimizer step on a global batch, with the same bits on any number of devices.

The batch is cut into V microbatches whatever the devices are, so every kernel sees the same shapes on 1, 2, … V of
them. Floating-point addition commutes but does not associate: only the pairing of the V gradients matters, not which
rank adds which, and the tree (`core.tree`) fixes the pairing. Each microbatch seeds the random generators by its own
number. Nothing is written to the model before the whole exchange has arrived, and the step counter moves last: if a
rank is lost meanwhile, the others repeat the step from the same state.
"""

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.buckets import pinned
from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.comm.requests import END_OF_FIT
from samestep.core.tree import rank_blocks
from samestep.data.batch import Batch, split_batch
from samestep.engine.audit import Audit, AuditFinding, RepeatStepError
from samestep.engine.buffers import refuse_sync_batchnorm
from samestep.engine.config import StepConfig, default_bucket_bytes
from samestep.engine.factory import make_strategy
from samestep.engine.finite_check import FiniteCheck, divisor, left_out_if
from samestep.engine.forward_backward import ForwardBackward, backward_on_this_thread, compiling_alike
from samestep.engine.gradients import divide, scale
from samestep.engine.kernel_flags import check_flags, enough_memory, kernel_flags
from samestep.engine.losses import GlobalCounts, wide_dtype
from samestep.engine.microbatch_runner import MicrobatchRunner, StepParts
from samestep.engine.observer import HeartbeatObserver, Observers, observers_in_scope
from samestep.engine.optimizer_settings import settings_of
from samestep.engine.parameters import (
    PurityCheck,
    held_by,
    is_dtensor,
    keep_numbers,
    move_states,
    named_parameters,
)
from samestep.engine.precision import LossScale
from samestep.engine.result import ADVICE, Agreed, StepResult, StepStats, read_headers, write_header
from samestep.engine.sharded_state import ShardedState
from samestep.engine.side_effects import MOST_NAMES, WATCHED_STEPS, Traces
from samestep.engine.strategy import ExchangeOptions
from samestep.engine.strategy_options import Sharded
from samestep.errors import DataError, DeterminismError, NonFiniteError, OutOfMemoryError, PeerLostError, UsageError

FIRST_STEPS = 3  # after which parameters without a gradient are named
# Of a batch that every rank holds whole, all values are compared in the first steps of so many, else some: the checksum
# of a batch of 154 MB takes 0.5 s of a core.
WHOLE_EVERY, COMPARED_VALUES = 100, 4096
NEEDS_LESS = (
    'more microbatches (num_microbatches), activation checkpointing, strategy="sharded", or a GPU that no other '
    "process uses"
)
CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_Schedule = tuple[dict[str, Any], list[Any]]


class TrainStep:
    """One training step; made by `samestep.Run.train_step`, which explains the arguments.

    Attributes:
        num_steps: steps taken so far.
        settings: the settings of optimizers and scheduler when the step was made.
        began_trained: by the parameters' names, whether they were trainable then.
        extra_state: further objects by name whose `state_dict()` counts as state in digests; equal on all ranks.
        strategy: places the state on the ranks, and runs the microbatches.
        compute: forward and backward of one microbatch.
        compiling: the context of it.
    """

    def __init__(
        self,
        membership: Membership,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        config: StepConfig,
    ) -> None:
        self.membership = membership
        self.model = model
        self.optimizers = tuple(optimizers)
        self.scheduler = config.scheduler
        self.config = config
        self.num_steps = 0
        self.extra_state: Mapping[str, Any] = {}
        self.settings = settings_of(self.optimizers, config.scheduler)
        self.began_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        own = HeartbeatObserver(membership.heartbeat)
        self.observers = Observers([own, *config.observers, *observers_in_scope()])
        self._used: set[str] = set()  # parameters that had a gradient in the first steps of this process
        self._num_checked = 0
        # Once true, for good: the other ranks are at another step, or this one is half updated.
        self._failed = False
        self._num_threads = torch.get_num_threads()
        device = membership.communicator.device
        self._flags = kernel_flags(device.type)

        refuse_sync_batchnorm(model)
        wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
        if found := [type(module).__name__ for module in model.modules() if isinstance(module, wrappers)]:
            raise UsageError(f"the model has a {found[0]}; a step shares out its microbatches: pass the module in it")
        if divided := [name for name, parameter in model.named_parameters() if is_dtensor(parameter)]:
            raise UsageError(
                f"parameter {divided[0]} is a DTensor (of parallelize_module, fully_shard or another training step), "
                "and a step divides a model itself: leave that out, or train in a loop of your own under `samestep run "
                "--logical-devices` (see docs/parallel-layouts.md)"
            )
        is_mean = membership.num_microbatches == 1 or config.counts_fn is not None
        num_summed = 1 if is_mean else config.global_batch_size
        self._scale = LossScale(device, config.precision == "16-mixed", num_summed)
        is_offloaded = isinstance(config.placement, Sharded) and config.placement.cpu_offload
        self._finite = FiniteCheck(
            device, self.optimizers, self._scale, config.on_nonfinite, config.late_check, is_offloaded
        )
        self._stats = StepStats(device, on_host=not self._finite.on_device)
        self._unread: deque[tuple[StepResult, _Schedule | None]] = deque()
        trained = named_parameters(model, self.optimizers).values()
        _check_trained(trained)  # before anything is moved or sharded
        _check_hooks(model, trained)
        bucket_bytes = config.bucket_bytes or default_bucket_bytes(device.type == "cuda")
        options = ExchangeOptions(bucket_bytes, config.overlap)
        try:
            self.strategy = make_strategy(membership, model, self.optimizers, config.placement, options)
            move_states(self.optimizers)
            for optimizer in self.optimizers:
                keep_numbers(optimizer)
        except (RuntimeError, MemoryError) as error:
            from samestep.engine.diagnosis import describe_model_shortage, is_out_of_memory

            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(describe_model_shortage(model, membership.rank, device)) from error
        explain, memory_advice = self.strategy.explain, self.strategy.memory_advice
        self.compute = ForwardBackward(membership, model, config, self._scale, self.observers, explain, memory_advice)
        is_watched = not isinstance(config.placement, Sharded) and membership.num_microbatches > 1
        self._traces = Traces(membership, model, config.loss_fn) if is_watched else None
        self.compiling = compiling_alike if "torch._dynamo" in sys.modules else nullcontext
        self._audit = None
        if config.audit is not None:
            self._audit = Audit(self)
        self._lay_out()
        self.observers.on_made(self)

    @property
    def communicator(self) -> Communicator:
        """The collectives of this rank, as the ranks are now."""
        return self.membership.communicator

    def __repr__(self) -> str:
        """What is trained, by what, and how far."""
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        strategy = type(self.config.placement).__name__.lower()
        return f"<samestep.TrainStep: {type(self.model).__name__} by {optimizers}, {strategy}; step {self.num_steps}>"

    @property
    def audit_findings(self) -> list[AuditFinding]:
        """What the audits of this step have found so far, in this process."""
        return [] if self._audit is None else self._audit.findings

    @property
    def loss_scale(self) -> Tensor:
        """The factor of a microbatch's loss before its backward, 0-d: 1 unless precision is "16-mixed"."""
        return self._scale.scale

    @property
    def sharded_state(self) -> ShardedState | None:
        """The sharded state; None if each rank has all of it."""
        return self.strategy.state

    def __call__(self, batch: Any) -> StepResult:
        """Takes one optimizer step on a global batch.

        Raises:
            NonFiniteError: the loss or the gradient of this step, or of an earlier one, is not finite; see `check`.
        """
        self._read_available()
        self._check_process()
        self.observers.on_step(self, batch)
        # The script's own autocast is for its forwards: under it torch refuses to join tensors of some dtypes.
        kind = self.communicator.device.type
        plain = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        try:
            with plain:
                # Repeated from the same state if a rank is lost.
                result = self.membership.perform(lambda: self._take(batch), "script")
        except BaseException as error:
            self.observers.on_failure(error)
            raise
        self.observers.on_update(self, result)
        self.observers.on_phase("script")
        return result

    def _take(self, value: Any) -> StepResult:
        """The step; repeated by the same ranks if an audit asks for that."""
        while True:
            with suppress(RepeatStepError):
                return self._step(value)

    def _step(self, value: Any) -> StepResult:
        """The step by the ranks as they are now; leaves everything as it was if a rank is lost meanwhile."""
        membership = self.membership
        batch = self._local_microbatches(value)
        self.observers.on_batch(batch)
        self._adapt()
        gradients, buffers = self.strategy.gradients, self.strategy.buffers
        num_leaves = batch.num_leaves(membership.num_microbatches)  # those with samples: V, or fewer
        blocks_by_rank = rank_blocks(membership.ranges, num_leaves)
        audit = self._audit
        if audit is not None and batch.sizes is not None:
            raise UsageError(
                "a stream for each microbatch is read by one rank alone, and no other can compute its microbatch "
                "again: leave audit (--audit) out, or give the loader a dataset"
            )
        if audit is not None and not audit.begin(self.num_steps, num_leaves, partial(self._fetch, value)):
            audit = None

        # 1. Forward and backward, one microbatch at a time: neither memory nor kernels depend on the number of ranks.
        #    Gradients are added along the tree as they come; the last backward starts their exchange.
        gradients.begin(blocks_by_rank)
        buffers.begin(self.num_steps)
        self._stats.begin(membership.mine)
        traces = self._traces if self.num_steps < WATCHED_STEPS else None
        device, where = self.communicator.device, f"step {self.num_steps + 1} on rank {membership.rank}"
        enough = enough_memory(device, where, NEEDS_LESS)
        parts = StepParts(self.num_steps, self.compute, self._purity, self._counts, self._stats, traces, audit)
        try:
            with enough, backward_on_this_thread(device), self.compiling():
                MicrobatchRunner(batch, parts, gradients, buffers).run()
        except BaseException as error:
            self._abandon()
            # The script's own exception is refused on one rank as on several; Ctrl-C in a notebook is no failure.
            alone = membership.world_size == 1
            self._failed = isinstance(error, Exception) if alone else not isinstance(error, PeerLostError)
            raise

        # 2. The only communication: the rest of the gradients, the statistics with the control message, the buffers.
        #    It raises on all ranks alike, and nothing has been written yet.
        self.observers.on_phase("exchange")
        num_touched = len(buffers.touched)
        try:
            agreed, words = self._exchange(batch, [*buffers.touched, *gradients.used], audit)
            touched, used = agreed.flags[:num_touched], agreed.flags[num_touched:]  # by any rank
            gradients.finish()
            buffers.exchange(touched, blocks_by_rank, batch.length)
            membership.await_exchange()
            if audit is not None:
                audit.judge(words)
        except BaseException:
            self._abandon()
            raise
        membership.requests.stop, membership.requests.checkpoint = agreed.stop, agreed.checkpoint
        if agreed.failed:
            # An earlier step, whose failure not every rank may have read: they raise it together, or some would wait.
            self._abandon()
            self._read_up_to(agreed.failed)

        # 3. The same arithmetic on every rank.
        self._check_used(used)
        self.observers.on_phase("update")
        return self._update(batch, num_leaves, used)

    def _local_microbatches(self, value: Any) -> Batch:
        """This rank's microbatches of a global batch, by index, as the ranks are now."""
        membership = self.membership
        # A loss may have written to the samples, so a step that is repeated fetches them anew.
        is_repeated = self._audit is not None and self._audit.is_repeating(self.num_steps)
        if isinstance(value, Batch) and value.version == membership.version and not is_repeated:
            batch = value
        elif isinstance(value, Batch):
            if value.renew is None:
                raise DataError("a batch of another run's loader; use the loader of this run")
            # In this phase: a rank that hangs while it fetches the microbatches of a lost one does not wait for others.
            self.observers.on_phase("data")
            batch = value.renew()
            self.observers.on_phase("script")
        else:
            device, version = membership.communicator.device, membership.version
            # By the number of the step, which all ranks agree on; a rank that has come later compares as much.
            compared = None if self.num_steps % WHOLE_EVERY < FIRST_STEPS else COMPARED_VALUES
            compared = compared if membership.world_size > 1 else 0
            batch = split_batch(value, membership.num_microbatches, membership.to_fetch, device, compared, version)
            self._check_lengths(batch.length)
        if batch.length < 1:
            raise DataError("the batch holds no samples; leave empty batches out")
        return batch

    def _fetch(self, value: Any, microbatch: int) -> Any:
        """The samples of one microbatch of a global batch, anew and whichever rank executes it."""
        if isinstance(value, Batch):
            assert value.renew is not None, "batches of a loader can be fetched anew"
            return value.renew(microbatch).microbatches[microbatch]
        only, device = range(microbatch, microbatch + 1), self.communicator.device
        return split_batch(value, self.membership.num_microbatches, lambda _: only, device, 0).microbatches[microbatch]

    def _exchange(self, batch: Batch, flags: list[bool], audit: Audit | None) -> tuple[Agreed, list[list[int]]]:
        """Exchanges the gradients, the statistics of all microbatches and the control messages of all ranks.

        Returns what all ranks have agreed on, and the words of each for an audit.
        """
        membership = self.membership
        first = self._unread[0][0] if self._unread else None
        failed = first.step if first is not None and first.is_there and not first.is_good else 0
        requests = membership.requests
        stop = END_OF_FIT if requests.asks_end else membership.heartbeat.stop_asked
        agreed = Agreed(stop, requests.asks_checkpoint, flags, failed)
        if membership.world_size > 1:
            self.strategy.gradients.start()
        words = [] if audit is None else audit.words()
        rows = [words]
        if membership.world_size > 1:
            header = write_header(batch, self.num_steps + 1, agreed)
            traces = self._traces if self.num_steps < WATCHED_STEPS else None
            left = [] if traces is None else traces.words()
            sent = [*header, *left, *words]
            headers = self._stats.exchange(membership.communicator, membership.ranges, sent)
            agreed = read_headers([row[: len(header)] for row in headers], len(flags))
            if traces is not None:
                traces.judge([row[len(header) :] for row in headers])
            rows = [row[len(header) + len(left) :] for row in headers]
        return agreed, rows

    def _check_used(self, used: list[bool]) -> None:
        """Names the parameters that got no gradient in the first steps; raises a `UsageError` if none got one."""
        if self._num_checked == FIRST_STEPS:
            return
        self._num_checked += 1
        names = [name for name, parameter in self._named.items() if parameter.requires_grad]
        self._used.update(name for name, is_used in zip(names, used, strict=True) if is_used)
        if not self._used:
            self._abandon()
            raise UsageError(
                f"none of the {len(names)} parameters that are trained got a gradient in step {self.num_steps + 1}: "
                "the loss depends on other tensors alone; check detach(), no_grad, and what the optimizer holds"
            )
        missing = [name for name in names if name not in self._used]
        if missing and self._num_checked == FIRST_STEPS:
            self.membership.notice(
                f"{len(missing)} of {len(names)} parameters got no gradient in the first {FIRST_STEPS} steps, such as "
                f"{', '.join(missing[:MOST_NAMES])}: check detach() and no_grad, or freeze them (requires_grad)"
            )

    @torch.no_grad()
    def _update(self, batch: Batch, num_leaves: int, used: list[bool]) -> StepResult:
        """Divides, clips, and updates the model, unless a number is not finite."""
        gradients, buffers, config = self.strategy.gradients, self.strategy.buffers, self.config
        total, count = self._stats.sums(num_leaves)  # floats, or 0-d tensors on the device, as all numbers here
        flats = gradients.flats  # [elements] of a bucket, or of this rank's part of it
        divided_by = 1.0
        if config.counts_fn is not None:
            count = count * 0 + 1  # the loss function has divided already
        elif num_leaves > 1:
            divided_by = divisor(count)
            divide(flats, divided_by)  # a sum over one count: no mean of means
        self._scale.unscale(flats)
        norm: Any = gradients.norm() if any(used) else torch.zeros((), device=self.communicator.device)
        device = self.communicator.device
        norm = norm.to(device, wide_dtype(device)) if self._finite.on_device else norm.item()
        # No bit below may depend on whether the host knows `ok`: a GPU goes on without waiting for it.
        ok, has_failed = self._finite.judge(total, count, norm, divided_by)
        if config.max_grad_norm is not None:
            self._clip(flats, config.max_grad_norm, norm, ok)
        gradients.assign(used)
        self.observers.on_gradients(None)
        skipped: Any = ok ^ True
        result = self._make_result(batch, self._stats.scalars([total, count, norm, skipped, has_failed], num_leaves))
        if self._finite.is_late:
            # The optimizers run in any case, and the device leaves their writes out; the host reads the result later.
            with left_out_if(skipped, self.optimizers):
                self._step_optimizers()
            buffers.write(ok)
            self._unread.append((result, self._schedule()))
        else:
            self._read(result, None)  # waits for the device, once a step
            if not result.skipped:
                self._step_optimizers()
                buffers.write(None)
        if self.scheduler is not None:
            self.scheduler.step()
        self.num_steps += 1  # moves last: until here the step can be repeated
        return result

    def _clip(self, flats: list[Tensor], limit: float, norm: Any, ok: Any) -> None:
        """Scales the gradient down to the greatest norm allowed; one that is not finite is left as it is."""
        if isinstance(norm, Tensor):
            # As Python computes it, to the bit: in float64, and not by a reciprocal, as `limit / tensor` is.
            factor = torch.full_like(norm, limit) / (norm + CLIP_EPSILON)
            scale(flats, torch.where(ok, factor.clamp(max=1.0), 1.0))
        elif ok and (factor := limit / (norm + CLIP_EPSILON)) < 1:
            scale(flats, factor)

    def _step_optimizers(self) -> None:
        self.strategy.before_update()
        for optimizer in self.optimizers:
            try:
                optimizer.step()
            except (RuntimeError, MemoryError) as error:
                from samestep.engine.diagnosis import describe_update_shortage, is_out_of_memory

                if not is_out_of_memory(error):
                    raise
                self._failed = True  # parameters before this one are updated: the step cannot be repeated
                name = type(optimizer).__name__
                raise OutOfMemoryError(
                    describe_update_shortage(name, self.num_steps + 1, self.membership.rank)
                ) from error
        self.strategy.after_update()

    def _abandon(self) -> None:
        """Restores the model after a step that failed."""
        self.strategy.buffers.abandon()
        self.strategy.gradients.abandon()

    # The sums of a step depend on the ranks, and on the parameters that are trainable.

    def _adapt(self) -> None:
        """Makes the sums anew if ranks were lost, or parameters were frozen or unfrozen, since the last step."""
        strategy = self.strategy
        if self.membership.version != self._version:
            strategy.gradients.remove_hooks()
            self._lay_out()
        strategy.sync_trainable()
        if self._what_is_trained() != self._trained:
            before = strategy.gradients
            self._lay_out()
            before.remove_hooks()  # after it: laying out may be refused, and the change then undone
        strategy.check_in_use()

    def _lay_out(self) -> None:
        self._version = self.membership.version
        self._named = self.strategy.held(self.optimizers)
        trainable = {name: p for name, p in self._named.items() if p.requires_grad}
        _check_trained(trainable.values())
        # A gradient from before, of the script's or of another layout, must not be taken for a microbatch's.
        for parameter in self._named.values():
            parameter.grad = None
        self.strategy.lay_out(trainable, self.optimizers, self.observers)
        state, counts_fn, seeds = self.strategy.state, self.config.counts_fn, (self.config.seed, self.config.stream)
        # Local shards are what microbatches could write to, unless each rank has the parameters whole (ZeRO-1).
        parts = None if state is None or state.has_whole_parameters else state.parts
        self._purity = PurityCheck(self.model, parts)
        self._counts = None if counts_fn is None else GlobalCounts(counts_fn, self.communicator, seeds)
        self._trained = self._what_is_trained()

    def _what_is_trained(self) -> tuple[Any, ...]:
        """Changes when parameters are frozen or unfrozen, join an optimizer, or lie in memory in another order."""
        held = [id(parameter) for optimizer in self.optimizers for parameter in held_by(optimizer)]
        return held, [(p.requires_grad, p.stride()) for p in self._named.values()]

    def _check_lengths(self, length: int) -> None:
        """Compares the lengths of batches that the script drew itself: they decide the sizes of the exchanges."""
        rows = self.membership.heartbeat.call("exchange", lambda: self.communicator.gather_words([length]))
        lengths = [row[0] for row in rows]
        if len(set(lengths)) > 1:
            raise DeterminismError(
                f"the ranks were handed batches of {lengths} samples in step {self.num_steps + 1}; hand every rank the "
                "whole global batch: use run.loader, or a DataLoader without a distributed sampler"
            )

    def _check_process(self) -> None:
        """Raises if something that decides the bits has changed, or if this rank alone would repeat a step."""
        if self.membership.is_late:
            raise UsageError(
                "this worker replaces a lost one, but a loop of your own cannot receive the state: leave --replace "
                "out (those that are left go on by themselves), or use Trainer"
            )
        if self._failed:
            raise DeterminismError(
                f"step {self.num_steps + 1} failed on rank {self.communicator.rank}, and its exception was caught: a "
                "step cannot be repeated, or left out, by one rank alone; let the exception end the run"
            )
        if self.communicator.device.type == "cpu" and torch.get_num_threads() != self._num_threads:
            raise DeterminismError(
                f"torch uses {torch.get_num_threads()} threads now, {self._num_threads} when the step was made; the "
                "number decides the bits: leave it alone, or give it by Run(num_threads=…) (--num-threads)"
            )
        check_flags(self._flags, self.communicator.device.type, "where the step was made with")

    # Results, which the host may read later than the step is taken.

    def _make_result(self, batch: Batch, scalars: Tensor | list[float]) -> StepResult:
        """Starts the copy of the scalars to the host, if they are on a device, without waiting for it."""
        event = None
        # Pinned memory, without which a copy from the device blocks the host.
        if isinstance(scalars, Tensor) and scalars.device.type == "cuda":
            scalars_on = scalars.device
            scalars = pinned(scalars.numel(), scalars.dtype).view(scalars.shape).copy_(scalars, non_blocking=True)
            event = torch.Event(scalars_on)
            event.record(torch.cuda.current_stream(scalars_on))  # the device need not be the current one
        read_before = self._read_up_to if self._finite.is_late else None
        number, num_microbatches = self.num_steps + 1, self.membership.num_microbatches
        light, names = batch.without_samples(), self._stats.names
        return StepResult(number, batch.length, light, num_microbatches, scalars, event, read_before, _names=names)

    def _read(self, result: StepResult, schedule: _Schedule | None) -> None:
        """Raises the failure of a step; later steps then update again, from the state before that one."""
        try:
            result.check()
        except NonFiniteError as error:
            self.num_steps = result.step - 1
            self._finite.reset()
            self._unread.clear()
            self._restore_schedule(schedule)
            if (name := self._purity.not_finite()) is not None:
                when = "the first step" if result.step == 1 else "this step"
                advice = (
                    f"Parameter {name} held NaN or infinity before {when}: look at how it was initialised or loaded"
                )
                raise NonFiniteError(str(error).replace(ADVICE, advice)) from None
            raise

    def _read_available(self) -> None:
        # Several ranks agree on a failure in the exchange of this step before one of them raises it.
        alone = self.membership.world_size == 1
        while self._unread and (self._unread[0][0].is_there if alone else self._unread[0][0].is_good):
            self._read(*self._unread.popleft())

    def _read_up_to(self, step: int) -> None:
        while self._unread and self._unread[0][0].step <= step:
            self._read(*self._unread.popleft())

    def _schedule(self) -> _Schedule | None:
        """The scheduler's state and the learning rates, to be restored if this step fails; None without a scheduler."""
        if self.scheduler is None:
            return None
        rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        return dict(self.scheduler.state_dict()), rates

    def _restore_schedule(self, schedule: _Schedule | None) -> None:
        if self.scheduler is None or schedule is None:
            return
        self.scheduler.load_state_dict(schedule[0])
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, schedule[1], strict=True):
            group["lr"] = rate

    def check(self) -> None:
        """Waits for all steps taken so far and raises their failures.

        Raises:
            NonFiniteError: the loss or the gradient of one of them is not finite, and `on_nonfinite` is "raise".
        """
        self._read_up_to(self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """The step counter and the loss scale; model, optimizers and scheduler have their own."""
        self.check()
        return {"num_steps": self.num_steps, "loss_scale": self._scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state; failures of earlier steps that were not read yet are dropped."""
        self._unread.clear()
        self._finite.reset()
        self.num_steps = int(state["num_steps"])
        self._scale.load_state_dict(state["loss_scale"])


def _check_hooks(model: nn.Module, trained: Iterable[Tensor]) -> None:
    """Raises a `UsageError` if a parameter waits for its gradient which is in no optimizer: the step computes none."""
    own = set(map(id, trained))
    for name, parameter in model.named_parameters():
        hooks = (parameter._post_accumulate_grad_hooks or {}).values() if parameter.requires_grad else ()
        is_waiting = any(not str(getattr(hook, "__module__", "")).startswith("samestep.") for hook in hooks)
        if is_waiting and id(parameter) not in own:  # samestep's own hooks belong to another step
            raise UsageError(
                f"{name} has a hook that waits for its gradient (an optimizer step in the backward) and is in no "
                "optimizer of this step, which computes no gradient of it: give it to the optimizer, without the hook"
            )


def _check_trained(parameters: Iterable[Tensor]) -> None:
    """Raises a `UsageError` if no parameter is trainable."""
    if not any(parameter.requires_grad for parameter in parameters):
        raise UsageError("no parameter of the optimizer is trainable; set requires_grad on those that should be")
