"""Mirrors: whatever is lost on the way, each tool has one run with every value once, and the bits are the same."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samestep.extras import is_installed
from samestep.runs import mirrors

PROGRAM = Path(__file__).with_name("mirrored_training.py")
STEPS = 18  # in three epochs
KEY = "0123456789abcdef" * 2 + "fedcba98"
TOOLS = [
    pytest.param(tool, marks=pytest.mark.skipif(not is_installed(tool), reason=f"{tool} is not installed"))
    for tool in ("wandb", "mlflow", "trackio")
]


def train(folder, tools, step=-1, kind="none", devices=1, **environment):
    command = [sys.executable, "-m", "samestep", "run", "--devices", f"cpu:{devices}", PROGRAM, tools, str(step), kind]
    places = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/ml.db", "TRACKIO_DIR": str(folder / "trackio")}
    keys = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **places, **keys, **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def known(folder, tool):
    return json.loads((folder / "run" / "loggers.json").read_text())[tool]["id"]


class Wandb:
    def __init__(self, folder, name):
        deadline = time.monotonic() + 20
        while True:  # W&B's own process writes, and may end after ours
            paths = sorted(folder.glob(f"wandb/offline-run-*-{name}/*.wandb"))
            sessions = [[*mirrors.wandb_records(path.read_bytes())] for path in paths]
            self.exits = [r.exit.exit_code for session in sessions for r in session if r.HasField("exit")]
            if sessions and (sessions[-1][-1].HasField("exit") or time.monotonic() > deadline):
                break
            time.sleep(0.1)
        records = [record for session in sessions for record in session]
        items = [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r.history.item} for r in records]
        self.rows = [(row["_step"], row) for row in items if row]
        begun = [record.run for record in records if record.HasField("run")]
        assert {run.run_id for run in begun} == {name}
        self.config = {each.key: json.loads(each.value_json) for each in begun[-1].config.update}
        updates = [u for record in records for u in record.summary.update]
        self.digest = json.loads(next(u.value_json for u in reversed(updates) if u.key == "digest"))
        self.has_ended = self.exits[-1] == 0


class Mlflow:
    def __init__(self, folder, name):
        with sqlite3.connect(folder / "ml.db") as base:
            read = lambda words: base.execute(words, (name,)).fetchall()  # noqa: E731
            values = read("SELECT step, key, value FROM metrics WHERE run_uuid = ?")
            self.rows = [(step, {key: value}) for step, key, value in values]
            self.config = dict(read("SELECT key, value FROM params WHERE run_uuid = ?"))
            self.digest = dict(read("SELECT key, value FROM tags WHERE run_uuid = ?"))["digest"]
            self.has_ended = read("SELECT status FROM runs WHERE run_uuid = ?") == [("FINISHED",)]
        base.close()


class Trackio:
    def __init__(self, folder, name):
        with sqlite3.connect(folder / "trackio" / "tests.db") as base:
            read = lambda words: base.execute(words, (name,)).fetchall()  # noqa: E731
            self.rows = [
                (s, json.loads(m)) for s, m in read("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id")
            ]
            self.config = json.loads(read("SELECT config FROM configs WHERE run_name = ?")[0][0])
            assert len(read("SELECT DISTINCT run_id FROM metrics WHERE run_name = ?")) == 1
        base.close()
        (self.digest,) = [row.pop("digest") for _, row in self.rows if "digest" in row] or [None]
        self.has_ended = self.digest is not None


READERS = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def check_whole(folder, tool, first=1):
    """Each value of the folder once, contract and digest."""
    read = READERS[tool](folder, known(folder, tool))
    lines = [json.loads(line) for line in (folder / "run" / "ledger.jsonl").read_text().splitlines()]
    losses = {line["step"] + 1: float.fromhex(line["loss"]) for line in lines if "loss" in line}
    found = sorted((step, row["loss/train"]) for step, row in read.rows if "loss/train" in row)
    assert found == [(step, losses[step]) for step in range(first, STEPS + 1)]
    assert sorted(row["epoch"] for _, row in read.rows if "epoch" in row) == [1, 2, 3][first // 7 :]
    pairs = [(step, tag) for step, row in read.rows for tag in row if tag[0] != "_"]
    assert len(set(pairs)) == len(pairs)
    assert (str(read.config["global_batch_size"]), str(read.config["seed"])) == ("8", "0")
    assert "packages" not in read.config
    assert read.digest == lines[-1]["digest"]
    assert read.has_ended


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The digest without a logger."""
    return train(tmp_path_factory.mktemp("plain"), "none").stdout.splitlines()[-1]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_rank_that_takes_over_goes_on_with_the_run_and_no_bit_key_or_host_is_touched(tmp_path, tool, plain):
    done = train(tmp_path, tool, 9, "kill", devices=3)
    assert done.returncode == 0, done.stderr
    check_whole(tmp_path, tool)
    assert done.stdout.splitlines()[-1] == plain
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert not (tmp_path / "hosts.txt").exists()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_run_that_raises_and_then_is_killed_is_resumed_under_its_id(tmp_path, tool, plain):
    assert train(tmp_path, tool, 9, "raise").returncode == 1
    first = known(tmp_path, tool)
    assert train(tmp_path, tool, 13, "kill").returncode == 137
    done = train(tmp_path, tool, devices=2)
    assert done.returncode == 0, done.stderr
    assert known(tmp_path, tool) == first
    check_whole(tmp_path, tool)
    assert done.stdout.splitlines()[-1] == plain


@pytest.mark.parametrize("tool", TOOLS)
def test_a_resume_under_another_contract_is_a_run_of_its_own_from_that_step_on(tmp_path, tool, plain):
    assert train(tmp_path, tool, 9, "raise").returncode == 1
    first = known(tmp_path, tool)
    done = train(tmp_path, tool, LR="0.02")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] != plain
    assert known(tmp_path, tool) != first
    check_whole(tmp_path, tool, first=9)
