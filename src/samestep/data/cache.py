"""The cache: a dataset of tensors in the device's memory, from which microbatches are taken by their ids."""

from typing import Any

import torch

from samestep.data.nested import leaves
from samestep.data.tensors import TensorData
from samestep.devices.transfer import to_device
from samestep.errors import OutOfMemoryError, UsageError


def cached(dataset: Any, cache: str | None, device: torch.device) -> Any:
    """The dataset, in the device's memory if that is asked for."""
    if cache is None:
        return dataset
    if cache != "device":
        raise UsageError(f"got cache={cache!r}; it is 'device', or None for no cache")
    if type(dataset) is not TensorData:
        raise UsageError(
            f"got a {type(dataset).__name__} with cache='device', which needs tensors: a TensorDataset, a "
            "samestep.TensorData, or tensors in tuples and dicts"
        )
    needed = sum(leaf.nbytes for leaf in leaves(dataset.tensors) if leaf.device != device)
    check_fits(needed, _free_bytes(device), device)
    return TensorData(to_device(dataset.tensors, device), dataset.transform)


def check_fits(needed: int, free: int | None, device: torch.device) -> None:
    """Raises an `OutOfMemoryError` if a dataset of so many bytes does not fit in what is free on a device."""
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"out of memory: with cache='device' the dataset takes {needed / 2**30:.3g} GiB of {device}, where "
            f"{free / 2**30:.3g} GiB are free: leave cache out, and batches come from host memory while the device "
            "computes; or keep the tensors in fewer bytes (uint8 pixels, and a transform that makes them floats)"
        )


def _free_bytes(device: torch.device) -> int | None:
    """What this process can still take of a GPU's memory; None where nobody says."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + unused)
