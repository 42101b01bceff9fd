"""The virtual devices of an adopted script: one context manager that puts them in and takes them out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samestep.scripts.adoption import Adoption
from samestep.scripts.patch import Patch, applied
from samestep.scripts.virtual import cuda, distributed, legacy, mixed, parallel, places, repeats
from samestep.scripts.virtual.handlers import handlers
from samestep.scripts.virtual.mode import VirtualMode
from samestep.scripts.virtual.registry import Machine, mark


@contextmanager
def virtual_devices(adoption: Adoption) -> Iterator[None]:
    """The time in which code on this thread, and in threads that it starts, sees CUDA devices that the CPU plays.

    It sees `num_visible(adoption)` of them. Tensors stay CPU tensors and carry the index of their device as an
    attribute, which files never hold. Draws on a device come from the CPU's generator. `adoption.mark` says where a
    tensor is, while the time lasts.

    Raises:
        UsageError: in the script, when it calls something of CUDA that has no virtual counterpart.
    """
    machine = Machine(adoption)
    modes: list[VirtualMode] = []
    mode = VirtualMode(machine, handlers(machine, lambda: modes[0]))
    modes.append(mode)
    before = adoption.mark, adoption.on_device
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    with applied(_patches(machine, mode)):
        adoption.mark, adoption.on_device = mark, torch.cuda.device
        try:
            with mode:
                yield
        finally:
            adoption.mark, adoption.on_device = before
            if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not default:
                torch.set_default_device(None if default is None else default.device)


def _patches(machine: Machine, mode: VirtualMode) -> list[Patch]:
    """What the mode does not reach."""
    return [
        *cuda.patches(machine),
        *legacy.patches(),
        *mixed.patches(),
        *parallel.patches(),
        *repeats.patches(),
        *distributed.patches(),
        *places.patches(machine, mode),
    ]
