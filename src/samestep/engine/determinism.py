"""Determinism of a process: its device, the switches of deterministic kernels, and the global random generators.

Draws before a run seeds the generators differ at each start. torch's generator keeps its initial seed, a random number
of 53 bits or more unless it was set; NumPy's keeps its entropy until `numpy.random.seed`. Compared with a new one of
that seed, each shows whether it was drawn from. Python's generator keeps neither, and modules draw from it when they
are imported.
"""

import gc
import random
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor, nn

from samestep.comm.environment import Environment
from samestep.data.batch import version_of
from samestep.data.nested import leaves
from samestep.data.randomness import Generators
from samestep.engine.deterministic_kernels import register_kernels
from samestep.engine.observer import StepObserver
from samestep.errors import CheckpointError, DeviceError

if TYPE_CHECKING:
    from samestep.engine.step import TrainStep

LARGEST_SET = 2**48  # seeds above are taken for random ones
CURE = "build samestep.Run first, or set a seed"


def own_device(device: str | torch.device | None, environment: Environment) -> torch.device:
    """This rank's device, made current: the user's choice, else the launcher's, else the first accelerator or the CPU.

    Of a kind without an index, each rank has the device with its local rank; a process that is alone the current one.
    """
    kind, index = environment.device_kind, None
    if device is not None:
        asked = _checked_device(device)
        kind, index = asked.type, asked.index
    elif kind is None:
        kind = _accelerator()
    if kind == "cpu":
        return torch.device("cpu")
    if index is None and environment.world_size > 1:
        index = environment.local_rank % max(1, torch.get_device_module(kind).device_count())
    elif index is None:
        index = torch.accelerator.current_device_index()
    own = torch.device(kind, index)
    make_current(own)
    return own


def _accelerator() -> str:
    """The kind of this process's accelerators; "cpu" if it has none, or of another kind than those that are used."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in ("cuda", "mps") else "cpu"


def make_current(device: torch.device) -> None:
    """Makes a GPU the one that "cuda", and a stream or event without a device, mean in this thread."""
    if device.type == "cuda":
        torch.accelerator.set_device_index(device)


def _checked_device(asked: str | torch.device) -> torch.device:
    """The device of this name; raises a `DeviceError` if this process does not have it."""
    try:
        chosen = torch.device(asked)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is not None and chosen.type == "cpu":
        return torch.device("cpu")
    own = _accelerator()
    if chosen is None or chosen.type != own:
        there = "cpu" if own == "cpu" else f"cpu and {own}"
        raise DeviceError(f"got device={str(asked)!r}; this process has {there}")
    if (chosen.index or 0) >= torch.accelerator.device_count():
        last = torch.accelerator.device_count() - 1
        raise DeviceError(f"got device={str(asked)!r}; this process has {chosen.type}:0 to {chosen.type}:{last}")
    return chosen


def make_deterministic(threads: int, reduction: str) -> None:
    """Sets the process-wide switches that equal bits need."""
    # On a GPU too: CPU kernels load the data there and initialise the model. So no number that follows from the cores
    # a rank, of which fewer devices leave more.
    torch.set_num_threads(threads)
    if reduction == "native":
        return
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms(True), without importing inductor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a pass over memory for nothing
    torch.backends.cudnn.benchmark = False
    register_kernels()
    if "torch._inductor.config" in sys.modules:  # else it reads the variable that `samestep` has set
        sys.modules["torch._inductor.config"].deterministic = True  # type: ignore[attr-defined]


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


def state_of(generator: Any) -> Any:
    """The state of a generator of the script's own, one of `data.randomness.GENERATORS`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    is_old = isinstance(generator, np.random.RandomState)
    return _arrays_as_tensors(generator.get_state(legacy=False) if is_old else generator.bit_generator.state)


def restore_state(generator: Any, state: Any) -> None:
    """Sets a generator of the script's own; raises a `CheckpointError` for a state of another form."""
    check_alike("generator", state, state_of(generator))
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        _check_python(state)
        generator.setstate(state)
    else:
        _check_numpy(state)
        if isinstance(generator, np.random.RandomState):
            generator.set_state(_tensors_as_arrays(state))
        else:
            generator.bit_generator.state = _tensors_as_arrays(state)


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
