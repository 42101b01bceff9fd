"""Repeats: what activation checkpointing compares when it runs a part of a forward again.

A wrapped forward's chunk plays on the chunk's device, its repeat on that of the model: the same CPU. So the device is
left out of the comparison (`torch/utils/checkpoint.py`, `_default_meta_extractor`).
"""

from typing import Any

import torch.utils.checkpoint as checkpointing
from torch import Tensor

from samestep.scripts.patch import Patch

_NAME = "_allowed_determinism_checks_to_fns"


def patches() -> list[Patch]:
    """The comparison without the device."""
    known: dict[str, Any] | None = getattr(checkpointing, _NAME, None)
    if known is None:
        return []

    def described(tensor: Tensor) -> dict[str, Any]:
        return {"shape": tensor.shape, "dtype": tensor.dtype}

    return [Patch(checkpointing, _NAME, {**known, "default": described})]
