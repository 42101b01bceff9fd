"""`launch`: functions and closures in workers, from this very process."""

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from gpus import environment, needs_fake_gpus

from samestep.errors import UsageError, WorkerError
from samestep.launcher.supervisor import launch

sys.path.insert(0, os.path.dirname(__file__))
import steps

pytestmark = pytest.mark.usefixtures("same_descriptors")


def test_an_importable_function_runs_in_clean_workers(capsys):
    result = launch(steps.describe, ("ab",), {"factor": 2}, devices="cpu:2")
    assert result == {"text": "abab", "rank": 0, "world_size": 2}
    assert capsys.readouterr() == ("printed by rank 0\n", "")


def test_a_closure_runs_in_clean_workers(capsys):
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


@pytest.mark.usefixtures("forks")
def test_a_rank_0_that_ends_its_process_has_no_result_and_one_that_exits_has_none():
    def leave(how):
        how(0) if os.environ["RANK"] == "0" else None
        return "of rank 1"

    assert launch(leave, (sys.exit,), devices="cpu:2") is None
    with pytest.raises(WorkerError, match=r"rank 0 ended its process in .*leave \(os._exit\?\)"):
        launch(leave, (os._exit,), devices="cpu:2")


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("function", "devices", "kind", "message"),
    [
        (
            lambda: steps.fail_on(1),
            "cpu:2",
            WorkerError,
            "(?s)^rank 1 on CPU worker 1 failed.*ValueError: this is rank 1$",
        ),
        (lambda: launch(steps.give_tensor), "cpu:1", WorkerError, "is a worker already"),
        ("train.py", "cpu:1", UsageError, "needed: a function"),
    ],
)
def test_what_fails_or_cannot_be_is_raised_here(function, devices, kind, message):
    with pytest.raises(kind, match=message):
        launch(function, devices=devices)


def test_a_closure_is_sent_to_spawned_workers_with_copies_of_what_it_uses():
    captured = torch.ones(2)

    def total(scale):
        captured.mul_(scale)
        return captured, os.getppid() != here

    here = os.getpid()
    result, is_child_of_another = launch(total, (3.0,), devices="cpu:1", start_method="spawn")
    assert (result.tolist(), captured.tolist(), is_child_of_another) == ([3.0, 3.0], [1.0, 1.0], True)


def test_a_closure_that_cannot_be_sent_is_refused_with_what_stands_in_the_way():
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"<lambda>.*cannot pickle '_thread.lock'.*within"):
        launch(lambda: lock.locked(), devices="cpu:1")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_function_of_the_main_program_is_called_with_its_arguments(method, tmp_path):
    program = """
        import sys
        from samestep.launcher.supervisor import launch

        class Setting:
            value = 3

        def work(setting):
            return setting

        if __name__ == "__main__":
            result = launch(work, (Setting(),), devices="cpu:2", start_method=sys.argv[1])
            print(type(result) is Setting, result.value)
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, path, method], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 3\n", "")


CELLS = """
    import torch, samestep

    print(torch.cuda.is_available(), torch.cuda.is_initialized())
    scale = torch.full((2,), 3.0)

    def train(number):
        run = samestep.Run(8)
        return run.world_size, str(run.device), (scale.to(run.device) * number).sum().item()

    print(samestep.launch(train, (2,), devices="1,3"))
    torch.ones(1, device="cuda")
    print(samestep.launch(train, (3,), devices="2,"))
"""


@needs_fake_gpus
def test_a_notebook_that_has_used_gpus_launches():
    command = [sys.executable, "-c", textwrap.dedent(CELLS)]
    done = subprocess.run(command, env=environment(4), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["True False", "(2, 'cuda:0', 12.0)", "(1, 'cuda:0', 18.0)"]


def test_the_quickstart_notebook_prints_what_is_stored_in_it(tmp_path):
    notebook = json.loads((Path(__file__).parents[2] / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    text = "\nprint('next')\n".join("".join(cell["source"]) for cell in cells)
    (tmp_path / "cells.py").write_text(text, encoding="utf-8")
    result = subprocess.run([sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    printed = result.stdout.split("next\n")
    lines = printed[2].splitlines()
    assert lines[:3] == lines[3:6]  # the lines of the epochs, on one device and on two
    assert [line[:11] for line in lines[6:]] == ["one device ", "two devices"]
    shown = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]
    one, other = (re.sub(r"\b[0-9a-f]{16}\b|\d\.\d+", "#", repr(texts)) for texts in (shown[1:], printed[1:]))
    assert one == other  # but for digits, which another kind of CPU rounds in its own way
