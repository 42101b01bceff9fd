"""The strategy `sharded`: every rank has 1/D of the state, and the model is unsharded module by module.

The gradient of one step of a sharded model: each rank sums its part of all microbatches' gradients on the tree.

FSDP2 gathers a module's parameters before its forward and backward, and after its backward asks for the sum of all
ranks' gradients; each rank keeps its part of it. Here no transfer adds: each rank gets its part of every rank's
gradient, one a rank, and pushes them on the tree in the order of the microbatches; the sum that FSDP2 then finds in
`.grad` is dropped.

In round k the ranks run the adjacent microbatches kD … kD + D - 1: parts that arrive together are adjacent leaves of
the tree that one rank makes, of other parts. If the last round has fewer microbatches than ranks, the other ranks run
along, since FSDP2's collectives need all of them, and their gradients are left out.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.comm.reduction import merge_blocks, merge_received
from samestep.core.tree import Block, TreeSum
from samestep.engine.buffers import BufferMerge
from samestep.engine.norms import ShardedNorm, finite_sum
from samestep.engine.observer import Observers
from samestep.engine.parameters import check_same_model, move_model
from samestep.engine.sharded_model import Group, ShardedModel, groups_in_forward
from samestep.engine.sharded_state import MIXED
from samestep.engine.strategy import StepGradients, Strategy
from samestep.engine.strategy_options import Sharded
from samestep.errors import DeterminismError, UsageError


class TransportAllGather:
    """Gathers the parameters of one module by our transport; of FSDP2's form, whose base class has no public name."""

    def __init__(self, communicator: Communicator, observers: Observers, on_gather: Callable[[], None]) -> None:
        self._communicator = communicator
        self._observers = observers
        self._on_gather = on_gather

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what arrives."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fills the output with the inputs of all ranks."""
        # The order in which modules are gathered is compared between the ranks at the end of the step.
        self._on_gather()
        transport = self._communicator.transport
        output_tensor.copy_(self._observers.waits(lambda: transport.gather(input_tensor).wait()))


class UnsummedReduceScatter:
    """Exchanges the gradients of one module without adding them, in the place of FSDP2's reduce-scatter."""

    def __init__(
        self,
        communicator: Communicator,
        observers: Observers,
        receive: Callable[[Tensor, Tensor], None],
        unread: Callable[[int], Tensor],
        is_empty: Callable[[], bool],
    ) -> None:
        self._communicator = communicator
        self._observers = observers
        self._receive = receive
        self._unread = unread
        self._is_empty = is_empty
        self._is_sum_next = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory to send; at every second call memory for the sum, which FSDP2 keeps until the end of the backward."""
        # FSDP2 allocates twice per reduce-scatter: first the flat gradients to send, then the sum.
        is_sum, self._is_sum_next = self._is_sum_next, not self._is_sum_next
        if is_sum and self._communicator.world_size > 1:
            return self._unread(int(size[0]))
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Exchanges the parts; leaves the output as it is."""
        part, ranks = output_tensor.numel(), self._communicator.world_size
        if self._is_empty():  # run along for the collectives' sake, at a place in the sums
            input_tensor.zero_()
        # An all-to-all: each rank receives its shard of every rank's gradient, and no transport adds.
        transport, sizes = self._communicator.transport, [part] * ranks
        received = self._observers.waits(lambda: transport.exchange(input_tensor, sizes, sizes).wait())
        self._receive(input_tensor, received)


class ShardedGradientSum(StepGradients):
    """Sums the gradients of all microbatches of a step, each rank its part."""

    def __init__(
        self, sharded: ShardedModel, trainable: dict[str, nn.Parameter], membership: Membership, observers: Observers
    ) -> None:
        self._sharded = sharded
        self._communicator = communicator = membership.communicator
        self._names = list(trainable)
        self._inputs: tuple[Tensor, ...] = tuple(p for p in sharded.model.parameters() if p.requires_grad)
        self.parameters = list(trainable.values())
        self._index = {name: index for index, name in enumerate(self._names)}
        self._groups = sharded.groups
        self._used = [False] * len(self._names)  # by a microbatch of this rank
        self._sums: list[TreeSum[Tensor]] = []
        self._flats: list[Tensor] = []
        self._order: list[int] = []  # the numbers of modules by exchange of gradients, -1 - number by unsharding
        self._unread: Tensor | None = None
        self.abandon()
        self.expect(0, False)
        for number, group in enumerate(self._groups):
            self._connect(number, group, observers)
        self._hooks = sharded.refuse_reading()
        self._hooks += [hook for number, group in enumerate(self._groups) for hook in self._watch(number, group)]
        shardings = [sharded.state.shardings[name] for name in self._names]
        self._norm = ShardedNorm(communicator, shardings, [parameter.dtype for parameter in self.parameters])

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (*self._inputs, *self._sharded.outlived())

    @property
    def used(self) -> list[bool]:
        return self._used

    @property
    def flats(self) -> list[Tensor]:
        return self._flats

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        self._num_leaves = sum(block.size for blocks in blocks_by_rank for block in blocks)
        self._sums = [TreeSum(Tensor.add_) for _ in self._groups]
        self._flats = []
        self._used = [False] * len(self._names)
        self._order = []
        self.forget()

    def forget(self) -> None:
        """Drops the parameters' gradients."""
        self._totals: list[Tensor] = []
        self._waiting: dict[int, Tensor] = {}
        for parameter in self.parameters:
            parameter.grad = None
        self._sharded.forget_gradients()

    def expect(self, microbatch: int, is_last: bool, is_empty: bool = False) -> None:
        """Announces the next microbatch; one beyond the last stands for running along."""
        ranks = self._communicator.world_size
        self._first = microbatch // ranks * ranks
        # In the last round a rank may have no microbatch of its own left; it runs one for the collectives'
        # sake.
        self._is_empty = is_empty
        self._is_out = is_empty or microbatch >= self._num_leaves
        self._calls = [0] * len(self._groups)

    def push(self, microbatch: int, loss: Tensor) -> Tensor:
        """Pushes the gradients that are not on the tree yet; returns the sum of the elements of this microbatch's."""
        if self._communicator.world_size == 1:  # FSDP2 makes no reduce-scatter then
            for number, group in enumerate(self._groups):
                flat = self._zeros(group) if self._is_empty else self._sharded.own_gradient(group)
                self._totals.append(finite_sum(flat))
                self._sums[number].push(Block(microbatch, 1), flat)
        # Modules that are called several times in a forward: now the sum over their calls is complete.
        for number, received in self._waiting.items():
            self._push_round(number, received)
        self._waiting = {}
        totals = [total.float() for total in self._totals]
        self._totals = []
        self._sharded.forget_gradients()
        return torch.stack(totals).sum() if totals else torch.zeros((), device=self._communicator.device)

    def start(self) -> None:
        """Checks that all ranks have exchanged the same modules' parameters and gradients, in the same order."""
        if self._communicator.world_size == 1:
            return
        # Without this a module of one rank would be taken for one of equal size on another, silently.
        # Seven bytes, since words are 63 bits.
        order = hashlib.blake2b(repr(self._order).encode(), digest_size=7).digest()
        words = self._communicator.gather_words([int.from_bytes(order, "little")])
        if len({word for (word,) in words}) > 1:
            raise DeterminismError(
                "the ranks ran different modules, or the same in another order (layers that are skipped at random, or "
                "by what is in the batch, do so): strategy='sharded' needs every microbatch to run all that `wrap` "
                "names; name larger modules, or use strategy='replicate'"
            )

    def finish(self) -> None:
        """Completes this rank's part of the sums over all microbatches: one flat tensor a module."""
        totals = (counter.root() for counter in self._sums)
        self._flats = [
            self._zeros(g) if total is None else total for g, total in zip(self._groups, totals, strict=True)
        ]

    def norm(self) -> Tensor:
        """The 2-norm of all sums on all ranks, of the same blocks as on one."""
        by_name = dict(self._views())
        return self._norm.of([by_name[name].reshape(-1) for name in self._names])

    def assign(self, used: Sequence[bool]) -> None:
        for name, view in self._views():
            if name in self._index:
                index = self._index[name]
                self.parameters[index].grad = view.to(self.parameters[index].device) if used[index] else None

    def abandon(self) -> None:
        self._num_leaves = 0
        self._sums, self._flats = [], []
        self.forget()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _connect(self, number: int, group: Group, observers: Observers) -> None:
        """Replaces FSDP2's collectives for a module."""
        communicator, module = self._communicator, group.module
        receive = partial(self._receive, number)
        scatter = UnsummedReduceScatter(communicator, observers, receive, self._unread_part, lambda: self._is_empty)
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # by its methods: the base has no public name
        # Neither a mean over the ranks, nor a rescaling for 16 bits: the tree adds plain sums.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if communicator.transport.stream is None:  # else NCCL's own, which FSDP2 runs beside the computation
            gather = TransportAllGather(communicator, observers, lambda: self._order.append(-1 - number))
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # likewise
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True)  # else ranks with and without them would exchange other sizes

    def _watch(self, number: int, group: Group) -> list[RemovableHandle]:
        """Hooks that count a module's calls and note which parameters get a gradient: FSDP2 sends zeros of the rest."""
        names = {id(parameter): name for name, parameter in self._sharded.model.named_parameters()}
        wanted = {name for name, _ in group.members}
        paths = {id(part): path for path, part in self._sharded.model.named_modules()}
        prefix = paths[id(group.module)]
        # FSDP2 makes the unsharded parameters at the first unsharding.
        group.module.unshard()  # gradients accumulate in the unsharded parameters, which exist only now
        hooks = [group.module.register_forward_pre_hook(self._count_calls(number))]  # type: ignore[attr-defined]
        for path, parameter in group.module.named_parameters():  # type: ignore[attr-defined]
            name = f"{prefix}.{path}" if prefix else path
            if name in wanted and name in self._index and id(parameter) not in names:
                self._inputs += (parameter,)
                hooks.append(parameter.register_post_accumulate_grad_hook(self._mark_used(self._index[name])))
        group.module.reshard()
        return hooks

    def _count_calls(self, number: int) -> Callable[..., None]:
        def on_call(module: nn.Module, _: object) -> None:
            self._calls[number] += torch.is_grad_enabled() and bool(groups_in_forward(module))

        return on_call

    def _mark_used(self, index: int) -> Callable[[Tensor], None]:
        reference = weakref.ref(self)  # the parameter outlives a step that the user drops

        def on_gradient(_: Tensor) -> None:
            owner = reference()
            if owner is not None and not owner._is_out:
                owner._used[index] = True

        return on_gradient

    def _receive(self, number: int, sent: Tensor, received: Tensor) -> None:
        """Takes the received parts of a module's gradients; the parts of several calls of a module are added first."""
        self._order.append(number)
        group = self._groups[number]
        if sent.numel() != group.numel * self._communicator.world_size:
            raise DeterminismError(
                f"a parameter of module {type(group.module).__name__} got no gradient, for which this version of "
                "PyTorch cannot stand in: use 2.13 or later, or strategy='replicate'"
            )
        if not self._is_out:
            self._totals.append(finite_sum(sent))
        # A module of several calls has one gradient per call, which autograd adds on one device before the
        # tree does.
        if number in self._waiting:
            self._waiting[number].add_(received)
        elif self._calls[number] > 1:
            self._waiting[number] = received
        else:
            self._push_round(number, received)

    def _push_round(self, number: int, received: Tensor) -> None:
        """Pushes the parts of a round's microbatches on the tree of a module."""
        group = self._groups[number]
        last = min(self._first + self._communicator.world_size, self._num_leaves)
        blocks = [Block(microbatch, 1) for microbatch in range(self._first, last)]
        sums = merge_received(blocks, received[: len(blocks) * group.numel], group.numel)
        for block, value in zip(merge_blocks(blocks), sums, strict=True):
            # A copy: as a view the sum would keep the parts of all ranks alive until the end of the step.
            self._sums[number].push(block, value.clone())

    def _unread_part(self, numel: int) -> Tensor:
        """Memory for FSDP2's sum of any module, which is never read."""
        if self._unread is None:
            self._unread = self._zeros(max(self._groups, key=lambda group: group.numel))
        return self._unread[:numel]

    def _zeros(self, group: Group) -> Tensor:
        part = self._sharded.state.parts[group.members[0][0]]
        return torch.zeros(group.numel, dtype=part.dtype, device=self._communicator.device)

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the gradient of each parameter, as a view of `_flats`."""
        for group, flat in zip(self._groups, self._flats, strict=True):
            for name, offset in group.members:
                part = self._sharded.state.parts[name]
                yield name, flat[offset : offset + part.numel()].view(part.shape)


PARTLY_UNSHARDED = (
    "a parameter was used while its module was not called (an output that reads the embedding's weights does so), and "
    "this rank has a part of it only: with Sharded(wrap=…) name modules that hold both, or none of the two"
)


class ShardedStrategy(Strategy):
    """Parameters, gradients and optimizer state are sharded over all ranks, by FSDP2."""

    gradients: ShardedGradientSum
    memory_advice = "more devices, smaller `wrap`, or Sharded(activation_checkpointing=True)"

    def __init__(
        self, membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], options: Sharded
    ) -> None:
        super().__init__(membership, model)
        # Compared before it is sharded, and moved afterwards: each rank then moves its local shards alone.
        membership.perform(lambda: check_same_model(model, membership.communicator))
        self._sharded = ShardedModel(membership, model, optimizers, options)
        move_model(model, membership.communicator.device)
        self.state = self._sharded.state
        if options.param_dtype is not None:
            self.contract = {"param_dtype": options.param_dtype}

    def lay_out(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], observers: Observers
    ) -> None:
        gradients = ShardedGradientSum(self._sharded, trainable, self._membership, observers)
        self.buffers = BufferMerge(self._model, self._membership.communicator)
        self.gradients = gradients

    def sync_trainable(self) -> None:
        """Raises a `UsageError` if parameters were frozen or unfrozen since."""
        self._sharded.check_trained()

    def after_load(self) -> None:
        """Reshards parameters that are unsharded: these have the values from before."""
        self._sharded.reshard()

    def explain(self, error: RuntimeError) -> UsageError | None:
        """A parameter was used while it was sharded."""
        return UsageError(PARTLY_UNSHARDED) if MIXED in str(error) else None
