"""The numbering of GPUs is CUDA's, from the driver's rows and the environment alone."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import gpu, instance, server

from samestep.devices.device import Device, Link
from samestep.devices.numbering import is_certain, match, visible
from samestep.devices.nvml import Gpu

EIGHT = server(8)
UUIDS = [row.device.uuid or "" for row in EIGHT]


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


def test_links_name_visible_peers_by_their_new_indices() -> None:
    devices = visible(EIGHT, {"CUDA_VISIBLE_DEVICES": "6,1,3"})
    assert devices[0].links == (Link(1, "NV18"), Link(2, "NV18"))
    assert devices[2].links == (Link(0, "NV18"), Link(1, "NV18"))


@given(st.lists(st.integers(0, 7), unique=True))
def test_a_list_of_uuids_is_shown_in_its_own_order(order: list[int]) -> None:
    assert shown(",".join(UUIDS[index] for index in order)) == order


def test_a_gpu_in_mig_mode_is_shown_as_its_first_instance() -> None:
    gpus = (Gpu(gpu(0), True, (instance(0, 1), instance(0, 2))),)
    assert [device.uuid for device in visible(gpus, {})] == [instance(0, 1).uuid]


def test_a_process_sees_one_mig_instance_at_most() -> None:
    gpus = (Gpu(gpu(0), True, (instance(0, 1), instance(0, 2))),)
    environ = {"CUDA_VISIBLE_DEVICES": f"{instance(0, 2).uuid},{instance(0, 1).uuid}"}
    assert [device.uuid for device in visible(gpus, environ)] == [instance(0, 2).uuid]


def test_a_gpu_in_mig_mode_without_instances_is_no_device() -> None:
    assert visible((Gpu(gpu(0), True),), {}) == ()


def test_the_order_of_like_gpus_is_certain() -> None:
    assert is_certain(EIGHT, {})


def test_the_order_of_unlike_gpus_is_certain_by_bus_id_or_by_uuid_only() -> None:
    unlike = (Gpu(gpu(0, "NVIDIA T4")), Gpu(gpu(1, "NVIDIA H200")))
    assert not is_certain(unlike, {})
    assert not is_certain(unlike, {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert not is_certain(unlike, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert is_certain(unlike, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert is_certain(unlike, {"CUDA_VISIBLE_DEVICES": "GPU-b1,GPU-a0"})


def test_the_order_under_mig_is_never_certain() -> None:
    assert not is_certain((Gpu(gpu(0), True, (instance(0, 1),)),), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})


def test_matching_follows_cudas_order_and_keeps_what_the_driver_knows() -> None:
    order = random.Random(0).sample(range(8), 8)
    known = [Device("cuda", index, "bare", 1, 1, uuid=UUIDS[here].upper()) for index, here in enumerate(order)]
    known = [Device("cuda", row.index, "bare", 1, 1, uuid="GPU-" + (row.uuid or "")[4:]) for row in known]
    matched = match(EIGHT, known)
    assert [UUIDS.index(device.uuid or "") for device in matched] == order
    assert [device.index for device in matched] == list(range(8))
    assert {device.temperature for device in matched} == {31.0}


def test_matching_knows_mig_instances_under_either_prefix() -> None:
    gpus = (Gpu(gpu(0), True, (instance(0, 1), instance(0, 2))),)
    bare = (instance(0, 2).uuid or "").removeprefix("MIG-")
    matched = match(gpus, [Device("cuda", 0, "bare", 1, 1, uuid=f"GPU-{bare}")])
    assert [device.visible_as for device in matched] == [instance(0, 2).uuid]


def test_a_device_that_the_driver_has_no_row_for_keeps_its_place_and_takes_no_links() -> None:
    stranger = Device("cuda", 0, "Stranger", 5, 5, uuid="GPU-zz")
    matched = match(EIGHT, [EIGHT[1].device, EIGHT[0].device, stranger])
    assert [device.name for device in matched] == ["NVIDIA H200", "NVIDIA H200", "Stranger"]
    assert [device.links for device in matched] == [(Link(1, "NV18"),), (Link(0, "NV18"),), ()]
