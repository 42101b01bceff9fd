"""The golden file holds where it was written, and what moves a bit is noticed anywhere."""

import json
import os
import subprocess
import sys

import golden
import golden_cases
import pytest
import torch

from samestep.devices.portable import CAPS, PORTABLE_VARIABLE, why_not_portable

PART = [
    *(f"recipe {name} 32-true sgd replicate" for name in ("lenet", "mlp", "vgg", "gpt")),
    *("recipe gpt bf16-mixed adam replicate", "recipe simplenet 16-mixed fused replicate"),
    *("feature scheduled", "feature clipped", "feature masked loss", "feature gan"),
    *("feature five microbatches, unequal shares", "feature overflow skipped", "resume loop", "ledger steps"),
]
QUICK = ["feature clipped", "recipe mlp 32-true sgd replicate"]


def only(names):
    """The words that choose some entries, which run in this process."""
    return ["--jobs", "0", *(word for name in names for word in ("--only", name))]


@pytest.fixture
def _recorded_here():
    recorded = json.loads(golden.FILE.read_text())["kind"]
    here = golden.kind(portable=why_not_portable("cpu") is None)
    if recorded != here:
        pytest.skip(f"golden.json holds for {recorded}; this machine is {here}")


def run(*words):
    """Runs the command in a process of its own, whose kernels are portable."""
    unset = {PORTABLE_VARIABLE, *CAPS}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run([sys.executable, golden.__file__, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def own_file(tmp_path_factory):
    """A golden file of two entries, of this machine."""
    path = tmp_path_factory.mktemp("golden") / "golden.json"
    golden.write(path, golden.run_matrix(QUICK, golden.SEED, 0))
    return path


@pytest.mark.usefixtures("_recorded_here")
def test_a_part_of_the_matrix_has_the_recorded_bits_on_one_to_three_ranks():
    run(*only(PART))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_recorded_here")
def test_the_whole_matrix_has_the_recorded_bits():
    run()


def test_the_same_run_is_equal(own_file, capsys):
    assert golden.main(["--file", str(own_file), *only(QUICK)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "2", "0", "0", "0", "0"]


def test_twin_another_seed_is_different(own_file, capsys):
    assert golden.main(["--file", str(own_file), "--seed", "4", *only(QUICK)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "0", "2", "0", "0", "0"]


def test_twin_a_step_that_is_off_by_a_millionth_is_different(own_file, capsys, monkeypatch):
    altered = lambda p: torch.optim.SGD(p, lr=0.05 * (1 + 1e-6), momentum=0.9, weight_decay=0.01)  # noqa: E731
    monkeypatch.setitem(golden_cases.OPTIMIZERS, "sgd", altered)
    assert golden.main(["--file", str(own_file), *only(QUICK)]) == 1
    assert "different  feature clipped: " in capsys.readouterr().out


def test_twin_ranks_that_disagree_have_failed(own_file, capsys, monkeypatch):
    real = golden_cases.take_steps
    by_rank = lambda step, batches: [*real(step, batches), step.communicator.rank // 2]  # noqa: E731
    monkeypatch.setattr(golden_cases, "take_steps", by_rank)
    assert golden.main(["--file", str(own_file), *only(QUICK)]) == 1
    assert "disagree: " in capsys.readouterr().out


def test_an_entry_that_is_no_longer_run_is_missing(own_file, capsys, monkeypatch):
    monkeypatch.delitem(golden_cases.CASES, QUICK[0])
    assert golden.main(["--file", str(own_file), *only(QUICK)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "1", "0", "0", "1", "0"]


def test_on_another_kind_of_machine_nothing_is_compared(own_file, tmp_path, capsys):
    other = json.loads(own_file.read_text())
    other["kind"]["cpu"] = "another one"
    (tmp_path / "golden.json").write_text(json.dumps(other))
    assert golden.main(["--file", str(tmp_path / "golden.json"), *only(QUICK)]) == 2
    assert "use --against COMMIT" in capsys.readouterr().out


def test_the_entries_of_the_file_are_those_of_the_matrix_and_no_two_recipes_end_alike():
    digests = json.loads(golden.FILE.read_text())["digests"]
    assert list(digests) == sorted(golden_cases.CASES)
    ends = {(case.group or name, digests[name]) for name, case in golden_cases.CASES.items() if name[:6] == "recipe"}
    assert len(ends) == len({group for group, _ in ends})
    # AdamW's two kernels compute the same update, and may round it alike.
    kinds = {(group.replace("fused", "adamw"), digest) for group, digest in ends}
    assert len(kinds) == len({digest for _, digest in ends}), "a step that was not taken"


@pytest.mark.slow
def test_a_commit_is_compared_with_the_working_tree():
    head = subprocess.run(["git", "cat-file", "-e", "HEAD:tests/golden/golden.py"], cwd=golden.ROOT)
    if head.returncode:
        pytest.skip("this is no git checkout with the golden files in it")
    words = ["--against", "HEAD", "--only", "feature clipped", "--only", "feature gan", "--jobs", "1"]
    assert run(*words).splitlines()[-1].split() == ["all", "2", "0", "0", "0", "0"]
