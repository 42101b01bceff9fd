"""The contract: what the bits of a run depend on, recorded with it and compared when it is taken up again."""

import ast
import hashlib
import inspect
import platform
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from samestep.comm.reduction import REDUCTIONS
from samestep.errors import UsageError
from samestep.plan.shards import check_num_shards
from samestep.version import __version__


@dataclass(frozen=True)
class Contract:
    """What decides the bits of a run. The number of devices is not in it.

    Attributes:
        global_batch_size: samples of one optimizer step.
        num_shards: slices of the global batch, the unit of computation.
        seed: of every random generator and of the order.
        reduction: "ordered" or "native".
        device_kind: "cpu", "cuda", …
        num_threads: CPU threads a worker; 0 where the device is not a CPU.
    """

    global_batch_size: int
    num_shards: int
    seed: int
    reduction: str
    device_kind: str
    num_threads: int

    def as_json(self) -> dict[str, Any]:
        """The contract with the versions and flags that the bits depend on too."""
        return {**asdict(self), "versions": versions(), "flags": precision_flags()}


def check_contract(global_batch_size: int, num_shards: int | None, reduction: str, seed: int) -> int:
    """Checks what the user asked for, and returns the number of shards.

    Raises:
        UsageError: names the argument and the option.
    """
    count = check_num_shards(num_shards, global_batch_size)
    if reduction not in REDUCTIONS:
        raise UsageError(f"got reduction={reduction!r}; --reduction is one of {', '.join(REDUCTIONS)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UsageError(f"got seed={seed!r}; it must be an integer from 0 to 2^63 - 1 (--seed)")
    return count


def versions() -> dict[str, str]:
    """Versions of everything that computes."""
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
    return found


def precision_flags() -> dict[str, Any]:
    """Flags that change what kernels compute."""
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def model_form(model: nn.Module) -> dict[str, Any]:
    """What a model is, but for its values: class, number of elements, and a hash of names, dtypes and shapes."""
    named = list(chain(model.named_parameters(), model.named_buffers()))
    text = "\n".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in named)
    elements = sum(parameter.numel() for parameter in model.parameters())
    return {"class": type(model).__qualname__, "elements": elements, "form": _short_hash(text)}


def code_hash(function: Callable[..., Any]) -> str | None:
    """A hash of a function's code, comments and layout aside; None where its source is not to be had."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    return _short_hash(ast.dump(tree))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
