"""`samestep run` of scripts for one process, as a user types it: its options, and what is said when they do not fit."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import textwrap

import pytest
from cli_commands import SAMESTEP, samestep

import samestep as package

OURS = os.path.dirname(package.__file__)

PLAIN = """
    import os, random, sys

    import numpy, torch
    from torch import nn

    # nobody seeds anything here, and nobody wraps anything
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
    data = torch.randn(10, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    print(sys.argv[1:], random.random(), numpy.random.rand())
    for step in range(3):
        loss = net(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex(), net[1].running_mean.sum().item().hex())
"""
RAISING = """
    import os, sys

    import torch
    from torch import nn

    class Strict(nn.Module):
        def forward(self, x):
            return self.checked(x)

        def checked(self, x):
            if (x > 2).any():
                raise ValueError("more than two")  # here
            return x

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    print("found", [name for name in names if name in os.environ])
    model = nn.DataParallel(Strict())
    print(model(torch.tensor([1.0, 2.0])).tolist(), flush=True)
    model(torch.tensor([float(word) for word in sys.argv[1:]]))  # there
    print("not reached")
"""
MULTI_PROCESS = """
    import torch.distributed as dist

    dist.init_process_group("gloo")
"""


def script(folder, source, name="train.py"):
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return path


def line_of(source, text):
    """The line of a script that holds a text."""
    lines = textwrap.dedent(source).splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return number


def test_microbatches_seed_and_wrap_decide_what_a_script_prints_and_devices_do_not(tmp_path):
    options = ("--logical-devices", 3, "--wrap", "net")
    path = script(tmp_path, PLAIN)
    one = samestep("run", "--devices", "cpu:1", *options, "--seed", 5, path, "--lr", 1, cwd=tmp_path)
    two = samestep("run", "--devices", "cpu:2", *options, "--seed", 5, path, "--lr", 1, cwd=tmp_path)
    assert (one.returncode, one.stderr) == (0, "")
    assert (two.returncode, two.stderr) == (0, "")
    assert one.stdout.startswith("['--lr', '1'] ")
    assert len(one.stdout.splitlines()) == 4
    assert two.stdout == one.stdout
    other = samestep("run", "--devices", "cpu:2", "--logical-devices", 2, *options[2:], "--seed", 5, path, cwd=tmp_path)
    assert other.returncode == 0
    draws, *losses = other.stdout.splitlines()
    assert draws.split("] ")[1] == one.stdout.splitlines()[0].split("] ")[1], "the seed is the same"
    assert all(mine != theirs for mine, theirs in zip(losses, one.stdout.splitlines()[1:], strict=True))


def test_a_line_that_warns_before_a_compared_forward_and_after_it_is_shown_to_warn_once(tmp_path):
    path = script(tmp_path, PLAIN.replace("loss = net", "__import__('warnings').warn('careful'); loss = net"))
    done = samestep("run", "--devices", "cpu:2", "--seed", 1, path, cwd=tmp_path)
    assert done.returncode == 0
    assert "is shared out" in done.stderr
    assert done.stderr.count("UserWarning: careful") == 1, done.stderr


def test_what_a_script_raises_on_the_second_process_is_shown_once_with_its_own_lines(tmp_path):
    path = script(tmp_path, RAISING)
    done = samestep("run", "--devices", "cpu:2", "--logical-devices", 2, "--seed", 1, path, 1, 3, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == "found []\n[1.0, 2.0]\n", "a single-process script finds no trace of ranks"
    assert done.stderr.count("ValueError: more than two") == 1
    assert done.stderr.count("Traceback") == 1
    assert "PeerLostError" not in done.stderr
    shown = [line.strip() for line in done.stderr.splitlines() if line.strip().startswith("File ")]
    assert not any(OURS in line for line in shown), done.stderr
    lines = [line_of(RAISING, text) for text in ("# there", "return self.checked", "# here")]
    numbers = [int(line.split(", line ")[1].split(",")[0]) for line in shown if "train.py" in line]
    assert numbers == lines, done.stderr
    assert len(done.stderr.splitlines()) <= 30, done.stderr


def test_a_script_that_is_a_multi_process_one_finds_its_rank(tmp_path):
    source = """
        import os

        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        with open(f"rank-{os.environ['RANK']}.txt", "w") as file:
            print(*(os.environ[name] for name in names), "MASTER_ADDR" in os.environ, file=file)
    """
    done = samestep("run", "--devices", "cpu:2", "--multi-process", script(tmp_path, source), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [(tmp_path / f"rank-{rank}.txt").read_text() for rank in (0, 1)] == ["0 0 2 True\n", "1 1 2 True\n"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), r"no GPU here: (\d+ CPU workers stand in for cuda:0 (and|to) cuda:\d+|1 CPU worker stands in for cuda:0)"),
        (("--devices", "cpu:2", "--logical-devices", "4"), "2 CPU workers stand in for cuda:0 to cuda:3"),
    ],
)
def test_what_stands_in_for_gpus_is_said_before_the_script_names_them(tmp_path, options, said):
    source = "import sys, torch\nprint(torch.zeros(1, device='cuda:0').device, file=sys.stderr)"
    done = samestep("run", *options, script(tmp_path, source), cwd=tmp_path)
    assert re.fullmatch(f"samestep: {said}\ncuda:0\n", done.stderr), done.stderr


ASKS = "the script runs as one for a single process, without these variables; if it deals with ranks, or a library of "


@pytest.mark.parametrize(
    ("library", "call", "said", "code"),
    [
        (
            "def size(): return os.getenv('WORLD_SIZE', '1')",
            "asking.size()",
            "asking.py, line 2, reads WORLD_SIZE: ",
            0,
        ),
        ("def rank(): return int(os.environ['RANK'])", "asking.rank()", "KeyError: 'RANK'\nsamestep: ", 1),
        ("RANK = os.environ.get('RANK')", "asking.RANK", "", 0),  # as libraries do to know who prints
        ("def home(): return os.environ['PATH']", "asking.home()", "", 0),
        ("__name__ = 'transformers.loading'\ndef size(): return os.getenv('WORLD_SIZE')", "asking.size()", "", 0),
    ],
)
def test_a_library_that_asks_for_ranks_when_it_is_called_is_named_once(tmp_path, library, call, said, code):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "asking.py").write_text(f"import os\n{library}\n")
    path = script(tmp_path, f"import sys\nsys.path.append('lib')\nimport asking\nfor _ in range(3):\n    {call}\n")
    done = samestep("run", "--devices", "cpu:2", path, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stderr.count(ASKS) == (2 if code else bool(said)), done.stderr  # the line, and beside an error its note


@pytest.mark.parametrize(
    "source", [pytest.param(MULTI_PROCESS, id="multi-process"), pytest.param(PLAIN, id="plain, with --multi-process")]
)
def test_wrap_is_refused_for_scripts_that_deal_with_ranks(tmp_path, refused, source):
    single_process = ["--multi-process"] if source is PLAIN else []
    path = script(tmp_path, source)
    said = refused("run", "--devices", "cpu:2", *single_process, "--wrap", "net", path)
    assert said.startswith("samestep: error: --wrap is for one process, and ")
    assert len(said.splitlines()) == 1
    if source is MULTI_PROCESS:
        assert f"train.py, line {line_of(MULTI_PROCESS, 'init_process_group')}" in said


def test_a_seed_is_refused_for_a_program_that_seeds_itself(tmp_path, refused):
    path = script(tmp_path, "import samestep\n\nrun = samestep.Run(global_batch_size=4)\n")
    said = refused("run", "--devices", "cpu:2", "--seed", "1", path)
    assert said.startswith("samestep: error: got --seed 1 for a script that uses samestep itself (train.py, line 3")
    assert "samestep.Run(seed=1)" in said


@pytest.mark.parametrize("command", [("run", "--devices", "cpu:2"), ("verify", "--devices", "cpu:1,cpu:2")])
@pytest.mark.parametrize("source", ["import samestep\nrun = samestep.Run()", "from samestep import Trainer"])
def test_logical_devices_are_refused_for_a_script_that_uses_samestep_itself(tmp_path, refused, command, source):
    path = script(tmp_path, f"import os\nrank = os.environ['RANK']\n{source}\n")
    said = refused(*command, "--logical-devices", 4, path)
    assert "got --logical-devices 4 for a script that uses samestep itself (train.py, line " in said
    assert "samestep.Run(num_microbatches=4)" in said


LOST = """
    import psutil
    import torch
    from torch import nn

    model = nn.DataParallel(nn.Linear(4, 2).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model(torch.randn(8, 4).cuda()).sum().backward()
        optimizer.step()
        torch.save(model.module.state_dict(), f"step-{step}.pt")
        if step == 3:
            beside = psutil.Process().parent().children()
            next(each for each in beside if "worker 1/2" in " ".join(each.cmdline())).kill()
"""


def test_a_lost_worker_ends_a_script_with_the_name_of_what_it_saved_last(tmp_path):
    script(tmp_path, LOST)
    done = samestep("run", "--devices", "cpu:2", "train.py", cwd=tmp_path)
    assert done.returncode == 128 + 9
    assert "was ended by SIGKILL" in done.stderr
    assert f"the script last saved {tmp_path / 'step-3.pt'}: start it again from there" in done.stderr


def test_a_script_that_asks_a_terminal_for_its_size_gets_it(tmp_path):
    path = script(
        tmp_path,
        """
        import os

        rows, columns = os.popen("stty size", "r").read().split()
        print(rows, columns, *os.get_terminal_size())
        """,
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 90, 0, 0))
    try:
        command = [*SAMESTEP, "run", "--devices", "cpu:2", str(path)]
        ended = subprocess.run(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, timeout=100)
        said = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ended.returncode == 0, said
    assert "40 90 90 40" in said
