"""`samestep train`, as a user types it: the same digest on every number of devices, and sentences for mistakes."""

import gzip
import json
import sys

import pytest
from cli_commands import samestep, write_table
from safetensors import safe_open

from samestep.devices.selection import cpu_workers_for
from samestep.runs.ledger import from_line
from samestep.text import counted


def train_json(*args, cwd, **options):
    """The JSON object that a training run ends with."""
    done = samestep("train", *args, "--json", cwd=cwd, **options)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.strip().splitlines()  # with --json nothing but the object goes to stdout
    return json.loads(line)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("tables") / "table.csv")


def test_lenet_on_real_images_gives_one_digest_on_all_numbers_of_devices(shared_data, tmp_path):
    digests = {}
    for count in (1, 3):
        result = train_json(
            "lenet",
            "--data-dir", shared_data / "fashion-mnist",
            "--devices", f"cpu:{count}",
            "--num-microbatches", 4,
            "--epochs", 2,
            "--seed", 0,
            "--run-dir", tmp_path / str(count),
            cwd=tmp_path,
        )  # fmt: skip
        digests[count] = result["digest"]
        assert result["devices"] == ["cpu"] * count
        assert result["num_microbatches"] == 4
        assert [epoch["epoch"] for epoch in result["epochs"]] == [1, 2]
        assert {"seconds", "samples_per_second", "train_loss", "eval"} <= result["epochs"][0].keys()
    assert len(set(digests.values())) == 1


@pytest.fixture(scope="module")
def alone(tables, tmp_path_factory):
    """The folder of a run of two epochs on one device, and what it ended with."""
    folder = tmp_path_factory.mktemp("alone") / "r"
    result = train_json(
        "mlp", "--data", tables, "--epochs", 2, "--devices", "cpu:1", "--run-dir", folder, cwd=folder.parent
    )
    return folder, result


def test_torchrun_gives_the_digest_of_our_own_launcher(tables, tmp_path, alone):
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "samestep",
    )
    theirs = train_json("mlp", "--data", tables, "--epochs", 2, "--run-dir", "b", cwd=tmp_path, command=torchrun)
    assert theirs["digest"] == alone[1]["digest"]
    assert theirs["devices"] == ["cpu", "cpu"]


def test_a_run_leaves_its_folder_and_says_where_and_another_seed_gives_another_digest(tables, tmp_path, alone):
    options = ("--epochs", 2, "--seed", 1, "--run-dir", "here")
    done = samestep("train", "mlp", "--data", tables, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "here"
    contract = json.loads((folder / "run.json").read_text())
    assert contract["num_microbatches"] == 4
    assert contract["recipe"] == "mlp"
    lines = [from_line(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    assert [line["event"] for line in lines if "event" in line] == ["start", "checkpoint", "end"]
    ledger = [line for line in lines if "event" not in line]
    assert [entry["step"] for entry in ledger] == list(range(1, len(ledger) + 1))
    assert sum(entry["num_samples"] for entry in ledger) == 2 * 160
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").iterdir())
    with safe_open(folder / "weights.safetensors", "pt") as weights:
        assert all(not name.startswith("module.") for name in weights.keys())  # noqa: SIM118 - no dict
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("epoch 2, time ")]
    assert counted(cpu_workers_for(8), "CPU worker") in done.stdout
    assert "here" in done.stdout
    (digest,) = (line.split()[-1] for line in lines if line.startswith("digest"))
    assert len(digest) == 64
    assert digest != alone[1]["digest"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["lenett"], "did you mean 'lenet'"),
        (["lenet", "--devices", "cpu:0"], "cpu"),
        (["lenet", "--devices", "gpu9"], "gpu9"),
        (["lenet", "--num-microbatches", "0"], "--num-microbatches"),
        (["lenet", "--global-batch-size", "0"], "--global-batch-size"),
        (
            ["lenet", "--num-microbatches", "2", "--devices", "cpu:3"],
            "use num_microbatches=3 or more (--num-microbatches; ",
        ),
        (["lenet", "--shares", "1,x"], "--shares"),
        (["lenet", "--devices", "cpu:2", "--shares", "1,2,3"], "--shares"),
        (["lenet", "--option", "width"], "name=value"),
        (
            ["lenet", "--precision", "8-bit"],
            "got precision='8-bit'; it is one of 32-true, bf16-mixed, 16-mixed (--precision)",
        ),
        (["lenet", "--optimizer", "lbfgs"], "it is one of sgd, adam, adamw (--optimizer)"),
        (["lenet", "--lr", "-1"], "got lr=-1.0; it must be above 0 (--lr)"),
        (["lenet", "--epochs", "0"], "got epochs=0; it must be 1 or more (--epochs)"),
        (["lenet", "--num-workers", "-1"], "got num_workers=-1; it must be 0 or more (--num-workers)"),
        (["vgg", "--option", "depth=3"], "no option 'depth'; it has width, dropout"),
        (["gpt", "--option", "layers=some"], "option 'layers' needs a whole number"),
        (["gpt", "--option", "heads=3"], "it must be a multiple of them (-o width, -o heads)"),
        (["lenet", "--data-dir", "nowhere"], "got --data-dir nowhere: there is no such folder"),
        (["mlp", "--data-dir", "."], "mlp reads one CSV file, by --data FILE.csv"),
        (["gpt", "--data", "nothing.txt"], "got --data nothing.txt: there is no such file"),
    ],
)
def test_a_mistake_gets_one_sentence_before_anything_starts(args, sentence, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    said = refused("train", *args)
    assert said.startswith("samestep: error: ")
    assert sentence in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def one_sentence(done, *words):
    """A failure told once, in a sentence, without a traceback."""
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert done.stderr.count(word) == 1, done.stderr


def write_images(folder, labels):
    """A pair of IDX files of 20 images."""
    folder.mkdir()
    sizes = b"".join(n.to_bytes(4, "big") for n in (20, 28, 28))
    (folder / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03" + sizes + bytes(20 * 28 * 28))
    with gzip.open(folder / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(b"\x00\x00\x08\x01" + (20).to_bytes(4, "big") + labels)
    return folder


def test_damaged_images_get_one_sentence_from_two_workers(tmp_path):
    folder = write_images(tmp_path / "data", labels=bytes([11] * 20))
    done = samestep("train", "lenet", "--data-dir", folder, "--devices", "cpu:2", "--run-dir", "r", cwd=tmp_path)
    one_sentence(done, "label 11")
    assert done.stdout == ""
    assert not (tmp_path / "r" / "ledger.jsonl").exists()


def test_a_loss_that_is_not_finite_names_step_microbatch_and_samples(tables, tmp_path):
    done = samestep(
        "train", "mlp", "--data", tables, "--optimizer", "sgd", "--lr", "1e30", "--run-dir", "r", cwd=tmp_path
    )
    one_sentence(done, "step 2: not finite: the loss of microbatch 0 (nan; sample ids ", "--max-grad-norm")
    shown = done.stderr.partition("sample ids ")[2].partition(")")[0]
    ids = [int(number) for number in shown.split(", ")]
    assert len(set(ids)) == len(ids) > 0
    assert all(0 <= number < 160 for number in ids), "of the 160 to train on"
    steps = [from_line(line) for line in (tmp_path / "r" / "ledger.jsonl").read_bytes().splitlines()]
    assert [step["step"] for step in steps if "event" not in step] == [1]


def test_a_run_folder_that_is_taken_is_left_alone(tables, tmp_path, alone):
    before = (alone[0] / "ledger.jsonl").read_bytes()
    done = samestep("train", "mlp", "--data", tables, "--epochs", 1, "--run-dir", alone[0], cwd=tmp_path)
    one_sentence(done, "already holds a run")
    assert (alone[0] / "ledger.jsonl").read_bytes() == before


def test_a_folder_with_other_things_is_left_alone(tables, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("mine")
    done = samestep("train", "mlp", "--data", tables, "--run-dir", "r", cwd=tmp_path)
    one_sentence(done, "is not empty")
    assert [entry.name for entry in (tmp_path / "r").iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_another_optimizer_brings_its_own_learning_rate_and_no_momentum(tables, tmp_path):
    train_json(
        "mlp", "--data", tables, "--epochs", 1, "--optimizer", "sgd", "--lr", "1e-6", "--run-dir", "a", cwd=tmp_path
    )
    train_json("mlp", "--data", tables, "--epochs", 1, "--optimizer", "adamw", "--run-dir", "b", cwd=tmp_path)
    first, second = (json.loads((tmp_path / name / "run.json").read_text()) for name in "ab")
    assert (first["lr"], first["momentum"]) == (1e-6, 0.0)
    assert second["lr"] == 1e-3
    assert "momentum" not in second
    done = samestep("train", "mlp", "--data", tables, "--momentum", "0.9", "--run-dir", "c", cwd=tmp_path)
    one_sentence(done, "--momentum 0.9 for adam")


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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(("table.csv", "--warmup-steps", 10_000), "it must be less"), (("nope.csv",), "nope.csv")],
    ids=["on a rank", "before any rank"],
)
def test_a_training_that_fails_before_it_begins_leaves_no_folder(tmp_path, words, sentence):
    write_table(tmp_path / "table.csv")
    one_sentence(samestep("train", "mlp", "--devices", "cpu:1", "--data", *words, cwd=tmp_path), sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
