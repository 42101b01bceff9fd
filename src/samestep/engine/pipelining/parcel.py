"""The parcel: what goes from one stage to the next, a value and the state of the random generators.

On one device a microbatch draws all its randomness from one stream, whichever layer draws. So each stage goes on where
the one before it stopped.
"""

import random
import struct
from collections.abc import Sequence
from typing import Any

import torch
from numpy.random import mtrand
from torch import Tensor

from samestep.data.randomness import Generators
from samestep.engine.pipelining.splitting import as_tensors

PYTHON = struct.Struct("=625I?d")
NUMPY = struct.Struct("=4Q2Q4QqqQqd")
FORM = struct.Struct("=?")


def packed(generators: Generators, value: Any) -> tuple[list[Tensor], bytes]:
    """What goes on after a value was computed: its tensors, and a note of its form and the generators' state."""
    return as_tensors(value), FORM.pack(isinstance(value, tuple | list)) + write_generators(generators)


def unpacked(generators: Generators, tensors: Sequence[Tensor | None], note: bytes) -> Any:
    """The value, of what arrived; the generators go on from where they were."""
    read_generators(generators, note[FORM.size :])
    (is_tuple,) = FORM.unpack_from(note)
    arrived = [tensor for tensor in tensors if tensor is not None]
    return tuple(arrived) if is_tuple else arrived[0]


def write_generators(generators: Generators) -> bytes:
    """The states of all global generators; they were seeded by `generators`."""
    parts = [generator.get_state().numpy().tobytes() for generator in generators.of_torch]
    _, words, gauss = random.getstate()
    parts.append(PYTHON.pack(*words, gauss is not None, gauss or 0.0))
    state = mtrand.get_state(legacy=False)
    counts = (state["buffer_pos"], state["has_uint32"], state["uinteger"], state["has_gauss"], state["gauss"])
    philox = state["state"]
    parts.append(NUMPY.pack(*philox["counter"], *philox["key"], *state["buffer"], *counts))
    return b"".join(parts)


def read_generators(generators: Generators, raw: bytes) -> None:
    """Puts all global generators, which were seeded by `generators`, in states that were written so."""
    start = 0
    for generator in generators.of_torch:
        size = generator.get_state().numel()
        generator.set_state(torch.frombuffer(bytearray(raw[start : start + size]), dtype=torch.uint8))
        start += size
    *words, has_gauss, gauss = PYTHON.unpack_from(raw, start)
    random.setstate((3, tuple(words), gauss if has_gauss else None))
    start += PYTHON.size
    numbers = NUMPY.unpack_from(raw, start)
    state = mtrand.get_state(legacy=False)
    state["state"]["counter"][:], state["state"]["key"][:] = numbers[:4], numbers[4:6]
    state["buffer"][:] = numbers[6:10]
    names = ("buffer_pos", "has_uint32", "uinteger", "has_gauss", "gauss")
    mtrand.set_state({**state, **dict(zip(names, numbers[10:], strict=True))})
