"""Mirrors: whatever is lost on the way, each tool has one run with every value once, and the bits are the same."""

import json
import os
import re
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
TOOLS = ("wandb", "mlflow", "trackio")
MISSING = [tool for tool in TOOLS if not is_installed(tool)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def train(folder, tools=TOOLS, step=-1, kind="none", devices=1, **environment):
    words = [PROGRAM, ",".join(tools), str(step), kind]
    command = [sys.executable, "-m", "samestep", "run", "--devices", f"cpu:{devices}", *words]
    places = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/ml.db", "TRACKIO_DIR": str(folder / "trackio")}
    keys = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    # Tools keep their statistics to themselves in tests, and are to do so without that.
    own = {key: value for key, value in os.environ.items() if key != "CI" and "PYTEST" not in key}
    environment = {**own, **places, **keys, **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def known(folder, tool, run="run"):
    return json.loads((folder / run / "loggers.json").read_text())[tool]["id"]


class Wandb:
    def __init__(self, folder, name):
        deadline = time.monotonic() + 20
        while True:  # W&B's own process writes, and may end after ours
            paths = sorted(folder.glob(f"wandb/offline-run-*/run-{name}.wandb"))
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


def check_whole(folder, tools=TOOLS, first=1):
    """Each value of the folder once, contract and digest."""
    lines = [json.loads(line) for line in (folder / "run" / "ledger.jsonl").read_text().splitlines()]
    losses = {line["step"]: float.fromhex(line["loss"]) for line in lines if "loss" in line}
    for tool in tools:
        read = READERS[tool](folder, known(folder, tool))
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
    return train(tmp_path_factory.mktemp("plain"), ["none"]).stdout.splitlines()[-1]


def test_the_rank_that_takes_over_goes_on_with_the_run_and_no_bit_key_or_host_is_touched(tmp_path, plain):
    tools = ["wandb", "trackio"]  # MLflow takes longest, and is killed below
    done = train(tmp_path, tools, step=9, kind="kill", devices=3)
    assert done.returncode == 0, done.stderr
    check_whole(tmp_path, tools)
    assert plain in done.stdout.splitlines()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert not (tmp_path / "hosts.txt").exists()


def test_a_run_that_raises_and_then_is_killed_is_resumed_under_its_id(tmp_path, plain):
    assert train(tmp_path, step=9, kind="raise").returncode == 1
    first = [known(tmp_path, tool) for tool in TOOLS]
    assert train(tmp_path, step=13, kind="kill").returncode == 137
    done = train(tmp_path, devices=2)
    assert done.returncode == 0, done.stderr
    assert [known(tmp_path, tool) for tool in TOOLS] == first
    check_whole(tmp_path)
    assert plain in done.stdout.splitlines()


def test_a_resume_under_another_contract_is_a_run_of_its_own_from_that_step_on(tmp_path, plain):
    assert train(tmp_path, ["trackio"], 9, "raise").returncode == 1
    first = known(tmp_path, "trackio")
    done = train(tmp_path, ["trackio"], LR="0.02")
    assert done.returncode == 0, done.stderr
    assert plain not in done.stdout.splitlines()
    assert known(tmp_path, "trackio") != first
    check_whole(tmp_path, ["trackio"], first=9)


BROKEN = {
    "WANDB_MODE": "broken",
    "MLFLOW_TRACKING_URI": "http://user:secret@127.0.0.1:9",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "TRACKIO_DIR": "/proc/none",
}


def test_tools_that_fail_leave_the_training_as_it_is_and_the_run_can_be_mirrored_later(tmp_path, plain):
    done = train(tmp_path, **BROKEN)
    assert done.returncode == 0, done.stderr
    assert plain in done.stdout.splitlines()
    for line in ("samestep: WandbLogger: ", "samestep: MlflowLogger: ", "trackio failed to flush"):
        assert done.stderr.count(line) == 1
    assert "secret" not in done.stderr
    done = train(tmp_path, kind="late")
    assert done.returncode == 0, done.stderr
    check_whole(tmp_path)


def test_the_programs_of_the_page_run(tmp_path):
    page = Path(__file__).parents[2].joinpath("docs", "hooks.md").read_text()
    block = lambda name: re.search(f'^```py title="{name}"\n(.*?)^```$', page, re.M | re.S)[1]  # noqa: E731
    words = ["import os", *(f"os.makedirs('{t}'); os.chdir('{t}')\n{block(t)}\n{block('trainer')}" for t in TOOLS)]
    environment = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "\n".join(words)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Logger:" not in done.stderr
    folders = ["wandb", "wandb/mlflow", "wandb/mlflow/trackio"]
    assert all(known(tmp_path / folder, tool, "runs/first") for folder, tool in zip(folders, TOOLS, strict=True))
