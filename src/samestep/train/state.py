"""The state of a run at a step boundary: taken apart into tensors and JSON, and put back exactly.

Nothing in it depends on the number of devices.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from samestep.data.randomness import Generators
from samestep.engine.step import TrainStep
from samestep.errors import CheckpointError
from samestep.train.packing import pack, unpack

FORMAT = 1


@dataclass(frozen=True)
class State:
    """A state that still shares the memory of what it was taken from: copy it before the next step.

    Attributes:
        files: tensors by name, for each file of a checkpoint.
        facts: the rest, as JSON.
    """

    files: dict[str, dict[str, Tensor]]
    facts: dict[str, Any]


def capture(step: TrainStep, rest: Mapping[str, Any]) -> State:
    """Takes a training step apart: its model, optimizers, scheduler, counters, and the random generators.

    Args:
        step: between two steps.
        rest: what else belongs to the state, in any nesting that `packing` takes.

    Raises:
        UsageError: an optimizer or scheduler holds something that cannot be stored without pickle.
        NonFiniteError: an earlier step, of which the host had not heard yet, was not finite.
    """
    progress = step.state_dict()
    optimizers = [pack(optimizer.state_dict(), f"optimizer.{i}") for i, optimizer in enumerate(step.optimizers)]
    scheduler = pack(None if step.scheduler is None else step.scheduler.state_dict(), "scheduler")
    others = {
        "step": progress,
        "generators": generator_states(step.communicator.device),
        "rest": dict(rest),
    }
    remaining = pack(others, "run")
    files = {
        "model": dict(model_tensors(step.model)),
        "optimizer": {name: tensor for packed in optimizers for name, tensor in packed.tensors.items()},
        "rest": {**scheduler.tensors, **remaining.tensors},
    }
    facts = {
        "format": FORMAT,
        "optimizers": [packed.facts for packed in optimizers],
        "scheduler": scheduler.facts,
        "run": remaining.facts,
    }
    return State(files, facts)


def restore(step: TrainStep, files: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Puts a captured state back, to the bit.

    Args:
        step: made from the same model and optimizers.
        files: of the captured state.
        facts: of the captured state.

    Returns:
        The `rest` that was given to `capture`.

    Raises:
        CheckpointError: the state is that of another model, of other optimizers, or of a newer format.
    """
    if facts.get("format") != FORMAT:
        raise CheckpointError(f"the state has format {facts.get('format')}; this version reads format {FORMAT}")
    if len(facts["optimizers"]) != len(step.optimizers):
        raise CheckpointError(
            f"got the state of {len(facts['optimizers'])} optimizers for a step of {len(step.optimizers)}"
        )
    saved_scheduler = unpack(facts["scheduler"], files["rest"])
    if (saved_scheduler is None) != (step.scheduler is None):
        there, here = ("a", "no") if saved_scheduler is not None else ("no", "a")
        raise CheckpointError(f"the state has {there} scheduler, the step has {here} one; needed: the same")
    load_model(step.model, files["model"])
    for optimizer, packed in zip(step.optimizers, facts["optimizers"], strict=True):
        load_optimizer(optimizer, unpack(packed, files["optimizer"]))
    if step.scheduler is not None:
        step.scheduler.load_state_dict(saved_scheduler)
    others = unpack(facts["run"], files["rest"])
    step.load_state_dict(others["step"])
    restore_generators(others["generators"], step.communicator.device)
    rest: dict[str, Any] = others["rest"]
    return rest


def model_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and all buffers, those that `state_dict` leaves out too, by name; tied ones once."""
    named = chain(model.named_parameters(), model.named_buffers())
    return [(name, t.detach()) for name, t in named if not isinstance(t, UninitializedParameter | UninitializedBuffer)]


@torch.no_grad()
def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Writes parameters and buffers, in place.

    Raises:
        CheckpointError: names, shapes or dtypes are those of another model; nothing is written then.
    """
    own = dict(model_tensors(model))
    missing, strange = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or strange:
        parts = [f"{what} {', '.join(names[:4])}" for what, names in (("no", missing), ("also", strange)) if names]
        raise CheckpointError(f"the checkpoint is of another model: it has {' and '.join(parts)}")
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in tensors.items():
        same = own[name].shape == tensor.shape and own[name].dtype == tensor.dtype
        if not same and name not in buffers:
            raise CheckpointError(
                f"the checkpoint is of another model: its {name} is {_form(tensor)}, the model's {_form(own[name])}"
            )
    for name, tensor in tensors.items():
        if own[name].shape == tensor.shape and own[name].dtype == tensor.dtype:
            own[name].copy_(tensor)
        else:
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._buffers[key] = tensor.to(own[name].device)


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimizer's state exactly: torch's own loading casts it to the parameters' dtype.

    Raises:
        CheckpointError: it is the state of an optimizer over other parameters.
    """
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint is of another optimizer: {error}") from error
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for key, value in state["state"].get(index, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of all global generators: what the script itself draws goes on from them."""
    return {
        "torch": [generator.get_state() for generator in Generators(device).of_torch],
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - the generator that scripts draw from
        "python": random.getstate(),
    }


def restore_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Puts the global generators back; those of another kind of device are left as they are."""
    for generator, state in zip(Generators(device).of_torch, states["torch"], strict=False):
        generator.set_state(state)
    np.random.set_state(states["numpy"])  # noqa: NPY002 - as above
    random.setstate(states["python"])


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
