"""The backward of wrapped forwards: the time between a region's end and its beginning, and where the ranks meet in it.

Meanwhile activation checkpointing may run parts of a chunk again: it must not write to the module's buffers, and what
is nested in it is not shared out.
"""

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from samestep.errors import DeterminismError
from samestep.scripts.adoption import Adoption
from samestep.scripts.failures import raise_together

OK, RAISED = 0, 1


@dataclass
class Backward:
    """A backward that runs through the chunks of a region.

    Attributes:
        put_back: ends what shields the module.
        state: a checksum of torch's generator when it began.
    """

    put_back: Callable[[], None] | None
    state: int


def begin_backward(adoption: Adoption, guard: Callable[[], Callable[[], None]] | None) -> None:
    """The gradients of a region's results are about to enter its chunks."""
    if adoption.backward is None:
        adoption.backward = Backward(guard() if guard is not None else None, generator_state())
        adoption.in_chunk = True


def end_backward(adoption: Adoption) -> bool:
    """The chunks are through; says whether they drew random numbers."""
    backward: Backward | None = adoption.backward
    if backward is None:
        return False
    adoption.backward = None
    adoption.in_chunk = False
    if backward.put_back is not None:
        backward.put_back()
    return backward.state != generator_state()


def meet_in_backward(adoption: Adoption, error: BaseException | None = None) -> None:
    """Meets all ranks where the gradients of a region's chunks are complete.

    Args:
        adoption: of this process.
        error: what this rank's chunks raised, if they did; all ranks raise it.

    Raises:
        DeterminismError: the chunks drew random numbers, or the ranks have drifted apart.
    """
    drew = end_backward(adoption)
    if adoption.communicator.device.type == "cpu" and not adoption.is_own_thread():
        raise DeterminismError(
            f"backward was called on the thread {threading.current_thread().name}; the ranks can meet only on the "
            "script's main thread: call it there"
        )
    rows = adoption.meet("the backward of a wrapped forward", [OK if error is None else RAISED, int(drew)])
    failed = [rank for rank, row in enumerate(rows) if row[0] == RAISED]
    if failed:
        raise_together(adoption, error, failed[0], "the backward of a wrapped forward")
    if any(row[1] for row in rows):
        raise DeterminismError(
            "random numbers were drawn in the backward of a wrapped forward (by a hook, by a custom Function, or by "
            "checkpointing with preserve_rng_state=False): they would depend on which rank runs which chunk. Draw them "
            "in the forward"
        )


def generator_state() -> int:
    """A checksum of the state of torch's generator, without drawing from it."""
    return zlib.crc32(torch.default_generator.get_state().numpy().tobytes())
