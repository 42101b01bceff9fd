"""The state of a run at a step boundary: captured as tensors and JSON, and restored exactly.

Nothing in it depends on the number of devices. Of sharded state each rank captures and restores its local shards.

`capture` takes a snapshot between two steps. One that was read goes through `check_captured` (whoever wrote it, it has
the form that `capture` gives), `check_fits` (it is of these models and optimizers) and `restore`. Only the last writes.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from samestep.checkpoint.local_shards import (
    SEVERAL,
    ShardSpec,
    Stored,
    local_part,
    local_tensors,
    localized,
    optimizer_state_dict,
)
from samestep.checkpoint.packing import DTYPES, as_bad_checkpoint, check_packed, extra_states, pack, unpack
from samestep.checkpoint.run_folder import FACTS_FILE
from samestep.checkpoint.storage import Snapshot
from samestep.engine.generator_states import check_generators, generator_states, restore_generators
from samestep.engine.optimizer_settings import Settings, apply_new_settings
from samestep.engine.parameters import held_by, restore_dtypes
from samestep.engine.sharded_state import ELEMENTWISE, LocalShard, ShardedState, Sharding
from samestep.engine.step import TrainStep
from samestep.errors import CheckpointError, UsageError

FORMAT = 2
NOT_OURS = "another checkpoint is needed: the state in this one cannot be taken up"
_LIKE_PARAMETER = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "sum")

Steps = TrainStep | Sequence[TrainStep]


@dataclass(frozen=True)
class _Parts:
    """The models and optimizers of several steps, each once and with its sharding: steps may share them."""

    steps: tuple[TrainStep, ...]
    models: dict[str, tuple[nn.Module, ShardedState | None]]
    began: list[dict[str, bool]]  # of each model, which parameters were trainable at first
    optimizers: list[tuple[Optimizer, ShardedState | None]]
    settings: list[dict[str, Any]]


def capture(step: Steps, rest: Mapping[str, Any]) -> Snapshot:
    """Captures models, optimizers, schedulers, counters and random generators of training steps, and `rest`.

    The tensors share the memory of the models and optimizers: copy them before the next step.
    """
    check_storable(step)
    parts = _parts(step)
    world_size = parts.steps[0].communicator.world_size
    packed = [
        pack(optimizer_state_dict(optimizer, sharded, world_size), f"optimizer.{number}")
        for number, (optimizer, sharded) in enumerate(parts.optimizers)
    ]
    others = {
        "steps": [each.state_dict() for each in parts.steps],
        "schedulers": [None if each.scheduler is None else each.scheduler.state_dict() for each in parts.steps],
        "settings": parts.settings,
        "generators": generator_states(parts.steps[0].communicator.device),
        "rest": dict(rest),
    }
    extra = {name: found for name, (model, _) in parts.models.items() if (found := extra_states(model))}
    if extra:
        others["extra"] = extra
    remaining = pack(others, "run")
    files: dict[str, dict[str, Stored]] = {
        name: model_tensors(model, sharded, world_size) for name, (model, sharded) in parts.models.items()
    }
    files["optimizer"] = {name: tensor for each in packed for name, tensor in each.tensors.items()}
    files["rest"] = remaining.tensors
    facts = {"format": FORMAT, "optimizers": [each.facts for each in packed], "run": remaining.facts}
    # Only what training has changed: what the program freezes when it begins is its own, and may be other now.
    facts["trained"] = {
        name: {key: p.requires_grad for key, p in model.named_parameters() if p.requires_grad != began.get(key)}
        for (name, (model, _)), began in zip(parts.models.items(), parts.began, strict=True)
    }
    facts["not_persistent"] = {name: not_persistent(model) for name, (model, _) in parts.models.items()}
    for key, of in (("tied", tied_names), ("config", hub_config)):  # for an export alone
        if found := {name: value for name, (model, _) in parts.models.items() if (value := of(model))}:
            facts[key] = found
    return Snapshot(sum(each.num_steps for each in parts.steps), files, facts)


def check_storable(step: Steps) -> None:
    """Raises a `UsageError` for a parameter or buffer of a dtype that files of safetensors do not have."""
    for model, _ in _parts(step).models.values():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if tensor.dtype.is_complex and tensor.dtype not in DTYPES:
                raise UsageError(f"{name} is {form(tensor)}, which no checkpoint holds; use complex64, or view_as_real")


def shard_spec_of(step: Steps) -> ShardSpec:
    """How the tensors of a captured state are sharded in this program."""
    parts = _parts(step)
    models = {
        name: {} if sharded is None or sharded.has_whole_parameters else dict(sharded.shardings)
        for name, (_, sharded) in parts.models.items()
    }
    optimizers: list[list[Sharding | None]] = []
    for optimizer, sharded in parts.optimizers:
        of = {} if sharded is None else {id(part): sharded.shardings.get(name) for name, part in sharded.parts.items()}
        optimizers.append([of.get(id(parameter)) for parameter in held_by(optimizer)])
    return ShardSpec(models, optimizers, parts.steps[0].communicator.rank)


def rest_of(state: Snapshot) -> dict[str, Any]:
    """The `rest` that was given to `capture`; raises a `CheckpointError` if the state is of another format."""
    rest: dict[str, Any] = _others(state)["rest"]
    return rest


def check_captured(state: Snapshot) -> None:
    """Raises a `CheckpointError` unless a snapshot, of unknown origin, is of the form that `capture` gives."""
    # Checksums that fit do not tell who wrote the files. So all is checked here that is used later without a check.
    with as_bad_checkpoint("it does not hold the state of a run"):
        others = _others(state)
        check_packed(state.facts["run"], state.files["rest"], "run")
        for number, each in enumerate(state.facts["optimizers"]):
            check_packed(each, state.files["optimizer"], f"optimizer.{number}")
        counts = [each["num_steps"] for each in others["steps"]]
        is_counted = all(type(count) is int and count >= 0 for count in counts) and sum(counts) == state.step
        is_whole = len(counts) == len(others["settings"]) == len(others["schedulers"])
        if not is_counted or not is_whole or not isinstance(others["rest"], dict):
            raise CheckpointError(f"its {FACTS_FILE} does not belong to a run after {state.step} steps")
        json.dumps(others["rest"].get("contract"))  # it is shown, and compared, as JSON


def check_fits(step: Steps, state: Snapshot) -> None:
    """Raises a `CheckpointError` that names the first difference unless the state is of these models and optimizers."""
    parts, others = _parts(step), _others(state)
    with as_bad_checkpoint(NOT_OURS):
        _check_parts(parts, others, state)


def _check_parts(parts: _Parts, others: Mapping[str, Any], state: Snapshot) -> None:
    check_generators(others["generators"], parts.steps[0].communicator.device)
    # Numbers first: what follows pairs the parts of the checkpoint with the program's.
    counts = (
        ("steps", len(others["steps"]), len(parts.steps)),
        ("models", sum(name not in ("optimizer", "rest") for name in state.files), len(parts.models)),
        ("optimizers", len(state.facts["optimizers"]), len(parts.optimizers)),
    )
    for what, there, here in counts:
        if there != here:
            raise CheckpointError(f"the checkpoint has the state of {there} {what}, this program has {here}")
    for name, (model, sharded) in parts.models.items():
        check_model(model, state.files[name], sharded)
        extra, ours = sorted(others.get("extra", {}).get(name, {})), sorted(extra_states(model))
        if extra != ours:
            raise CheckpointError(
                f"the checkpoint is of another model: it has extra state of {extra}, the model has some of {ours}"
            )
    for was, now in zip(others["settings"], parts.settings, strict=True):
        kinds = [name for name, _ in was["optimizers"]], [name for name, _ in now["optimizers"]]
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"the checkpoint has the state of {' and '.join(kinds[0])}, which {' and '.join(kinds[1])} cannot take "
                "up; use the same optimizer"
            )
        schedulers = _schedulers(was["scheduler"]), _schedulers(now["scheduler"])
        if schedulers[0] != schedulers[1]:
            raise CheckpointError(
                f"the checkpoint has the state of {schedulers[0]}, and this program has {schedulers[1]}; use the same "
                "scheduler"
            )
    for (optimizer, _), packed in zip(parts.optimizers, state.facts["optimizers"], strict=True):
        groups = unpack(packed.get("param_groups", []), state.files["optimizer"])
        sizes, own = ([len(group["params"]) for group in of] for of in (groups, optimizer.param_groups))
        if sizes and sizes != own:
            raise CheckpointError(
                f"the checkpoint has the state of {type(optimizer).__name__} over {in_groups(sizes)}, and this "
                f"program's holds {in_groups(own)}; give it the same parameters in the same groups, before `fit` also "
                "those that were added in training by add_param_group (with allow_contract_change=True)"
            )


def restore(step: Steps, state: Snapshot) -> dict[str, Any]:
    """Restores a captured state, to the bit, and returns the `rest` that was given to `capture`.

    Settings of optimizers and schedulers that changed in the program since then stay. The state has unsharded tensors
    or this rank's local shards. Raises a `CheckpointError` if it is of another model, optimizer or format.
    """
    check_fits(step, state)
    with as_bad_checkpoint(NOT_OURS):
        return _restore(_parts(step), _others(state), state)


def _restore(parts: _Parts, others: Mapping[str, Any], state: Snapshot) -> dict[str, Any]:
    # Values before what is kept beside them: extra states may refer to parameters. Generators last: what is loaded
    # before them may draw. Parameters that a forward has left unsharded hold the values from before (`after_load`).
    rank = parts.steps[0].communicator.rank
    for name, (model, sharded) in parts.models.items():
        load_model(model, state.files[name], sharded, rank)
    _restore_extras(parts, others, state)
    for each in parts.steps:
        each.strategy.after_load()
    for (optimizer, sharded), packed in zip(parts.optimizers, state.facts["optimizers"], strict=True):
        load_optimizer(optimizer, unpack(packed, state.files["optimizer"]), sharded, rank)
    seen: set[int] = set()  # an optimizer may belong to several steps
    for each, progress, schedule, old in zip(
        parts.steps, others["steps"], others["schedulers"], others["settings"], strict=True
    ):
        if each.scheduler is not None:
            each.scheduler.load_state_dict(schedule)
        each.load_state_dict(progress)
        if seen.isdisjoint(map(id, each.optimizers)):
            apply_new_settings(each.optimizers, each.scheduler, Settings(**old), each.settings)
        seen.update(map(id, each.optimizers))
    restore_generators(others["generators"], parts.steps[0].communicator.device)
    rest: dict[str, Any] = others["rest"]
    return rest


def _restore_extras(parts: _Parts, others: Mapping[str, Any], state: Snapshot) -> None:
    """Restores the extra states of modules, and which parameters were frozen or unfrozen in training."""
    for (name, (model, _)), began in zip(parts.models.items(), parts.began, strict=True):
        for path, extra in others.get("extra", {}).get(name, {}).items():
            model.get_submodule(path).set_extra_state(extra)
        changed = state.facts.get("trained", {}).get(name, {})
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(changed.get(key, began.get(key, parameter.requires_grad)) is True)


def model_tensors(model: nn.Module, sharding: ShardedState | None = None, world_size: int = 1) -> dict[str, Stored]:
    """Parameters and all buffers, non-persistent ones too, by name; tied ones once; local shards of sharded ones."""
    lazy = UninitializedParameter | UninitializedBuffer
    named = local_tensors(model, sharding, world_size)
    return {name: t if isinstance(t, LocalShard) else t.detach() for name, t in named if not isinstance(t, lazy)}


def check_model(model: nn.Module, tensors: Mapping[str, Stored], sharding: ShardedState | None = None) -> None:
    """Raises a `CheckpointError` unless names, shapes and dtypes are the model's; buffers may come, go and change."""
    own = model_tensors(model, sharding, SEVERAL)
    buffers = {  # those that are None now, too
        f"{path}.{key}" if path else key
        for path, module in model.named_modules(remove_duplicate=False)
        for key in module._buffers
    }
    missing = [name for name in own if name not in tensors and name not in buffers]
    strange = sorted(name for name in tensors if name not in own and name not in buffers)
    if missing or strange:
        parts = [f"{what} {', '.join(names[:4])}" for what, names in (("no", missing), ("also", strange)) if names]
        raise CheckpointError(f"the checkpoint is of another model: it has {' and '.join(parts)}")
    for name, tensor in own.items():
        if name not in buffers and form(tensors[name]) != form(tensor):
            raise CheckpointError(
                f"the checkpoint is of another model: its {name} is {form(tensors[name])}, the model's {form(tensor)}"
            )


@torch.no_grad()
def load_model(
    model: nn.Module, tensors: Mapping[str, Stored], sharding: ShardedState | None = None, rank: int = 0
) -> None:
    """Writes parameters and buffers in place; any unsharded (gathered) parameters must be resharded before the call."""
    check_model(model, tensors, sharding)
    own: dict[str, Tensor] = dict(chain(model.named_parameters(), model.named_buffers()))
    shardings: Mapping[str, Sharding] = {}
    if sharding is not None and not sharding.has_whole_parameters:
        own |= sharding.parts
        shardings = sharding.shardings
    device = next((tensor.device for tensor in own.values()), torch.device("cpu"))
    for name in own.keys() | tensors.keys():
        there = tensors.get(name)
        if name in shardings and there is not None:
            own[name].view(-1).copy_(local_part(there, shardings[name], rank))
            continue
        assert not isinstance(there, LocalShard), "a tensor that is not sharded here is unsharded in the state"
        if name in own and there is not None and form(own[name]) == form(there):
            own[name].copy_(there)
        else:
            # A buffer that came, went or changed its form in training, as `check_model` allows of buffers alone.
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._buffers[key] = None if there is None else there.to(device, copy=True)


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, state: dict[str, Any], sharding: ShardedState | None, rank: int) -> None:
    """Loads an optimizer's state exactly: torch's own loading casts it to the parameters' dtype."""
    state = localized(optimizer, state, sharding, rank)
    parameters = held_by(optimizer)
    indices = [index for group in state["param_groups"] for index in group["params"]]
    # Torch raises if their numbers differ.
    for index, parameter in zip(indices, parameters, strict=False):
        if unlike := misfit(optimizer, state["state"].get(index, {}), parameter):
            raise CheckpointError(f"the checkpoint is of another optimizer: it has {unlike}")
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint is of another optimizer: {error}") from error
    restore_dtypes(optimizer, state)


def not_persistent(model: nn.Module) -> list[str]:
    """The names of the buffers that `state_dict` leaves out."""
    return [
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key in sorted(module._non_persistent_buffers_set)
    ]


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of parameters and buffers that have several, and the first name of each."""
    first = {id(tensor): name for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    every = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}


def hub_config(model: nn.Module) -> str | None:
    """The content of config.json for a model of transformers; None for other models, and those with adapters."""
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "save_pretrained") or not hasattr(config, "to_json_string") or hasattr(model, "peft_config"):
        return None
    with suppress(TypeError, ValueError):  # a checkpoint is written all the same
        # FSDP2 has put a subclass in the place of the model's class.
        named = {**json.loads(config.to_json_string()), "architectures": [type(model).__name__.removeprefix("FSDP")]}
        # By which `from_pretrained` loads: of the weights as they are now, not as they once were loaded.
        dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
        named |= {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in named and dtype}
        return json.dumps(named, indent=2, sort_keys=True)  # a text, since it may hold infinities
    return None


def _parts(step: Steps) -> _Parts:
    # By identity, in the order of the steps: the two steps of a GAN share a model, and name it once.
    steps = (step,) if isinstance(step, TrainStep) else tuple(step)
    models = {id(each.model): (each.model, each.sharded_state) for each in steps}.values()
    # By the first step of a model.
    began = {id(each.model): each.began_trained for each in reversed(steps)}
    names = ("model" if number == 0 else f"model.{number}" for number in range(len(models)))
    optimizers = {id(one): (one, each.sharded_state) for each in steps for one in each.optimizers}.values()
    settings = [{"optimizers": each.settings.optimizers, "scheduler": each.settings.scheduler} for each in steps]
    of_models = [began[id(model)] for model, _ in models]
    return _Parts(steps, dict(zip(names, models, strict=True)), of_models, list(optimizers), settings)


def _others(state: Snapshot) -> dict[str, Any]:
    """The state outside models and optimizers."""
    if not isinstance(state.facts, Mapping) or state.facts.get("format") != FORMAT:
        found = state.facts.get("format") if isinstance(state.facts, Mapping) else None
        raise CheckpointError(f"the state has format {found}; this version reads format {FORMAT}")
    others: dict[str, Any] = unpack(state.facts["run"], state.files["rest"])
    return others


def in_groups(sizes: Sequence[int]) -> str:
    """Numbers of parameters, for messages: 3 parameters in groups of 1 and 2."""
    groups = f" in groups of {' and '.join(map(str, sizes))}" if len(sizes) > 1 else ""
    return f"{sum(sizes)} parameter{'s' if sum(sizes) != 1 else ''}{groups}"


def _schedulers(settings: Mapping[str, Any] | None) -> str:
    """The classes of schedulers, for messages: SequentialLR of LinearLR and StepLR."""
    if settings is None:
        return "no scheduler"
    inner = [_schedulers(part) for part in settings.get("schedulers", {}).values()]
    return f"{settings['class']} of {' and '.join(inner)}" if inner else str(settings["class"])


def misfit(optimizer: Optimizer, entries: Mapping[str, Any], parameter: Tensor) -> str:
    """What of a parameter's state has another size, which torch's fused kernels do not check: they reach other memory.

    Any saved state may have `fused` switched on, whether this program has it or not.
    """
    is_own = type(optimizer).__name__ in ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim.")
    names = _LIKE_PARAMETER if isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | torch.optim.Adagrad) else ()
    for key, value in entries.items():
        is_like = isinstance(value, Tensor) and (key in names or (is_own and value.ndim > 0 and key != "step"))
        if is_like and value.shape != parameter.shape:
            return f"{key} {form(value)} of a parameter {form(parameter)}"
    return ""


def form(tensor: Stored) -> str:
    """The dtype and shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
