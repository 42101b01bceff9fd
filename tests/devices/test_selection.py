"""A specification selects its devices, or is an error that names the existing ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU_TORCH, GIB, gpu, machine

from samestep.devices import selection as selection_module
from samestep.devices.device import IDLE_MEMORY, Device, Process
from samestep.devices.inventory import TorchBuild
from samestep.devices.selection import FORMS, MAX_CPU_WORKERS, cpu_workers_for, select
from samestep.errors import DeviceError, SamestepError

TWO = machine(gpu(0), gpu(1))
EIGHT = machine(*(gpu(index) for index in range(8)))
NONE = machine(torch=CPU_TORCH, cores=4)
PYTHON = Process(4321, "python")


@pytest.mark.parametrize(
    ("spec", "indices"),
    [
        ("auto", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("AUTO ", (0, 1, 2, 3, 4, 5, 6, 7)),
        (4, (0, 1, 2, 3)),
        ("4", (0, 1, 2, 3)),
        ("+4", (0, 1, 2, 3)),
        ("0,4", (0, 4)),
        ("4, 0", (4, 0)),
        ("4,", (4,)),
        ("0,", (0,)),
        ("cuda", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("cuda:0", (0,)),
        ("cuda:0,cuda:4", (0, 4)),
        ("cuda:0,4", (0, 4)),
        ("CUDA:7,", (7,)),
        ("free:3", (0, 1, 2)),
    ],
)
def test_accelerators_are_selected_as_written(spec: str | int, indices: tuple[int, ...]) -> None:
    selection = select(spec, EIGHT)
    assert selection.kind == "cuda"
    assert selection.indices == indices
    assert selection.count == len(indices)
    assert selection.devices == tuple(EIGHT.devices[index] for index in indices)


@pytest.mark.parametrize(("spec", "count"), [("auto", 2), (3, 3), ("3", 3), ("cpu", 1), ("cpu:2", 2), ("cpu: 2", 2)])
def test_without_an_accelerator_cpu_workers_are_selected(spec: str | int, count: int) -> None:
    selection = select(spec, NONE)
    assert selection.kind == "cpu"
    assert selection.indices == tuple(range(count))
    assert selection.environment == {}


def test_cpu_workers_see_no_gpu_even_where_there_are_some() -> None:
    selection = select("cpu:2", EIGHT)
    assert (selection.kind, selection.count) == ("cpu", 2)
    assert selection.environment == {"CUDA_VISIBLE_DEVICES": ""}


def test_workers_are_given_uuids_in_the_order_asked_for() -> None:
    selection = select("4,0", EIGHT)
    assert selection.environment == {"CUDA_VISIBLE_DEVICES": f"{gpu(4).uuid},{gpu(0).uuid}"}


def test_variables_of_a_command_are_the_same_for_each_device() -> None:
    selection = select("4,0", EIGHT).with_variables(SAMESTEP_AUDIT="10:exclude")
    whole, last = selection.worker_environment, selection.only(1).worker_environment
    assert [name for name in whole if whole[name] != last[name]] == ["CUDA_VISIBLE_DEVICES"]
    assert last["SAMESTEP_AUDIT"] == whole["SAMESTEP_AUDIT"] == "10:exclude"


def test_where_no_variable_limits_what_is_seen_workers_use_the_indices_as_they_are() -> None:
    apple = machine(Device("mps", 0, "Apple GPU", GIB, GIB), torch=TorchBuild("2.13.0", mps=True))
    for spec in ("auto", "mps", 1, "mps:0", "0,"):
        selection = select(spec, apple)
        assert (selection.kind, selection.environment) == ("mps", {})


@pytest.mark.parametrize(
    ("spec", "expected"), [("cpu", "1 CPU worker"), ("cpu:2", "2 CPU workers"), ("0,4", "cuda:0,cuda:4 (NVIDIA H200)")]
)
def test_a_selection_is_described_in_a_few_words(spec: str, expected: str) -> None:
    assert select(spec, EIGHT).describe() == expected


def test_unlike_devices_are_described_apart() -> None:
    mixed = machine(gpu(0), gpu(1), gpu(2, "NVIDIA T4"))
    assert select("auto", mixed).describe() == "cuda:0,cuda:1 (NVIDIA H200), cuda:2 (NVIDIA T4)"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("4,", "asked for device 4, this machine has 0-1"),
        ("0,4", "asked for device 4, this machine has 0-1"),
        ("cuda:2", "asked for device 2, this machine has 0-1"),
        (4, "asked for 4 devices, this machine has 0-1 (cuda); ask for at most 2, or for CPU workers with cpu:4"),
        ("0", 'asked for 0 devices; a count is 1 or more (for the device with index 0 write "0,")'),
        (0, "asked for 0 devices"),
        (-1, "asked for -1 devices"),
        ("-1", "asked for -1 devices"),
        ("cpu:0", "asked for cpu:0: cpu:N is a number of CPU workers, 1 or more"),
        ("free:0", "asked for free:0: free:N is a number of idle devices, 1 or more"),
        ("0,0", "asked for device 0 twice"),
        ("cuda:1,01", "asked for device 1 twice"),
        ("mps", "asked for mps, this machine has 0-1 (cuda); ask for cuda or for cpu:2"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(spec: str | int, message: str) -> None:
    with pytest.raises(DeviceError) as caught:
        select(spec, TWO)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    ["", ",", "all", "gpu", "cuda:", "cuda:x", "cpu:", "cpu:x", "cpu:-1", "cpu:1,2", "free", "free:", "free:x",
     "free:-1", "1.5", "0;1", "0,,1", ",0", "-1,0", "0,-1", "cuda,0", "0,cuda:1", "cuda:0,mps:1", "cuda:0,cpu", "0-3",
     "xpu", "xpu:0", True, 1.5, None, [0, 1]],
)  # fmt: skip
def test_garbage_gets_the_list_of_what_can_be_written(spec: object) -> None:
    with pytest.raises(DeviceError) as caught:
        select(spec, TWO)  # type: ignore[arg-type]  # this is what is tried
    assert FORMS in str(caught.value)


@given(st.text(alphabet="0123456789,:+- acdefopruxmsk", max_size=12))
def test_any_text_selects_something_or_gets_a_sentence(spec: str) -> None:
    error: SamestepError | None = None
    try:
        selection = select(spec, EIGHT)
        assert selection.count == len(set(selection.indices)) >= 1
    except SamestepError as caught:
        error = caught
    assert error is None or (error.exit_code == 2 and str(error).startswith(("asked for", "cannot read")))


def test_accelerators_asked_of_a_torch_without_them_get_the_reason() -> None:
    note = "2 NVIDIA GPUs (NVIDIA H200) cannot be used: torch 2.13.0+cpu was built without CUDA."
    unusable = machine(torch=CPU_TORCH, unusable=(gpu(0), gpu(1)), notes=(note,))
    for spec in ("cuda", "cuda:0", "0,1"):
        with pytest.raises(DeviceError, match=r"built without CUDA.*ask for cpu:2") as caught:
            select(spec, unusable)
        assert "torch 2.13.0+cpu shows no accelerator" in str(caught.value)


def test_auto_says_why_gpus_are_left_unused() -> None:
    unusable = machine(torch=CPU_TORCH, unusable=(gpu(0),), notes=("1 GPU cannot be used.",))
    assert select("auto", unusable).notes == ("1 GPU cannot be used.",)
    assert select("cpu:2", unusable).notes == ()
    assert select("auto", machine(notes=("No driver answers.",))).notes == ("No driver answers.",)


def test_auto_without_an_accelerator_is_as_many_cpu_workers_as_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection_module, "physical_cores", lambda: 16)
    assert [cpu_workers_for(*given) for given in ((8,), (64,), (1,), (8, 3), (2, 3))] == [8, 16, 1, 2, 1]
    assert select("auto", NONE).count == 2
    assert select("auto", NONE, 5).count == 5
    assert select("3", NONE, 5).count == 3
    assert select("auto", TWO, 5).kind == "cuda"


def test_more_cpu_workers_than_cores_are_allowed_and_many_more_are_told() -> None:
    assert select("cpu:8", NONE).notes == ()
    (note,) = select("cpu:9", NONE).notes
    assert note == "9 CPU workers share 4 cores: as many as cores are the fastest, with the same bits."


def test_cpu_workers_end_at_64_or_at_the_cores() -> None:
    assert select(f"cpu:{MAX_CPU_WORKERS}", NONE).count == MAX_CPU_WORKERS
    with pytest.raises(DeviceError, match="asked for 65 CPU workers, at most 64 may share 4 cores"):
        select("cpu:65", NONE)
    assert select("cpu:96", machine(cores=128)).count == 96


def test_free_takes_idle_devices_with_the_most_free_memory_first() -> None:
    rows = (gpu(0, used=IDLE_MEMORY), gpu(1, processes=(PYTHON,)), gpu(2, used=IDLE_MEMORY // 2), gpu(3))
    assert select("free:3", machine(*rows)).indices == (3, 2, 0)


def test_a_device_with_much_memory_in_use_is_not_idle_though_no_process_shows() -> None:
    with pytest.raises(DeviceError, match=r"asked for 2 idle devices, 1 of 2 is idle \(cuda:0: 5\.0 GiB in use\)"):
        select("free:2", machine(gpu(0, used=5 * GIB), gpu(1)))


def test_too_few_idle_devices_are_counted_and_their_users_named() -> None:
    rows = (gpu(0, used=20 * GIB, processes=(PYTHON, Process(7, "unknown"))), gpu(1), gpu(2))
    with pytest.raises(DeviceError) as caught:
        select("free:3", machine(*rows))
    assert "asked for 3 idle devices, 2 of 3 are idle" in str(caught.value)
    assert "(cuda:0: 20.0 GiB in use by python (pid 4321), unknown (pid 7))" in str(caught.value)


def test_free_without_an_accelerator_offers_cpu_workers() -> None:
    with pytest.raises(DeviceError, match="shows no accelerator on this machine; ask for cpu:2"):
        select("free:2", NONE)


def test_this_machine_is_looked_at_where_no_inventory_is_given() -> None:
    assert select("cpu:1").describe() == "1 CPU worker"
    assert select("auto").count >= 1
