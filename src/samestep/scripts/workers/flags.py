"""What a forward depends on beside its module: modes, flags and variables of the process.

They are read before each forward and each backward, and sent when they differ from what the workers have: the script
sets them at any time, and they are of the process, not of the module. What cannot be read as a value (a mode of the
script's, a hook on saved tensors) is refused while it is on.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from samestep.callsite import is_script_file
from samestep.engine import kernel_flags
from samestep.errors import UsageError
from samestep.scripts.script_state import VISIBLE_DEVICES
from samestep.scripts.simulated.cuda import SimulatedMode
from samestep.scripts.simulated.devices import OwnMode

KINDS = ("cpu", "cuda")
CUDA = torch.backends.cuda
ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (CUDA.matmul, "allow_tf32"),
    (CUDA.matmul, "allow_fp16_reduced_precision_reduction"),
    (CUDA.matmul, "allow_bf16_reduced_precision_reduction"),
    (CUDA.matmul, "allow_fp16_accumulation"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "enabled"),
    (torch.backends.mkldnn, "enabled"),
)
FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    *((partial(getattr, *each), partial(setattr, *each)) for each in ATTRIBUTES),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    # Last of the precisions: the names above are older ones for the same.
    *(
        (partial(getattr, of, "fp32_precision"), partial(setattr, of, "fp32_precision"))
        for of in (kernel_flags.CUDA | kernel_flags.CPU).values()
    ),
    (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp),
    (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp),
    (CUDA.math_sdp_enabled, CUDA.enable_math_sdp),
    (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp),
    (CUDA.fp16_bf16_reduction_math_sdp_allowed, CUDA.allow_fp16_bf16_reduction_math_sdp),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (CUDA.preferred_linalg_library, CUDA.preferred_linalg_library),
    (CUDA.preferred_blas_library, CUDA.preferred_blas_library),
)
"""The flags of kernels: how each is read, and set."""


def flags_now(before: Mapping[bytes, bytes]) -> dict[str, Any]:
    """The values in this process, which had these variables before the script ran."""
    variables: dict[bytes, bytes] = vars(os.environb)["_data"].copy()  # each look through `os.environ` decodes all
    # Those that the script has set or removed, which count on other machines too; all others are the machine's own.
    names = {*before, *variables} if variables != before else ()
    return {
        "environment": variables,
        "changed": {name for name in names if before.get(name) != variables.get(name)},
        "folder": os.getcwd(),
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "autocast": [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in KINDS],
        "cache": torch.is_autocast_cache_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "flags": [_read(read) for read, _ in FLAGS],
    }


def set_flags(values: dict[str, Any], own: Mapping[bytes, bytes] | None) -> None:
    """Gives this process these values; inference mode is left to the caller.

    On another machine than the driver's, `own` are the variables that it began with: they stay, but for those that the
    script has changed, and those that it lacks join them. Its folder has the same path, if there is one.
    """
    variables, changed = values["environment"], values["changed"]
    if own is not None:
        sent = {name: value for name, value in variables.items() if name != VISIBLE_DEVICES.encode() or name in changed}
        variables = {**sent, **{name: value for name, value in own.items() if name not in changed}}
    # By the mapping, not by its dictionary: code in C asks the process, which this sets too.
    os.environb.clear()
    os.environb.update(variables)
    with suppress(OSError) if own is not None else nullcontext():
        os.chdir(values["folder"])
    torch.set_default_dtype(values["dtype"])
    # Only then: setting one puts a mode on the stack, through which every call goes.
    if str(torch.get_default_device()) != values["device"]:
        torch.set_default_device(values["device"])
    is_deterministic, warns_only = values["deterministic"]
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
    for kind, is_enabled, dtype in values["autocast"]:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(values["cache"])
    torch.set_anomaly_enabled(*values["anomaly"])
    for (read, write), value in zip(FLAGS, values["flags"], strict=True):
        if value is not None and _read(read) != value:
            write(value)


def _read(read: Callable[[], Any]) -> Any:
    """A flag; None if torch refuses an older name for what was set by a newer one."""
    try:
        return read()
    except RuntimeError:
        return None


def refuse_modes() -> None:
    """Raises for what the script has put around a forward, and the workers do not have."""
    modes = [
        mode
        for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
        if not isinstance(mode, SimulatedMode | OwnMode | DeviceContext)
    ]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack = None if hooks is None else getattr(inspect.unwrap(hooks[0]), "__code__", None)
    if modes or (pack is not None and is_script_file(pack.co_filename)):
        what = f"the mode {type(modes[0]).__name__}" if modes else "a hook on saved tensors"
        raise UsageError(
            f"a forward that several devices compute runs within {what}, which the workers do not have; enter it in "
            "the module's forward, or share nothing out (--logical-devices 1)"
        )
