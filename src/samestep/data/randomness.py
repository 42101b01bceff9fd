"""The global random generators, seeded so that draws do not depend on the rank that makes them.

A step seeds them by (seed, stream, step, microbatch), a loader by (seed, epoch, first sample). The generators are the
global ones of torch (CPU and device), NumPy and Python. Their states are saved before and restored after, so that the
script's own draws do not depend on the microbatches that its rank has run.
"""

# ruff: noqa: NPY002 - the global generators that scripts draw from are the legacy ones

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand  # the functions of np.random, with their types
from torch import Tensor

from samestep.core.seeds import derive_seed

_PYTHONS: Any = random.random  # a method of its generator
GLOBAL_OF_NUMPY: Any = mtrand.rand.__self__  # type: ignore[attr-defined]  # whose methods are the functions of np.random
GLOBAL = (torch.default_generator, GLOBAL_OF_NUMPY, _PYTHONS.__self__)
"""The global generators of the host."""

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
MAX_PARTS = 64  # longer lists are taken for data
ASIDE_STREAM = 2**34  # distinct from the streams of steps, samples and evaluations


class GeneratorStates(NamedTuple):
    """The states of all generators; NumPy's as its bit generator, which `seed` replaces, and the half of a pair."""

    of_torch: list[Tensor]
    of_python: Any
    of_numpy: Any
    half: dict[str, Any]  # "has_gauss", "gauss": the cached half of a pair of normal draws


class Generators:
    """The global generators of this process, the generator of the rank's device included."""

    def __init__(self, device: torch.device) -> None:
        self.of_torch = [torch.default_generator, *_device_generators(device)]
        # Seeding NumPy's default Mersenne twister takes longer than a small forward; Philox has a state of a few words.
        self._philox = np.random.Philox(key=0)
        self._fresh: Any = self._philox.state

    def seed(self, seed: int) -> None:
        """Seeds all of them, inside `preserved`, with 64 bits; torch's CPU generator uses the lower 32."""
        for generator in self.of_torch:
            generator.manual_seed(seed)
        random.seed(seed)
        self._fresh["state"]["key"][0] = seed
        self._philox.state = self._fresh
        mtrand.set_bit_generator(self._philox)  # also drops the cached half of a pair of normal draws

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores every generator after the block."""
        saved = self.save()
        try:
            yield
        finally:
            self.restore(saved)

    @contextmanager
    def aside(self, number: int) -> Iterator[None]:
        """Runs a block of the user's code, which only one rank runs, on the random stream of that number."""
        with self.preserved():
            self.seed(derive_seed(ASIDE_STREAM, number))
            yield

    def save(self) -> GeneratorStates:
        """The state of every generator."""
        of_torch = [generator.get_state() for generator in self.of_torch]
        numpy = mtrand.get_bit_generator()
        # The state has the cached half beside the bit generator's own words, and reading a Mersenne twister's words
        # takes longer than all else here: so the state is read while Philox is there.
        GLOBAL_OF_NUMPY._bit_generator = self._philox
        try:
            state = mtrand.get_state(legacy=False)
        finally:
            GLOBAL_OF_NUMPY._bit_generator = numpy
        half = {name: state[name] for name in ("has_gauss", "gauss")}
        return GeneratorStates(of_torch, random.getstate(), numpy, half)

    def restore(self, saved: GeneratorStates) -> None:
        """Restores the saved state of every generator."""
        mtrand.set_bit_generator(saved.of_numpy)
        if saved.half["has_gauss"]:  # which the line above drops; the generator is as it was, since Philox drew instead
            mtrand.set_state({**mtrand.get_state(legacy=False), **saved.half})
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
    """Seeds every global generator of this process, alike on all ranks, so that the script's own draws agree."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    mtrand.set_bit_generator(mtrand.get_bit_generator())  # drops the cached half of a normal pair
    random.seed(seed)


def held_generators(holder: Any, depth: int = 3) -> list[Any]:
    """The generators in the attributes of an object and of what they hold: a dataset's transforms."""
    if isinstance(holder, GENERATORS):
        return [holder] if holder not in GLOBAL else []
    if depth == 0 or isinstance(holder, type | ModuleType | FunctionType):
        return []
    parts = holder if isinstance(holder, list | tuple) else getattr(holder, "__dict__", {}).values()
    return [one for part in islice(parts, MAX_PARTS) for one in held_generators(part, depth - 1)]


def seed_each(generators: Sequence[Any], *seed: int) -> None:
    """Seeds generators of NumPy's, Python's or torch's, each with a number of its own."""
    for index, generator in enumerate(generators):
        number = derive_seed(*seed, index)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number)
        elif isinstance(generator, random.Random):
            generator.seed(number)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(number % 2**32)
        else:
            generator.bit_generator.state = type(generator.bit_generator)(number).state
