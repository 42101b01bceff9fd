"""Roots: what a script calls backward on is the same on all ranks, or the ranks have drifted apart.

A loss that uses what a hook collected inside a wrapped forward, above all, has on each rank the values of that rank's
chunks only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.data.batch import checksum
from samestep.engine.site import script_line
from samestep.scripts.adoption import Adoption
from samestep.scripts.backward import end_backward, meet_in_backward
from samestep.scripts.patch import Patch

CHECKED = 3
CHECKED_EVERY = 50


@dataclass
class Count:
    """How many times the script has called backward."""

    calls: int = 0


def patches(adoption: Adoption) -> list[Patch]:
    """What compares the roots, every so often, and what sees to it that all ranks learn of a backward that fails."""
    count = Count()
    backward, grad = torch.autograd.backward, torch.autograd.grad

    def checked_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        _check(adoption, count, tensors)
        with _together(adoption):
            return backward(tensors, *args, **kwargs)

    def checked_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        _check(adoption, count, outputs)
        with _together(adoption):
            return grad(outputs, *args, **kwargs)

    pairs: list[tuple[str, Callable[..., Any]]] = [("backward", checked_backward), ("grad", checked_grad)]
    return [Patch(torch.autograd, name, function) for name, function in pairs]


@contextmanager
def _together(adoption: Adoption) -> Iterator[None]:
    """The time of a backward that the script calls; one called inside of it, or in a chunk, is left alone."""
    if not adoption.may_meet():
        yield
        return
    try:
        yield
    except (Exception, SystemExit) as error:
        if adoption.backward is not None:  # the others wait where this rank's chunks would have been through
            meet_in_backward(adoption, error)
        raise
    finally:
        end_backward(adoption)


def _check(adoption: Adoption, count: Count, roots: Any) -> None:
    """Compares the roots of the first few backward passes, and of some later ones."""
    if adoption.world_size == 1 or adoption.num_forwards == 0 or not adoption.may_meet():
        return
    count.calls += 1
    if count.calls > CHECKED and count.calls % CHECKED_EVERY:
        return
    tensors: Sequence[Any] = [roots] if isinstance(roots, Tensor) else list(roots)
    with torch._C.DisableTorchFunction():
        own = checksum([tensor for tensor in tensors if isinstance(tensor, Tensor)])
        if len({row[0] for row in adoption.meet("a backward", [own])}) > 1:
            adoption.drifted(
                "the ranks call backward on different values: the loss uses something that a rank has from its own "
                "chunks only, such as activations collected by a hook or an attribute inside a wrapped forward "
                "(return them from the forward instead)",
                f"{own:x} at {script_line()}",
            )
