"""Tensor, context, expert and pipeline parallelism of scripts with `--logical-devices`: equal bits on any devices."""

import sys
from pathlib import Path

import pytest
from cli_commands import samestep

SCRIPT = Path(__file__).with_name("layouts.py")
PIPELINES = "GPipe,1F1B,interleaved"
ON_CPUS = f"tensor,data by tensor,hybrid,placements,experts,collectives,all to all,whole,{PIPELINES}"
ON_GPUS = "tensor,data by tensor,placements,experts,ring,whole"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 4)
RTOL = 1e-4  # gloo adds in another order, and AdamW divides by small roots


def printed(folder, devices, kind, names, *words, **variables):
    """What the layouts print on four ranks, by name as numbers: on devices, or over torchrun's processes."""
    command = (*TORCHRUN,) if devices is None else ("run", "--devices", devices, "--logical-devices", 4)
    options = {"command": ()} if devices is None else {}
    options |= {"OMP_NUM_THREADS": "1", **variables}
    done = samestep(*command, SCRIPT, kind, names, *words, cwd=folder, **options)
    assert done.returncode == 0, done.stderr
    found, name = {}, ""
    for line in done.stdout.splitlines():
        if "0x" in line:
            found[name].append(float.fromhex(line))
        else:
            name = line
            found[name] = []
    assert [*found] == names.split(",")
    assert all(found.values())
    return found


def test_layouts_on_cpus_have_the_same_bits_on_any_number_of_devices_and_torchrun_s_numbers(tmp_path):
    one, *others = (printed(tmp_path, f"cpu:{count}", "cpu", ON_CPUS) for count in (1, 2, 3, 4))
    for other in others:
        assert other == one
    theirs = printed(tmp_path, None, "cpu", ON_CPUS)
    for name, numbers in theirs.items():
        assert one[name] == pytest.approx(numbers, rel=RTOL), name
    assert one["all to all"] == pytest.approx(one["whole"], rel=RTOL)
    for name in PIPELINES.split(","):  # every schedule adds up the gradients of the same microbatches
        assert one[name] == pytest.approx(one["GPipe"], rel=RTOL), name


def test_data_by_the_device_that_a_rank_really_has_is_found_out(tmp_path):
    one, two = (printed(tmp_path, f"cpu:{count}", "cpu", "hybrid", "leak") for count in (1, 2))
    assert one != two


def test_layouts_on_simulated_gpus_have_the_bits_of_cpus_and_those_that_cpus_lack_those_of_one_process(tmp_path):
    one, three = (printed(tmp_path, f"cpu:{count}", "cuda", f"{ON_GPUS},draws,{PIPELINES}") for count in (1, 3))
    assert one == three
    on_cpus = printed(tmp_path, "cpu:2", "cpu", f"tensor,data by tensor,placements,experts,{PIPELINES}")
    assert {name: one[name] for name in on_cpus} == on_cpus
    assert one["ring"] == pytest.approx(one["whole"], rel=RTOL)
