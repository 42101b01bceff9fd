"""NVIDIA GPUs: NVML's answers are read whole, a missing answer is no error, and the numbering is CUDA's.

The GPUs are made up: the stand-in answers NVML's questions from plain data and raises NVML's own errors.
"""

import random
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import GIB, gpu, server

from samestep.devices.device import Device, Process
from samestep.devices.nvidia import NvmlReading, is_certain, match, read, visible


class StandIn:
    """An NVML with these GPUs (a dict of answers each); a question without an answer is not supported."""

    def __init__(self, gpus: list[dict[str, Any]], start: Exception | None = None) -> None:
        self.gpus = gpus
        self.start = start
        self.running = 0

    def nvmlInit(self) -> None:
        if self.start is not None:
            raise self.start
        self.running += 1

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        if "lost" in self.gpus[index]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.gpus[index]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return "/usr/bin/python3" if pid == 12 else str(self._unsupported())

    def _unsupported(self, *arguments: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDevice"):
            return getattr(pynvml, name)

        def answer(handle: dict[str, Any], *arguments: Any) -> Any:
            found = handle.get(name, self._unsupported)
            return found(*arguments) if callable(found) else found

        return answer


def test_a_machine_without_a_driver_has_no_gpus_and_no_problem() -> None:
    for code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        assert read(StandIn([], pynvml.NVMLError(code))) == NvmlReading()


def test_a_driver_that_does_not_start_is_told() -> None:
    reading = read(StandIn([], pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)))
    assert reading.gpus == ()
    assert "mismatch" in reading.problems[0]


def test_the_library_here_is_asked_without_an_error() -> None:
    assert isinstance(read(), NvmlReading)


def test_a_gpu_that_answers_nothing_is_still_listed_and_nvml_is_closed() -> None:
    nvml = StandIn([{}])
    (gpu,) = read(nvml).gpus
    assert (gpu.name, gpu.memory_total, gpu.uuid) == ("NVIDIA GPU", 0, None)
    assert nvml.running == 0


def test_a_gpu_is_read_whole() -> None:
    memory = SimpleNamespace(total=141 * GIB, reserved=GIB, used=20 * GIB, free=120 * GIB)
    answers = {
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetUUID": "GPU-a0",
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:1A:00.0"),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetCpuAffinity": [1 << 63 | 0b110, 1],
        "nvmlDeviceGetComputeRunningProcesses_v3": [
            SimpleNamespace(pid=12, usedGpuMemory=20 * GIB),
            SimpleNamespace(pid=99, usedGpuMemory=None),
        ],
    }
    reading = read(StandIn([answers]))
    device = reading.gpus[0]
    assert (device.kind, device.index, device.name, device.uuid) == ("cuda", 0, "NVIDIA H200", "GPU-a0")
    assert (device.memory_total, device.memory_free, device.memory_used) == (140 * GIB, 120 * GIB, 20 * GIB)
    assert device.processes == (Process(12, "python3"), Process(99, "unknown"))
    assert (device.pci_bus_id, device.visible_as) == ("00000000:1a:00.0", "GPU-a0")
    assert device.cores == (1, 2, 63, 64)


def test_an_older_driver_without_reserved_memory_is_read() -> None:
    def memory_info(*version: int) -> Any:
        if version:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=16 * GIB, used=GIB, free=15 * GIB)

    (gpu,) = read(StandIn([{"nvmlDeviceGetMemoryInfo": memory_info}])).gpus
    assert (gpu.memory_total, gpu.memory_free) == (16 * GIB, 15 * GIB)


def test_a_lost_gpu_is_told_and_the_others_are_read() -> None:
    reading = read(StandIn([{"lost": True}, {"nvmlDeviceGetName": "NVIDIA H200"}]))
    assert [gpu.index for gpu in reading.gpus] == [1]
    assert reading.problems[0].startswith("GPU 0 does not answer NVML")


def test_gpus_come_by_pci_bus_id() -> None:
    rows = [{"nvmlDeviceGetPciInfo": SimpleNamespace(busId=bus)} for bus in ("00000000:3B:00.0", "00000000:1A:00.0")]
    assert [gpu.index for gpu in read(StandIn(rows)).gpus] == [1, 0]


# Numbering.

EIGHT = server(8)
UUIDS = [row.uuid or "" for row in EIGHT]


def shown(entries: str | None) -> list[int]:
    """The driver's numbers of the GPUs that CUDA_VISIBLE_DEVICES leaves, in torch's order."""
    environ = {} if entries is None else {"CUDA_VISIBLE_DEVICES": entries}
    return [UUIDS.index(device.uuid or "") for device in visible(EIGHT, environ)]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", []),
        ("4,0", [4, 0]),
        (" 4 , 0", [4, 0]),
        ("0,2,-1,1", [0, 2]),
        ("0,8,1", [0]),
        ("9", []),
        ("-1", []),
        ("none", []),
        ("1,1", []),
        ("1gpu,2", [1, 2]),
        ("0,GPU-b1", [0]),
        (UUIDS[5] + "," + UUIDS[2], [5, 2]),
        ("GPU-c2,GPU-a", [2, 0]),
        ("GPU-c2,GPU-ffff,GPU-a", [2]),
        ("GPU-", []),
        ("GPU-c2,1", [2]),
        ("GPU-c2,GPU-c", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(entries: str | None, expected: list[int]) -> None:
    assert shown(entries) == expected


def test_indices_are_those_that_torch_would_show() -> None:
    devices = visible(EIGHT, {"CUDA_VISIBLE_DEVICES": "6,1"})
    assert [device.index for device in devices] == [0, 1]
    assert [device.torch_name for device in devices] == ["cuda:0", "cuda:1"]


@given(st.lists(st.integers(0, 7), unique=True))
def test_a_list_of_uuids_is_shown_in_its_own_order(order: list[int]) -> None:
    assert shown(",".join(UUIDS[index] for index in order)) == order


def test_the_order_of_like_gpus_is_certain() -> None:
    assert is_certain(EIGHT, {})


def test_the_order_of_unlike_gpus_is_certain_by_bus_id_or_by_uuid_only() -> None:
    unlike = (gpu(0, "NVIDIA T4"), gpu(1, "NVIDIA H200"))
    assert not is_certain(unlike, {})
    assert not is_certain(unlike, {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert not is_certain(unlike, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert is_certain(unlike, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert is_certain(unlike, {"CUDA_VISIBLE_DEVICES": "GPU-b1,GPU-a0"})


def test_matching_follows_cudas_order_and_keeps_what_the_driver_knows() -> None:
    order = random.Random(0).sample(range(8), 8)
    known = [Device("cuda", index, "bare", 1, 1, uuid=UUIDS[here].upper()) for index, here in enumerate(order)]
    known = [Device("cuda", row.index, "bare", 1, 1, uuid="GPU-" + (row.uuid or "")[4:]) for row in known]
    matched = match(EIGHT, known)
    assert [UUIDS.index(device.uuid or "") for device in matched] == order
    assert [device.index for device in matched] == list(range(8))
    assert {device.memory_total for device in matched} == {140 * GIB}


def test_a_device_that_the_driver_has_no_row_for_keeps_its_place() -> None:
    stranger = Device("cuda", 0, "Stranger", 5, 5, uuid="GPU-zz")
    matched = match(EIGHT, [EIGHT[1], EIGHT[0], stranger])
    assert [device.name for device in matched] == ["NVIDIA H200", "NVIDIA H200", "Stranger"]
