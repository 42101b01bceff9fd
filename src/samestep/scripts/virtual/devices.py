"""The virtual devices of an adopted script: one context manager that puts them in and takes them out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samestep.scripts.adoption import Adoption
from samestep.scripts.patch import applied
from samestep.scripts.virtual import comm, cuda, misc_patches
from samestep.scripts.virtual.cuda_types import tensor_type_patches
from samestep.scripts.virtual.handlers import handlers
from samestep.scripts.virtual.mode import VirtualMode
from samestep.scripts.virtual.registry import DeviceRegistry, mark


@contextmanager
def virtual_devices(adoption: Adoption) -> Iterator[None]:
    """Simulates `num_visible(adoption)` CUDA devices on the CPU, for this thread and threads that it starts.

    Tensors stay CPU tensors and carry the index of their device as an attribute, which files never hold. Draws on a
    device come from the CPU's generator. `adoption.mark` sets the device of a tensor.
    """
    registry = DeviceRegistry(adoption)
    modes: list[VirtualMode] = []
    mode = VirtualMode(registry, handlers(registry, lambda: modes[0]))
    modes.append(mode)
    before = adoption.mark, adoption.on_device
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    patches = [
        *cuda.patches(registry),
        *tensor_type_patches(),
        *comm.patches(),
        *misc_patches.patches(registry, mode),
    ]
    with applied(patches):
        adoption.mark, adoption.on_device = mark, torch.cuda.device
        try:
            with mode:
                yield
        finally:
            adoption.mark, adoption.on_device = before
            if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not default:
                torch.set_default_device(None if default is None else default.device)
