"""Portable kernels in real processes: the same bits by every starter, refusals, and the contract."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samestep.checkpoint.contract_diff import differences
from samestep.cli.options import made_portable
from samestep.devices import portable
from samestep.devices.portable import CAPS, check_portable, chosen_portable, portable_variables
from samestep.devices.selection import select
from samestep.errors import UsageError

HERE = "cpu" if platform.machine() == "x86_64" and sys.platform == "linux" else "none"
pytestmark = pytest.mark.skipif(HERE == "none", reason="kernels are portable on x86-64 CPUs under Linux")

PROGRAM = """
import sys
import numpy as np
import torch
from torch import nn
import samestep

if "early" in sys.argv:
    torch.ones(3).exp()
run = samestep.Run(12, 4)
model = nn.Sequential(nn.Linear(20, 33), nn.GELU(), nn.Dropout(0.1), nn.Linear(33, 3))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
data = torch.randn(40, 20), torch.arange(40) % 3
loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
with samestep.Trainer(run, model, optimizer, loss, run_dir=sys.argv[1]) as trainer:
    trainer.fit(data, 3 if "resume" in sys.argv else 2, resume="auto" if "resume" in sys.argv else None)
    product = np.log(np.linspace(1, 2, 4001)).reshape(-1, 1)
    run.print("DIGEST", trainer.digest, hash((product.T @ product).tobytes()))
"""


def end_of(folder):
    """The digest of a run's final state, by its ledger."""
    return json.loads((folder / "ledger.jsonl").read_text().splitlines()[-1])["digest"]


@pytest.fixture
def start(tmp_path):
    """Starts the program in a folder; what it printed, and on stderr."""
    (tmp_path / "train.py").write_text(PROGRAM)

    def start(*words, code=0, **variables):
        unset = {"SAMESTEP_PORTABLE", *CAPS}
        env = {name: value for name, value in os.environ.items() if name not in unset}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **variables}
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stdout + done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("DIGEST")]
        return " ".join(lines), done.stderr

    return start


RUN = ("-m", "samestep", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
ON = {"SAMESTEP_PORTABLE": "1"}


def test_every_starter_and_number_of_devices_gives_the_same_bits_and_other_kernels_others(start, tmp_path):
    expected, said = start(*RUN, "--portable", "--devices", "cpu:1", "train.py", "one")
    assert "NumPy" not in said
    assert start(*RUN, "--devices", "cpu:3", "train.py", "three", **ON)[0] == expected
    digest = expected.split()[1]
    for number, words in enumerate([(), TORCHRUN]):
        found, said = start(*words, "train.py", number, **ON)
        assert found.split()[1] == digest
        assert "NumPy was imported before" in said
    found, said = start("train.py", "capped", **ON, **CAPS)
    assert (found, "NumPy" in said) == (expected, False)
    plain, _ = start("train.py", "plain")
    assert start(*RUN, "--no-portable", "--devices", "cpu:2", "train.py", "unportable", **ON)[0] == plain
    assert plain.split()[1] != digest
    one, other = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("one", "plain"))
    assert one["portable"].startswith("on")
    assert "portable" not in other
    changes = {change.field: change for change in differences(other, one)}
    assert changes["portable"].breaks


def test_a_run_is_not_resumed_in_the_other_mode_and_is_replayed_in_its_own(start):
    start("train.py", "portable", **ON, **CAPS)
    start("train.py", "native")
    for folder, variables in (("portable", {}), ("native", ON)):
        _, said = start("train.py", folder, "resume", code=1, **variables)
        assert "portable:" in said
        assert "decides whether kernels are alike on all CPUs" in said
    start("train.py", "portable", "resume", **ON, **CAPS)
    for folder in ("portable", "native"):
        for words in (("replay", folder, "--step", "5"), ("audit", folder), ("audit", folder, "--devices", "cpu:2")):
            assert "NumPy was imported" not in start("-m", "samestep", *words)[1]


OF_PROCESSES = """
import sys
import torch

torch.distributed.init_process_group("gloo")
if torch.distributed.get_rank() == 0:
    kernels = sys.modules.get("samestep.engine.portable_kernels")
    print("DIGEST", bool(kernels and kernels.is_portable()))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("words", [("cpu:2",), ("cpu:1", "--logical-devices", "2")])
def test_a_script_of_several_processes_has_the_kernels_by_the_option_alone(start, tmp_path, words):
    (tmp_path / "train.py").write_text(OF_PROCESSES)
    assert start(*RUN, "--portable", "--devices", *words, "train.py")[0] == "DIGEST True"
    assert start(*RUN, "--devices", *words, "train.py")[0] == "DIGEST False"


def test_a_recipe_is_portable_by_its_option_and_stays_so(start, tmp_path):
    words = ("-m", "samestep", "train", "lenet", "--max-steps", "2", "--data", "digits")
    start(*words, "--run-dir", "run", "--portable", "--devices", "cpu:2")
    start(*words[:4], "--data", "digits", "--resume", "run", "--max-steps", "3", "--devices", "cpu:1")
    recipe = ("-m", "samestep.recipes.lenet", "--run-dir", "torchrun", "--max-steps", "3")
    start(*TORCHRUN, *recipe, **ON, **CAPS)
    assert end_of(tmp_path / "run") == end_of(tmp_path / "torchrun")
    _, said = start(*words[:4], "--resume", "run", "--max-steps", "4", "--no-portable", code=2)
    assert "portable:" in said
    assert "--no-portable" in said


def test_a_cpu_without_such_kernels_trains_by_its_own_and_a_line_says_so(monkeypatch, tmp_path, capsys):
    about = tmp_path / "cpuinfo"
    about.write_text("processor : 0\nflags : fpu sse4_2 avx\n")
    monkeypatch.setattr(portable.why_not_portable, "__defaults__", (about,))
    selection = select("cpu:2")
    assert made_portable(selection, None, default=True) is selection
    line = "--portable, the default, is left out: this CPU has no avx2 and no fma; the bits then "
    line += "depend on the kind of CPU\n"
    assert capsys.readouterr().err.endswith(line)
    assert made_portable(selection, None) is selection
    assert made_portable(selection, False, default=True).variables == {"SAMESTEP_PORTABLE": "0"}
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the digests are those of PyTorch 2.13")
def test_the_digest_of_the_documentation_is_that_of_this_machine(start, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    shown = re.findall(r"^samestep (train lenet .*?) +# digest +(\w+)…$", page, re.MULTILINE)
    (_, other), (words, digest) = shown  # on one device and on three, as recipes in tests/engine/test_invariance.py
    assert other == digest
    start("-m", "samestep", *words.split(), "--run-dir", "run")
    assert end_of(tmp_path / "run").startswith(digest)


def test_code_for_this_cpu_is_refused(start, tmp_path):
    more = "loss, run_dir=sys.argv[1], compile=True"
    (tmp_path / "train.py").write_text(PROGRAM.replace("loss, run_dir=sys.argv[1]", more))
    assert "torch.compile generates code for the CPU that it runs on" in start("train.py", "run", code=1, **ON)[1]


def test_what_was_computed_before_is_refused(start):
    _, said = start("train.py", "run", "early", code=1, **ON)
    assert "had chosen kernels for this CPU before" in said


def test_devices_and_cpus_without_such_kernels_are_refused(tmp_path):
    about = tmp_path / "cpuinfo"
    about.write_text("processor : 0\nflags : fpu sse4_2 avx\n")
    with pytest.raises(UsageError, match=r"this CPU has no avx2 and no fma; leave it out \(--no-portable\)"):
        check_portable("cpu", about)
    with pytest.raises(UsageError, match="the devices are cuda's"):
        portable_variables("cuda", True)
    assert portable_variables("cuda", None) == {}
    assert chosen_portable("cuda", None, default=True) is None
    about.write_text("processor : 0\nflags : fpu avx2 fma\n")
    check_portable("cpu", about)


def test_another_value_of_the_variable_is_refused(start):
    _, said = start("train.py", "run", code=1, SAMESTEP_PORTABLE="yes")
    assert "SAMESTEP_PORTABLE='yes'" in said
    assert not Path("run").exists()
