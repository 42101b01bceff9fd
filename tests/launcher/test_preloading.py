"""What the workers' parent imports: all that their program needs, once, and nothing heavy that it does not."""

import json
import subprocess
import sys
import textwrap

import psutil
import pytest
from gpus import environment, needs_fake_gpus
from launcher.conftest import MAIN

from samestep.launcher.os_processes import EarlyServer, server_variables

FIRST_STEP = """
import importlib, json, sys
from samestep.launcher.job import TRAINING
for name in ("torch.distributed", *TRAINING):
    importlib.import_module(name)
before = set(sys.modules)
import torch, samestep
run = samestep.Run(global_batch_size=8, seed=0)
model = torch.nn.Linear(3, 1)
step = run.train_step(model, {optimizer}, lambda m, b: m(b).mean())
for batch in run.loader(torch.rand(8, 3), shuffle=True):
    step(batch)
print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))
"""
HEAVY = {"matplotlib", "tensorboard", "sklearn", "scipy", "pandas", "transformers", "PIL", "IPython", "rich", "typer"}


@pytest.fixture
def anew(starter):
    """Starts programs anew, not as forks of one that has imported all."""
    starter.start = lambda *arguments: starter.start_program(MAIN, "run", *arguments)
    return starter


def modules_of_a_first_step(optimizer):
    program = FIRST_STEP.format(optimizer=optimizer)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_after_the_fork_a_first_step_imports_next_to_nothing():
    preloaded, later = modules_of_a_first_step("torch.optim.AdamW(model.parameters())")
    assert not HEAVY & {name.partition(".")[0] for name in [*preloaded, *later]}
    assert [name for name in later if name.partition(".")[0] not in ("samestep", "torch")] == []
    assert len([name for name in later if name.startswith("torch")]) < 5


@pytest.mark.slow
def test_twin_without_torch_dynamo_every_worker_would_import_it(monkeypatch):
    shorter = FIRST_STEP.replace("*TRAINING)", "TRAINING[-1])")
    monkeypatch.setitem(globals(), "FIRST_STEP", shorter)
    _, later = modules_of_a_first_step("torch.optim.SGD(model.parameters(), lr=0.1)")
    assert "torch._dynamo" in later
    assert len(later) > 100


TRIVIAL = """
import gc, json, os, sys
def note(place):
    module = sys.modules.get("torch._dynamo")
    # What is there at the fork is frozen, and not among what Python may collect.
    own = any(each is module for each in gc.get_objects())
    facts[place] = "absent" if module is None else "own" if own else "shared"
facts = {"collects": gc.isenabled()}
note("start")
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
"""
TOLD = """
note("end")
with open(f"facts-{dist.get_rank()}.json", "w") as file:
    json.dump(facts, file)
dist.destroy_process_group()
"""
PLAIN_STEP = "torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)\n"
HIDDEN_STEP = 'getattr(torch, "op" + "tim").SGD([torch.ones(2, requires_grad=True)], lr=0.1)\n'


@pytest.mark.parametrize(
    ("step", "start", "end"),
    [("", "absent", "absent"), (PLAIN_STEP, "shared", "shared"), (HIDDEN_STEP, "absent", "own")],
    ids=["without an optimizer", "with one", "twin: with one that the script's text does not show"],
)
def test_workers_share_torch_dynamo_if_they_need_it(anew, step, start, end):
    anew.script("train.py", TRIVIAL + step + TOLD)
    done = anew.run("--devices", "cpu:2", "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    for rank in range(2):
        facts = json.loads((anew.folder / f"facts-{rank}.json").read_text())
        assert facts == {"collects": True, "start": start, "end": end}


LATE = """
import importlib, random, sys
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 2)).to(device)
optimizers = importlib.import_module("torch.op" + "tim")
print("torch._dynamo" in sys.modules)
optimizer = optimizers.SGD(model.parameters(), lr=0.1, momentum=0.9)
print(random.random(), random.Random().random(), np.random.rand(), np.random.default_rng().random())
images, labels = torch.randn(64, 8, device=device), torch.randint(0, 2, (64,), device=device)
for first in range(0, 64, 16):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[first : first + 16]), labels[first : first + 16])
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
print([parameter.sum().item().hex() for parameter in model.parameters()])
"""


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_single_process_script_has_the_same_bits_whenever_torch_dynamo_is_imported(anew, devices):
    """Here "optimizer" is a name in the text; without it nothing shows the optimizer before it is built."""
    anew.script("early.py", LATE)
    anew.script("late.py", LATE.replace("optimizers", "them").replace("optimizer", "it"))
    outputs = []
    for name, is_early in (("early.py", "True"), ("late.py", "False")):
        done = anew.run("--devices", devices, "--logical-devices", "4", "--seed", "3", name)
        assert done.returncode == 0, done.stderr
        first, *rest = done.stdout.splitlines()
        assert first == is_early
        outputs.append(rest)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 6


WATCHED = """
import sys
from samestep.__main__ import main
from samestep.launcher.os_processes import ServerProcess
start = ServerProcess.start
def noted(*args):
    print("with typer" if "typer" in sys.modules else "before typer", file=sys.stderr)
    return start(*args)
ServerProcess.start = noted
main()
"""


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["run", "--devices", "cpu:2"], ["before typer"], 0),
        (["run", "--devices", "cpu:2", "--num_threads", "2"], ["with typer"], 0),
        (["run", "--devices", "cpu:1", "--start-method=spawn"], ["with typer"], 0),
        (["run", "--devices", "none"], ["before typer", "samestep: error: cannot read 'none' as devices;"], 2),
        (["run", "--help"], [], 0),
        (["verify", "--devices", "none"], [], 2),
    ],
)
def test_one_server_starts_and_before_all_else_if_the_command_line_shows_its_variables(tmp_path, words, said, code):
    script = tmp_path / "script.py"
    script.write_text("pass\n")
    command = [sys.executable, "-c", WATCHED, *words, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if "typer" in line or (words[0] == "run" and "error" in line)]
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))


def test_an_early_server_is_taken_once_and_only_with_its_variables_and_else_killed():
    before = set(psutil.Process().children())
    early = EarlyServer(server_variables(1))
    (server,) = set(psutil.Process().children()) - before
    assert early.take_server(server_variables(2)) is None
    assert not server.is_running()
    assert early.take_server(server_variables(1)) is None
    early.close()


UNASKED = """
    import importlib, os, sys
    from samestep.launcher.job import TRAINING
    from samestep.verify.program_runner import PRELOAD

    own = "samestep.recipes.lenet", "samestep.scripts.single_process"
    for name in ("torch.distributed", *TRAINING, *PRELOAD, *own):
        importlib.import_module(name)
    import torch

    if os.fork() == 0:
        torch.cuda.init()
        print(torch.ones(2, device="cuda:1").sum().item(), flush=True)
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@needs_fake_gpus
def test_what_is_imported_before_the_fork_starts_no_gpu_driver():
    """A driver that has been asked, if only for the number of GPUs, is lost to forks."""
    command = [sys.executable, "-c", textwrap.dedent(UNASKED)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
