"""Waiting for the other ranks, at the borders of divided modules: who waits says so, and is not the one that hangs.

Collectives of DTensor are started where a module begins or ends, and waited for where somebody reads the result, which
would look like computing. In the backward the sums of the inputs' gradients are told; what sequence parallelism gathers
there is not.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from samestep.comm.heartbeat import Heartbeat
from samestep.errors import LossError


def tell_waiting(module: nn.Module, heartbeat: Heartbeat) -> None:
    """Waits where a divided module begins and ends, as an exchange.

    Args:
        module: whose hooks are there.
        heartbeat: says what this rank is doing.
    """

    def wait_behind(called: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if not inputs and not isinstance(called, nn.MultiheadAttention):
            raise LossError(
                f"a divided {type(called).__name__} was called without an argument by position: what comes by name "
                "(input=x) is not brought to the ranks; call module(x)"
            )
        borders = {  # attention is given one value three times
            id(x): Border.apply(x, heartbeat)  # type: ignore[no-untyped-call]
            for x in inputs
            if isinstance(x, Tensor) and x.requires_grad
        }
        return tuple(borders.get(id(x), x) for x in inputs)

    module.register_forward_pre_hook(wait_behind, prepend=True)
    module.register_forward_pre_hook(lambda _, inputs: tuple(waited_for(value, heartbeat) for value in inputs))
    module.register_forward_hook(lambda _, __, output: waited_for(output, heartbeat))


class Border(Function):
    """Hands a value on; waits for its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, heartbeat: Heartbeat) -> Tensor:
        """The value itself."""
        ctx.heartbeat = heartbeat
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Its gradient, when it is there."""
        return waited_for(gradient, ctx.heartbeat), None


def waited_for(value: Any, heartbeat: Heartbeat) -> Any:
    """A value, when what of it was under way is there."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    if isinstance(local, AsyncCollectiveTensor):
        before = heartbeat.enter("exchange")
        local.wait()
        heartbeat.enter(before)
    return value
