"""The selection: which of the devices a run uses, from what a user wrote.

| written | meaning |
|---|---|
| `auto` | all accelerators; two CPU workers where there is none |
| `4` | a COUNT: the first 4 accelerators; 4 CPU workers where there is no accelerator |
| `0,4` | INDICES: accelerators 0 and 4, in this order; one index alone takes a trailing comma, `4,` |
| `cpu`, `cpu:2` | one CPU worker, two CPU workers |
| `cuda`, `mps`, `xpu` | all accelerators of that kind |
| `cuda:0`, `cuda:0,4`, `cuda:0,cuda:4` | these accelerators, in this order |
| `free:2` | two idle accelerators (no compute process, little memory in use), those with the most free memory first |

Indices are torch's as this process's environment makes it show them: CUDA_VISIBLE_DEVICES is respected.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

from samestep.devices.device import Device, Kind, counted, gib
from samestep.devices.inventory import Inventory, discover
from samestep.errors import DeviceError

FORMS = 'auto, 4 (a count), "0,4" or "4," (indices), cpu, cpu:2, cuda, cuda:0, cuda:0,4, free:2, mps, xpu'

MAX_CPU_WORKERS = 64
"""CPU workers that may be asked for even of a machine with fewer cores."""

_AUTO_CPU_WORKERS = 2


@dataclass(frozen=True)
class Selection:
    """The devices of a run, one worker each, in the order of the workers' local ranks.

    Attributes:
        kind: the device type in torch's words.
        devices: the devices.
        environment: variables to set for the workers before they import torch. A worker then sees the selected
            devices and no others, numbered 0, 1, … in this order.
        notes: sentences on what a user might not expect.
    """

    kind: Kind
    devices: tuple[Device, ...]
    environment: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def indices(self) -> tuple[int, ...]:
        """The devices' indices as this process sees them; 0, 1, … for CPU workers."""
        return tuple(device.index for device in self.devices)

    @property
    def count(self) -> int:
        """How many devices, and so workers, there are."""
        return len(self.devices)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """What each worker gives `torch.device` under `environment`: "cuda:0", "cuda:1", …; "cpu" for each."""
        if not self.environment or self.kind in ("cpu", "mps"):
            return tuple(device.torch_name for device in self.devices)
        return tuple(f"{self.kind}:{rank}" for rank in range(self.count))

    def describe(self) -> str:
        """The selection in a few words: "2 CPU workers", "cuda:0,cuda:4 (NVIDIA H200)"."""
        if self.kind == "cpu":
            return counted(self.count, "CPU worker")
        groups = groupby(self.devices, key=lambda device: device.name)
        return ", ".join(f"{','.join(device.torch_name for device in group)} ({name})" for name, group in groups)


def select(spec: str | int = "auto", inventory: Inventory | None = None) -> Selection:
    """Chooses devices as the table at the top of this module says.

    Args:
        spec: what the user wrote; an int is a count.
        inventory: what is there; this machine is looked at when None.

    Raises:
        DeviceError: a spec that means nothing, or devices that are not there.
    """
    text = _normalised(spec)
    if text == "cpu" or text.startswith("cpu:"):
        return _cpu_workers(_parse_cpu(text), inventory or discover(accelerators=False))
    if text == "auto" or text.isdecimal():
        return _any_kind(text, inventory or discover())
    if text.startswith("free:"):
        num_idle = _parse_free(text)
        inventory = inventory or discover()
        return _of(inventory, _idle(num_idle, inventory))
    kind, indices = _parse_indices(text)
    inventory = inventory or discover()
    return _of(inventory, _of_kind(kind, indices, inventory))


def _normalised(spec: str | int) -> str:
    """The spec as text without spaces, with counts checked."""
    if isinstance(spec, bool) or not isinstance(spec, str | int):
        raise _meaningless(repr(spec))
    text = re.sub(r"\s*([,:])\s*", r"\1", str(spec).strip().lower())
    if re.search(r"\d{10}", text):
        raise DeviceError(f"asked for {text}, which is more than there can be; write one of: {FORMS}")
    if re.fullmatch(r"[+-]?\d+", text) and int(text) < 1:
        raise DeviceError(f'asked for {text} devices; a count is 1 or more (for the device with index 0 write "0,")')
    return text.removeprefix("+")


def _meaningless(spec: str) -> DeviceError:
    return DeviceError(f"cannot read {spec} as devices; write one of: {FORMS}")


def _parse_cpu(text: str) -> int:
    """The number of workers in "cpu" or "cpu:N"."""
    number = re.fullmatch(r"cpu(?::(\d+))?", text)
    if number is None:
        raise _meaningless(repr(text))
    count = int(number[1] or 1)
    if count < 1:
        raise DeviceError(f"asked for {text}: cpu:N is a number of CPU workers, 1 or more (cpu:1 for one)")
    return count


def _parse_free(text: str) -> int:
    """The number of devices in "free:N"."""
    number = re.fullmatch(r"free:(\d+)", text)
    if number is None:
        raise _meaningless(repr(text))
    if int(number[1]) < 1:
        raise DeviceError(f"asked for {text}: free:N is a number of idle devices, 1 or more")
    return int(number[1])


def _parse_indices(text: str) -> tuple[Kind | None, tuple[int, ...] | None]:
    """A kind and indices, each None where not said."""
    if text in ("cuda", "mps", "xpu"):
        return cast(Kind, text), None
    kind: str | None = None
    indices: list[int] = []
    for position, entry in enumerate(text.removesuffix(",").split(",")):
        parts = re.fullmatch(r"(?:(cuda|mps|xpu):)?(\d+)", entry)
        if parts is None or (parts[1] and position and parts[1] != kind):
            raise _meaningless(repr(text))
        kind = parts[1] or kind
        index = int(parts[2])
        if index in indices:
            raise DeviceError(f"asked for device {index} twice in {text!r}; name each device once")
        indices.append(index)
    return cast("Kind | None", kind), tuple(indices)


def _any_kind(text: str, inventory: Inventory) -> Selection:
    """All accelerators or the first N, or CPU workers where there is none."""
    have = len(inventory.devices)
    if not have:
        workers = _cpu_workers(_AUTO_CPU_WORKERS if text == "auto" else int(text), inventory)
        return replace(workers, notes=(*(inventory.notes if inventory.unusable else ()), *workers.notes))
    wanted = have if text == "auto" else int(text)
    if wanted > have:
        raise DeviceError(
            f"asked for {counted(wanted, 'device')}, {_has(inventory)}; "
            f"ask for at most {have}, or for CPU workers with cpu:{wanted}"
        )
    return _of(inventory, inventory.devices[:wanted])


def _of_kind(kind: Kind | None, indices: Sequence[int] | None, inventory: Inventory) -> tuple[Device, ...]:
    """The devices with these indices, or all; checks that they are there."""
    devices = inventory.devices
    if not devices or (kind is not None and devices[0].kind != kind):
        numbers = "" if indices is None else ",".join(map(str, indices))
        wanted = f"device {numbers}" if kind is None else f"{kind}:{numbers}".removesuffix(":")
        why = f" ({' '.join(inventory.notes)})" if inventory.notes else ""
        mend = f"ask for cpu:2, or install a build of torch for {kind or 'an accelerator'}"
        if devices:
            mend = f"ask for {devices[0].kind} or for cpu:2"
        raise DeviceError(f"asked for {wanted}, {_has(inventory)}{why}; {mend}")
    if indices is None:
        return devices
    for index in indices:
        if index >= len(devices):
            raise DeviceError(f"asked for device {index}, {_has(inventory)}")
    return tuple(devices[index] for index in indices)


def _idle(count: int, inventory: Inventory) -> tuple[Device, ...]:
    """The idle devices with the most free memory."""
    devices = inventory.devices
    if not devices:
        raise DeviceError(f"asked for {counted(count, 'idle device')}, {_has(inventory)}; ask for cpu:{count}")
    idle = sorted((device for device in devices if device.is_idle), key=lambda device: -device.memory_free)
    if len(idle) < count:
        users = "; ".join(_use(device) for device in devices if not device.is_idle)
        busy = f" ({users})" if users else ""
        raise DeviceError(
            f"asked for {counted(count, 'idle device')}, {len(idle)} of {len(devices)} "
            f"{'is' if len(idle) == 1 else 'are'} idle{busy}; wait, ask for fewer, or name the devices by index"
        )
    return tuple(idle[:count])


def _use(device: Device) -> str:
    """Who uses a device: "cuda:1: python (pid 12, 20.1 GiB)"."""
    users = ", ".join(
        f"{process.name} (pid {process.pid}{'' if process.memory is None else f', {gib(process.memory)}'})"
        for process in device.processes
    )
    return f"{device.torch_name}: {users or f'{gib(device.memory_used)} in use'}"


def _of(inventory: Inventory, devices: Sequence[Device]) -> Selection:
    """The selection of these accelerators, which the workers alone see."""
    entries = [device.visible_as for device in devices if device.visible_as is not None]
    environment = {}
    if inventory.variable is not None and len(entries) == len(devices):
        environment[inventory.variable] = ",".join(entries)
    return Selection(devices[0].kind, tuple(devices), environment)


def _cpu_workers(count: int, inventory: Inventory) -> Selection:
    """The selection of so many CPU workers, which see no GPU."""
    most = max(MAX_CPU_WORKERS, inventory.cores)
    if count > most:
        raise DeviceError(f"asked for {count} CPU workers, at most {most} may share {_cores(inventory)}")
    notes = (f"{count} CPU workers share {_cores(inventory)}.",) if count > inventory.cores else ()
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    environment = {name: none for name, none in hidden.items() if name == inventory.variable}
    return Selection("cpu", tuple(replace(inventory.cpu, index=rank) for rank in range(count)), environment, notes)


def _has(inventory: Inventory) -> str:
    """What there is, as the end of a sentence."""
    devices = inventory.devices
    if not devices:
        return f"{inventory.torch} shows no accelerator on this machine"
    return f"this machine has {'0' if len(devices) == 1 else f'0-{len(devices) - 1}'} ({devices[0].kind})"


def _cores(inventory: Inventory) -> str:
    return counted(inventory.cores, "core")
