"""The gradient of one step of a sharded model: each rank sums its part of all microbatches' gradients on the tree.

In round k the ranks run the adjacent microbatches kD … kD + D - 1. As soon as a module's backward is through, each rank
gets its part of the module's gradient from all of them, and pushes these parts on its counter in the order of the
microbatches: the same tree as on one rank, of other parts. Where the last round has fewer microbatches than ranks, the
others run along, and what they make is left out.
"""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.comm.membership import Membership
from samestep.comm.reduction import merge_blocks, merge_received
from samestep.core.tree import Block, TreeSum
from samestep.engine.norms import ShardedNorm
from samestep.engine.observer import Observers
from samestep.engine.sharding.exchange import PartGather, PieceScatter
from samestep.engine.sharding.model import ShardedModel, Together
from samestep.errors import DeterminismError


class ShardedGradientSum:
    """Sums the gradients of all microbatches of a step, each rank its part; methods as those of `GradientSum`.

    Attributes:
        inputs: empty: which leaves there are FSDP2 knows.
        is_sharded: true.
        used: for each parameter whether a microbatch of this rank used it.
        flats: after `finish` this rank's part of the sums over all microbatches, a flat tensor a module.
    """

    is_sharded = True
    inputs: tuple[Tensor, ...] = ()

    def __init__(
        self, sharded: ShardedModel, trainable: dict[str, nn.Parameter], membership: Membership, observers: Observers
    ) -> None:
        self._sharded = sharded
        self._communicator = communicator = membership.communicator
        self._observers = observers
        self._names = list(trainable)
        self.parameters = list(trainable.values())
        self._index = {name: index for index, name in enumerate(self._names)}
        self._groups = sharded.groups
        self._sums: list[TreeSum[Tensor]] = []
        self.flats: list[Tensor] = []
        self.used = [False] * len(self._names)
        self._totals: list[Tensor] = []
        self._first = self._num_leaves = 0
        self._is_out = False
        self._order: list[int] = []
        self._unread: Tensor | None = None
        self._calls = [0] * len(self._groups)
        self._waiting: dict[int, Tensor] = {}
        for number, group in enumerate(self._groups):
            self._connect(number, group)
        self._hooks = sharded.refuse_reading()
        self._hooks += [hook for number, group in enumerate(self._groups) for hook in self._watch(number, group)]
        spreads = [sharded.state.spreads[name] for name in self._names]
        self._norm = ShardedNorm(communicator, spreads, [parameter.dtype for parameter in self.parameters])

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Starts a step."""
        self._num_leaves = sum(block.size for blocks in blocks_by_rank for block in blocks)
        self._sums = [TreeSum(Tensor.add_) for _ in self._groups]
        self.flats = []
        self.used = [False] * len(self._names)
        self._order = []
        self.forget()

    def forget(self) -> None:
        """Drops the parameters' gradients."""
        self._totals = []
        self._waiting = {}
        for parameter in self.parameters:
            parameter.grad = None
        self._sharded.forget_gradients()

    def expect(self, microbatch: int, is_last: bool) -> None:
        """Announces which microbatch comes next; one beyond the last stands for running along."""
        ranks = self._communicator.world_size
        self._first = microbatch // ranks * ranks
        self._is_out = microbatch >= self._num_leaves
        self._calls = [0] * len(self._groups)

    def push(self, microbatch: int, loss: Tensor) -> Tensor:
        """What the backward of a microbatch has left is on the tree already; drops the rest."""
        if self._communicator.world_size == 1:
            for number, group in enumerate(self._groups):
                flat = self._sharded.own_gradient(group)
                self._totals.append(flat.sum())
                self._sums[number].push(Block(microbatch, 1), flat)
        for number, received in self._waiting.items():
            self._push(number, received)
        self._waiting = {}
        totals = [total.float() for total in self._totals]
        self._totals = []
        self._sharded.forget_gradients()
        return torch.stack(totals).sum() if totals else torch.zeros((), device=self._communicator.device)

    def start(self) -> None:
        """Makes sure that what the ranks have exchanged belongs together."""
        if self._communicator.world_size == 1:
            return
        order = hashlib.blake2b(repr(self._order).encode(), digest_size=7).digest()
        words = self._communicator.gather_words([int.from_bytes(order, "little")])
        if len({word for (word,) in words}) > 1:
            raise DeterminismError(
                "the ranks ran different modules, or the same in another order (layers that are skipped at random, or "
                "by what is in the batch, do so): strategy='sharded' needs every microbatch to run all that `wrap` "
                "names; "
                "name larger modules, or use strategy='replicate'"
            )

    def finish(self) -> None:
        """This rank's part of the sums over all microbatches: one flat tensor a module."""
        self.flats = []
        for group, counter in zip(self._groups, self._sums, strict=True):
            total = counter.root()
            self.flats.append(self._zeros(group) if total is None else total)

    def norm(self) -> Tensor:
        """The 2-norm of all sums on all ranks, of the same blocks as on one."""
        by_name = dict(self._views())
        return self._norm.of([by_name[name].reshape(-1) for name in self._names])

    def assign(self, used: Sequence[bool]) -> None:
        """Gives each part of a parameter that any microbatch used its gradient; the others get None."""
        for name, view in self._views():
            if name in self._index:
                index = self._index[name]
                self.parameters[index].grad = view.to(self.parameters[index].device) if used[index] else None

    def abandon(self) -> None:
        """Drops what a step that failed has left."""
        self._sums, self.flats = [], []
        self.forget()

    def remove_hooks(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _connect(self, number: int, group: Together) -> None:
        """Has FSDP2 exchange the parameters and gradients of a module by us."""
        communicator, observers, module = self._communicator, self._observers, group.module
        take = partial(self._take, number)
        module.set_custom_reduce_scatter(PieceScatter(communicator, observers, take, self._unread_part))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if communicator.device.type == "cpu":
            module.set_custom_all_gather(PartGather(communicator, observers, lambda: self._order.append(-1 - number)))
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True)

    def _watch(self, number: int, group: Together) -> list[RemovableHandle]:
        """Notes how often a module is called, and which parameters get a gradient: FSDP2 fills the others up."""
        names = {id(parameter): name for name, parameter in self._sharded.model.named_parameters()}
        wanted = {member.name for member in group.members}
        paths = {id(part): path for path, part in self._sharded.model.named_modules()}
        prefix = paths[id(group.module)]
        group.module.unshard()
        hooks = [group.module.register_forward_pre_hook(self._note_call(number))]  # type: ignore[attr-defined]
        for path, parameter in group.module.named_parameters():  # type: ignore[attr-defined]
            name = f"{prefix}.{path}" if prefix else path
            if name in wanted and name in self._index and id(parameter) not in names:
                hooks.append(parameter.register_post_accumulate_grad_hook(self._note_use(self._index[name])))
        group.module.reshard()
        return hooks

    def _note_call(self, number: int) -> Callable[..., None]:
        def on_call(*_: object) -> None:
            is_run_anew = torch._C._current_graph_task_id() != -1  # in the backward, by activation checkpointing
            self._calls[number] += torch.is_grad_enabled() and not is_run_anew

        return on_call

    def _note_use(self, index: int) -> Callable[[Tensor], None]:
        reference = weakref.ref(self)  # a parameter must not keep alive what sums its gradient

        def on_gradient(_: Tensor) -> None:
            owner = reference()
            if owner is not None and not owner._is_out:
                owner.used[index] = True

        return on_gradient

    def _take(self, number: int, sent: Tensor, received: Tensor) -> None:
        """Takes the parts that this rank got of the gradients of a module.

        A module that was called several times hands over its gradient as often; first these are added up.
        """
        self._order.append(number)
        group = self._groups[number]
        if sent.numel() != group.numel * self._communicator.world_size:
            raise DeterminismError(
                f"a parameter of module {type(group.module).__name__} got no gradient, for which this version of "
                "PyTorch cannot stand in: use 2.13 or later, or strategy='replicate'"
            )
        if not self._is_out:
            self._totals.append(sent.sum())
        if number in self._waiting:
            self._waiting[number].add_(received)
        elif self._calls[number] > 1:
            self._waiting[number] = received
        else:
            self._push(number, received)

    def _push(self, number: int, received: Tensor) -> None:
        """Pushes what came of the microbatches of a round on the tree of a module."""
        group = self._groups[number]
        last = min(self._first + self._communicator.world_size, self._num_leaves)
        blocks = [Block(microbatch, 1) for microbatch in range(self._first, last)]
        sums = merge_received(blocks, received[: len(blocks) * group.numel], group.numel)
        for block, value in zip(merge_blocks(blocks), sums, strict=True):
            self._sums[number].push(block, value.clone())

    def _unread_part(self, numel: int) -> Tensor:
        """Memory that FSDP2 may take for the sum of a module; nobody reads it."""
        if self._unread is None:
            part = self._sharded.state.parts[self._groups[0].members[0].name]
            most = max(group.numel for group in self._groups)
            self._unread = torch.zeros(most, dtype=part.dtype, device=self._communicator.device)
        return self._unread[:numel]

    def _zeros(self, group: Together) -> Tensor:
        part = self._sharded.state.parts[group.members[0].name]
        return torch.zeros(group.numel, dtype=part.dtype, device=self._communicator.device)

    def _views(self) -> list[tuple[str, Tensor]]:
        """This rank's part of the gradient of each parameter, as a view of `flats`."""
        views = []
        for group, flat in zip(self._groups, self.flats, strict=True):
            for member in group.members:
                part = self._sharded.state.parts[member.name]
                views.append((member.name, flat[member.offset : member.offset + part.numel()].view(part.shape)))
        return views
