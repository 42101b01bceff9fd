"""The inventory: the hardware of this machine, and the build of the installed torch, without importing torch.

The process that starts a run must stay able to fork, which even `torch.accelerator.is_available()` may prevent, so it
does not import torch. NVIDIA GPUs are read by NVML, the CPU by psutil, and torch's build from the text of its
`version.py`. Only for Apple and AMD GPUs, or an order that CUDA alone knows, a child process imports torch or
asks the driver.
"""

import ast
import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from samestep.devices.cuda_probe import load_driver
from samestep.devices.device import Device, Kind
from samestep.text import counted

if TYPE_CHECKING:
    from samestep.devices import nvidia

_PROBE = Path(__file__).with_name("cuda_probe.py")
_PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class TorchBuild:
    """The build of the installed torch.

    Attributes:
        version: such as "2.13.0+cu130"; None if torch is not installed.
        cuda: the CUDA version of the build, None without CUDA; likewise `hip` (AMD).
        mps: whether it was built for Apple GPUs.
    """

    version: str | None = None
    cuda: str | None = None
    hip: str | None = None
    mps: bool = False

    @property
    def kind(self) -> Kind:
        """The accelerator's device type; "cpu" for a build without one."""
        if self.cuda or self.hip:
            return "cuda"
        return "mps" if self.mps else "cpu"

    def __str__(self) -> str:
        return "torch (not installed)" if self.version is None else f"torch {self.version}"


@dataclass(frozen=True)
class Inventory:
    """The hardware of a machine.

    Attributes:
        devices: the accelerators that torch would show, with torch's indices.
        cpu: the CPU as one device, with the machine's memory.
        cores: logical cores that this process may use (its affinity).
        torch: the build of the installed torch.
        unusable: GPUs that this torch cannot use; their indices are nvidia-smi's.
        variable: the environment variable that limits which of `devices` a process sees; None if there is none.
        notes: sentences on surprises, such as hidden GPUs.
        misnamed: one of them, if the variable names GPUs that CUDA does not show; else empty.
    """

    devices: tuple[Device, ...]
    cpu: Device
    cores: int
    torch: TorchBuild
    unusable: tuple[Device, ...] = ()
    variable: str | None = None
    notes: tuple[str, ...] = ()
    misnamed: str = ""


def discover(environ: Mapping[str, str] | None = None, *, accelerators: bool = True) -> Inventory:
    """The hardware of this machine; neither imports torch nor touches a device.

    If torch has already initialised CUDA in this process, the numbering is torch's.

    Args:
        environ: holds CUDA_VISIBLE_DEVICES and the like; None for this process's environment.
        accelerators: whether to look for accelerators; without, it takes no time.
    """
    environ = os.environ if environ is None else environ
    build = torch_build()
    bare = Inventory(devices=(), cpu=_cpu(), cores=usable_cores(), torch=build, variable=_variable(build, environ))
    if not accelerators:
        return bare
    if build.hip or build.kind == "mps":
        return replace(bare, devices=_probed_devices(build, bare.variable, environ))
    from samestep.devices import nvidia  # here: workers, and runs on the CPU, read no GPUs

    return _with_nvidia(bare, nvidia.read(), environ)


def usable_cores() -> int:
    """The number of logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_cores(root: Path = Path("/sys")) -> int:
    """The number of cores that this process may use at once: without hyperthreads, within its control group's quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for number in allowed:
        place = root / f"devices/system/cpu/cpu{number}/topology"
        try:
            cores.add(tuple((place / name).read_text() for name in ("physical_package_id", "core_id")))
        except OSError:  # not Linux
            return min(len(allowed), psutil.cpu_count(logical=False) or len(allowed))
    with contextlib.suppress(OSError, ValueError):  # no quota is the word "max"
        quota, period = (root / "fs/cgroup/cpu.max").read_text().split()
        return max(1, min(len(cores), int(quota) // int(period)))
    return len(cores)


def torch_build(spec: ModuleSpec | None = None) -> TorchBuild:
    """Torch's build, from the text of its `version.py`."""
    if spec is None and (spec := _find_torch()) is None:
        return TorchBuild()
    if not spec.submodule_search_locations:
        return TorchBuild()
    file = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    try:
        values = _constants(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return TorchBuild()
    mps = sys.platform == "darwin" and platform.machine() == "arm64"
    return TorchBuild(values.get("__version__"), values.get("cuda"), values.get("hip"), mps)


def _find_torch() -> ModuleSpec | None:
    try:
        return importlib.util.find_spec("torch")
    except ValueError:  # a replacement of torch without a spec
        return None


def _constants(source: str) -> dict[str, str]:
    """The names to which a module's text assigns a constant string."""
    values: dict[str, str] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Constant):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if isinstance(statement.value.value, str):
                values.update({target.id: statement.value.value for target in targets if isinstance(target, ast.Name)})
    return values


def _variable(build: TorchBuild, environ: Mapping[str, str]) -> str | None:
    """The variable that limits the devices of a process."""
    if build.hip:  # ROCm obeys CUDA's too; the one in use is kept
        cuda_only = "CUDA_VISIBLE_DEVICES" in environ and "HIP_VISIBLE_DEVICES" not in environ
        return "CUDA_VISIBLE_DEVICES" if cuda_only else "HIP_VISIBLE_DEVICES"
    return "CUDA_VISIBLE_DEVICES" if build.kind == "cuda" else None


def _with_nvidia(bare: Inventory, reading: "nvidia.NvmlReading", environ: Mapping[str, str]) -> Inventory:
    """The inventory with NVIDIA GPUs; asks CUDA only for an order that NVML's rows do not decide."""
    from samestep.devices import nvidia
    from samestep.extras import missing

    build, gpus = bare.torch, reading.gpus
    notes = list(reading.problems)
    if build.kind != "cuda":
        if gpus:
            names = ", ".join(sorted({gpu.name for gpu in gpus}))
            notes.append(
                f"{counted(len(gpus), 'NVIDIA GPU')} ({names}) cannot be used: {build} was built without CUDA; "
                "install a CUDA build of torch to use them."
            )
        return replace(bare, unusable=gpus, notes=tuple(notes))
    # A process that has initialised CUDA keeps the numbering of that moment, whatever the variables say now.
    known = _initialised_torch()
    if known is None and (not gpus or not nvidia.is_certain(gpus, environ)):
        known = _ask("driver", environ) or None
    if known is None and gpus and not nvidia.is_certain(gpus, environ):
        notes.append(
            "The order of unlike GPUs is a guess, nvidia-smi's; set CUDA_DEVICE_ORDER=PCI_BUS_ID to make it certain."
        )
    devices = nvidia.visible(gpus, environ) if known is None else nvidia.match(gpus, known)
    unknown = "what is in use on the GPUs (memory, processes)"
    if devices and not reading.is_installed:
        notes.append(missing("pynvml", unknown) + ".")
    elif devices and not gpus:
        notes.append(f"NVML does not answer, so {unknown} is unknown.")
    if not devices and not gpus:
        notes.append(f"{build} was built for CUDA, and no NVIDIA driver answers; install it to use a GPU.")
    setting, misnamed = environ.get("CUDA_VISIBLE_DEVICES"), ""
    cause = "CUDA" if setting is None else f"CUDA_VISIBLE_DEVICES={setting}"
    if len(devices) < len(gpus):
        notes.append(f"{cause} leaves {len(devices)} of this machine's {counted(len(gpus), 'GPU')} visible.")
    # "-1" ends the list on purpose.
    named = list(takewhile(lambda entry: entry.strip() != "-1", setting.split(","))) if setting else []
    if len(devices) < len(named) and (gpus or devices or _ask("driver", {**environ, "CUDA_VISIBLE_DEVICES": "0"})):
        misnamed = (
            f"{cause} names {counted(len(named), 'device')}, but CUDA takes {len(devices)}: its list ends at an "
            "entry that is no GPU of this machine, as a MIG instance is, and is empty if one is named twice."
        )
        notes.append(misnamed)
    return replace(bare, devices=devices, notes=tuple(notes), misnamed=misnamed)


def _initialised_torch() -> tuple[Device, ...] | None:
    """The GPUs by torch; None unless this process has initialised CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(
        Device("cuda", index, row.name, row.total_memory, row.total_memory, uuid=f"GPU-{row.uuid}")
        for index, row in enumerate(properties)
    )


def _probed_devices(build: TorchBuild, variable: str | None, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """The devices by torch in a child process, each with its entry in the variable that limits them."""
    devices = _ask("torch", environ, build.kind)
    if variable is None:
        return devices
    setting = environ.get(variable)
    entries = [str(device.index) for device in devices] if setting is None else setting.split(",")
    return tuple(replace(device, visible_as=entry.strip()) for device, entry in zip(devices, entries, strict=False))


def _ask(whom: str, environ: Mapping[str, str], kind: Kind = "cuda") -> tuple[Device, ...]:
    """The devices by the probe in a child process; none if it fails, or if there is no driver, as on many machines."""
    if whom == "driver" and load_driver() is None:
        return ()
    # -P: else the folder of the probe is searched first, whose `nvidia.py` hides the package of that name.
    command = [sys.executable, "-P", str(_PROBE), whom]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _PROBE_SECONDS, "check": True}
    try:
        rows = json.loads(subprocess.run(command, env=dict(environ), **options).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    return tuple(
        Device(kind, index, row["name"], row["total"], row["free"], uuid=row["uuid"], visible_as=row["uuid"])
        for index, row in enumerate(rows)
    )


def _cpu() -> Device:
    memory = psutil.virtual_memory()
    return Device("cpu", 0, _cpu_name(), memory.total, memory.available)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
