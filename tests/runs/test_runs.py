"""Runs are found and told apart: finished, under way, stopped, crashed; and a broken folder hides no other."""

import errno
import fcntl
import json
import os
import time

import pytest
import typer
from ledger_runs import write
from typer.testing import CliRunner

from samestep.checkpoint.run_folder import take_lock
from samestep.cli import runs as command
from samestep.errors import DataError, UsageError
from samestep.report.run_summary import make_report
from samestep.runs.ledger import to_line
from samestep.runs.run_list import find_runs, is_run, read_contract, run_status

CONTRACT = {"epochs": 3, "command": ["python", "-m", "samestep.recipes.lenet"], "seed": 0}
OLD = time.time() - 3600


def step(number, world_size=2, loss=1.5):
    return {"step": number, "loss": loss.hex(), "grad_norm": "0x1.0p+0", "lr": [], "world_size": world_size}


def event(name, number, **fields):
    return {"event": name, "step": number, "time": "2026-01-31T12:00:00.123+00:00", **fields}


def make_run(folder, ledger=(), contract=CONTRACT, checkpoints=(), when=OLD):
    """A run's folder as a run leaves it, last written at a time."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(contract))
    (folder / "ledger.jsonl").write_bytes(b"".join(map(to_line, ledger)))
    for name in checkpoints:
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "manifest.json").write_text("{}")
    for path in folder.rglob("*"):
        os.utime(path, (when, when))
    return folder


def shown(*arguments):
    app = typer.Typer()
    app.command()(command.runs)
    result = CliRunner().invoke(app, [str(item) for item in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_finished_run_is_summed_up(tmp_path):
    ledger = [event("start", 0, world_size=2), *map(step, range(1, 5)), event("end", 4, digest="00")]
    found = run_status(make_run(tmp_path / "a", ledger))
    assert (found.state, found.program, found.steps) == ("finished", "lenet", 4)
    assert (found.loss, found.world_sizes) == (1.5, (2,))
    assert found.changed == pytest.approx(OLD)
    assert found.checkpoint is None
    assert found.problems == ()


START, STOP = event("start", 0, world_size=2), event("stop", 1, signal="SIGTERM")
RESUME, END = event("resume", 1, world_size=1), event("end", 2, digest="00")


@pytest.mark.parametrize(
    ("events", "age", "state"),
    [
        ([START, END], 3600, "finished"),
        ([START, STOP], 3600, "stopped"),
        ([START], 3600, "crashed"),
        ([START], 0, "crashed"),
        ([START, STOP, RESUME], 3600, "crashed"),
        ([START, END, RESUME], 3600, "crashed"),
        ([START, END, RESUME, STOP], 3600, "stopped"),
        ([START, event("death", 1, rank=1), event("heal", 1, world_size=1), END], 3600, "finished"),
        ([START, STOP, event("checkpoint", 1)], 3600, "stopped"),
        ([], 3600, "crashed"),
    ],
)
def test_the_state_is_told_by_how_the_ledger_ends(tmp_path, events, age, state):
    folder = make_run(tmp_path / "a", [step(1), *events], when=time.time() - age)
    assert run_status(folder).state == state


def test_a_run_whose_lock_is_held_is_under_way_and_once_it_is_let_go_it_has_crashed(tmp_path):
    folder = make_run(tmp_path / "a", [START, step(1)])
    lock = take_lock(folder, pytest.fail)
    assert run_status(folder).state == "running"
    lock.release()
    (folder / ".lock").write_text("{}")  # as a process that was killed leaves it
    assert run_status(folder).state == "crashed"


@pytest.mark.parametrize(("age", "state"), [(0, "running?"), (3600, "crashed")])
def test_without_locks_what_was_written_lately_may_be_a_run_under_way(tmp_path, monkeypatch, age, state):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    folder = make_run(tmp_path / "a", [START, step(1)])
    (folder / ".lock").touch()
    for path in folder.iterdir():
        os.utime(path, (time.time() - age, time.time() - age))
    monkeypatch.setattr(fcntl, "flock", flock)
    assert run_status(folder).state == state


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path):
    names = ["step-00000900", "step-00001200", ".tmp-step-00009999-1", "step-100000000"]
    folder = make_run(tmp_path / "a", [step(1)], checkpoints=names)
    (folder / "checkpoints" / "latest").write_text("step-00000900")
    assert run_status(folder).checkpoint == "step-100000000"


def test_world_sizes_are_those_that_the_run_had_one_after_another(tmp_path):
    events = [START, event("death", 3, rank=1), event("heal", 3, world_size=1), event("join", 4, world_size=2)]
    assert run_status(make_run(tmp_path / "a", [step(1), *events])).world_sizes == (2, 1, 2)
    assert run_status(make_run(tmp_path / "b", [step(1, 4), step(2, 4)])).world_sizes == (4,)
    assert run_status(make_run(tmp_path / "c", [step(1, 4), step(2, 3)])).world_sizes == (4, 3)


def test_runs_come_newest_first_and_other_folders_are_left_out(tmp_path):
    for number, name in enumerate(["b", "a", "c"]):
        make_run(tmp_path / name, when=OLD + number)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "file").write_text("")
    assert [run.path.name for run in find_runs(tmp_path)] == ["c", "a", "b"]
    assert [run.path.name for run in find_runs(tmp_path / "a")] == ["a"]
    assert not is_run(tmp_path / "notes")


def test_a_folder_that_is_not_there_is_bad_usage(tmp_path):
    with pytest.raises(DataError, match=r"no folder .*nowhere"):
        find_runs(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"no folder .*nowhere; name one with runs in it") as caught:
        shown(tmp_path / "nowhere")
    assert caught.value.exit_code == 2


BROKEN = {
    "no contract": lambda folder: (folder / "run.json").unlink(),
    "contract is no JSON": lambda folder: (folder / "run.json").write_bytes(b"\xff{"),
    "contract is a list": lambda folder: (folder / "run.json").write_text("[1]"),
    "contract of odd types": lambda folder: (folder / "run.json").write_text('{"command": 4, "epochs": []}'),
    "no ledger": lambda folder: (folder / "ledger.jsonl").unlink(),
    "ledger is garbage": lambda folder: (folder / "ledger.jsonl").write_bytes(b'\xff\n{}\n[1]\n{\n"event"\n'),
    "ledger of odd types": lambda folder: (folder / "ledger.jsonl").write_bytes(to_line({"step": "x", "loss": 3})),
    "ledger is a folder": lambda folder: ((folder / "ledger.jsonl").unlink(), (folder / "ledger.jsonl").mkdir()),
    "checkpoints are a file": lambda folder: (folder / "checkpoints").write_text(""),
    "a dangling link": lambda folder: (folder / "link").symlink_to(folder / "nowhere"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_listed_as_far_as_it_can_be_read(tmp_path, name):
    make_run(tmp_path / "good", [step(1)])
    BROKEN[name](make_run(tmp_path / "bad", [step(1)]))
    assert {run.path.name for run in find_runs(tmp_path)} == {"good", "bad"}
    assert "bad" in shown(tmp_path)
    assert len(json.loads(shown(tmp_path, "--json"))) == 2


def test_what_cannot_be_read_is_said(tmp_path):
    folder = make_run(tmp_path / "a", [step(1)])
    BROKEN["contract is no JSON"](folder)
    BROKEN["ledger is a folder"](folder)
    problems = run_status(folder).problems
    assert problems[0].startswith("run.json cannot be read: ")
    assert problems[1].startswith("ledger.jsonl cannot be read: ")
    assert f"note: {folder}: run.json cannot be read" in shown(tmp_path)
    assert read_contract(folder) is None


def test_a_last_line_that_is_cut_off_is_said(tmp_path):
    folder = make_run(tmp_path / "a", [START, step(1)])
    with (folder / "ledger.jsonl").open("ab") as ledger:
        ledger.write(to_line(step(2))[:-20] + b"x" * 200_000)
    found = run_status(folder)
    assert (found.steps, found.problems) == (1, ("ledger.jsonl: damaged lines: 1 (line 3 first)",))


def test_the_table_tells_where_a_run_resumes_and_what_script_it_was(tmp_path):
    contract = {"command": ["python", "lib/train [x].py", "--lr", "1"]}
    make_run(tmp_path / "[run]", [step(12, loss=0.123456)], contract=contract, checkpoints=["step-00000008"])
    row, how = [line for line in shown(tmp_path).splitlines() if "[run]" in line]
    for cell in ("train [x].py", "crashed", " 12 ", "0.1235", " 2 "):
        assert cell in row
    assert how.startswith(f"to go on from step-00000008: its command, with resume={str(tmp_path / '[run]')!r}")


def test_json_has_every_field_and_stays_json(tmp_path):
    make_run(tmp_path / "a", [step(1, loss=float("nan"))])
    (found,) = json.loads(shown(tmp_path, "--json"), parse_constant=lambda name: pytest.fail(name))
    assert found["loss"] == "nan"
    assert found["path"] == str(tmp_path / "a")
    assert (found["state"], found["steps"], found["world_sizes"]) == ("crashed", 1, [2])


def test_an_empty_folder_has_no_runs(tmp_path):
    assert shown(tmp_path) == f"no runs in {tmp_path}\n"
    assert json.loads(shown(tmp_path, "--json")) == []


def test_the_ledger_of_a_run_that_ran_is_summed_up(tmp_path):
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "ledger.jsonl", world_size=3, steps=5)
    (found,) = find_runs(tmp_path)
    assert (found.steps, found.world_sizes, found.state) == (5, (3,), "crashed")
    assert found.loss is not None
    assert 0 < found.loss < 10


def test_what_an_audit_found_is_shown_beside_the_runs_and_in_the_report(tmp_path):
    found = {
        "ranks": [1],
        "microbatch": 6,
        "names": ["loss"],
        "devices": ["cpu"],
        "action": "warn",
        "found": "bits of it",
    }
    ledger = [event("start", 0, world_size=2), step(1), event("audit", 2, **found), step(2)]
    make_run(tmp_path / "run", ledger)
    make_run(tmp_path / "good", ledger[:2])
    [problem] = run_status(tmp_path / "run").problems
    assert problem == "an audit found wrong bits: bits of it"
    assert run_status(tmp_path / "good").problems == ()
    assert "an audit found wrong bits: bits of it" in shown(tmp_path).replace("\n", " ")
    [summary] = make_report([tmp_path / "run"]).runs
    assert [finding.text for finding in summary.findings if "audit" in finding.text] == [f"{problem}."]
    [audit] = [each for each in summary.events if each.name == "audit"]
    assert (audit.label, audit.sentence) == ("wrong bits", "audit: bits of it (warn)")
