"""The exchange under FSDP2: it hands over parameters and gradients by our transport, and never adds.

FSDP2 gathers a module's parameters before its forward and backward, and after its backward asks for the sum of all
ranks' gradients, of which each rank keeps its part. Here each rank gets the parts themselves, one a rank, and pushes
them on the tree in the order of the microbatches; what FSDP2 then finds in `.grad` is dropped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from samestep.comm.communicator import Communicator
from samestep.engine.observer import Observers


class PartGather(AllGather):
    """Gathers the parameters of one module by the transport."""

    def __init__(self, communicator: Communicator, observers: Observers, note: Callable[[], None]) -> None:
        self._communicator = communicator
        self._observers = observers
        self._note = note

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what arrives."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fills the output with the inputs of all ranks."""
        self._note()
        transport = self._communicator.transport
        output_tensor.copy_(self._observers.waits(lambda: transport.gather(input_tensor).wait()))


class PieceScatter(ReduceScatter):
    """Hands over the gradients of one module, without adding them."""

    def __init__(
        self,
        communicator: Communicator,
        observers: Observers,
        take: Callable[[Tensor, Tensor], None],
        unread: Callable[[int], Tensor],
    ) -> None:
        self._communicator = communicator
        self._observers = observers
        self._take = take
        self._unread = unread
        self._is_sum_next = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, and then for what FSDP2 takes to be the sum, which it keeps to the end."""
        is_sum, self._is_sum_next = self._is_sum_next, not self._is_sum_next
        if is_sum and self._communicator.world_size > 1:
            return self._unread(int(size[0]))
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Exchanges the parts. The output is left as it is: nobody reads it."""
        part, ranks = output_tensor.numel(), self._communicator.world_size
        transport, sizes = self._communicator.transport, [part] * ranks
        received = self._observers.waits(lambda: transport.exchange(input_tensor, sizes, sizes).wait())
        self._take(input_tensor, received)
