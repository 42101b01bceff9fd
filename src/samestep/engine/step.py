"""The step: one optimizer update over the microbatches of a global batch, whichever ranks execute them.

    save every random generator
    for each of my microbatches, in order:
        seed every generator with (seed, stream, step, microbatch)
        total, count = loss(model, microbatch)          a sum, and what to divide it by
        backward(total)
        push the microbatch's gradient on the tree
    restore every random generator
    reduce over the ranks along the same tree
    divide by the global count; clip; update       the same arithmetic on every rank

Nothing is written to the model before the whole exchange has arrived, and the step counter moves last.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.core.tree import Block, rank_blocks
from samestep.data.batch import Batch, split_batch
from samestep.engine.buffers import refuse_sync_batchnorm
from samestep.engine.compiled import compile_loss, fix_shapes
from samestep.engine.counts import GlobalCounts
from samestep.engine.gradients import GradientSum
from samestep.engine.graphs import MicrobatchGraphs, check_graphs
from samestep.engine.header import read_headers, write_header
from samestep.engine.losses import LossFn, describe
from samestep.engine.memory import (
    Shortage,
    describe_shortage,
    describe_update_shortage,
    is_out_of_memory,
    missing_state_bytes,
    num_sums_alive,
)
from samestep.engine.microbatches import MicrobatchRunner
from samestep.engine.parameters import named_parameters
from samestep.engine.placement import check_mesh, is_tensor_parallel, place
from samestep.engine.precision import LossScale, check_precision
from samestep.engine.result import ADVICE, StepResult
from samestep.engine.rows import DeviceRows, HostRows, is_finite, quotient
from samestep.engine.settings import settings_of
from samestep.engine.spread import SpreadState
from samestep.engine.strategies import REPLICATE, Replicate, Strategy
from samestep.engine.traces import Traces
from samestep.engine.update import FlatUpdate
from samestep.errors import (
    DataError,
    DeterminismError,
    NonFiniteError,
    OutOfMemoryError,
    PeerLostError,
    UsageError,
)

if TYPE_CHECKING:
    from samestep.engine.placement import Gradients

BUCKET_BYTES = 8 * 2**20
MIN_SCALE = 2.0**-10
CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
OnNonFinite = Literal["raise", "skip"]
_Schedule = tuple[dict[str, Any], list[Any]]


class TrainStep:
    """One training step; made by `samestep.Run.train_step`, which says what each argument means."""

    def __init__(
        self,
        membership: Membership,
        seed: int,
        stream: int,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        loss_fn: LossFn,
        *,
        counts_fn: Callable[[Any], Any] | None = None,
        scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = None,
        precision: str = "32-true",
        on_nonfinite: OnNonFinite = "raise",
        late_check: bool | None = None,
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        compile: bool = False,
        graphed_length: int | None = None,
        strategy: Strategy = REPLICATE,
    ) -> None:
        if not callable(loss_fn):
            raise UsageError(f"got {describe(loss_fn)} as loss_fn; it must be a function loss_fn(model, batch)")
        if max_grad_norm is not None and not (isinstance(max_grad_norm, int | float) and max_grad_norm > 0):
            raise UsageError(f"got max_grad_norm={max_grad_norm!r}; it must be above 0, or None for no clipping")
        if on_nonfinite not in ("raise", "skip"):
            raise UsageError(f"got on_nonfinite={on_nonfinite!r}; it is 'raise' or 'skip'")
        self.membership = membership
        self.model = model
        self.optimizers = tuple(optimizers)
        self.num_steps = 0
        self.before_first: Callable[[], None] | None = None  # called before step 0, not in a run that is resumed
        self._failed = False
        self._num_threads = torch.get_num_threads()
        self.loss_fn = loss_fn
        self.scheduler = scheduler
        self.settings = settings_of(self.optimizers, scheduler)
        self.precision = precision
        self.max_grad_norm = max_grad_norm
        dtype = check_precision(precision)
        self._on_nonfinite = on_nonfinite
        self._overlap = overlap and graphed_length is None  # hooks do not run in a replay
        self._bucket_bytes = bucket_bytes

        refuse_sync_batchnorm(model)
        device = membership.communicator.device
        if graphed_length is not None:
            check_graphs(device)
        # the optimizer imported it
        if membership.communicator.reduction == "ordered" and "torch._dynamo" in sys.modules:
            fix_shapes()
        self.strategy = strategy
        if graphed_length is not None and (strategy != REPLICATE or is_tensor_parallel(model)):
            raise UsageError("CUDA graphs need a model that every rank has whole: leave cuda_graphs=True out")
        check_mesh(membership, model, strategy, compile)
        self._late = _can_check_late(device, self.optimizers) if late_check is None else late_check
        if self._late and not all(_honours_found_inf(optimizer) for optimizer in self.optimizers):
            raise UsageError(
                "late_check=True needs Adam or AdamW with fused=True, which can skip an update on the device"
            )
        _check_trained(named_parameters(model, self.optimizers).values())
        self.placement = place(membership, model, self.optimizers, strategy)
        self._scale = LossScale(device, enabled=precision == "16-mixed")
        self._counts_fn = counts_fn
        self._rows: Any = DeviceRows(device) if self._late else HostRows()
        self._poisoned: Any = torch.zeros((), dtype=torch.bool, device=device) if self._late else False
        self._unread: deque[tuple[StepResult, _Schedule | None]] = deque()
        self._version = -1
        self._buffers: Any
        self._gradients: Gradients
        self._flat_update: FlatUpdate | None
        self.compile = compile
        run_loss = compile_loss(loss_fn) if compile else loss_fn
        inner = MicrobatchRunner(membership, seed, stream, model, run_loss, dtype, self._scale, self._rows)
        inner.explain, inner.note_loss = self.placement.explain, self.placement.note_loss
        if (
            isinstance(strategy, Replicate)
            and self.spread is None
            and membership.num_microbatches > 1
            and graphed_length is None
        ):
            inner.traces = Traces(membership, model, loss_fn)
        self.runner: Any = self.placement.make_runner(inner, seed, stream, self._rows)
        self.cuda_graphs = graphed_length is not None
        if graphed_length is not None:
            self.runner.graphs = MicrobatchGraphs(graphed_length, device)
        self._settle_in_membership()

    @property
    def communicator(self) -> Communicator:
        """This rank's communicator, as the ranks are now."""
        return self.membership.communicator

    @property
    def spread(self) -> SpreadState | None:
        """What of the state is spread over the ranks; None where each has all of it."""
        return self.placement.state

    @property
    def spread_over(self) -> Communicator:
        """Among the ranks over which the state is spread; several groups of ranks may have the same."""
        return self.placement.communicator

    def __call__(self, batch: Any) -> StepResult:
        """Takes one optimizer step on a global batch.

        Args:
            batch: a `Batch` of the run's loader, or any nested value of tensors that holds the whole global batch
                (samples along dim 0), the same on every rank.

        Returns:
            Loss, gradient norm and number of samples of the global batch; waits for the device only when read.

        Raises:
            NonFiniteError: the loss or gradient of this step (or, where the check is late, of an earlier one) was not
                finite; the state is the one from before that step.
            DeterminismError: an operation has no deterministic form, or the ranks were handed different batches.
            LossError: the loss function broke its contract.
            OutOfMemoryError: a microbatch did not fit on some rank; raised on all of them.
            PeerLostError: a rank died or did not answer in time, and the run cannot heal.
        """
        if self.num_steps == 0 and self.before_first is not None:
            self.before_first()
            self.before_first = None
        self._read_what_is_there()
        self._check_process()
        self.membership.heartbeat.step = self.num_steps
        result = self.membership.perform(lambda: self._attempt(batch))
        self.membership.heartbeat.enter("script")
        return result

    def _attempt(self, value: Any) -> StepResult:
        """The step by the ranks as they are; leaves everything as it was if a rank is lost meanwhile."""
        membership = self.membership
        if membership.version != self._version:
            self._settle_in_membership()
        batch = self._own_microbatches(value)
        if batch.length < 1:
            raise DataError("the batch holds no samples; leave empty batches out")
        self.placement.note_frozen()
        if self._what_is_trained() != self._trained:
            before = self._gradients
            self._lay_out()
            before.remove_hooks()
        self.placement.check_in_use()

        num_leaves = min(membership.num_microbatches, batch.length)
        blocks_by_rank = self._blocks(num_leaves)
        self._gradients.begin(blocks_by_rank)
        self._buffers.begin(self.num_steps)
        try:
            shortage = self.runner.run(batch, self.num_steps)
        except BaseException as error:
            self._abandon()
            # The script's own exception is refused on one rank as on several; Ctrl-C in a notebook is nobody's failure.
            self._failed = (
                isinstance(error, Exception) if membership.world_size == 1 else not isinstance(error, PeerLostError)
            )
            raise
        try:
            membership.heartbeat.enter("exchange")
            used, touched = self._exchange_header(batch, shortage)
            self._gradients.finish()
            self._buffers.exchange(touched, blocks_by_rank, batch.length)
        except (PeerLostError, OutOfMemoryError):
            self._abandon()
            raise
        membership.heartbeat.enter("update")
        return self._update(batch, num_leaves, used)

    def _blocks(self, num_leaves: int) -> tuple[tuple[Block, ...], ...]:
        """The blocks that each rank ships, of so many microbatches that hold samples."""
        if num_leaves not in self._blocks_by_leaves:
            self._blocks_by_leaves[num_leaves] = rank_blocks(self.membership.data_ranges, num_leaves)
        return self._blocks_by_leaves[num_leaves]

    def _settle_in_membership(self) -> None:
        """Lays out what depends on the ranks."""
        if self._version >= 0:
            self._gradients.remove_hooks()
        self._version = self.membership.version
        self._blocks_by_leaves: dict[int, tuple[tuple[Block, ...], ...]] = {}
        self.runner.counts = None if self._counts_fn is None else GlobalCounts(self._counts_fn, self.membership.data)
        self._buffers = self.runner.buffers = self.placement.make_buffers()
        self._lay_out()

    def _own_microbatches(self, value: Any) -> Batch:
        """This rank's microbatches of a global batch, as the ranks are now."""
        membership = self.membership
        if isinstance(value, Batch):
            if value.version == membership.version:
                return value
            if value.renew is None:
                raise DataError("a batch of another run's loader; use the loader of this run")
            # who hangs while it fetches the microbatches of the lost waits for nobody
            before = membership.heartbeat.enter("data")
            renewed = value.renew()
            membership.heartbeat.enter(before)
            return renewed
        compare = membership.world_size > 1
        device = membership.communicator.device
        batch = split_batch(
            value, membership.num_microbatches, membership.to_fetch, device, compare, membership.version
        )
        self._check_lengths(batch.length)
        return batch

    def _abandon(self) -> None:
        """Puts the model back after a step that came to nothing."""
        self._buffers.abandon()
        self._gradients.abandon()

    def _check_lengths(self, length: int) -> None:
        """Compares the lengths of batches that the script drew itself: they decide what the ranks exchange."""
        lengths = [row[0] for row in self.communicator.gather_words([length])]
        if len(set(lengths)) > 1:
            raise DeterminismError(
                f"the ranks were handed batches of {lengths} samples in step {self.num_steps}; hand every rank the "
                "whole global batch: use run.loader, or a DataLoader without a distributed sampler"
            )

    def _check_process(self) -> None:
        """Raises if something has changed on which equal bits rest, or if this rank alone would take a step."""
        self.membership.check_here()
        if self._failed:
            raise DeterminismError(
                f"step {self.num_steps} failed on rank {self.communicator.rank}, and its exception was caught: a step "
                "cannot be repeated, or left out, by one rank alone; let the exception end the run"
            )
        if self.communicator.device.type == "cpu" and torch.get_num_threads() != self._num_threads:
            raise DeterminismError(
                f"torch uses {torch.get_num_threads()} threads now, {self._num_threads} when the step was made; the "
                "number decides the bits: leave it alone, or give it by Run(num_threads=…) (--num-threads)"
            )

    def _exchange_header(self, batch: Batch, shortage: Shortage | None) -> tuple[list[bool], list[bool]]:
        """Sends the gradient on its way, and gathers the rows of all microbatches and what the ranks must agree on.

        Returns:
            For each trainable parameter whether any microbatch used it; what is `touched` of the buffers by any
            microbatch.
        """
        membership, used = self.membership, self._gradients.used
        touched = self._buffers.touched
        if membership.world_size == 1:
            if shortage is not None:
                self._explain_shortage(batch, shortage)
            membership.stop, membership.checkpoint_agreed = membership.stop_asked, membership.asks_checkpoint
            return used, touched
        flags = [*touched, membership.asks_checkpoint, *used]
        said = write_header(batch, self.num_steps, membership.stop_asked, shortage is not None, flags)
        gradients = self._gradients
        if not self._late and isinstance(gradients, GradientSum) and gradients.carries_letters():
            headers = self._rows.exchange_by_letter(gradients.send_with_letter, membership.ranges, said)
        else:
            gradients.start_rest()
            headers = self._rows.exchange(self.communicator, membership.ranges, said)
        heard = read_headers(headers, len(flags))
        if heard.is_short:
            self._explain_shortage(batch, shortage)
        count = len(touched)
        membership.stop, membership.checkpoint_agreed = heard.stop, heard.flags[count]
        return heard.flags[count + 1 :], heard.flags[:count]

    def _explain_shortage(self, batch: Batch, shortage: Shortage | None) -> NoReturn:
        """Measures, on ranks whose memory ran out, which number of microbatches fits; raises alike on all ranks.

        Raises:
            OutOfMemoryError: names the microbatch, and the `num_microbatches` that fits.
        """
        assert isinstance(self._gradients, GradientSum), "where the model is spread the microbatch itself has raised"
        self._gradients.drain()
        fitting, num_samples = 0, 0
        if shortage is not None:
            with self.runner.generators.preserved():
                fitting = shortage.measure(
                    self.runner.run_slice,
                    self._needed_beside,
                    batch.length,
                    self.membership.num_microbatches,
                    self.communicator.device,
                )
            self._gradients.forget()
            num_samples = shortage.num_samples
        rows = self.communicator.gather_words(
            [-1 if shortage is None else shortage.microbatch, num_samples, fitting, int(shortage is not None)]
        )
        raise OutOfMemoryError(
            describe_shortage(rows, batch.length, self.membership.num_microbatches, self.communicator.device)
        )

    def _needed_beside(self, num_microbatches: int) -> tuple[list[int], list[int]]:
        """Bytes that a step with so many microbatches needs beside those of one microbatch, and for the update."""
        factor = num_microbatches // self.membership.num_microbatches
        ours = range(factor * self.membership.mine.start, factor * self.membership.mine.stop)
        assert isinstance(self._gradients, GradientSum), "where the model is spread nothing is measured"
        gradient = self._gradients.bucket_bytes
        on_their_way = 0 if self.membership.world_size == 1 else 3
        state = [size for optimizer in self.optimizers for size in missing_state_bytes(optimizer)]
        return gradient * (num_sums_alive(ours) + on_their_way) + state, gradient * 2

    @torch.no_grad()
    def _update(self, batch: Batch, num_leaves: int, used: list[bool]) -> StepResult:
        """Divides, clips, and updates the model, unless something is not finite."""
        gradients = self._gradients
        total, count = self._rows.sums(num_leaves)
        if self.runner.counts is not None:
            count = count * 0 + 1  # the loss function has divided already
        elif num_leaves > 1:
            gradients.divide(_divisor(count))
        self._scale.unscale(gradients.flats)
        norm: Any = gradients.norm() if any(used) else torch.zeros((), device=self.communicator.device)
        if not self._late:
            norm = norm.item()
        ok, poisoned = self._judge(is_finite(quotient(total, count)), is_finite(norm))
        if self.max_grad_norm is not None:
            self._clip(norm, ok)
        gradients.assign(used)
        if self._late:
            sums = [total, count, norm, ~ok, poisoned]
        else:
            sums = [total, count, norm, float(not ok), float(poisoned)]
        result = self._make_result(batch, self._rows.scalars(sums, num_leaves))
        self._apply(ok, used, result)
        return result

    def _clip(self, norm: Any, ok: Any) -> None:
        """Scales the gradient down to the greatest norm allowed."""
        factor = self.max_grad_norm / (norm + CLIP_EPSILON)
        if isinstance(factor, Tensor):
            self._gradients.scale(torch.where(ok, factor.clamp(max=1.0), 1.0))
        elif ok and factor < 1:
            self._gradients.scale(factor)

    def _judge(self, finite_loss: Any, finite_gradient: Any) -> tuple[Any, Any]:
        """Decides whether to update, and whether this step is the first bad one: on the device if the check is late."""
        ok = finite_loss & finite_gradient & (self._poisoned ^ True)
        bad = (finite_loss & finite_gradient) ^ True
        if self._scale.enabled:  # an overflow is nothing bad while there is room to scale down
            at_the_end: Any = self._scale.scale <= MIN_SCALE
            if not self._late:
                at_the_end = bool(at_the_end)
            bad = (finite_loss ^ True) | ((finite_gradient ^ True) & at_the_end)
        if self._on_nonfinite == "skip":
            bad = bad & False
        first = bad & (self._poisoned ^ True)
        self._poisoned = self._poisoned | bad
        self._scale.update(finite_gradient ^ True, self._poisoned ^ True)
        return ok, first

    def _apply(self, ok: Tensor, used: list[bool], result: StepResult) -> None:
        """Runs the optimizers, merges the buffers, and moves the step counter last."""
        if self._late:
            found_inf = (~ok).to(torch.float32)
            for optimizer in self.optimizers:
                optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            self._step_optimizers(used)
            for optimizer in self.optimizers:
                del optimizer.found_inf  # type: ignore[attr-defined]
            self._buffers.write(ok)
            self._unread.append((result, self._schedule()))
        else:
            self._read(result, None)
            if ok:
                self._step_optimizers(used)
                self._buffers.write(None)
        if self.scheduler is not None:
            self.scheduler.step()
        self.num_steps += 1

    def _step_optimizers(self, used: list[bool]) -> None:
        """The update.

        Args:
            used: for each trainable parameter whether it has a gradient.

        Raises:
            OutOfMemoryError: it did not fit, and the model may be half updated.
        """
        self.placement.begin_update()
        for optimizer in self.optimizers:
            try:
                if self._flat_update is None:
                    optimizer.step()
                else:
                    self._flat_update.step(self._gradients.flats, used)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._failed = True
                name = type(optimizer).__name__
                raise OutOfMemoryError(describe_update_shortage(name, self.num_steps, self.membership.rank)) from error
        self.placement.end_update()

    def _make_result(self, batch: Batch, scalars: Tensor | list[float]) -> StepResult:
        """Starts the copy of the scalars to the host, if they are not there, without waiting for it."""
        event = None
        if isinstance(scalars, Tensor) and scalars.device.type == "cuda":
            scalars = torch.empty(scalars.shape, dtype=scalars.dtype, pin_memory=True).copy_(scalars, non_blocking=True)
            event = torch.Event(self.communicator.device)
            event.record()
        settle = self._read_up_to if self._late else None
        return StepResult(
            self.num_steps,
            batch.length,
            batch.without_samples(),
            self.membership.num_microbatches,
            scalars,
            event,
            settle,
        )

    def _read(self, result: StepResult, schedule: _Schedule | None) -> None:
        """Raises what a step found; from then on steps update again, starting from the state before that one."""
        try:
            result.check()
        except NonFiniteError as error:
            self.num_steps = result.step
            self._poisoned = self._poisoned & False
            self._gradients.drop_memory()
            self._unread.clear()
            self._restore_schedule(schedule)
            if (name := self.runner.guard.not_finite()) is not None:
                when = "the first step" if result.step == 0 else "this step"
                advice = (
                    f"Parameter {name} held NaN or infinity before {when}: look at how it was initialised or loaded"
                )
                raise NonFiniteError(str(error).replace(ADVICE, advice)) from None
            raise

    def _read_what_is_there(self) -> None:
        while self._unread and self._unread[0][0].is_there:
            self._read(*self._unread.popleft())

    def _read_up_to(self, step: int) -> None:
        while self._unread and self._unread[0][0].step <= step:
            self._read(*self._unread.popleft())

    def _schedule(self) -> _Schedule | None:
        """The scheduler's state and the learning rates, for going back to this step; None without a scheduler."""
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
        """Waits for all steps taken so far and raises what they found.

        Raises:
            NonFiniteError: see `__call__`.
        """
        self._read_up_to(self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """The step counter and the loss scale; model, optimizers and scheduler have their own."""
        self.check()
        return {"num_steps": self.num_steps, "loss_scale": self._scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a saved state; what was still unread of earlier steps is forgotten."""
        self._unread.clear()
        self._poisoned = self._poisoned & False
        self.num_steps = int(state["num_steps"])
        self._scale.load_state_dict(state["loss_scale"])

    def _what_is_trained(self) -> tuple[Any, ...]:
        """Changes when parameters are frozen or unfrozen, or join an optimizer."""
        held = [id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        return held, [p.requires_grad for p in self._named.values()]

    def _lay_out(self) -> None:
        """Makes the gradient sum over the parameters that the optimizers hold and that are trainable now."""
        placement = self.placement
        named = placement.held(self.optimizers)
        trainable = {name: p for name, p in named.items() if p.requires_grad}
        _check_trained(trainable.values())
        self._named = named
        self.runner.guard = placement.make_guard()
        if self.runner.graphs is not None:
            self.runner.graphs.drop()
        for parameter in self._named.values():
            parameter.grad = None
        gradients = placement.make_gradients(trainable, self.optimizers, self._bucket_bytes, self._overlap)
        self._gradients = self.runner.gradients = gradients
        self._trained = self._what_is_trained()
        self._flat_update = None
        if len(self.optimizers) == 1 and not self._late:
            self._flat_update = placement.make_flat_update(self.optimizers[0], gradients)


def _check_trained(parameters: Iterable[Tensor]) -> None:
    """Raises a `UsageError` if none of them is trained."""
    if not any(parameter.requires_grad for parameter in parameters):
        raise UsageError("no parameter of the optimizer is trainable; set requires_grad on those that should be")


def _divisor(count: Any) -> Any:
    """What the gradient is divided by; 1 where the count makes the loss no number, so that no memory is spoilt."""
    if isinstance(count, Tensor):
        return torch.where(torch.isfinite(count) & (count != 0), count, 1)
    return count if is_finite(count) and count else 1.0


def _honours_found_inf(optimizer: Optimizer) -> bool:
    """Whether the optimizer leaves its whole state alone when `found_inf` says so: fused Adam and AdamW do."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.Adam) and fused


def _can_check_late(device: torch.device, optimizers: Sequence[Optimizer]) -> bool:
    """Whether the host need not look at the outcome before the update: on a CPU it sees it anyway."""
    return device.type != "cpu" and all(_honours_found_inf(optimizer) for optimizer in optimizers)
