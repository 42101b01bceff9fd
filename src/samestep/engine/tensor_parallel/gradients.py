"""The gradient of one step where the model is divided: this rank's parts of it, on the tree of the ranks along "data".

Parameters that every rank along "tensor" has get the same gradient on each of them, or shares of it that are added up
(DTensor says which). Copies that drift apart would be noticed by nobody, so they are compared.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.comm.membership import Membership
from samestep.data.batch import tensor_checksum
from samestep.engine.buffers import COMPARED_ELEMENTS, COMPARED_EVERY, COMPARED_STEPS
from samestep.engine.gradients import GradientSum
from samestep.engine.losses import wide_dtype
from samestep.engine.norms import block_norm, block_norms
from samestep.engine.tensor_parallel.model import DividedModel
from samestep.errors import DeterminismError


class DividedGradientSum(GradientSum):
    """Sums the gradients of all microbatches of a step, of this rank's parts.

    Args:
        divided: the model.
        trainable: this rank's parts of the parameters that the optimizers update, by name.
        membership: the ranks.
        bucket_bytes: how much travels in one message.

    Attributes:
        inputs: the DTensors and parameters of the model, as autograd wants them.
        is_spread: true.
    """

    is_spread = True

    def __init__(
        self, divided: DividedModel, trainable: dict[str, nn.Parameter], membership: Membership, bucket_bytes: int
    ) -> None:
        super().__init__(
            list(trainable.values()),
            list(trainable),
            membership.data,
            bucket_bytes,
            False,
            membership.heartbeat.recording,
        )
        self.inputs = tuple(divided.leaves[name] for name in trainable)
        self._tensor = divided.communicator
        self._model = divided.model
        self._is_divided = [name in divided.state.spreads for name in trainable]
        self._num_compared = 0
        self._losses: list[Tensor] = []

    def forget(self) -> None:
        """Drops the gradients, of the model's own parameters too."""
        super().forget()
        for leaf in self.inputs:
            leaf.grad = None

    def note_loss(self, loss: Tensor) -> None:
        """Keeps the loss of a microbatch until it is compared."""
        if self._compares:
            self._losses.append(loss.detach().double().nan_to_num())

    def collect(self, microbatch: int) -> Tensor:
        """Pushes what the backward of a microbatch left on the tree; shares of a gradient are added up before."""
        shares: list[tuple[nn.Parameter, Tensor]] = []
        for leaf, part in zip(self.inputs, self.parameters, strict=True):
            if leaf is part or leaf.grad is None:
                continue
            gradient = cast(DTensor, leaf.grad)
            own = cast(DTensor, leaf.detach())
            if any(placement.is_partial() for placement in gradient.placements):
                shares.append((part, gradient.to_local()))
            else:
                part.grad = gradient.redistribute(placements=own.placements).to_local()
        for (part, _), whole in zip(shares, self._added([share for _, share in shares]), strict=True):
            part.grad = whole
        return super().collect(microbatch)

    def carries_letters(self) -> bool:
        """False: what the ranks have to say concerns all of them, and the gradient some."""
        return False

    def start_rest(self) -> None:
        """Sends every bucket on its way, if others have these parts, too."""
        if self._communicator.world_size > 1:
            super().start_rest()

    def finish(self) -> None:
        """Waits for the sums over all microbatches.

        Raises:
            DeterminismError: the ranks along "tensor" have different gradients of a parameter that each of them has.
        """
        super().finish()
        if self._compares:
            self._compare_state()
            self._compare()
        self._num_compared += 1

    def norm(self) -> Tensor:
        """The 2-norm of all sums, of every rank's parts: the same on all ranks, 0-d."""
        by_index = dict(self.views())
        wide = wide_dtype(self._communicator.device)
        norms = [norm.to(wide) for norm in block_norms([by_index[k] for k in range(len(by_index))])]
        own = [norm for norm, is_divided in zip(norms, self._is_divided, strict=True) if is_divided]
        same = [norm for norm, is_divided in zip(norms, self._is_divided, strict=True) if not is_divided]
        parts = [torch.stack(same)] if same else []
        if own:
            parts.append(self._tensor.transport.gather(torch.stack(own)).wait())
        return block_norm(torch.cat(parts)).to(norms[0].dtype)

    def _added(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """The sums of shares over the ranks along "tensor", in the order of the ranks, in one message a dtype."""
        sums: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(share.dtype for share in shares):
            members = [index for index, share in enumerate(shares) if share.dtype == dtype]
            flat = torch.cat([shares[index].reshape(-1) for index in members])
            total, *others = self._tensor.transport.gather(flat).wait().clone().view(self._tensor.world_size, -1)
            for other in others:
                total += other
            parts = total.split([shares[index].numel() for index in members])
            sums.update(zip(members, parts, strict=True))
        return [sums[index].view(share.shape) for index, share in enumerate(shares)]

    @property
    def _compares(self) -> bool:
        """Whether the ranks along "tensor" compare what each of them has in this step."""
        return self._num_compared < COMPARED_STEPS or self._num_compared % COMPARED_EVERY == 0

    def _compare_state(self) -> None:
        """Compares the losses of the microbatches, and the buffers."""
        losses, self._losses = self._losses, []
        buffers = dict(self._buffers())
        words = [int(tensor_checksum(tensor)) for tensor in (*losses, *buffers.values())]
        names = [None] * len(losses) + list(buffers)
        for name, row in zip(names, zip(*self._tensor.gather_words(words), strict=True), strict=True):
            if len(set(row)) > 1:
                what = "losses of one microbatch" if name is None else f"values in the buffer {name}"
                raise DeterminismError(
                    f"the ranks that share one model have different {what}: computed from a part of the features or "
                    'positions; bring these together first ("rowwise", "colwise_gathered"), or leave what divides '
                    "them out of the plan"
                )

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The small buffers by name; large ones are tables."""
        for name, buffer in self._model.named_buffers():
            if buffer.numel() > COMPARED_ELEMENTS:
                continue
            yield name, buffer.to_local() if isinstance(buffer, DTensor) else buffer

    def _compare(self) -> None:
        """Compares the gradients of parameters that every rank along "tensor" has."""
        views = [(index, view) for index, view in self.views() if not self._is_divided[index]]
        rows = self._tensor.gather_words([int(tensor_checksum(view)) for _, view in views])
        for (index, _), words in zip(views, zip(*rows, strict=True), strict=True):
            if len(set(words)) > 1:
                raise DeterminismError(
                    f"the ranks that share one model have different gradients of {self._names[index]}, of which each "
                    "has all: it is used on a part of the features or positions; name its module in the plan "
                    '("sequence", "colwise", "rowwise"), or leave what divides these out'
                )
