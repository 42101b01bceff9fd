"""What the workers' parent imports: all that a first step needs, once, and nothing heavy that it does not."""

import json
import subprocess
import sys

import pytest
from gpus import needs_fake_gpus, run

FIRST_STEP = """
import importlib, json, sys
from samestep.launcher.forkserver import PRELOADED
for name in PRELOADED:
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
    shorter = FIRST_STEP.replace("PRELOADED:", '[n for n in PRELOADED if n != "torch._dynamo"]:')
    monkeypatch.setitem(globals(), "FIRST_STEP", shorter)
    _, later = modules_of_a_first_step("torch.optim.SGD(model.parameters(), lr=0.1)")
    assert "torch._dynamo" in later
    assert len(later) > 100


UNASKED = """
    import importlib, os, sys
    from samestep.launcher.forkserver import PRELOADED
    from samestep.verify.runner import PRELOAD

    for name in (*PRELOADED, *PRELOAD, "samestep.recipes.job", "samestep.scripts.script"):
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
    assert run(UNASKED) == "2.0\n"
