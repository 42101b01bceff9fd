"""The global random generators, seeded so that draws do not depend on which rank makes them.

A step seeds them by (seed, stream, step, microbatch), a loader by (seed, epoch, sample id). The generators are torch's
(CPU and device), NumPy's and Python's global ones. Their states are saved before and restored after, so the script's
own draws do not depend on which microbatches its rank has run.
"""

# ruff: noqa: NPY002 - the global generators that scripts draw from are the legacy ones

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand  # NumPy's public functions, with their types
from torch import Tensor

from samestep.core.seeds import derive_seed

ASIDE_STREAM = 2**34  # apart from the streams of steps, samples and evaluations


class SavedState(NamedTuple):
    """The states of all generators; NumPy's as its bit generator, which `seed` replaces, and as a value."""

    of_torch: list[Tensor]
    of_python: Any
    of_numpy: Any
    numpy_state: Any


class Generators:
    """The global generators of this process.

    Args:
        device: this rank's device; its generator is seeded along with the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self.of_torch = [torch.default_generator, *_device_generators(device)]
        # Seeding NumPy's own Mersenne twister takes longer than a small forward: Philox has a state of a few words.
        self._philox = np.random.Philox(key=0)
        self._fresh: Any = self._philox.state

    def seed(self, seed: int) -> None:
        """Seeds all of them with a number of 64 bits, of which torch's CPU generator takes the lower 32.

        Call it inside `preserved`.
        """
        for generator in self.of_torch:
            generator.manual_seed(seed)
        random.seed(seed)
        self._fresh["state"]["key"][0] = seed
        self._philox.state = self._fresh
        mtrand.set_bit_generator(self._philox)  # also drops the half of a normal pair that an odd draw left

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Leaves every generator as it was, whatever the block seeds or draws."""
        saved = self.save()
        try:
            yield
        finally:
            self.restore(saved)

    @contextmanager
    def aside(self, number: int) -> Iterator[None]:
        """Runs the user's code on one rank alone, on a random stream of its own; `number` is another one each time."""
        with self.preserved():
            self.seed(derive_seed(ASIDE_STREAM, number))
            yield

    def save(self) -> SavedState:
        """The state of every generator."""
        of_torch = [generator.get_state() for generator in self.of_torch]
        numpy = mtrand.get_bit_generator(), mtrand.get_state(legacy=False)
        return SavedState(of_torch, random.getstate(), *numpy)

    def states_off_device(self) -> str:
        """The states of all generators but the device's own, written out for a comparison; takes a millisecond."""
        of_torch = [generator.get_state().tolist() for generator in self.of_torch[:-1]]
        return repr((of_torch, random.getstate(), mtrand.get_state(legacy=False)))

    def restore(self, saved: SavedState) -> None:
        """Puts every generator in the state that was saved."""
        mtrand.set_bit_generator(saved.of_numpy)
        if saved.numpy_state["has_gauss"]:
            # The bits are as they were, since another generator drew; half of a normal pair is not among them.
            mtrand.set_state(saved.numpy_state)
        random.setstate(saved.of_python)
        for generator, state in zip(self.of_torch, saved.of_torch, strict=True):
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
    np.random.seed(seed % 2**32)
    mtrand.set_bit_generator(mtrand.get_bit_generator())  # drops the held half of a normal pair of any bit generator
    random.seed(seed)
