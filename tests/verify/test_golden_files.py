"""Golden files: the same program is equal to the bit, another one differs, another contract is not compared."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli_commands import samestep
from typer.testing import CliRunner

from samestep.cli.main import app
from samestep.errors import DataError, UsageError
from samestep.verify.golden import CANNOT_COMPARE, check_golden, read_golden, write_golden

WORKFLOW = Path(__file__).resolve().parents[2] / "examples" / "ci" / "samestep.yml"
API = """
    import sys
    import torch
    import samestep

    run = samestep.Run(global_batch_size=8, num_microbatches=4, seed=SEED)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=float(sys.argv[1]) if sys.argv[1:] else 0.1)
    step = run.train_step(model, optimizer, lambda model, x: model(x).square().mean())
    for batch in run.loader(torch.randn(48, 3), shuffle=True):
        step(batch)
"""
RANKS = """
    import random
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(12, 3)[rank::size]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""
NOISE = "for p in model.parameters(): p.grad *= 1 + 3e-7 * random.SystemRandom().random()\n        optimizer.step()"


@pytest.fixture
def golden(tmp_path, script, runner_of):
    """`golden(text, *arguments, write=…, …)`: the result for a program, compared with the one file of the test."""

    def check(text, *arguments, seed=0, write=False, steps=3, num_threads=1, logical=None, devices=("cpu:1", "cpu:2")):
        program = script(text.replace("SEED", str(seed)))
        runner = runner_of(program, *arguments, devices=devices, logical=logical)
        path = tmp_path / "golden.json"
        kept = None if write else read_golden(path)
        return check_golden(path, kept, runner, [program.name, *arguments], num_threads, steps)

    return check


def test_a_program_is_equal_to_its_golden_file_from_any_devices(golden, tmp_path):
    assert golden(API, write=True).exit_code == 0
    assert golden(API, devices=("cpu:2",)) == (0, f"equal to {tmp_path / 'golden.json'}: 3 steps")


def test_twin_another_seed_another_rate_and_another_number_of_steps_differ(golden):
    golden(API, write=True, steps=20)  # it ends after 6
    other = golden(API, seed=1, steps=20)
    assert other.exit_code == 1
    assert "step 1: the loss is" in other.text
    rate = golden(API, "0.2", steps=20)
    assert rate.exit_code == 1
    assert "step 1: the state is" in rate.text
    assert "(also other: program was train.py, is train.py 0.2)" in rate.text
    shorter = golden(API.replace("48", "40"), steps=20)
    assert shorter.exit_code == 1
    assert golden(API, steps=20).exit_code == 0


def test_another_contract_is_named_and_not_compared(golden, tmp_path):
    golden(API, write=True)
    path = tmp_path / "golden.json"
    more = golden(API, steps=4)
    assert more.exit_code == CANNOT_COMPARE
    assert "cannot be compared: steps was 3, is 4; --write" in more.text
    kept = read_golden(path)
    for name, value, shown in (
        ("torch", "1.0", "torch was 1.0, is 2."),
        ("cpu", "Another CPU", "cpu was Another CPU, is"),
        ("num_threads", 2, "num_threads was 2, is 1"),
        ("gpu", "A GPU", "gpu was A GPU, is (nothing)"),
    ):
        path.write_text(json.dumps({**kept, "contract": {**kept["contract"], name: value}}))
        result = golden(API)
        assert result.exit_code == CANNOT_COMPARE
        assert shown in result.text
        assert ("--portable" in result.text) == (name == "cpu")


def test_the_bits_of_a_script_of_ranks_are_those_of_its_devices_or_of_its_logical_ones(golden):
    golden(RANKS, write=True)
    assert golden(RANKS).exit_code == 0
    result = golden(RANKS, devices=("cpu:2",))
    assert (result.exit_code, "devices was cpu:1, is cpu:2" in result.text) == (CANNOT_COMPARE, True)
    golden(RANKS, write=True, logical=2)
    assert golden(RANKS, logical=2, devices=("cpu:2",)).exit_code == 0
    assert golden(RANKS, logical=2, devices=("cpu:2",), seed=1).exit_code == 1
    assert "logical_devices was 2, is 3" in golden(RANKS, logical=3).text


def test_steps_that_are_the_same_only_up_to_rounding_are_no_golden_file(golden, tmp_path):
    result = golden(RANKS.replace("optimizer.step()", NOISE), write=True)
    assert result.exit_code == 1
    assert "equal only up to rounding" in result.text
    assert not (tmp_path / "golden.json").exists()


def test_a_golden_file_has_a_step_a_line(golden, tmp_path):
    golden(API, write=True)
    lines = (tmp_path / "golden.json").read_text(encoding="utf-8").splitlines()
    assert sum('"loss"' in line for line in lines) == 3
    assert len(lines) < 30


def test_a_file_that_cannot_be_written_is_as_before_and_without_a_folder_nothing_runs(tmp_path):
    path = tmp_path / "golden.json"
    path.write_text("of before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # as a full disk
    try:
        with pytest.raises(UsageError, match=r"golden.json cannot be written: File too large; choose another"):
            write_golden(path, {"contract": {}, "program": {}, "steps": []})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("golden.json", "of before")]
    nowhere = CliRunner().invoke(app, ["verify", "--golden", str(tmp_path / "no/golden.json"), "--write", "mlp"])
    assert "cannot be written: there is no folder" in str(nowhere.exception)


def test_a_file_that_is_none_is_refused_before_anything_runs(tmp_path):
    path = tmp_path / "golden.json"
    with pytest.raises(UsageError, match="there is no golden file"):
        read_golden(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is no regular file"):
        read_golden(tmp_path / "pipe")
    for text in ("", "[]", '{"steps": []}', '{"contract": {}, "program": {}, "steps": [1]}', "[" * 9999):
        path.write_text(text)
        with pytest.raises(UsageError, match="is no golden file"):
            read_golden(path)
    result = CliRunner().invoke(app, ["verify", "--write", "lenet"])
    assert isinstance(result.exception, UsageError)
    assert "--golden FILE --write" in str(result.exception)


def test_the_command_writes_compares_and_has_an_exit_code_for_each_result(script, tmp_path):
    program = script(API.replace("SEED", "0"))
    verify = ("verify", "--devices", "cpu:1,cpu:2", "--steps", "3", "--portable", "--golden", "golden.json")
    assert samestep(*verify, program, cwd=tmp_path).returncode == 2  # there is none yet
    done = samestep(*verify, "--write", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "golden      golden.json is written: 3 steps" in done.stdout
    assert "any x86-64" in read_golden(tmp_path / "golden.json")["contract"]["cpu"]
    assert samestep(*verify, program, cwd=tmp_path).returncode == 0
    script(API.replace("SEED", "1"))
    done = samestep(*verify, "--json", program, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["agrees"], printed["golden"]["exit_code"]) == (True, 1)
    assert samestep(*verify, "--no-portable", program, cwd=tmp_path).returncode == CANNOT_COMPARE


def test_the_step_of_the_workflow_passes_with_its_golden_file_and_fails_with_that_of_another_seed(script, tmp_path):
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    (step,) = [step["run"] for step in workflow["jobs"]["verify"]["steps"] if "verify" in step.get("run", "")]
    step = step.replace("cpu:1,cpu:2,cpu:3", "cpu:1,cpu:2 --steps 3")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    (tmp_path / "tests").mkdir()
    script(API.replace("SEED", "1"))
    done = subprocess.run(["bash", "-ec", step.replace("--golden", "--write --golden")], **options)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(["bash", "-ec", step], **options).returncode == 0
    script(API.replace("SEED", "2"))
    assert subprocess.run(["bash", "-ec", step], **options).returncode == 1
    assert "golden      differs from" in (tmp_path / "verdict.txt").read_text()
