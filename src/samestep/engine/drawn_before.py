"""Draws before a run seeds the generators, which differ at each start.

torch's generator keeps its initial seed, a random number of 53 bits or more unless it was set; NumPy's keeps its
entropy until `numpy.random.seed`. Compared with a new one of that seed, each shows whether it was drawn from. Python's
generator keeps neither, and modules draw from it when they are imported.
"""

import gc
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor, nn

from samestep.data.checksums import version_of
from samestep.data.nested import leaves
from samestep.engine.observer import StepObserver

if TYPE_CHECKING:
    from samestep.engine.step import TrainStep


LARGEST_SET = 2**48  # seeds above are taken for random ones
CURE = "build samestep.Run first, or set a seed"


class DrawnBefore:
    """The tensors that existed when a run was made, if generators without a seed had been drawn from by then.

    A parameter that was written to more than once since it was made (`load_state_dict`, an initialisation of the
    script's own) may no longer hold what was drawn, and is left out; so is a constant one.
    """

    def __init__(self) -> None:
        self._torch, self._numpy = _torch_has_drawn(), _numpy_has_drawn()
        drawn = self._torch or self._numpy
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)] if drawn else []
        self._there = {id(tensor): (weakref.ref(tensor), version_of(tensor)) for tensor in found if not tensor.is_meta}
        self._has_parameters = any(isinstance(tensor, nn.Parameter) for tensor in found)

    def parameters(self, model: nn.Module) -> list[str]:
        """The names of a model's parameters with numbers that were drawn from torch's generator before the run."""
        if not self._torch:
            return []
        return [name for name, p in model.named_parameters() if version_of(p) <= 1 and self._holds(p)]

    def describe_data(self, data: Any) -> str:
        """A sentence on tensors with numbers that may have been drawn before the run; "" if there are none.

        Draws from torch's generator are ascribed to the model, if there was one.
        """
        kinds = ["NumPy's"] * self._numpy + ["torch's"] * (self._torch and not self._has_parameters)
        if not kinds or not any(isinstance(leaf, Tensor) and self._holds(leaf) for leaf in leaves(data)):
            return ""
        return (
            f"data was made before samestep.Run, when {' and '.join(kinds)} generator had been drawn from without a "
            f"seed: it may be other data at each start; {CURE} (numpy.random.seed, torch.manual_seed) before the data"
        )

    def _holds(self, tensor: Tensor) -> bool:
        """Whether a tensor existed, is unchanged since, and has more than one value."""
        there = self._there.get(id(tensor))
        if there is None or there[0]() is not tensor or there[1] != version_of(tensor):
            return False
        flat = tensor.data.reshape(-1)
        return flat.numel() > 0 and bool((flat != flat[0]).any())


class DrawnParameters(StepObserver):
    """Reports, before the first step, parameters that were drawn before the run and not written to since.

    A run that is resumed takes no first step.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._versions: dict[str, int] = {}

    def on_made(self, step: "TrainStep") -> None:
        """Remembers how often the parameters were written to."""
        self._versions = self._current(step)

    def on_step(self, step: "TrainStep", batch: Any) -> None:
        """Reports, and leaves."""
        step.observers.remove(self)
        now = self._current(step)
        names = [name for name, version in self._versions.items() if now.get(name) == version]
        if names and step.num_steps == 0:
            shown = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
            step.membership.notice(
                f"the model has parameters that were drawn before samestep.Run, when torch's generator had no seed "
                f"({shown}): they are others at each start; {CURE} (torch.manual_seed) before the model"
            )

    def _current(self, step: "TrainStep") -> dict[str, int]:
        return {name: version_of(p) for name, p in step.model.named_parameters() if name in self._names}


def _torch_has_drawn() -> bool:
    generator = torch.default_generator
    seed = generator.initial_seed()
    return seed > LARGEST_SET and not torch.equal(
        torch.Generator().manual_seed(seed).get_state(), generator.get_state()
    )


def _numpy_has_drawn() -> bool:
    generator = mtrand.get_bit_generator()
    origin = getattr(generator, "seed_seq", None)
    if origin is None or type(generator) is not np.random.MT19937:
        return False
    fresh: Any = np.random.MT19937(origin).state["state"]
    now: Any = generator.state["state"]
    return fresh["pos"] != now["pos"] or not np.array_equal(fresh["key"], now["key"])
