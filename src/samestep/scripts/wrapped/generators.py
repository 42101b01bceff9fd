"""The module's own generators: seeded for each chunk like the global ones, and put back after the forward."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from samestep.core.seeds import derive_seed
from samestep.engine.drawing import reachable


class OwnGenerators:
    """The generators that a module holds in attributes: NumPy's, Python's, torch's.

    Args:
        module: whose attributes are searched.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._generators: Sequence[Any] = reachable([module])[0]

    def seed(self, seed: int) -> None:
        """Seeds each of them with a number of its own."""
        for index, generator in enumerate(self._generators):
            own = derive_seed(seed, index)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(own)
            elif isinstance(generator, random.Random):
                generator.seed(own)
            elif isinstance(generator, np.random.RandomState):
                generator.seed(own % 2**32)
            else:
                generator.bit_generator.state = type(generator.bit_generator)(own).state

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Leaves every one as it was."""
        states = [_state(generator) for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                if isinstance(generator, torch.Generator | np.random.RandomState):
                    generator.set_state(state)
                elif isinstance(generator, random.Random):
                    generator.setstate(state)
                else:
                    generator.bit_generator.state = state


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state
