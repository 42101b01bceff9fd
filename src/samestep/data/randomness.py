"""Randomness: the global generators, seeded so that draws do not depend on which rank makes them.

A step seeds them by (seed, stream, step, shard), a loader by (seed, epoch, sample id). The generators are torch's (CPU
and device), NumPy's and Python's global ones. Their states are saved before and restored after, so what a script draws
elsewhere does not depend on who ran what. NumPy's state is not copied, which is slow, but its bit generator is
exchanged for one of our own.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand


class Generators:
    """The global generators of this process, and what it takes to seed them cheaply.

    Args:
        device: this rank's device; its generator is seeded along with the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self.of_torch = [torch.default_generator, *_device_generators(device)]
        self._numpy = np.random.Philox(key=0)
        self._numpy_state: Any = self._numpy.state

    def seed(self, seed: int) -> None:
        """Seeds all of them with a number of 64 bits, of which torch's CPU generator takes the lower 32.

        Call it inside `preserved`.
        """
        for generator in self.of_torch:
            generator.manual_seed(seed)
        random.seed(seed)
        self._numpy_state["state"]["key"][0] = np.uint64(seed)
        self._numpy.state = self._numpy_state
        mtrand.set_bit_generator(self._numpy)  # also drops the half of a normal pair that an odd draw left over

    @contextmanager
    def preserved(self, wholly: bool = False) -> Iterator[None]:
        """Leaves every generator as it was, whatever the block seeds or draws.

        Args:
            wholly: also keep the half of a normal pair that NumPy holds back after an odd draw, which costs 0.1 ms.
                Else it is dropped: enter the block equally often on every rank.
        """
        half = mtrand.get_state(legacy=False) if wholly else {"has_gauss": 0}
        states = [generator.get_state() for generator in self.of_torch]
        python_state = random.getstate()
        numpy_generator = mtrand.get_bit_generator()
        try:
            yield
        finally:
            mtrand.set_bit_generator(numpy_generator)
            if half["has_gauss"]:
                mtrand.set_state(half)
            random.setstate(python_state)
            for generator, state in zip(self.of_torch, states, strict=True):
                generator.set_state(state)


def _device_generators(device: torch.device) -> list[torch.Generator]:
    """The default generator of an accelerator; none for the CPU."""
    if device.type == "cpu":
        return []
    if device.type == "mps":
        return [torch.mps._get_default_mps_generator()]
    module = torch.get_device_module(device)
    module.init()
    return [module.default_generators[device.index or 0]]


def seed_process(seed: int) -> None:
    """Seeds every global generator of this process alike on all ranks: what the script draws itself is replicated."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the legacy generator is what scripts draw from
    random.seed(seed)
