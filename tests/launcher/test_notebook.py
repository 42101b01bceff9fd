"""`launch`: functions and closures in workers, from this very process."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from samestep.errors import UsageError, WorkerError
from samestep.launcher.notebook import launch

sys.path.insert(0, os.path.dirname(__file__))
import steps

pytestmark = pytest.mark.usefixtures("same_descriptors")


def test_an_importable_function_runs_in_clean_workers(capsys):
    result = launch(steps.describe, ("ab",), {"factor": 2}, devices="cpu:2")
    assert result == {"text": "abab", "rank": 0, "world_size": 2}
    assert capsys.readouterr() == ("printed by rank 0\n", "")


def test_an_importable_function_runs_in_spawned_workers():
    result = launch(steps.give_tensor, devices="cpu:1", start_method="spawn")
    assert torch.equal(result, torch.arange(3))


def test_a_closure_runs_in_forks_of_this_process(capsys):
    captured = torch.ones(2)

    def total(scale):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        value = captured * scale * (dist.get_rank() + 1)
        dist.all_reduce(value)
        print("rank", dist.get_rank(), "of", dist.get_world_size(), "parent", os.getppid() != here)
        dist.destroy_process_group()
        return value

    here = os.getpid()
    assert torch.equal(launch(total, (2.0,), devices="cpu:2"), torch.full((2,), 6.0))
    assert capsys.readouterr().out == "rank 0 of 2 parent True\n"
    assert "RANK" not in os.environ


def test_the_workers_failure_is_raised_here():
    with pytest.raises(
        WorkerError, match=r"(?s)^rank 1 on CPU worker 1 failed.*steps\.py.*ValueError: this is rank 1$"
    ):
        launch(steps.fail_on, (1,), devices="cpu:2")


def test_a_closure_cannot_be_spawned_and_the_message_says_what_to_do():
    with pytest.raises(UsageError, match=r"import the function by name.*\.py file"):
        launch(lambda: None, devices="cpu:1", start_method="spawn")


def test_launch_in_a_worker_is_refused():
    with pytest.raises(WorkerError, match="is a worker already"):
        launch(lambda: launch(steps.give_tensor), devices="cpu:1")


def test_what_is_no_function_is_refused():
    with pytest.raises(UsageError, match="needs a function"):
        launch("train.py", devices="cpu:1")


def test_a_function_of_the_main_program_is_forked_with_its_arguments(tmp_path):
    program = """
        from samestep.launcher.notebook import launch

        class Setting:
            value = 3

        def work(setting):
            return setting

        if __name__ == "__main__":
            result = launch(work, (Setting(),), devices="cpu:2")
            print(type(result) is Setting, result.value)
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 3\n", "")
