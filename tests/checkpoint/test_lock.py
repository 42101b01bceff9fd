"""One run at a time writes to a run folder, whoever is killed, and whatever is left of who was."""

import errno
import fcntl
import json
import os
from pathlib import Path

import psutil
import pytest
from started_programs import SECONDS, Programs

from samestep.checkpoint.run_folder import LOCK_FILE, create_folder, is_locked, take_lock
from samestep.errors import UsageError

# Waits in step 4 of 12, the first of an epoch, until the file "go" is there; "careless" takes no lock.
PROGRAM = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional
import samestep
from samestep.runs import run_log

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(x)
    def __getitem__(self, index):
        return x[index], x[index].sum(0, keepdim=True)

class Free:
    def release(self):
        pass

if "careless" in sys.argv:
    run_log.take_lock = lambda *_: Free()
run = samestep.Run(global_batch_size=10, num_microbatches=2, seed=1)
x = torch.randn(40, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def loss(model, batch):
    if trainer.step.num_steps == 4:
        Path("at-work").touch()
        while "waits" in sys.argv and not Path("go").exists():
            time.sleep(0.01)
    return functional.mse_loss(model(batch[0]), batch[1])

with samestep.Trainer(run, model, optimizer, loss, run_dir="run", checkpoint_steps=1) as trainer:
    trainer.fit(Rows(), epochs=3, resume="auto", num_workers=2 * ("fetched" in sys.argv))
    digest = trainer.digest
run.print("digest", digest)
"""


@pytest.fixture
def programs(tmp_path):
    found = Programs(tmp_path, PROGRAM)
    yield found
    found.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The digest of the program that nobody disturbs."""
    return Programs(tmp_path_factory.mktemp("reference"), PROGRAM).here()


def events(entries):
    return [entry["event"] for entry in entries if entry.get("event") not in (None, "checkpoint")]


def test_the_second_of_two_runs_is_refused_in_a_sentence_and_the_first_ends_undisturbed(programs, reference):
    first = programs.start("waits")
    programs.wait_for("at-work")
    _, stderr = programs.start().communicate(timeout=SECONDS)
    assert f"UsageError: another run, process {first.pid} on " in stderr
    assert "has been writing to run since 20" in stderr
    assert stderr.endswith(": wait for its end, end it, or choose another folder by run_dir (--run-dir)\n")
    (programs.folder / "go").touch()
    stdout, stderr = first.communicate(timeout=SECONDS)
    assert stdout.split()[-2:] == ["digest", reference], stderr
    assert events(programs.entries()) == ["start", "end"]
    assert not (programs.folder / "run" / LOCK_FILE).exists()


@pytest.mark.slow
def test_without_the_lock_both_would_write(programs):
    """The twin of the test above."""
    first = programs.start("waits")
    programs.wait_for("at-work")
    _, stderr = programs.start("careless").communicate(timeout=SECONDS)
    assert "UsageError" not in stderr
    (programs.folder / "go").touch()
    first.communicate(timeout=SECONDS)
    assert events(programs.entries()) == ["start", "resume", "end", "end"]


def test_a_killed_run_holds_the_lock_no_longer_although_its_data_workers_live_on(programs, reference):
    first = programs.start("waits", "fetched")
    programs.wait_for("at-work")
    fetchers = psutil.Process(first.pid).children(recursive=True)
    assert len(fetchers) >= 2
    first.kill()
    first.wait()
    try:
        assert all(process.is_running() for process in fetchers)
        assert json.loads((programs.folder / "run" / LOCK_FILE).read_text())["pid"] == first.pid
        take_lock(programs.folder / "run", pytest.fail, wait_seconds=0.0).release()
    finally:
        for process in fetchers:
            process.kill()
    assert programs.here() == reference


def test_two_trainers_of_one_program_are_told_to_close_the_first(tmp_path):
    lock = take_lock(tmp_path, pytest.fail)
    with pytest.raises(UsageError, match=r"another trainer of this program .* close it \(trainer.close\(\)"):
        take_lock(tmp_path, pytest.fail, wait_seconds=0.0)
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    take_lock(tmp_path, pytest.fail, wait_seconds=0.0).release()


def test_all_locks_of_a_program_have_one_callback_for_its_forks(tmp_path, monkeypatch):
    """None can be removed; that a child holds no lock, another test shows."""
    callbacks = []
    real = os.register_at_fork
    monkeypatch.setattr(os, "register_at_fork", lambda **calls: callbacks.append(calls) or real(**calls))
    for _ in range(3):
        take_lock(tmp_path, print).release()
    assert len(callbacks) <= 1


def test_a_lock_that_is_given_back_in_time_is_waited_for(tmp_path):
    lock = take_lock(tmp_path, pytest.fail)
    calls = []

    def meanwhile():
        calls.append(True)
        if len(calls) == 2:
            lock.release()

    take_lock(tmp_path, pytest.fail, SECONDS, meanwhile).release()
    assert len(calls) == 2


def test_asking_for_the_lock_tells_who_holds_it_and_keeps_nobody_out(tmp_path):
    assert is_locked(tmp_path) is False
    lock = take_lock(tmp_path, pytest.fail)
    before = (tmp_path / LOCK_FILE).read_bytes(), (tmp_path / LOCK_FILE).stat().st_mtime_ns, tmp_path.stat().st_mtime_ns
    assert is_locked(tmp_path) is True
    after = (tmp_path / LOCK_FILE).read_bytes(), (tmp_path / LOCK_FILE).stat().st_mtime_ns, tmp_path.stat().st_mtime_ns
    assert after == before
    lock.release()
    (tmp_path / LOCK_FILE).write_text('{"pid": 1}')
    assert is_locked(tmp_path) is False
    take_lock(tmp_path, pytest.fail, wait_seconds=0.0).release()


def test_a_run_that_starts_while_somebody_asks_tries_once_more(tmp_path):
    (tmp_path / LOCK_FILE).touch()
    with (tmp_path / LOCK_FILE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # whoever asks, held for longer than asking takes
        assert is_locked(tmp_path) is False, "those who ask do not take each other for a run"
        take_lock(tmp_path, pytest.fail, SECONDS, file.close).release()


def test_giving_back_removes_no_lock_of_another_folder_that_took_the_place(tmp_path):
    (tmp_path / "run").mkdir()
    lock = take_lock(tmp_path / "run", pytest.fail)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    other = take_lock(tmp_path / "run", pytest.fail, wait_seconds=0.0)
    lock.release()
    assert (tmp_path / "run" / LOCK_FILE).exists()
    other.release()


def test_a_file_system_without_locks_is_told_of_and_the_run_goes_on(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    told = []
    take_lock(tmp_path, told.append).release()
    (sentence,) = told
    assert sentence.startswith(f"{tmp_path / LOCK_FILE} cannot be locked (No locks available): take care that no other")


def test_a_lock_that_was_left_behind_is_no_run(tmp_path):
    (tmp_path / LOCK_FILE).write_text('{"pid": 1}')
    assert create_folder(tmp_path) == Path(tmp_path)
