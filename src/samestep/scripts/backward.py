"""Backward passes of a single-process script: the first one is looked at, and devices are short of memory aloud."""

import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from samestep.engine.kernel_flags import check_shortages
from samestep.patch import Patch
from samestep.scripts.script_state import ScriptState

NEEDS_LESS = (
    "smaller chunks (--logical-devices, or a smaller batch), activation checkpointing, or a GPU that no other process "
    "uses"
)


def check_memory(script: ScriptState, shortages: int, where: str) -> None:
    """Raises if the device's memory was short since there were so many shortages, and no error came of it."""
    check_shortages(shortages, script.communicator.device, where, NEEDS_LESS)


def generator_state(generators: Sequence[torch.Generator] = (torch.default_generator,)) -> int:
    """A checksum of the states of torch's generators, by default the host's alone, without drawing from them."""
    return zlib.crc32(b"".join(generator.get_state().numpy().tobytes() for generator in generators))


def patches(script: ScriptState) -> list[Patch]:
    """The patch of `torch.autograd.backward`: calls `at_first_backward` before the script's first one."""
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        if script.at_first_backward is not None and script.may_meet():
            look, script.at_first_backward = script.at_first_backward, None
            look(sys._getframe(1))
        return original(*args, **kwargs)

    return [Patch(torch.autograd, "backward", backward)]
