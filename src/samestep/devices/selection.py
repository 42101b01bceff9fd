"""The selection: the devices of a run, by the user's specification (`--devices`)."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import cast

from samestep.devices.device import Device, Kind, gib
from samestep.devices.inventory import Inventory, discover, physical_cores
from samestep.errors import DeviceError
from samestep.text import counted

FORMS = 'auto, 4 (a count), "0,4" or "4," (indices), cpu, cpu:2, cuda, cuda:0, cuda:0,4, free:2, mps'

MAX_CPU_WORKERS = 64
"""The largest number of CPU workers on a machine with fewer cores."""

MANY_A_CORE = 2
"""The largest number of CPU workers a core without a note: more of them wait for each other in each step."""

AUTO_CPU_WORKERS = 2
"""The CPU workers of "auto" for a program that does not say how many microbatches it has."""


@dataclass(frozen=True)
class Selection:
    """The devices of a run, one worker each, in the order of the workers' local ranks.

    Attributes:
        kind: torch's device type.
        devices: the devices.
        environment: variables to set for the workers before they import torch. A worker then sees the selected
            devices alone, numbered 0, 1, … in this order.
        variables: further ones, of commands; the same for each device.
        notes: sentences on surprises, such as why there are no GPUs.
    """

    kind: Kind
    devices: tuple[Device, ...]
    environment: dict[str, str]
    notes: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def worker_environment(self) -> dict[str, str]:
        """All variables to set for the workers."""
        return {**self.environment, **self.variables}

    def with_variables(self, **variables: str) -> "Selection":
        """The same devices, whose workers have further variables."""
        return replace(self, variables={**self.variables, **variables})

    @property
    def indices(self) -> tuple[int, ...]:
        """The devices' indices in this process; 0, 1, … for CPU workers."""
        return tuple(device.index for device in self.devices)

    @property
    def count(self) -> int:
        return len(self.devices)

    def label(self, position: int) -> str:
        """The device at a position, in messages: "CPU worker 1", "cuda:4 (NVIDIA H200)"."""
        device = self.devices[position]
        return f"CPU worker {device.index}" if self.kind == "cpu" else f"{device.torch_name} ({device.name})"

    def only(self, *positions: int) -> "Selection":
        """The selection of the devices at these positions alone."""
        environment = dict(self.environment)
        if self.kind != "cpu":  # whose variable hides all GPUs
            for name, entries in environment.items():
                environment[name] = ",".join(entries.split(",")[position] for position in positions)
        devices = tuple(self.devices[position] for position in positions)
        return replace(self, devices=devices, environment=environment)

    def describe(self) -> str:
        """A short description: "2 CPU workers", "cuda:0,cuda:4 (NVIDIA H200)"."""
        if self.kind == "cpu":
            return counted(self.count, "CPU worker")
        groups = groupby(self.devices, key=lambda device: device.name)
        return ", ".join(f"{','.join(device.torch_name for device in group)} ({name})" for name, group in groups)


def select(
    spec: str | int = "auto", inventory: Inventory | None = None, cpu_workers: int = AUTO_CPU_WORKERS
) -> Selection:
    """Selects devices.

    Args:
        spec: "auto" (all accelerators, else CPU workers), a count, indices ("0,4"; one alone takes a comma, "4,"),
            "cpu", "cpu:2", "cuda", "cuda:0,4", "mps", or "free:2" (the emptiest idle accelerators). Indices are
            torch's; CUDA_VISIBLE_DEVICES is respected.
        inventory: the hardware; None for this machine.
        cpu_workers: the number of CPU workers that "auto" means.

    Raises:
        DeviceError: the spec cannot be read, or the devices do not exist.
    """
    text = _normalised(spec)
    if text == "cpu" or text.startswith("cpu:"):
        count = _parse_count(text, "cpu", "CPU workers", 1)
        return _cpu_workers(count, inventory or discover(accelerators=False))
    if text == "auto" or text.isdecimal():
        return _any_kind(text, inventory or discover(), cpu_workers)
    if text.startswith("free:"):
        count = _parse_count(text, "free", "idle devices")
        inventory = inventory or discover()
        return _of(inventory, _idle(count, inventory))
    kind, indices = _parse_indices(text)
    inventory = inventory or discover()
    return _of(inventory, _of_kind(kind, indices, inventory))


def cpu_workers_for(num_microbatches: int, num_nodes: int = 1) -> int:
    """The CPU workers of "auto" on each of some machines: one a core, as long as each has a microbatch."""
    return max(1, min(physical_cores(), num_microbatches // num_nodes))


def describe_unused_cores(num_microbatches: int) -> str:
    """A sentence for a script that was started by `python`, on the cores that a run could use; "" for anything else."""
    main = sys.modules["__main__"]
    cores, path = cpu_workers_for(num_microbatches), str(getattr(main, "__file__", ""))
    if cores == 1 or getattr(main, "__spec__", None) is not None or not path.endswith(".py"):
        return ""
    name = os.path.relpath(path)
    return f"{name} trains on one core; `samestep run {name}` uses {cores} cores, with the same bits"


def _normalised(spec: str | int) -> str:
    """The spec as text without spaces, with counts checked."""
    if isinstance(spec, bool) or not isinstance(spec, str | int):
        raise _meaningless(repr(spec))
    text = re.sub(r"\s*([,:])\s*", r"\1", str(spec).strip().lower())
    if re.search(r"\d{10}", text):
        raise DeviceError(f"asked for {text}, which is more than any machine has; needed: one of {FORMS}")
    if re.fullmatch(r"[+-]?\d+", text) and int(text) < 1:
        raise DeviceError(f'asked for {text} devices; a count is 1 or more (for the device with index 0 write "0,")')
    return text.removeprefix("+")


def _meaningless(spec: str) -> DeviceError:
    return DeviceError(f"cannot read {spec} as devices; needed: one of {FORMS}")


def _parse_count(text: str, word: str, noun: str, default: int | None = None) -> int:
    """The number in "cpu:N" or "free:N"."""
    number = re.fullmatch(rf"{word}(?::(\d+))?", text)
    if number is None or (number[1] is None and default is None):
        raise _meaningless(repr(text))
    count = int(number[1] or default or 0)
    if count < 1:
        raise DeviceError(f"asked for {text}: {word}:N is a number of {noun}, 1 or more")
    return count


def _parse_indices(text: str) -> tuple[Kind | None, tuple[int, ...] | None]:
    """A kind and indices; None for one that is left out."""
    if text in ("cuda", "mps"):
        return cast(Kind, text), None
    kind: str | None = None
    indices: list[int] = []
    for position, entry in enumerate(text.removesuffix(",").split(",")):
        parts = re.fullmatch(r"(?:(cuda|mps):)?(\d+)", entry)
        if parts is None or (parts[1] and position and parts[1] != kind):
            raise _meaningless(repr(text))
        kind = parts[1] or kind
        index = int(parts[2])
        if index in indices:
            raise DeviceError(f"asked for device {index} twice in {text!r}; name each device once")
        indices.append(index)
    return cast("Kind | None", kind), tuple(indices)


def _any_kind(text: str, inventory: Inventory, cpu_workers: int) -> Selection:
    """All accelerators or the first N; CPU workers if there is none."""
    have = len(inventory.devices)
    if not have:
        if inventory.misnamed:
            remedy = f"name GPUs by index or UUID, unset {inventory.variable}, or ask for CPU workers with cpu:2"
            raise DeviceError(f"asked for {text}: {' '.join(inventory.notes)} Instead, {remedy}")
        workers = _cpu_workers(cpu_workers if text == "auto" else int(text), inventory)
        return replace(workers, notes=(*inventory.notes, *workers.notes))
    wanted = have if text == "auto" else int(text)
    if wanted > have:
        raise DeviceError(
            f"asked for {counted(wanted, 'device')}, {_has(inventory)}; "
            f"ask for at most {have}, or for CPU workers with cpu:{wanted}"
        )
    return _of(inventory, inventory.devices[:wanted])


def _of_kind(kind: Kind | None, indices: Sequence[int] | None, inventory: Inventory) -> tuple[Device, ...]:
    """The devices with these indices, or all, if they exist."""
    devices = inventory.devices
    if not devices or (kind is not None and devices[0].kind != kind):
        numbers = "" if indices is None else ",".join(map(str, indices))
        wanted = f"device {numbers}" if kind is None else f"{kind}:{numbers}".removesuffix(":")
        why = f" ({' '.join(inventory.notes)})" if inventory.notes else ""
        remedy = f"ask for {devices[0].kind} or for cpu:2" if devices else "ask for cpu:2"
        if not devices and (inventory.torch.kind == "cpu" or kind not in (None, inventory.torch.kind)):
            remedy += f", or install a build of torch for {kind or 'an accelerator'}"
        raise DeviceError(f"asked for {wanted}, {_has(inventory)}{why}; {remedy}")
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
    """The use of a device: "cuda:1: 20.1 GiB in use by python (pid 12)"."""
    users = ", ".join(f"{process.name} (pid {process.pid})" for process in device.processes)
    return f"{device.torch_name}: {gib(device.memory_used)} in use{users and f' by {users}'}"


def _of(inventory: Inventory, devices: Sequence[Device]) -> Selection:
    """The selection of these accelerators."""
    # A list for all of them or none: a shorter one would hide devices, and number the others differently.
    entries = [device.visible_as for device in devices if device.visible_as is not None]
    environment = {}
    if inventory.variable is not None and len(entries) == len(devices):
        environment[inventory.variable] = ",".join(entries)
    return Selection(devices[0].kind, tuple(devices), environment, (inventory.misnamed,) if inventory.misnamed else ())


def _cpu_workers(count: int, inventory: Inventory) -> Selection:
    """The selection of CPU workers, from which GPUs are hidden."""
    most = max(MAX_CPU_WORKERS, inventory.cores)
    if count > most:
        raise DeviceError(f"asked for {count} CPU workers, at most {most} may share {_cores(inventory)}")
    crowd = f"{count} CPU workers share {_cores(inventory)}: as many as cores are the fastest, with the same bits."
    notes = (crowd,) if count > MANY_A_CORE * inventory.cores else ()
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}
    environment = {name: none for name, none in hidden.items() if name == inventory.variable}
    return Selection("cpu", tuple(replace(inventory.cpu, index=rank) for rank in range(count)), environment, notes)


def _has(inventory: Inventory) -> str:
    """The accelerators, as the end of a sentence."""
    devices = inventory.devices
    if not devices:
        return f"{inventory.torch} shows no accelerator on this machine"
    return f"this machine has {'0' if len(devices) == 1 else f'0-{len(devices) - 1}'} ({devices[0].kind})"


def _cores(inventory: Inventory) -> str:
    return counted(inventory.cores, "core")
