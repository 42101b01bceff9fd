"""The policy about failed workers, in Python and on the command line, and the variables of their processes."""

import sys

import pytest
from marked import SECONDS

from samestep.devices.selection import select
from samestep.errors import UsageError
from samestep.launcher import job
from samestep.launcher.job import Policy, process_variables


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"min_devices": 0}, "--min-devices"),
        ({"max_restarts": -1}, "--max-restarts"),
        ({"hang_seconds": -1.0}, "--hang-seconds"),
        ({"hang_seconds": float("nan")}, "--hang-seconds"),
        ({"grace_seconds": -1.0}, "--grace-seconds"),
        ({"grace_seconds": float("inf")}, "--grace-seconds"),
        ({"replace": True}, "--max-restarts"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(values, said):
    with pytest.raises(UsageError, match=said):
        Policy(**values)


def test_more_devices_than_there_are_cannot_be_the_least_number():
    Policy(min_devices=2).check_devices(2, 2)
    with pytest.raises(UsageError, match="--min-devices 3"):
        Policy(min_devices=3).check_devices(2, 2)


def test_workers_of_other_machines_count_twice_among_open_files(monkeypatch):
    monkeypatch.setattr(job, "soft_limit", lambda name: 100)
    Policy().check_devices(15, 15)
    Policy().check_devices(8, 8, 7)
    with pytest.raises(UsageError, match="9 workers need 104 open files, and 100 are allowed: ulimit -n 104"):
        Policy().check_devices(9, 9, 7)


def test_the_command_refuses_it_too_and_starts_nothing(starter):
    starter.script("ok.py", "open('ran', 'w')")
    done = starter.run("--devices", "cpu:2", "--min_devices", "3", "ok.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "samestep: error: got 2 devices and --min-devices 3; give no more than there are\n"
    assert not (starter.folder / "ran").exists()


def test_workers_hash_strings_alike_unless_the_user_sets_the_variable(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert process_variables(select("cpu:2"), 1)["PYTHONHASHSEED"] == "0"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert "PYTHONHASHSEED" not in process_variables(select("cpu:2"), 1)


@pytest.mark.slow
def test_a_script_of_torch_distributed_is_restarted_as_torchrun_does(starter):
    starter.script(
        "ddp.py",
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1:\n"
        "    os._exit(3)\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 0:\n"
        "    print(total.item(), os.environ['TORCHELASTIC_MAX_RESTARTS'])\n"
        "dist.destroy_process_group()\n",
    )
    done = starter.run("--devices", "cpu:2", "--max_restarts", "2", "--start-method", "spawn", "ddp.py")
    assert (done.returncode, done.stdout) == (0, "2.0 2\n")
    assert "samestep: all workers start again (1 of 2)" in done.stderr


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_a_limit_on_open_files_that_is_too_low_is_refused_before_anything_starts(starter):
    starter.script("ok.py", "import samestep\nprint(samestep.Run(8, 4).world_size)\nopen('ran', 'w')")
    needed = 56

    def run(limit):
        words = (sys.executable, "-m", "samestep", "run", "--devices", "cpu:4", "ok.py")
        return starter.start_program(starter.script("limited.py", LIMITED), limit, *words)

    stdout, stderr = (refused := run(needed - 1)).communicate(timeout=SECONDS)
    assert (refused.returncode, stdout) == (2, "")
    assert "4 workers need 56 open files, and 55 are allowed: ulimit -n 56, or fewer workers" in stderr
    assert "Traceback" not in stderr
    assert not (starter.folder / "ran").exists()
    stdout, stderr = (enough := run(needed)).communicate(timeout=SECONDS)
    assert (enough.returncode, stdout) == (0, "4\n"), stderr
