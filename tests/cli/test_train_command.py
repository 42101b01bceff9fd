"""`samestep train`, as a user types it: the same digest on every number of devices, and sentences for mistakes."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from cli_commands import samestep, write_table
from safetensors import safe_open

from samestep.devices.portable import portable_variables
from samestep.devices.selection import cpu_workers_for
from samestep.recipes import mlp
from samestep.recipes.catalog import NAMES
from samestep.runs.ledger import from_line

CAPS = portable_variables("cpu", True)  # which a launcher sets before NumPy is imported


def digest_of(done):
    """The digest that a run printed at its end."""
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("digest"))
    return line.split()[-1]


def entries(folder):
    """The steps and the events of a run's ledger."""
    lines = [from_line(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    return [line for line in lines if "event" not in line], [line for line in lines if "event" in line]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("tables") / "table.csv")


def test_lenet_on_real_images_gives_one_digest_on_all_numbers_of_devices(shared_data, tmp_path):
    words = ("--data", shared_data / "fashion-mnist", "--num-microbatches", 4, "--max-steps", 8)
    done = [samestep("train", "lenet", *words, "--devices", f"cpu:{count}", cwd=tmp_path) for count in (1, 3)]
    assert len({*map(digest_of, done)}) == 1


@pytest.fixture(scope="module")
def alone(tables, tmp_path_factory):
    """The folder of a run of two epochs on one device, and its digest."""
    folder = tmp_path_factory.mktemp("alone") / "r"
    words = ("--data", tables, "--epochs", 2, "--devices", "cpu:1", "--run-dir", folder, "--checkpoint-steps", 1)
    return folder, digest_of(samestep("train", "mlp", *words, cwd=folder.parent))


def test_the_command_is_samestep_run_of_the_script_whatever_starts_it(tables, tmp_path, alone):
    words = ("--data", tables, "--epochs", 2)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for number, command in enumerate(((), torchrun)):
        python = (sys.executable, *command, "-m", "samestep.recipes.mlp")
        done = samestep(*words, "--run-dir", str(number), cwd=tmp_path, command=python, **CAPS)
        assert digest_of(done) == alone[1]
    for number, script in (("2", ("-m", "samestep.recipes.mlp")), ("3", ("--portable", mlp.__file__))):
        done = samestep("run", "--devices", "cpu:2", *script, *words, "--run-dir", number, cwd=tmp_path)
        assert digest_of(done) == alone[1]


def test_a_copy_with_another_layer_has_its_own_digest_the_same_on_any_devices(tables, tmp_path, alone):
    text = Path(mlp.__file__).read_text()
    assert "nn.ReLU(), nn.Linear(16, 32)" in text
    (tmp_path / "my_mlp.py").write_text(text.replace("nn.ReLU(), nn.Linear(16, 32)", "nn.Tanh(), nn.Linear(16, 32)"))
    words = ("my_mlp.py", "--data", tables, "--epochs", 2)
    found = [digest_of(samestep("run", "--devices", f"cpu:{count}", *words, cwd=tmp_path)) for count in (1, 3)]
    assert found[0] == found[1] != alone[1]
    assert len(list((tmp_path / "runs").glob("my_mlp-*"))) == 2


def test_a_run_leaves_its_folder_and_says_where_and_another_seed_gives_another_digest(tables, tmp_path, alone):
    done = samestep("train", "mlp", "--data", tables, "--epochs", 2, "--seed", 1, "--run-dir", "here", cwd=tmp_path)
    assert digest_of(done) != alone[1]
    folder = tmp_path / "here"
    contract = json.loads((folder / "run.json").read_text())
    assert contract["num_microbatches"] == 4
    assert contract["command"][:3] == ["python", "-m", "samestep.recipes.mlp"]
    ledger, events = entries(folder)
    assert [line["event"] for line in events] == ["start", "checkpoint", "end"]
    assert [entry["step"] for entry in ledger] == list(range(1, len(ledger) + 1))
    assert sum(entry["num_samples"] for entry in ledger) == 2 * 160
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").iterdir())
    with safe_open(folder / "weights.safetensors", "pt") as weights:
        assert all(not name.startswith("module.") for name in weights.keys())  # noqa: SIM118 - no dict
    assert [line for line in done.stdout.splitlines() if line.startswith("epoch 2, time ")]
    assert "run      here" in done.stdout


def test_a_sharded_run_goes_on_on_one_device_and_ends_with_its_digest(tables, tmp_path, alone):
    words = ("mlp", "--data", tables, "--run-dir", "run")
    first = samestep("train", *words, "--epochs", 1, "--devices", "cpu:2", "--strategy", "sharded", cwd=tmp_path)
    digest_of(first)
    ended = samestep("train", *words, "--epochs", 2, "--devices", "cpu:1", "--resume", "run", cwd=tmp_path)
    assert "resumed from" in ended.stdout
    assert digest_of(ended) == alone[1]


def test_auto_takes_up_the_newest_run_that_did_not_end_and_begins_a_new_one_after_that(tables, tmp_path, alone):
    shutil.copytree(alone[0], tmp_path / "runs" / "mlp-1")
    shutil.copytree(alone[0], tmp_path / "runs" / "mlp-2")
    ledger = tmp_path / "runs" / "mlp-1" / "ledger.jsonl"
    ledger.write_bytes(b"".join(line for line in ledger.read_bytes().splitlines(True) if b'"end"' not in line))
    words = ("train", "mlp", "--data", tables, "--epochs", 2, "--resume", "auto", "--devices", "cpu:1")
    first = samestep(*words, cwd=tmp_path)
    assert digest_of(first) == alone[1]
    assert "run      runs/mlp-1" in first.stdout
    assert "resumed from" in first.stdout
    second = samestep(*words, cwd=tmp_path)
    assert digest_of(second) == alone[1]
    assert "resumed from" not in second.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_a_changed_contract_is_listed_once_and_changes_nothing(tables, tmp_path, alone):
    shutil.copytree(alone[0], tmp_path / "a")
    before = (tmp_path / "a" / "ledger.jsonl").read_bytes()
    done = samestep("train", "mlp", "--data", tables, "--epochs", 3, "--resume", "a", "--lr", 0.5, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("these decide the bits:") == 1
    assert "Traceback" not in done.stderr
    assert (tmp_path / "a" / "ledger.jsonl").read_bytes() == before


def test_without_a_name_the_recipes_are_listed_and_help_after_one_is_its_own(tmp_path):
    done = samestep("train", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(NAMES)
    helped = samestep("train", "gpt", "--devices", "cpu:1", "--help", cwd=tmp_path)
    assert helped.returncode == 0, helped.stderr
    assert "--head-width" in helped.stdout


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["lenett"], "did you mean 'lenet'"),
        (["lenet", "--devices", "cpu:0"], "cpu"),
        (["lenet", "--devices", "gpu9"], "gpu9"),
    ],
)
def test_a_mistake_gets_one_sentence_before_anything_starts(args, sentence, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    said = refused("train", *args)
    assert said.startswith("samestep: error: ")
    assert sentence in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["lenet", "--num-microbatches", "2", "--devices", "cpu:3"], "use num_microbatches=3 or more"),
        (["lenet", "--seed", "x"], "argument --seed: got x; it must be a whole number, 0 or more"),
        (["lenet", "--data", "nowhere"], "got --data nowhere; needed: digits, or a folder of IDX files"),
        (["gpt", "--data", "nothing.txt"], "nothing.txt"),
        (["lenet", "--resume", "nope"], "nope is not there; resume (--resume) takes a run's folder"),
    ],
)
def test_a_mistake_in_a_recipe_s_arguments_gets_one_sentence(args, sentence, tmp_path):
    done = samestep("train", "--devices", "cpu:2", *args, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert done.stderr.count(sentence) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def one_sentence(done, *words):
    """A failure told once, in a sentence, without a traceback."""
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert done.stderr.count(word) == 1, done.stderr


def test_a_loss_that_is_not_finite_names_step_microbatch_and_samples(tables, tmp_path):
    done = samestep("train", "mlp", "--data", tables, "--lr", "1e30", "--run-dir", "r", cwd=tmp_path)
    one_sentence(done, ": not finite: the loss of microbatch 0 (", "set max_grad_norm")
    shown = done.stderr.partition("sample ids ")[2].partition(")")[0]
    ids = [int(number) for number in shown.split(", ")]
    assert len(set(ids)) == len(ids) > 0
    assert all(0 <= number < 160 for number in ids), "of the 160 to train on"
    assert [step["step"] for step in entries(tmp_path / "r")[0]] == [1]


def test_a_folder_with_other_things_is_left_alone(tables, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("mine")
    done = samestep("train", "mlp", "--data", tables, "--run-dir", "r", cwd=tmp_path)
    one_sentence(done, "is not empty")
    assert [entry.name for entry in (tmp_path / "r").iterdir()] == ["thesis.tex"]


SHARED = """import sys
import samestep
run = samestep.Run(64, {arguments})
print(run.communicator.world_size)
"""


def test_auto_is_a_worker_a_core_and_a_script_alone_is_told_so(tmp_path):
    script = tmp_path / "train.py"
    for arguments, cores in (("", cpu_workers_for(8)), ("num_microbatches=1", 1)):
        script.write_text(SHARED.format(arguments=arguments))
        workers = samestep("run", "train.py", cwd=tmp_path)
        assert (workers.stdout.split(), workers.returncode) == ([str(cores)], 0)
        assert "one core" not in workers.stderr
        alone = samestep(cwd=tmp_path, command=(sys.executable, "train.py"))
        line = f"samestep: train.py trains on one core; `samestep run train.py` uses {cores} cores, with the same bits"
        assert alone.stderr.splitlines() == ([line] if cores > 1 else [])
    script.write_text(SHARED.format(arguments='device="cpu"'))
    assert samestep(cwd=tmp_path, command=(sys.executable, "train.py")).stderr == ""
