"""Profiles: the trace holds the phases of some steps, the table the times of the ledger, and no bit changes."""

import json
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch
from cli_commands import samestep, write_table
from profile_programs import NUM_STEPS, traced

from samestep.cli.profile import step_times
from samestep.comm.environment import PROFILE_VARIABLE, Environment, chosen_profile
from samestep.comm.heartbeat import Heartbeat
from samestep.errors import UsageError
from samestep.run.profile import NUM_STEPS as TRACED_STEPS
from samestep.run.profile import SKIPPED_STEPS, keep_profile
from samestep.runs.ledger import to_line

PROGRAM = str(Path(__file__).with_name("profile_programs.py"))
PHASES = ("data", "forward", "backward", "exchange", "update")
SINGLE_PROCESS = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    net = nn.DataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in DataLoader(torch.randn(80, 4), batch_size=8):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
    print(loss.item().hex())
"""


def ranges(path):
    """How often each range is in a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def play(heartbeat, num_steps):
    """Steps in which something is computed."""
    for heartbeat.step in range(num_steps):
        for phase in PHASES:
            heartbeat.enter(phase)
            torch.ones(2).add(1)
    heartbeat.enter("script")


def test_the_trace_holds_every_phase_of_some_steps_and_later_ones_cost_nothing(tmp_path):
    heartbeat = Heartbeat()
    keep_profile(heartbeat, tmp_path / "new", Environment())
    play(heartbeat, SKIPPED_STEPS + TRACED_STEPS + 5)
    assert heartbeat.on_phase is None
    found = ranges(tmp_path / "new" / "rank-0.json")
    assert sum(name.startswith("ProfilerStep") for name in found) == TRACED_STEPS
    assert {name: found[name] for name in PHASES} == dict.fromkeys(PHASES, TRACED_STEPS)


def test_a_folder_that_cannot_be_written_to_does_not_end_the_run(tmp_path, capfd):
    (tmp_path / "file").touch()
    heartbeat = Heartbeat()
    keep_profile(heartbeat, tmp_path / "file" / "profile", Environment())
    play(heartbeat, SKIPPED_STEPS + TRACED_STEPS + 5)
    assert "samestep: the profile: " in capfd.readouterr().err


def test_two_ranks_leave_traces_and_the_bits_are_those_without(worlds, tmp_path):
    digests = worlds(2).run(traced, str(tmp_path))
    assert worlds(2).run(traced, None) == digests
    for rank in (0, 1):
        assert set(PHASES) < ranges(tmp_path / f"rank-{rank}.json").keys()


def test_without_being_asked_for_there_is_none(worlds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    worlds(2).run(traced, None)
    assert list(tmp_path.iterdir()) == []
    assert chosen_profile({}) is None
    assert chosen_profile({PROFILE_VARIABLE: ""}) is None
    assert chosen_profile({PROFILE_VARIABLE: "here"}) == "here"


def test_the_table_is_of_the_ledger_s_last_steps_without_the_first(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    rows = [{"data": 9.0, "compute": 9.0, "exchange": 9.0, "update": 9.0}] * 10
    rows += [{"data": 0.001, "compute": 0.006, "exchange": 0.002, "update": 0.001}] * 19
    rows += [{"data": 0.02, "compute": 0.006, "exchange": 0.002, "update": 0.001}]
    base = {"num_samples": 1, "loss": (1.0).hex(), "grad_norm": (1.0).hex(), "lr": []}
    ledger.write_bytes(b"".join(to_line({"step": n, **base, "seconds": row}) for n, row in enumerate(rows)))
    times = step_times(tmp_path)
    assert times["num_steps"] == 20
    assert times["milliseconds"] == pytest.approx({"data": 1, "compute": 6, "exchange": 2, "update": 1})
    assert times["shares"]["data"] == pytest.approx((19 * 1 + 20) / (20 * 10 + 19))
    ledger.write_bytes(to_line({"step": 0, **base}))
    with pytest.raises(UsageError, match="holds no step with its times"):
        step_times(tmp_path)
    with pytest.raises(UsageError, match="no ledger"):
        step_times(tmp_path / "none")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("tables") / "table.csv")


def train_mlp(table, folder, name, *options):
    """What a training run on two devices prints with --json."""
    words = ("train", "mlp", "--data", table, "--epochs", 3, "--devices", "cpu:2", "--run-dir", name, "--json")
    done = samestep(*words, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_training_with_a_profile_ends_with_the_table_and_the_same_bits(table, tmp_path):
    plain, profiled = train_mlp(table, tmp_path, "plain"), train_mlp(table, tmp_path, "run", "--profile")
    assert plain["digest"] == profiled["digest"]
    assert "profile" not in plain
    assert not (tmp_path / "plain" / "profile").exists()
    folder = tmp_path / "run" / "profile"
    assert profiled["profile"]["traces"] == [str(folder / f"rank-{rank}.json") for rank in (0, 1)]
    assert sum(profiled["profile"]["shares"].values()) == pytest.approx(1)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    again = samestep("profile", "run", "--json", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert json.loads(again.stdout)["milliseconds"] == profiled["profile"]["milliseconds"]
    told = samestep("profile", "run", cwd=tmp_path)
    assert "exchange" in told.stdout
    assert "traces of 2 ranks: run/profile/rank-*.json" in told.stdout
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before


@pytest.mark.slow
def test_a_killed_rank_leaves_the_others_trace(tmp_path):
    options = {"folder": str(tmp_path), "killed": [1, 2]}
    words = ("run", "--devices", "cpu:2", "--profile-dir", "there", PROGRAM, json.dumps(options))
    done = samestep(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "traces of 1 rank: " in done.stderr
    assert set(PHASES) < ranges(tmp_path / "there" / "rank-0.json").keys()


@pytest.mark.slow
def test_a_script_leaves_its_trace_when_the_environment_asks_for_it(tmp_path):
    words = (PROGRAM, json.dumps({"folder": str(tmp_path)}))
    done = samestep(*words, cwd=tmp_path, command=(sys.executable,), **{PROFILE_VARIABLE: "mine"})
    assert (done.returncode, done.stdout) == (0, "")
    assert ranges(tmp_path / "mine" / "rank-0.json")["update"] == min(TRACED_STEPS, NUM_STEPS - SKIPPED_STEPS - 1)


@pytest.mark.slow
def test_a_single_process_script_is_profiled_and_prints_what_it_printed(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SINGLE_PROCESS))
    words = ("run", "--devices", "cpu:2", "--logical-devices", 2, "--seed", 1)
    plain = samestep(*words, "script.py", cwd=tmp_path)
    done = samestep(*words, "--profile", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "traces of 2 ranks" in done.stderr
    found = ranges(tmp_path / "profile" / "rank-1.json")
    assert {"forward", "exchange", "Optimizer.step#SGD.step"} <= found.keys()
    short = samestep(*words, "--profile-dir", "short", "-m", "platform", cwd=tmp_path)
    assert "no rank came as far as step 5" in short.stderr
