"""The contract: all settings that the bits of a run depend on, recorded with it and compared on resume."""

import ast
import hashlib
import inspect
import json
import os
import platform
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from samestep.checkpoint.local_shards import SEVERAL, local_tensors
from samestep.checks import check_number
from samestep.comm.transport import Connection
from samestep.core.microbatches import check_num_microbatches
from samestep.data.loader import Loader
from samestep.devices.nvidia import driver_version
from samestep.engine.kernel_flags import recorded_flags
from samestep.engine.sharded_state import ShardedState
from samestep.engine.step import TrainStep
from samestep.errors import DeviceError
from samestep.version import __version__

CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu11")  # wheels of it, whose version torch cannot tell
SWITCHES = re.compile(
    "CUBLAS(?!_WORKSPACE_CONFIG|.*LOG).*|NVIDIA_TF32_OVERRIDE|DISABLE_ADDMM_CUDA_LT|TORCH_BLAS_PREFER_CUBLASLT"
    "|TORCH_CUDNN_USE_HEURISTIC_MODE_B"
)
"""Variables that choose kernels of matrix products and convolutions, or how they round."""
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Contract:
    """The settings that decide the bits of a run; the number of devices is not one of them.

    Attributes:
        global_batch_size: samples of one optimizer step.
        num_microbatches: slices of the global batch, the unit of computation.
        seed: of every random generator and of the order.
        device_kind: "cpu", "cuda", …
        num_threads: CPU threads a rank, on GPUs too: samples are loaded and parameters initialised by CPU kernels.
        portable: which kernels are alike on every x86-64 CPU, in words; None if they are this CPU's own.
    """

    global_batch_size: int
    num_microbatches: int
    seed: int
    device_kind: str
    num_threads: int
    portable: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The contract, with versions and flags."""
        more: dict[str, Any] = {"gpu": gpu_facts()} if self.device_kind == "cuda" else {}
        own = {name: value for name, value in asdict(self).items() if name != "portable" or value is not None}
        return {**own, **more, "versions": versions(), "flags": recorded_flags(self.device_kind)}


def check_contract(global_batch_size: int, num_microbatches: int | None, seed: int) -> int:
    """Checks arguments of `Run`; returns the number of microbatches."""
    count = check_num_microbatches(num_microbatches, global_batch_size)
    check_number("seed", seed, 0, 2**63 - 1)
    return count


def versions() -> dict[str, str]:
    """The versions of all libraries that compute."""
    found = {
        "samestep": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
        others = {"cublas": next(filter(None, map(_version_of, CUBLAS)), None), "driver": driver_version()}
        found |= {name: text for name, text in others.items() if text is not None}
    return found


def gpu_facts(device: torch.device | None = None) -> dict[str, Any]:
    """What kernels are chosen by, and split their sums by: the model of the GPU, by default the current one."""
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
        # Read when a handle of cuBLAS is made: what a product may split its sums into fits in there.
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        **{name: value for name, value in sorted(os.environ.items()) if SWITCHES.fullmatch(name)},
    }


def check_same_gpus(ranks: Connection, device: torch.device) -> None:
    """Raises a `DeviceError` if ranks have GPUs, libraries or variables by which kernels round otherwise."""
    libraries = {name: text for name, text in versions().items() if name in ("torch", "cuda", "cudnn", "cublas")}
    found = [json.loads(word) for word in ranks.gather_words(json.dumps(gpu_facts(device) | libraries))]
    by_rank = {name: [facts.get(name) for facts in found] for name in chain(*found)}
    if differ := {name: values for name, values in by_rank.items() if len(set(values)) > 1}:
        shown = "; ".join(f"{name} by rank: {', '.join(map(str, values))}" for name, values in differ.items())
        raise DeviceError(
            f"the ranks would not compute the same bits. {shown}. Use equal GPUs (--devices), libraries and variables "
            "for all ranks"
        )


def _version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not there."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def step_contract(step: TrainStep) -> dict[str, Any]:
    """A step's part of the contract: model, loss, update."""
    return {
        "precision": step.config.precision,
        **step.strategy.contract,
        "compile": step.config.compile,
        "max_grad_norm": step.config.max_grad_norm,
        "model": model_form(step.model, step.sharded_state),
        "loss_code": code_hash(step.config.loss_fn),
        **step.settings.as_json(),
    }


def loader_contract(loader: Loader | DataLoader[Any]) -> dict[str, Any]:
    """A loader's part of the contract: the samples of each step, as far as a loader of the user's own shows them."""
    fields: dict[str, Any] = {"drop_last": loader.drop_last}
    if isinstance(loader, Loader):
        fields["shuffle"] = loader.shuffle
    else:
        fields["shuffle"] = isinstance(loader.sampler, RandomSampler)
        fields["data_loader"] = {"batch_size": loader.batch_size, "sampler": type(loader.sampler).__name__}
    with suppress(TypeError):
        fields["num_samples"] = (
            loader.num_samples_at_first if isinstance(loader, Loader) else len(loader.dataset)  # type: ignore[arg-type]
        )
    return fields


def model_form(model: nn.Module, sharding: ShardedState | None = None) -> dict[str, Any]:
    """The form of a model without its values: class, number of elements, hashes of its tensors and of its code.

    Its code is the code of its modules' classes, torch's own classes aside.
    """
    # As on several ranks: there a local shard has the shape of its whole tensor, and the form must not depend on ranks.
    named = dict(local_tensors(model, sharding, SEVERAL))
    text = "\n".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in named.items())
    elements = sum(named[name].shape.numel() for name, _ in model.named_parameters())
    classes = {kind for module in model.modules() if not (kind := class_of(module)).__module__.startswith("torch.")}
    codes = sorted(f"{kind.__qualname__} {code_hash(kind)}" for kind in classes)
    form = {"class": class_of(model).__qualname__, "elements": elements, "form": _short_hash(text)}
    return {**form, "code": _short_hash("\n".join(codes))} if codes else form


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module as its author wrote it: FSDP2 derives a class of its own for sharded modules."""
    kind = type(module)
    first, *others = kind.__bases__
    is_derived = first.__name__ == "FSDPModule" and first.__module__.startswith("torch.")
    return others[0] if is_derived and others else kind


def code_hash(function: Callable[..., Any]) -> str | None:
    """A hash of the code of a function or class without comments, docstrings, layout; None if it has no source.

    Functions that it calls are not part of it. It is the same under every version of Python.
    """
    # Arguments that a partial binds are no code; a loss with other weights has to be shown by a field of the contract.
    while isinstance(function, partial):
        function = function.func
    source = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(source)))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return _short_hash(normal_form(tree))


def normal_form(node: object) -> str:
    """Parsed code, or a part of it, as text that is the same under every version of Python.

    `ast.dump` is not: versions differ in the fields that a node has (PEP 695), in whether empty ones are shown, and in
    how the texts of an f-string are cut (PEP 701). Here fields are sorted, those that hold nothing are left out, and
    neighbouring texts are one.
    """
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({', '.join(_pieces(node))})"
    if isinstance(node, ast.AST):
        fields = [(name, getattr(node, name, None)) for name in sorted(node._fields)]
        shown = [f"{name}={normal_form(value)}" for name, value in fields if value is not None and value != []]
        return f"{type(node).__name__}({', '.join(shown)})"
    if isinstance(node, list):
        return f"[{', '.join(map(normal_form, node))}]"
    return repr(node)


def _pieces(text: ast.JoinedStr) -> Iterator[str]:
    """The texts of an f-string and the values between them."""
    for is_text, group in groupby(text.values, lambda value: isinstance(value, ast.Constant)):
        if not is_text:
            yield from map(normal_form, group)
        elif joined := "".join(piece.value for piece in group):  # type: ignore[attr-defined]  # they are constants
            yield repr(joined)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
