"""`samestep train --resume`, as a user types it: the run goes on with its own options, or a sentence says why not."""

import json
import os
import shutil

import pytest
from cli_commands import samestep, write_table

from samestep.runs.ledger import from_line


def digest(done):
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("digest"))
    return line.split()[-1]


def entries(folder):
    return [from_line(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]


def content(folder):
    """Every file and folder, when it was last changed, and what is in it."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (folder, *folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with a run that has ended, `a`, of 8 steps with options of its own, and its digest."""
    folder = tmp_path_factory.mktemp("recorded")
    write_table(folder / "table.csv")
    done = samestep(
        *("train", "mlp", "--data", folder / "table.csv", "--epochs", 4, "--seed", 3, "--lr", 0.02),
        *("--devices", "cpu:2", "--shares", "2,1", "--run-dir", "a"),
        *("--checkpoint-steps", 3, "--keep", 9, "--digest-every", 1),
        cwd=folder,
    )
    return folder, digest(done)


@pytest.fixture
def folder(recorded, tmp_path):
    """A copy of it, to change."""
    shutil.copytree(recorded[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_checkpoint_is_gone_on_from_in_another_folder_on_other_devices_with_the_run_s_options(recorded, folder):
    before = content(folder / "a")
    resume = ("--resume", "a/checkpoints/step-00000003", "--run-dir", "b", "--devices", "cpu:1")
    assert digest(samestep("train", *resume, cwd=folder)) == recorded[1]
    assert content(folder / "a") == before
    steps = {entry["step"]: entry for entry in entries(folder / "a") if "event" not in entry}
    again = [entry for entry in entries(folder / "b") if "event" not in entry]
    assert [entry["step"] for entry in again] == [4, 5, 6, 7, 8]
    for entry in again:
        same = {"world_size": 2, "seconds": None}
        assert {**entry, **same} == {**steps[entry["step"]], **same}
    first, second = (json.loads((folder / name / "run.json").read_text())["job"] for name in "ab")
    assert {**first, "keep": 9} == {**second, "shares": [2, 1]}
    assert "shares" not in second, "they were those of the devices"


@pytest.mark.slow
def test_auto_takes_up_the_newest_run_that_did_not_end_and_begins_a_new_one_after_that(recorded, folder):
    (folder / "runs").mkdir()
    (folder / "a").rename(folder / "runs" / "mine")
    (folder / "runs" / "mine" / "result.json").unlink()
    shutil.rmtree(folder / "runs" / "mine" / "checkpoints" / "step-00000008")
    (folder / "runs" / "other").mkdir()
    (folder / "runs" / "other" / "run.json").write_text('{"recipe": "lenet"}')
    done = samestep("train", "mlp", "--resume", "auto", "--devices", "cpu:3", cwd=folder)
    assert digest(done) == recorded[1]
    assert "resumed from step-00000006" in done.stdout
    assert (folder / "runs" / "mine" / "result.json").exists()
    done = samestep(
        *("train", "mlp", "--resume", "auto", "--devices", "cpu:1"), *("--data", "table.csv", "--epochs", 1), cwd=folder
    )
    assert "resumed" not in done.stdout
    assert digest(done) != recorded[1]
    assert len(list((folder / "runs").glob("mlp-*"))) == 1


def test_a_changed_contract_is_listed_once_and_changes_nothing(folder):
    before = content(folder / "a")
    done = samestep("train", "--resume", "a", "--seed", 4, "--num-threads", 2, "--devices", "cpu:2", cwd=folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for line in ("seed: 3 before, 4 now", "num_threads: 1 before, 2 now", "--allow-contract-change"):
        assert done.stderr.count(line) == 1, done.stderr
    assert content(folder / "a") == before


def test_what_only_the_workers_find_changed_is_bad_usage_too_and_the_folder_keeps_its_time(folder):
    rows = (folder / "table.csv").read_text().splitlines()
    (folder / "copy.csv").write_text("\n".join(rows[:-40]) + "\n")
    before = (folder / "a").stat().st_mtime_ns
    done = samestep("train", "--resume", "a", "--data", "copy.csv", "--devices", "cpu:1", cwd=folder)
    assert done.returncode == 2
    assert "these decide the bits:" in done.stderr
    assert "num_samples: 160 before, 128 now" in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "a").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_changed_contract_that_is_allowed_is_written_down_and_more_epochs_are_kept(recorded, folder):
    changed = ("--lr", 0.01, "--allow-contract-change", "--epochs", 5)
    done = samestep("train", "--resume", "a", *changed, "--devices", "cpu:1", cwd=folder)
    assert "changed since the checkpoint: lr: 0.02 -> 0.01" in done.stdout
    assert digest(done) != recorded[1]
    (event,) = (entry for entry in entries(folder / "a") if entry.get("event") == "contract_change")
    assert (event["step"], event["fields"]) == (8, [["lr", 0.02, 0.01]])
    assert [entry["lr"] for entry in entries(folder / "a") if "event" not in entry][8:] == [[(0.01).hex()]] * 2
    job = json.loads((folder / "a" / "run.json").read_text())["job"]
    assert (job["epochs"], job["lr"], job["seed"]) == (5, 0.01, 3)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ["--resume", "nope"],
            "nope is not there; resume (--resume) takes the folder of a run, a checkpoint in one, or auto",
        ),
        (["--resume", "table.csv"], "table.csv"),
        (["--resume", "a/checkpoints"], "holds no run"),
        (["--resume", "a/checkpoints/step-00000099"], "step-00000099 is not there"),
        (["--resume", "auto"], "there is no recipe to train; give one of"),
        (["lenet", "--resume", "a"], "got the recipe lenet, and a is a run of mlp; leave it out"),
        (["--resume", "a", "--run-dir", "b"], "b is not empty"),
        (["--resume", "other"], "other is not a run of `samestep train`; the program that made it can resume it"),
        (["--resume", "broken"], "broken/run.json cannot be read"),
        (["--resume", "a", "--epochs", "0"], "got epochs=0; it must be 1 or more (--epochs)"),
    ],
)
def test_a_mistake_gets_one_sentence_before_anything_starts(recorded, tmp_path, monkeypatch, refused, args, sentence):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "table.csv"):
        os.symlink(recorded[0] / name, name)
    for name, text in (("b/mine", ""), ("other/run.json", "{}"), ("broken/run.json", "{")):
        os.makedirs(os.path.dirname(name))
        with open(name, "w") as file:
            file.write(text)
    said = refused("train", *args)
    assert said.startswith("samestep: error: ")
    assert sentence in said


def test_a_run_of_an_options_file_goes_on_with_its_schedule_its_metric_and_its_end(tmp_path):
    """The command line comes before the file; a resumed run, and a replay, need neither."""
    write_table(tmp_path / "table.csv")
    (tmp_path / "run.toml").write_text(
        'recipe = "mlp"\ndata = "table.csv"\nscheduler = "cosine"\nwarmup-steps = 2\nmax_steps = 99\n'
        'eval-every = 2\nbest = "rmse:max"\npatience = 7\nepochs = 9\n'
    )
    options = ("--max-steps", 7, "--checkpoint-steps", 3, "--digest-every", 1, "--keep", 9)
    whole = digest(samestep("train", "--config", "run.toml", *options, "--run-dir", "a", cwd=tmp_path))
    steps = [entry for entry in entries(tmp_path / "a") if "event" not in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 8))
    assert len({tuple(entry["lr"]) for entry in steps}) == 7
    job = json.loads((tmp_path / "a" / "run.json").read_text())["job"]
    assert (job["max_steps"], job["best"], job["patience"], job["eval_every"]) == (7, "rmse:max", 7, 2)
    resume = ("--resume", "a/checkpoints/step-00000003", "--run-dir", "b", "--devices", "cpu:1")
    assert digest(samestep("train", *resume, cwd=tmp_path)) == whole
    done = samestep("replay", "a", "--step", 5, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = samestep("train", "--resume", "a", "--scheduler", "linear", cwd=tmp_path)
    assert done.returncode == 2
    assert "scheduler" in done.stderr
