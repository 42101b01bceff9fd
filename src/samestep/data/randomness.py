"""Randomness: the global generators, seeded so that draws do not depend on which rank makes them.

A step seeds them by (seed, stream, step, microbatch), a loader by (seed, epoch, sample id). The generators are torch's
(CPU and device), NumPy's and Python's global ones. Their states are saved before and restored after, so what a script
draws elsewhere does not depend on who ran what. NumPy's state is not copied, which is slow, but its bit generator is
exchanged for one of our own; the half of a normal pair that NumPy holds back after an odd draw is read and put back
by itself.
"""

import _random
import ctypes
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

from samestep.core.seeds import derive_seed

ASIDE_STREAM = 2**34  # apart from the streams of steps, samples and evaluations


class Generators:
    """The global generators of this process, and what it takes to seed them cheaply.

    Args:
        device: this rank's device; its generator is seeded along with the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self.of_torch = [torch.default_generator, *_device_generators(device)]
        self._python = PythonState()
        self._numpy = NumpyStream()

    def seed(self, seed: int) -> None:
        """Seeds all of them with a number of 64 bits, of which torch's CPU generator takes the lower 32.

        Call it inside `preserved`.
        """
        for generator in self.of_torch:
            generator.manual_seed(seed)
        self._python.seed(seed)
        self._numpy.seed(seed)
        mtrand.set_bit_generator(self._numpy.generator)  # also drops the half of a normal pair that an odd draw left

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
        """The time in which one rank alone runs code of the user's: it draws from a stream of its own.

        Args:
            number: of the stream, another one each time.
        """
        with self.preserved():
            self.seed(derive_seed(ASIDE_STREAM, number))
            yield

    def save(self) -> "SavedState":
        """The state of every generator."""
        of_torch = [generator.get_state() for generator in self.of_torch]
        return SavedState(of_torch, self._python.save(), mtrand.get_bit_generator(), _half_of_pair())

    def states_off_device(self) -> str:
        """The states of all generators but the device's own, written out for a comparison; takes a millisecond."""
        of_torch = [generator.get_state().tolist() for generator in self.of_torch[:-1]]
        return repr((of_torch, random.getstate(), mtrand.get_state(legacy=False)))

    def restore(self, saved: "SavedState") -> None:
        """Puts every generator in the state that was saved."""
        mtrand.set_bit_generator(saved.of_numpy)
        if saved.half["has_gauss"]:
            _half_of_pair(saved.half)
        self._python.restore(saved.of_python)
        for generator, state in zip(self.of_torch, saved.of_torch, strict=True):
            generator.set_state(state)


class PythonState:
    """Saves and restores the state of Python's global generator, by a copy of its memory.

    `random.getstate` makes 625 integers, which costs 13 microseconds for both ways and 20 KB of a core's cache; a copy
    costs one. In CPython the generator is an index and 624 words of 32 bits (Modules/_randommodule.c, RandomObject). It
    is compared with what `getstate` says before it is relied on; elsewhere `getstate` does it.
    """

    def __init__(self) -> None:
        generator: Any = random._inst
        self._generator = generator
        self._size = 0
        if sys.implementation.name != "cpython":
            return
        header, words = object.__basicsize__, generator.getstate()[1]
        size = 4 * len(words)
        if size <= _random.Random.__basicsize__ - header:
            self._address = id(generator) + header
            memory = struct.unpack(f"={len(words)}I", ctypes.string_at(self._address, size))
            self._size = size if memory == (words[-1], *words[:-1]) else 0

    def seed(self, seed: int) -> None:
        """Does what `random.seed` does with an integer, without asking what it is."""
        _random.Random.seed(self._generator, seed)
        self._generator.gauss_next = None

    def save(self) -> Any:
        """The state as it is now, for `restore`."""
        if not self._size:
            return random.getstate()
        return ctypes.string_at(self._address, self._size), self._generator.gauss_next

    def restore(self, saved: Any) -> None:
        """Puts the generator in a saved state."""
        if not self._size:
            random.setstate(saved)
            return
        ctypes.memmove(self._address, saved[0], self._size)
        self._generator.gauss_next = saved[1]


class NumpyStream:
    """A Philox generator that is seeded by writing to its memory: a quarter of what NumPy's own way costs.

    Its state is a pointer to a counter of four words of 64 bits, one to a key of two, and what of the last block has
    not been drawn yet (numpy/random/src/philox/philox.h, philox_state), at the address that NumPy publishes for use by
    C; all of it lies in the object. It is tried out before it is relied on; elsewhere the generator's `state` is set.

    Attributes:
        generator: for NumPy.
    """

    COUNTER_BYTES, REST_BYTES = 32, 48

    def __init__(self) -> None:
        self.generator = np.random.Philox(key=0)
        self._fresh: Any = self.generator.state
        self._beginning, self._zero = b"", bytes(self.COUNTER_BYTES)
        self._counter = self._rest = 0
        here = range(id(self.generator), id(self.generator) + type(self.generator).__basicsize__)
        address: int = self.generator.ctypes.state_address
        rest = address + struct.calcsize("PP")
        if address not in here or rest + self.REST_BYTES - 1 not in here:
            return
        counter, key = struct.unpack("PP", ctypes.string_at(address, struct.calcsize("PP")))
        if counter not in here or key not in here:
            return
        self._beginning = ctypes.string_at(rest, self.REST_BYTES)
        self._counter, self._rest, self._key = counter, rest, ctypes.c_uint64.from_address(key)
        if not self._is_understood():
            self._rest = 0

    def seed(self, seed: int) -> None:
        """Begins the stream of a number of 64 bits."""
        if self._rest:
            ctypes.memmove(self._counter, self._zero, self.COUNTER_BYTES)
            ctypes.memmove(self._rest, self._beginning, self.REST_BYTES)
            self._key.value = seed
            return
        self._fresh["state"]["key"][0] = np.uint64(seed)
        self.generator.state = self._fresh

    def _is_understood(self) -> bool:
        """Whether a generator that has drawn is seeded as NumPy would seed it."""
        self._fresh["state"]["key"][0] = 2**64 - 59
        expected = np.random.Philox(key=0)
        expected.state = self._fresh
        drawn = np.random.Generator(self.generator)
        drawn.random(5)
        drawn.integers(2**16, dtype=np.uint32)
        self.seed(2**64 - 59)
        return _words(self.generator.state) == _words(expected.state)


def _words(state: Any) -> list[Any]:
    """All that the state of a Philox generator says."""
    inner = state["state"]
    return [
        *inner["counter"],
        *inner["key"],
        *state["buffer"],
        state["buffer_pos"],
        state["has_uint32"],
        state["uinteger"],
    ]


class SavedState(NamedTuple):
    """What `Generators.save` found.

    Attributes:
        of_torch: a state a generator.
        of_python: as `PythonState.save` gives it.
        of_numpy: the bit generator itself, which is exchanged for one of our own.
        half: what `_half_of_pair` gives.
    """

    of_torch: list[Tensor]
    of_python: Any
    of_numpy: Any
    half: dict[str, Any]


def _half_of_pair(half: dict[str, Any] | None = None) -> Any:
    """What NumPy's global generator holds beside its bits, half of a normal pair; or puts it back.

    `get_state` and `set_state` alone reach it, and both copy the bits, which takes 0.1 ms: so for their time there is
    something else in the place of the bit generator.
    """
    holder: Any = mtrand._rand
    own = holder._bit_generator
    holder._bit_generator = SimpleNamespace(state={"bit_generator": "", "state": None})
    try:
        return holder.get_state(legacy=False) if half is None else holder.set_state(half)
    finally:
        holder._bit_generator = own


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
    mtrand.set_bit_generator(mtrand.get_bit_generator())  # drops half of a normal pair, if it is not NumPy's own, too
    random.seed(seed)
