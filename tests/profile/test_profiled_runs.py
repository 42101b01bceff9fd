"""Profiles of real runs: what is seen is what happened, it is there however the run ends, and it changes no bit."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from pathlib import Path

import pytest
from profile_programs import NUM_STEPS, record

from samestep.comm.environment import PROFILE_VARIABLE, chosen_profile
from samestep.train.profile.files import read_ranks
from samestep.train.profile.numbers import KINDS
from samestep.train.profile.showing import merge_profile

PROGRAM = str(Path(__file__).with_name("profile_programs.py"))
SAMESTEP = [sys.executable, "-m", "samestep"]
ADOPTED = """
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


def command(*words, cwd, **variables):
    """Runs a command to its end."""
    environment = {**os.environ, "COLUMNS": "160", **variables}
    return subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def intervals(trace):
    """The complete events of a trace by process and thread, those that last longer first where two begin together."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event))
    return {place: sorted(spans, key=lambda span: (span[0], -span[1])) for place, spans in found.items()}


def check_nesting(spans):
    """Two events of a thread lie apart, or one lies in the other."""
    open_ends = []
    for begin, end, event in spans:
        while open_ends and open_ends[-1] <= begin + 1e-3:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-3, event
        open_ends.append(end)


def check_trace(folder, num_ranks):
    """The trace has what Chrome's format asks for, its events nest, and phases add up to their steps."""
    trace = json.loads((folder / "trace.json").read_text())
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts"} <= event.keys()
        assert event["ph"] in "XMi"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            assert isinstance(event["args"]["step"], int)
    threads = intervals(trace)
    assert {pid for pid, _ in threads} == set(range(num_ranks))
    for (_, tid), spans in threads.items():
        check_nesting(spans)
        if tid != 1:
            continue
        sums, lengths = defaultdict(float), {}
        for begin, end, event in spans:
            if event["name"] == "step":
                lengths[event["args"]["step"]] = end - begin
            else:
                sums[event["args"]["step"]] += end - begin
        assert lengths.keys() == sums.keys()
        assert all(sums[step] == pytest.approx(length, abs=0.01) for step, length in lengths.items())
    return threads


@pytest.fixture
def profile_of(worlds, tmp_path):
    """`profile_of(options)`: the profile of a run on two ranks, and its digest."""
    count = [0]

    def run(**options):
        count[0] += 1
        folder = tmp_path / str(count[0])
        digests = worlds(2).run(record, options, str(folder))
        assert len(set(digests)) == 1
        return merge_profile(folder), digests[0]

    return run


def test_two_ranks_leave_a_trace_whose_phases_add_up_and_the_bits_are_those_without(profile_of, worlds, tmp_path):
    profile, digest = profile_of(evaluate=True)
    threads = check_trace(profile.folder, 2)
    assert worlds(2).run(record, {}, None) == [digest] * 2
    assert [len(rank.steps) for rank in profile.numbers.ranks] == [NUM_STEPS - NUM_STEPS // 2] * 2
    for rank in (0, 1):
        names = [event["name"] for _, _, event in threads[rank, 1]]
        assert {"step", "data", "forward", "backward", "exchange", "update", "evaluate"} == set(names) - {"script"}
        assert names.count("evaluate") == 1
        assert names.count("forward") == names.count("step")
    for rank in read_ranks(profile.folder):
        for step in rank.steps:
            assert len(step.buckets) > 2
            assert step.hidden is not None, "the buckets of the last layers leave while backward goes on"
            (backward,) = [(begin, end) for phase, begin, end in step.events if phase == "backward"]
            assert backward[0] < step.hidden[0] < step.hidden[1] == backward[1]
    for numbers in profile.numbers.ranks:
        assert sum(numbers.share(kind) for kind in KINDS) == pytest.approx(1)


def test_a_slow_dataset_is_named_and_a_quick_one_is_not(profile_of):
    slow, _ = profile_of(data_seconds=0.01, forward_seconds=[0.1])
    assert "data" in [advice.about for advice in slow.advice]
    assert slow.numbers.slowest.median_ms("data") >= 4 * 10
    quick, _ = profile_of(forward_seconds=[0.1])
    assert "data" not in [advice.about for advice in quick.advice]


def test_a_slow_rank_is_named_and_even_ones_are_not(profile_of):
    uneven, _ = profile_of(forward_seconds=[0.001, 0.04])
    assert "ranks" in [advice.about for advice in uneven.advice]
    assert uneven.numbers.slowest.rank == 1
    even, _ = profile_of(forward_seconds=[0.04, 0.04])
    assert "ranks" not in [advice.about for advice in even.advice]


def test_without_being_asked_for_nothing_is_recorded_and_nothing_is_left(worlds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    worlds(2).run(record, {}, None)
    assert list(tmp_path.iterdir()) == []
    assert chosen_profile({}) is None
    assert chosen_profile({PROFILE_VARIABLE: ""}) is None
    assert chosen_profile({PROFILE_VARIABLE: "here"}) == "here"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table to fit, made by arithmetic."""
    path = tmp_path_factory.mktemp("tables") / "table.csv"
    rows = [f"{i % 7},{(i * i) % 11},{(i % 7) * 2 - i % 5}" for i in range(200)]
    path.write_text("a,b,target\n" + "\n".join(rows) + "\n")
    return path


def train_mlp(table, folder, name, *options):
    """What a training run on two devices prints with --json."""
    words = ("train", "mlp", "--data", table, "--epochs", 2, "--devices", "cpu:2", "--run-dir", name, "--json")
    done = command(*SAMESTEP, *words, "--checkpoint-steps", 2, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_training_with_a_profile_ends_with_the_table(table, tmp_path):
    profile = train_mlp(table, tmp_path, "run", "--profile")["profile"]
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json", "rank-1.json", "trace.json"]
    names = {event["name"] for _, _, event in check_trace(folder, 2)[0, 1]}
    assert {"ledger", "checkpoint"} <= names
    assert profile["num_ranks"] == 2
    assert profile["advice"]
    assert set(KINDS) < profile["slowest"]["kinds"].keys()
    assert profile["ratio"] == pytest.approx(profile["step_ms"] / profile["compute_limit_ms"])
    assert "ledger" not in [advice["about"] for advice in profile["advice"]], "no checksum is due in 14 steps"
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    for place in ("run", "run/profile"):
        again = command(*SAMESTEP, "profile", place, "--json", cwd=tmp_path)
        assert (again.returncode, again.stderr) == (0, "")
        shown = json.loads(again.stdout)
        same = ("num_ranks", "num_steps", "step_ms", "slowest", "median", "advice", "notes")
        assert {name: shown[name] for name in same} == {name: profile[name] for name in same}
    told = command(*SAMESTEP, "profile", "run", cwd=tmp_path)
    assert "exchange exposed" in told.stdout
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before
    nothing = command(*SAMESTEP, "profile", "run/checkpoints", cwd=tmp_path)
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("samestep: error: run/checkpoints holds no profile")


@pytest.mark.slow
def test_training_ends_in_the_same_bits_with_a_profile_and_leaves_none_without(table, tmp_path):
    plain, profiled = train_mlp(table, tmp_path, "plain"), train_mlp(table, tmp_path, "profiled", "--profile")
    assert plain["digest"] == profiled["digest"]
    assert not (tmp_path / "plain" / "profile").exists()
    assert "profile" not in plain


def test_a_killed_rank_leaves_the_others_profile(tmp_path):
    options = {"folder": str(tmp_path), "killed": [1, 12]}
    words = ("run", "--devices", "cpu:2", "--profile", PROGRAM, json.dumps(options))
    done = command(*SAMESTEP, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of 2 ranks 1 left a profile" in done.stderr
    assert "the compute limit" in done.stderr
    names = {event["name"] for _, _, event in check_trace(tmp_path / "profile", 1)[0, 1]}
    assert "regroup" in names
    (rank,) = read_ranks(tmp_path / "profile")
    assert rank.rank == 0
    assert rank.steps[-1].number == NUM_STEPS - 1


def test_a_script_alone_shows_its_profile_when_the_environment_asks_for_it(tmp_path):
    done = command(
        sys.executable, PROGRAM, json.dumps({"folder": str(tmp_path)}), cwd=tmp_path, **{PROFILE_VARIABLE: "mine"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "the compute limit" in done.stderr
    check_trace(tmp_path / "mine", 1)
    assert (tmp_path / "digest-0").exists()


@pytest.mark.slow
def test_a_rank_that_is_killed_without_healing_leaves_the_others_profile(tmp_path):
    options = {"folder": str(tmp_path), "killed": [1, 12]}
    words = ("run", "--devices", "cpu:2", "--no-heal", "--profile-dir", "there", PROGRAM, json.dumps(options))
    done = command(*SAMESTEP, *words, cwd=tmp_path)
    assert done.returncode != 0
    assert "the compute limit" in done.stderr
    check_trace(tmp_path / "there", 1)
    assert not list(tmp_path.glob("digest-*"))


@pytest.mark.slow
def test_a_rank_that_is_ended_because_another_failed_leaves_its_profile(tmp_path):
    options = {"folder": str(tmp_path), "fails": [1, 12], "waits": 12}
    words = ("run", "--devices", "cpu:2", "--no-heal", "--profile-dir", "there", PROGRAM, json.dumps(options))
    done = command(*SAMESTEP, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "this rank fails" in done.stderr
    check_trace(tmp_path / "there", 2)


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_its_profile(tmp_path):
    options = {"folder": str(tmp_path), "waits": 12}
    words = ("run", "--devices", "cpu:2", "--profile-dir", "there", PROGRAM, json.dumps(options))
    with subprocess.Popen([*SAMESTEP, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("waits-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT
    assert "the compute limit" in said
    check_trace(tmp_path / "there", 2)
    assert not list(tmp_path.glob("digest-*"))


@pytest.mark.slow
def test_an_adopted_script_is_profiled_and_prints_what_it_printed(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(ADOPTED))
    words = ("run", "--devices", "cpu:2", "--num-microbatches", 2, "--seed", 1)
    plain = command(*SAMESTEP, *words, "script.py", cwd=tmp_path)
    done = command(*SAMESTEP, *words, "--profile", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "not wrapped" in done.stderr
    names = {event["name"] for _, _, event in check_trace(tmp_path / "profile", 2)[0, 1]}
    assert {"data", "forward", "backward", "exchange", "update", "script"} <= names


@pytest.mark.slow
def test_ranks_that_somebody_else_started_leave_their_profile_to_rank_0(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = command(
        *torchrun, PROGRAM, json.dumps({"folder": str(tmp_path)}), cwd=tmp_path, **{PROFILE_VARIABLE: "mine"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the compute limit") == 1
    check_trace(tmp_path / "mine", 2)
