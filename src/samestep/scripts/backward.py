"""Backward passes of a single-process script: exchange points, errors that all ranks raise, the check of roots."""

import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor

from samestep.callsite import script_line
from samestep.comm.exceptions import blamed, packed, unpacked
from samestep.data.batch import checksum
from samestep.engine.forward_backward import backward_on_this_thread
from samestep.engine.kernel_flags import check_shortages, num_shortages
from samestep.errors import DeterminismError
from samestep.patch import Patch
from samestep.scripts.shared_script import SharedScript

OK, RAISED = 0, 1
NEEDS_LESS = (
    "smaller chunks (--logical-devices, or a smaller batch), activation checkpointing, or a GPU that no other process "
    "uses"
)
CHECKED = 3
CHECKED_EVERY = 50


@dataclass
class Backward:
    """A backward that runs through the chunks of a region."""

    put_back: Callable[[], None] | None  # puts the module's own buffers back
    state: int  # checksum of torch's generators when it began
    task: int  # autograd's number of it
    shortages: int  # of the device's memory before it
    sums: Any = None  # `regions.PieceSums` of the gradients that were there so far

    def is_running(self) -> bool:
        """Whether this is the innermost backward that runs: a hook may have begun another within it."""
        return torch._C._current_graph_task_id() == self.task


def begin_backward(script: SharedScript, guard: Callable[[], Callable[[], None]] | None) -> None:
    """Marks the start of the chunks' backward; called at the end of the region, where gradients enter it."""
    # Activation checkpointing may run parts of a chunk again meanwhile: it must not write to the module's buffers, and
    # nothing nested in it is split over the ranks.
    if script.backward is None:
        put_back, state = guard() if guard is not None else None, generator_state(script.generators.of_torch)
        shortages = num_shortages(script.communicator.device)
        script.backward = Backward(put_back, state, torch._C._current_graph_task_id(), shortages)
        script.in_chunk = True


def end_backward(script: SharedScript) -> bool:
    """Marks the end of the chunks' backward; returns whether it drew random numbers."""
    backward: Backward | None = script.backward
    if backward is None:
        return False
    script.backward = None
    script.in_chunk = False
    if backward.put_back is not None:
        backward.put_back()
    return backward.state != generator_state(script.generators.of_torch)


def meet_in_backward(
    script: SharedScript, flags: Sequence[bool] = (), error: BaseException | None = None
) -> list[bool]:
    """Synchronizes the ranks when their chunks' gradients are complete; an error of one rank is raised on all.

    Returns for each flag whether it is set on any rank.
    """
    if error is None and script.backward is not None:
        check_memory(script, script.backward.shortages, f"the backward of a wrapped forward on rank {script.rank}")
    drew = end_backward(script)
    if not script.is_own_thread():
        raise DeterminismError(
            f"backward was called on the thread {threading.current_thread().name}; the ranks can meet only on the "
            "script's main thread: call it there"
        )
    with torch._C.DisableTorchFunction():  # flags are on the host, whatever the script's default device is
        words, own = [OK if error is None else RAISED, int(drew)], torch.tensor(flags, dtype=torch.uint8)
        rows, parts = script.gather("the backward of a wrapped forward", words, own)
        by_rank = [part.tolist() for part in parts]
    failed = [rank for rank, row in enumerate(rows) if row[0] == RAISED]
    if failed:
        raise_together(script, error, failed[0], "the backward of a wrapped forward")
    if any(row[1] for row in rows):
        raise DeterminismError(
            "random numbers were drawn in the backward of a wrapped forward (by a hook, by a custom Function, or by "
            "checkpointing with preserve_rng_state=False): they would depend on which rank runs which chunk. Draw them "
            "in the forward"
        )
    return [any(flags) for flags in zip(*by_rank, strict=True)]


def check_memory(script: SharedScript, shortages: int, where: str) -> None:
    """Raises if the device's memory was short since there were so many shortages, and no error came of it."""
    check_shortages(shortages, script.communicator.device, where, NEEDS_LESS)


def raise_together(script: SharedScript, error: BaseException | None, rank: int, where: str) -> NoReturn:
    """Raises the error of rank `rank` on all ranks; elsewhere as a copy raised from a `PeerLostError`."""
    own = error if script.rank == rank else None
    if script.world_size > 1:
        data = script.share("the failure of a wrapped forward", None if own is None else packed(own), rank)
        if own is None:
            raise blamed(unpacked(data), rank, f"rank {rank} raised it in {where}")
    assert own is not None, "the failed rank has an error to raise"
    script.own_failure = own
    raise own


def generator_state(generators: Sequence[torch.Generator] = (torch.default_generator,)) -> int:
    """A checksum of the states of torch's generators, by default the host's alone, without drawing from them."""
    return zlib.crc32(b"".join(generator.get_state().numpy().tobytes() for generator in generators))


def patches(script: SharedScript) -> list[Patch]:
    """Patches of `torch.autograd.backward` and `grad`: check the roots, and raise a rank's error on all ranks."""
    calls = count(1)

    backward, grad, device = torch.autograd.backward, torch.autograd.grad, script.communicator.device

    def checked_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if script.at_first_backward is not None and script.may_meet():
            look, script.at_first_backward = script.at_first_backward, None
            look(sys._getframe(1))
        _check_roots(script, calls, tensors)
        with backward_on_this_thread(device), _errors_shared(script):
            return backward(tensors, *args, **kwargs)

    def checked_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        _check_roots(script, calls, outputs)
        with backward_on_this_thread(device), _errors_shared(script):
            return grad(outputs, *args, **kwargs)

    return [Patch(torch.autograd, "backward", checked_backward), Patch(torch.autograd, "grad", checked_grad)]


@contextmanager
def _errors_shared(script: SharedScript) -> Iterator[None]:
    """Raises an error of the script's backward on all ranks; leaves alone one nested in another or in a chunk."""
    if not script.may_meet():
        yield
        return
    try:
        yield
    except (Exception, SystemExit) as error:
        if script.backward is not None:  # the other ranks wait at the end of this rank's chunks
            meet_in_backward(script, error=error)
        raise
    finally:
        end_backward(script)


def _check_roots(script: SharedScript, calls: Iterator[int], roots: Any) -> None:
    """Compares the roots of the first few backward passes, and of every 50th later one."""
    # A loss that uses activations collected by a hook inside a wrapped forward, above all, has on each rank the values
    # of that rank's chunks only.
    if script.world_size == 1 or script.num_forwards == 0 or not script.may_meet():
        return
    number = next(calls)
    if number > CHECKED and number % CHECKED_EVERY:
        return
    tensors = [roots] if isinstance(roots, Tensor) else list(roots)
    with torch._C.DisableTorchFunction():
        own = checksum([tensor for tensor in tensors if isinstance(tensor, Tensor)])
        if len({row[0] for row in script.meet("a backward", [own])}) > 1:
            script.raise_diverged(
                "the ranks call backward on different values: the loss uses something that a rank has from its own "
                "chunks only, such as activations collected by a hook or an attribute inside a wrapped forward "
                "(return them from the forward instead)",
                f"{own:x} at {script_line()}",
            )
