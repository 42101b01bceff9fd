"""Weights of other libraries: read from their files, of which none runs code, into a model and its optimizers."""

import io
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from samestep.checkpoint.export import MODEL, model_weights, optimizer_states, read_place
from samestep.checkpoint.packing import as_bad_checkpoint
from samestep.checkpoint.resume import names_checkpoint
from samestep.checkpoint.run_folder import holds_run
from samestep.checkpoint.state import (
    EXTRA_STATE,
    form,
    in_groups,
    load_optimizer,
    misfit,
    saved_extra_states,
    tied_names,
)
from samestep.checkpoint.storage import list_checkpoints
from samestep.checkpoint.verified_files import SUFFIX
from samestep.engine.losses import describe
from samestep.engine.parameters import held_by
from samestep.engine.sharded_state import ELEMENTWISE, divided_parameters
from samestep.errors import CheckpointError, UsageError
from samestep.files import open_regular, read_object
from samestep.text import counted, listed

Content = tuple[dict[str, Any], list[Any]]  # tensors by name, and states of optimizers
_INDEX, _METADATA = ".index.json", ".metadata"
_FILES = [f"{name}{end}" for name in (f"model{SUFFIX}", "pytorch_model.bin") for end in ("", _INDEX)]
_MODELS = ("state_dict", "model", "model_state_dict")
_OPTIMIZERS = ("optimizer_states", "optimizer", "optimizer_state_dict", "optim")
_OPTIMIZER_NAME = re.compile(r"((?:app\.)?optim\w*(?:\.\d+)?)\.(?:state\.(?P<key>.+)\.(?P<kind>\w+)|param_groups.*)")
# What the hyperparameters and callbacks in a checkpoint of Lightning consist of, beside tensors and plain values.
_HARMLESS = re.compile(
    r"pathlib(\._local)?\.\w*Path|argparse\.Namespace|_codecs\.encode|datetime\.\w+|numpy\.(dtype|dtypes\.\w+)"
    r"|numpy\.(_core|core)\.multiarray\.scalar|(lightning|pytorch_lightning|lightning_fabric)\.\w[\w.]*"
)


def load_weights(
    model: nn.Module,
    source: str | Path,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    strict: bool = True,
) -> list[str]:
    """Loads weights that another library has saved into a model, and the state of its optimizer if one is given.

    Call it on all ranks, each of which reads the files, before the model is divided: before `Run.train_step`, `Trainer`
    or `parallelize_module`. Pickles are read by `torch.load(weights_only=True)`, so no code in them is run.

    Args:
        model: written in place. If its names have something before them in the source, such as the `net.` of a
            LightningModule or the `module.` of DistributedDataParallel, that is cut off.
        source: a file of safetensors or of `torch.save`, the index of several, a checkpoint of Lightning; a folder of
            `save_pretrained`, of Accelerate's `save_state` or of `torch.distributed.checkpoint`; a run or a checkpoint.
        optimizer: over parameters of the model; all that the source has the state of, in its order. What it keeps of
            each parameter is loaded (moments, counts of steps); settings such as the learning rate stay the program's.
        strict: whether a tensor that is missing, unexpected, or of another shape or dtype is an error. Else what fits
            is loaded, of the optimizer's state too, whose groups must have as many parameters; other dtypes of the
            model's tensors are converted.

    Returns:
        A text on each tensor that did not fit.

    Raises:
        UsageError: there is no such source, or the optimizer is not the model's.
        CheckpointError: it does not fit, or is not read without running code in it; nothing is changed then.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    if divided := divided_parameters(model):
        raise UsageError(
            f"{divided[0]} is divided over the ranks already; load weights before the training step is made"
        )
    state: dict[str, Any] = model.state_dict()
    # Of modules with `get_extra_state`, whose values may be of any type and size.
    extra = {name for name in state if name.rpartition(".")[2] == EXTRA_STATE}
    own = {name: value for name, value in state.items() if name in extra or isinstance(value, Tensor)}
    if empty := [name for name in own.keys() - extra if is_lazy(own[name]) or own[name].is_meta]:
        raise UsageError(
            f"the model has no memory yet for {listed(sorted(empty))}; before weights are loaded call it on a batch if "
            "its modules are lazy, or model.to_empty(device='cpu') if it was made on the device meta"
        )
    weights, states = _read(Path(source), bool(optimizers), bool(extra))
    prefix = _prefix(own, weights)
    cut = {name: name.removeprefix(prefix) if name.startswith(prefix) else "" for name in weights}
    fitting = {
        cut[name]: value
        for name, value in weights.items()
        if cut[name] in extra or (cut[name] in own and isinstance(value, Tensor))
    }
    first = tied_names(model)
    loaded = {first.get(name, name) for name in fitting}
    misfits = [f"no {name}" for name in own if first.get(name, name) not in loaded]
    # Numbers and settings that stand beside the tensors are no weights.
    kept = [name for name, value in weights.items() if isinstance(value, Tensor) or name.endswith(EXTRA_STATE)]
    misfits += [f"also {name}" for name in kept if cut[name] not in fitting]
    forms = {name: (form(value), form(own[name])) for name, value in fitting.items() if name not in extra}
    misfits += [f"{name} as {there}, which is {here} here" for name, (there, here) in forms.items() if there != here]
    if not loaded or (strict and misfits):
        remedy = "; strict=False loads what fits" if loaded else ""
        raise CheckpointError(f"{source} does not fit the model: it has {listed(misfits)}{remedy}")
    if len(states) < len(optimizers) or (strict and 0 < len(optimizers) < len(states)):
        raise CheckpointError(
            f"{source} has the state of {counted(len(states), 'optimizer')}, and {len(optimizers)} are to be loaded; "
            "give all in that order, strict=False for the first ones, or no optimizer=… to load the weights alone"
        )
    taken = [_fitted(model, each, saved, prefix) for each, saved in zip(optimizers, states, strict=False)]
    unfit = [f"the optimizer's {text}" for _, texts in taken for text in texts]
    unfit += [f"also the state of optimizer {number}" for number in range(len(taken), len(states)) if taken]
    if strict and unfit:
        raise CheckpointError(f"{source} does not fit the optimizer: it has {unfit[0]}; strict=False loads what fits")
    model.load_state_dict(
        {name: v for name, v in fitting.items() if name in extra or v.shape == own[name].shape}, strict=False
    )
    for each, (entries, _) in zip(optimizers, taken, strict=True):
        load_optimizer(each, {**each.state_dict(), "state": entries})
    return misfits + unfit


def _read(path: Path, with_optimizer: bool, with_extra: bool) -> Content:
    """The tensors in files of any library, and what is asked for of optimizers and of the extra state of modules."""
    if names_checkpoint(path) or holds_run(path) or list_checkpoints(path):
        place, snapshot = read_place(path, None if with_optimizer or with_extra else MODEL)
        weights, tied = model_weights(place, snapshot, MODEL)
        extra = saved_extra_states(snapshot, MODEL) if with_extra else {}
        return {**weights, **tied, **extra}, optimizer_states(snapshot) if with_optimizer else []
    with as_bad_checkpoint(f"{path} cannot be read"):
        if (path / _METADATA).is_file():
            return _read_distributed(path, with_optimizer)
        if not path.is_dir():
            return _read_file(path)
        name = next((name for name in _FILES if (path / name).is_file()), None)
        if name is None:
            raise UsageError(f"{path} has no weights; needed in it: {', '.join(_FILES)} or {_METADATA}")
        numbered = sorted(path.glob("optimizer*.bin"), key=lambda file: (len(file.name), file.name))
        beside = [*numbered, *path.glob("optimizer.pt")] if with_optimizer else []
        return _read_file(path / name)[0], _as_states([_read_pickle(file) for file in beside])


def _read_file(path: Path) -> Content:
    if not path.is_file():
        raise UsageError(f"there is no {path}; needed: a file of weights, a checkpoint, or a folder with them")
    if path.name.endswith(_INDEX):
        names = sorted(set(read_object(path)["weight_map"].values()))
        return {key: value for name in names for key, value in _read_file(_within(path.parent, name))[0].items()}, []
    if path.suffix == SUFFIX:
        return load_file(path), []
    content = _read_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds {describe(content)}; needed: tensors by the names of a state_dict()")
    weights = next((content[key] for key in _MODELS if isinstance(content.get(key), Mapping)), content)
    return dict(weights), next(filter(None, (_as_states(content[key]) for key in _OPTIMIZERS if key in content)), [])


def _as_states(saved: Any) -> list[Any]:
    """The states of optimizers that stand in an entry of a file; none if it holds anything else, such as a name."""
    states = list(saved) if isinstance(saved, list | tuple) else [saved]
    are_states = (isinstance(each, Mapping) and isinstance(each.get("state"), Mapping) for each in states)
    return states if all(are_states) else []


class _Inert:
    """Stands for an object of any class in a pickle: keeps what it is made of, and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values: Any = values

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"values": state})


def _read_pickle(path: Path) -> Any:
    is_zip = zipfile.is_zipfile(path)
    names = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) if is_zip else set()
    inert: list[Any] = [
        (dict if name.endswith("Dict") else _Inert, name) for name in names if _HARMLESS.fullmatch(name)
    ]
    try:
        with torch.serialization.safe_globals(inert):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        if met := re.search(r"GLOBAL (\S+)", str(error)):
            raise _refusal(path, met[1]) from None
        why = str(error).partition("WeightsUnpickler error: ")[2].partition("\n")[0]
        raise CheckpointError(
            f"{path} is no file of torch.save, or not only of tensors and plain values ({why})"
        ) from None


def _refusal(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle that needs {what}, and is not read: code in a file of unknown origin may do anything; in "
        "the program that wrote it save the weights alone by torch.save(model.state_dict(), file)"
    )


class _Metadata(pickle.Unpickler):
    """Reads the .metadata of a distributed checkpoint, which torch itself unpickles without a limit."""

    # The pickle can name dtypes and what makes tuples, dicts and inert objects, and nothing else.
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) in (("torch", "Size"), ("collections", "OrderedDict")):
            return tuple if name == "Size" else dict
        if module.startswith(("torch.distributed.checkpoint.", "pathlib")) or name == "_get_layout":
            return _Inert
        raise pickle.UnpicklingError(f"{module}.{name}")


def _read_distributed(folder: Path, with_optimizer: bool) -> Content:
    """The content of a folder of torch.distributed.checkpoint; tensors are joined from the parts of all ranks."""
    with open_regular(folder / _METADATA) as file:
        try:
            metadata: Any = _Metadata(file).load()
        except pickle.UnpicklingError as error:
            raise _refusal(folder / _METADATA, str(error)) from None
    weights: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    num_left: dict[str, int] = {}
    for index, stored in metadata.storage_data.items():
        match = _OPTIMIZER_NAME.fullmatch(index.fqn)
        if match and not (with_optimizer and match["key"]):
            continue
        with open_regular(_within(folder, stored.relative_path)) as file:
            file.seek(stored.offset)
            data = io.BytesIO(file.read(stored.length))
        value = torch.load(data, map_location="cpu", weights_only=True)
        into, name = weights, index.fqn
        if match:
            key: Any = int(match["key"]) if match["key"].isdigit() else match["key"]
            into, name = states.setdefault(match[1], {"state": {}})["state"].setdefault(key, {}), match["kind"]
        if isinstance(value, Tensor):
            size = metadata.state_dict_metadata[index.fqn].size
            whole = into.setdefault(name, value.new_empty(size))
            offset = getattr(index, "offset", None) or (0,) * value.ndim
            whole[tuple(slice(at, at + length) for at, length in zip(offset, value.shape, strict=True))] = value
            num_left[index.fqn] = num_left.get(index.fqn, whole.numel()) - value.numel()
        else:
            into[name] = value
    if partial := [f"a part of {name} alone" for name, count in num_left.items() if count]:
        raise CheckpointError(f"{folder} has {listed(partial)}")
    return weights, [states[name] for name in sorted(states)]


def _within(folder: Path, name: str) -> Path:
    """A file of a folder by a name that stands in another file of it."""
    if PurePath(name).name != name:
        raise CheckpointError(f"{folder} names {name!r}, which is not a file in it")
    return folder / name


def _prefix(ours: Iterable[str], theirs: Iterable[str]) -> str:
    """What stands before most of the model's names in a source; the shortest of several."""
    names, there = list(ours), set(theirs)
    found = ({other.removesuffix(name) for other in there if other.endswith(f".{name}")} for name in names)
    options: set[str] = {"", *next(filter(None, found), ())}
    return min(options, key=lambda prefix: (-sum(f"{prefix}{name}" in there for name in names), len(prefix), prefix))


def _fitted(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], prefix: str
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """A saved state by the numbers of this optimizer's parameters, numbered or named there, and what does not fit."""
    places = {id(parameter): number for number, parameter in enumerate(held_by(optimizer))}
    named = list(model.named_parameters(remove_duplicate=False))
    if not places.keys() <= {id(parameter) for _, parameter in named}:
        raise UsageError(
            "the optimizer holds parameters that the model does not have; make it of the model's, and load before the "
            "training step is made"
        )
    # Also without the first words of the prefix: a distributed checkpoint has optimizer.state beside app.model.
    words = [prefix[at:] for at in range(len(prefix) + 1) if at == 0 or prefix[at - 1] == "."]
    numbers: dict[Any, int] = {f"{w}{name}": places[id(p)] for w in words for name, p in named if id(p) in places}
    groups = saved.get("param_groups") or optimizer.state_dict()["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    if not any(isinstance(key, str) for key in keys):
        sizes, own = ([len(group["params"]) for group in of] for of in (groups, optimizer.param_groups))
        if sizes != own:
            raise CheckpointError(
                f"the optimizer's state is over {in_groups(sizes)}, and this program's holds {in_groups(own)}; give it "
                "the same parameters in the same groups"
            )
        numbers |= {key: number for number, key in enumerate(keys)}
    state, misfits, held = {}, list[str](), held_by(optimizer)
    keeps = [names for group in optimizer.param_groups for names in [_kept(optimizer, group)] * len(group["params"])]
    for key, entries in saved.get("state", {}).items():
        has = {name for name, value in entries.items() if value is not None}
        kept = keeps[numbers.get(key, 0)]
        if key not in numbers or (kept is not None and has - {"step"} != kept - {"step"}):
            misfits.append(
                f"{listed(sorted(has)) or 'nothing'} of {key}, and the program's {type(optimizer).__name__} keeps "
                f"{listed(sorted(kept or ())) or 'nothing'} of {len(places)} parameters"
            )
        elif unlike := misfit(optimizer, entries, held[numbers[key]]):
            misfits.append(unlike)
        else:
            # In memory of their own, not of a mapped file: kernels look at alignment.
            state[numbers[key]] = {name: v.clone() if isinstance(v, Tensor) else v for name, v in entries.items()}
    return state, misfits


def _kept(optimizer: Optimizer, group: Mapping[str, Any]) -> set[str] | None:
    """What an elementwise optimizer of torch keeps of a group's parameters, by a step of a copy; None for others."""
    if type(optimizer).__name__ not in ELEMENTWISE or not type(optimizer).__module__.startswith("torch.optim."):
        return None
    probe, parameter = copy(optimizer), nn.Parameter(torch.zeros(1, 1))
    parameter.grad = torch.zeros(1, 1)
    probe.state = type(optimizer.state)(dict)
    probe.param_groups = [{**group, "params": [parameter], "capturable": False}]
    probe.step()
    return {name for name, value in probe.state[parameter].items() if value is not None}
