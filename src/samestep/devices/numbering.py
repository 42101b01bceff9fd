"""The numbering: which GPUs torch shows, and in which order, as a function of NVML's rows and the environment.

CUDA orders GPUs by CUDA_DEVICE_ORDER: PCI_BUS_ID is NVML's (nvidia-smi's) order; the default, FASTEST_FIRST, is the
same where all GPUs are of one model, and known only to the driver else. CUDA_VISIBLE_DEVICES then picks from that
order. So torch's "cuda:0" need not be nvidia-smi's GPU 0.

Nothing depends on guessing the order right for long: workers are given CUDA_VISIBLE_DEVICES as a list of UUIDs, and
CUDA numbers the devices of such a list as they stand in it, whatever CUDA_DEVICE_ORDER says. Where the order is not
certain from the rows alone (`is_certain`), `inventory` asks the driver in a throw-away process and hands its answer
to `match`.

Sources: CUDA programming guide, appendix on environment variables; MIG user guide, on CUDA's device enumeration; and
how `torch.cuda.device_count` reads CUDA_VISIBLE_DEVICES.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from samestep.devices.device import Device, Link
from samestep.devices.nvml import Gpu


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Device, ...]:
    """The devices that torch would show, with torch's indices, from NVML's rows and CUDA_VISIBLE_DEVICES.

    Entries are indices, UUIDs or unambiguous beginnings of UUIDs. As in CUDA, the first entry that is none of them
    ends the list, and a device named twice empties it. A GPU in MIG mode computes through its instances only, and a
    process sees one instance at most, its only device then.
    """
    entries = environ.get("CUDA_VISIBLE_DEVICES")
    if entries is None:
        chosen = [_computing(gpu) for gpu in gpus]
    elif entries.startswith("MIG-"):
        chosen = list(_by_prefix(entries, "MIG-", [instance for gpu in gpus for instance in gpu.instances]))
    elif entries.startswith("GPU-"):
        mig_of = {gpu.device.uuid: gpu for gpu in gpus}
        chosen = [_computing(mig_of[gpu.uuid]) for gpu in _by_prefix(entries, "GPU-", [gpu.device for gpu in gpus])]
    else:
        chosen = [_computing(gpus[index]) for index in _indices(entries, len(gpus))]
    devices = [device for device in chosen if device is not None]
    instances = [device for device in devices if device in {i for gpu in gpus for i in gpu.instances}]
    return _renumbered(instances[:1] or devices)


def match(gpus: Sequence[Gpu], known: Sequence[Device]) -> tuple[Device, ...]:
    """The devices in the order that CUDA itself told, with what NVML knows about each, matched by UUID."""
    rows = {_bare(row.uuid): row for gpu in gpus for row in (gpu.device, *gpu.instances) if row.uuid}
    strangers = [replace(device, index=-1 - position) for position, device in enumerate(known)]
    return _renumbered([rows.get(_bare(device.uuid), device) for device in strangers])


def is_certain(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> bool:
    """Whether `visible` gives CUDA's own order, and not only the likely one."""
    if any(gpu.mig for gpu in gpus):
        return False
    entries = environ.get("CUDA_VISIBLE_DEVICES")
    if entries is not None and (not entries or entries.startswith("GPU-")):
        return True
    return environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.device.name for gpu in gpus}) <= 1


def _computing(gpu: Gpu) -> Device | None:
    """What computes on a GPU: itself, or its first MIG instance, or nothing."""
    if not gpu.mig:
        return gpu.device
    return gpu.instances[0] if gpu.instances else None


def _indices(entries: str, num_gpus: int) -> list[int]:
    """The leading run of valid indices; none where one comes twice. Like C's strtoul, "1x" reads as 1."""
    indices: list[int] = []
    for entry in entries.split(","):
        number = re.match(r"\s*([+-]?\d+)", entry)
        index = -1 if number is None else int(number[1])
        if not 0 <= index < num_gpus:
            break
        if index in indices:
            return []
        indices.append(index)
    return indices


def _by_prefix(entries: str, prefix: str, devices: Sequence[Device]) -> list[Device]:
    """The leading run of entries that name one device each; none where a device comes twice."""
    chosen: list[Device] = []
    for entry in entries.split(","):
        named = [device for device in devices if entry.startswith(prefix) and (device.uuid or "").startswith(entry)]
        if len(named) != 1:
            break
        if named[0] in chosen:
            return []
        chosen.append(named[0])
    return chosen


def _bare(uuid: str | None) -> str:
    """A UUID without "GPU-" or "MIG-", which torch's device properties leave out."""
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-").lower()


def _renumbered(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices with indices 0, 1, … and links to one another only."""
    index_of = {device.index: index for index, device in enumerate(devices)}
    return tuple(
        replace(
            device,
            index=index,
            links=tuple(
                sorted(
                    (Link(index_of[link.peer], link.kind) for link in device.links if link.peer in index_of),
                    key=lambda link: link.peer,
                )
            ),
        )
        for index, device in enumerate(devices)
    )
