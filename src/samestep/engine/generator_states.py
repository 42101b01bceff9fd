"""States of random generators, as they are saved."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.data.randomness import Generators
from samestep.errors import CheckpointError


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of all global random generators."""
    return {
        "torch": [generator.get_state() for generator in Generators(device).of_torch],
        "numpy": _arrays_as_tensors(np.random.get_state(legacy=False)),  # noqa: NPY002 - scripts draw from it
        "python": random.getstate(),
    }


def restore_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Sets the global generators, other kinds of devices aside; raises as `check_generators` does."""
    check_generators(states, device)
    for generator, state in zip(Generators(device).of_torch, states["torch"], strict=False):
        generator.set_state(state)
    np.random.set_state(_tensors_as_arrays(states["numpy"]))  # noqa: NPY002 - as above
    random.setstate(states["python"])


def check_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Raises a `CheckpointError` for states that are not of the form of this program's."""
    check_alike("random generators", states, generator_states(device))
    _check_numpy(states["numpy"])
    _check_python(states["python"])


def _check_numpy(state: Mapping[str, Any]) -> None:
    memory = state.get("buffer", state["state"].get("key"))  # of Philox or MT19937, which read there without looking
    position = state.get("buffer_pos", state["state"].get("pos", 0))
    if position and not 0 <= position <= len(memory):
        raise CheckpointError(f"the checkpoint's state of NumPy's generator is at {position} of {len(memory)} numbers")


def _check_python(state: Sequence[Any]) -> None:
    if not all(0 <= word < 2**32 for word in state[1]):  # CPython keeps the lowest 32 bits of each
        raise CheckpointError("the checkpoint's state of Python's generator has words of more than 32 bits")


def check_alike(what: str, there: Any, here: Any) -> None:
    """Raises a `CheckpointError` unless a checkpoint's value has the types of this program's, all the way down."""
    if not _is_alike(there, here):
        raise CheckpointError(f"the checkpoint's {what} cannot be taken up: not of the form that this program's have")


def _is_alike(there: Any, here: Any) -> bool:
    if isinstance(here, Tensor):
        return isinstance(there, Tensor) and (there.dtype, there.shape) == (here.dtype, here.shape)
    if type(there) is not type(here):
        return there is None or here is None or (isinstance(there, int | float) and type(here) is float)
    if isinstance(here, dict):
        return there.keys() == here.keys() and all(_is_alike(there[key], value) for key, value in here.items())
    if isinstance(here, list | tuple):  # of generators there is a list, as long as there are kinds of devices
        same_length = isinstance(here, list) or len(there) == len(here)
        return same_length and all(map(_is_alike, there, here))
    return True


def _arrays_as_tensors(value: Any) -> Any:
    """A generator's state without NumPy arrays, which `torch.load` does not load with `weights_only=True`."""
    if isinstance(value, dict):
        return {key: _arrays_as_tensors(entry) for key, entry in value.items()}
    return torch.from_numpy(value.view(f"i{value.itemsize}").copy()) if isinstance(value, np.ndarray) else value


def _tensors_as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tensors_as_arrays(entry) for key, entry in value.items()}
    return value.numpy().view(f"u{value.element_size()}") if isinstance(value, Tensor) else value
