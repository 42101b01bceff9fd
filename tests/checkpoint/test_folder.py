"""The run folder: each file whole or not at all, and a sentence where it cannot be written."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from train_programs import make_trainer, points
from worlds import cpu_only, in_turns

from samestep.checkpoint.export import write_weights
from samestep.checkpoint.run_folder import create_folder, new_folder_name
from samestep.errors import RunFolderError, UsageError
from samestep.files import append_whole, replacing, write_json
from samestep.run.run import Run


class Tied(nn.Module):
    """An embedding that is the output layer too."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


def leave(communicator, model, folder):
    """Writes the weights of a model in training."""
    run = Run(4, 2, communicator=communicator)
    write_weights(folder / "weights.safetensors", run.train_step(model, torch.optim.SGD(model.parameters()), len))


def test_a_folder_is_made_with_its_parents_and_taken_once_it_holds_a_contract(tmp_path):
    folder = create_folder(tmp_path / "a" / "b")
    assert create_folder(folder) == folder, "an empty folder is no run"
    write_json(folder / "run.json", {})
    with pytest.raises(
        UsageError,
        match=r"already holds a run; go on with it by resume='auto' \(--resume auto\), choose another folder",
    ):
        create_folder(folder)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError) as caught:
        create_folder(tmp_path / "file" / "run")
    assert str(caught.value) == (
        f"cannot write {tmp_path}/file/run: Not a directory; choose another folder by run_dir (--run-dir)"
    )


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "run.json"
    for value in ({"a": 1}, {"b": [1.5, None]}):
        write_json(path, value)
        assert json.loads(path.read_text()) == value
    assert os.listdir(tmp_path) == ["run.json"]


def test_what_fails_midway_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})

    def fail():
        with replacing(path) as temporary:
            temporary.write_text('{"b"')
            raise KeyError("midway")

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["run.json"]


def test_weights_come_back_with_buffers_and_plain_names(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    in_turns(1, leave, model, tmp_path)
    loaded = load_file(tmp_path / "weights.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value.cpu()) for name, value in model.state_dict().items())
    assert os.listdir(tmp_path) == ["weights.safetensors"]


def test_tied_weights_are_written_once_and_load_again(tmp_path):
    from safetensors.torch import load_model

    model, other = Tied(), Tied()
    in_turns(1, leave, model, tmp_path)
    loaded = load_file(tmp_path / "weights.safetensors")
    assert len({"embed.weight", "head.weight"} & loaded.keys()) == 1
    load_model(other, tmp_path / "weights.safetensors")
    assert torch.equal(other.embed.weight, model.embed.weight.cpu())
    assert other.head.weight is other.embed.weight


def test_appending_adds_all_of_the_data(tmp_path):
    with (tmp_path / "lines").open("ab", buffering=0) as file:
        for data in (b"one\n", b"", b"two\n" * 1000):
            append_whole(file, tmp_path / "lines", data)
    assert (tmp_path / "lines").read_bytes() == b"one\n" + b"two\n" * 1000


FILE_OPERATIONS = {"open", "write", "mkdir", "rename", "replace", "unlink", "fsync", "flock", "chmod", "utime"}


def start(communicator, folder, resume="auto"):
    """A run that the command takes for one of its own."""
    job = {"recipe": "mlp"}
    with make_trainer(communicator, run_dir=folder, contract={**job, "job": job}) as trainer:
        trainer.fit(points(), 1, resume=resume)
        return trainer.digest


def killed_after(number, folder):
    """Starts a run in a fork, which is killed after so many operations on files; whether that was before it trained."""
    pid = os.fork()
    if pid == 0:
        done = 0

        def look(frame, event, function):
            nonlocal done
            if event == "call" and frame.f_code.co_name == "_train_epoch":
                os._exit(0)
            done += event == "c_return" and function.__name__ in FILE_OPERATIONS
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)

        def doomed(communicator):
            sys.setprofile(look)
            start(communicator, folder)

        try:
            in_turns(1, doomed)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


@cpu_only("it forks this process, which CUDA does not survive")
def test_a_run_that_is_killed_at_any_point_of_its_start_is_begun_anew_by_auto(tmp_path, refused, capsys):
    [digest] = in_turns(1, start, tmp_path / "whole", None)
    states, number = set(), 1
    while killed_after(number, folder := tmp_path / str(number)):
        number += 1
        state = frozenset((path.name, path.stat().st_size > 0) for path in folder.rglob("*"))
        if state in states or not folder.exists():
            continue
        states.add(state)
        capsys.readouterr()
        words = ("train", "mlp", "--resume", "auto", "--run-dir", folder, "--devices")
        assert "cannot read 'none' as devices" in refused(*words, "none"), state
        assert in_turns(1, start, folder) == [digest], state
    assert len(states) > 8, states


def test_new_names_are_below_runs_and_never_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        names.append(new_folder_name("lenet"))
        names[-1].mkdir(parents=True)
    assert len(set(names)) == 3
    assert all(name.parts[0] == "runs" and name.name.startswith("lenet-") for name in names)


FULL = """
import resource, signal, sys
from pathlib import Path
from torch import nn
from samestep.errors import RunFolderError
from samestep.files import replacing, write_json
from samestep.checkpoint.verified_files import write_tensors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
write_json(folder / "run.json", {"old": 1})
def write_weights(model):
    with replacing(folder / "weights.safetensors") as temporary:
        write_tensors(temporary, model.state_dict())
write_weights(nn.Linear(2, 2))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for write in (
    lambda: write_json(folder / "run.json", list(range(10_000))),
    lambda: write_weights(nn.Linear(100, 100)),
):
    try:
        write()
    except RunFolderError as error:
        print(error)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit on the size of files here")
def test_a_full_disk_is_a_sentence_and_leaves_the_old_files(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"cannot write {tmp_path / name}" for name in ("run.json", "weights.safetensors")
    ]
    assert all(line.endswith("free some space, or choose another folder by run_dir (--run-dir)") for line in lines)
    assert json.loads((tmp_path / "run.json").read_text()) == {"old": 1}
    assert load_file(tmp_path / "weights.safetensors")["weight"].shape == (2, 2)
    assert sorted(os.listdir(tmp_path)) == ["run.json", "weights.safetensors"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_renamed_in_mid_run_ends_the_run_in_a_sentence_and_is_not_made_anew(tmp_path, replaced):
    folder, moved = tmp_path / "run", tmp_path / "moved"

    class Mover:
        def log(self, step, scalars):
            if step == 3 and not moved.exists():
                while not (folder / "checkpoints" / "latest").exists():
                    time.sleep(0.01)
                folder.rename(moved)
                if replaced:
                    folder.mkdir()

        def close(self):
            pass

    def train(communicator, run_dir, resume=None, loggers=()):
        with make_trainer(communicator, run_dir=run_dir, checkpoint_steps=2, loggers=loggers) as trainer:
            trainer.fit(points(), 2, resume=resume)
            return trainer.digest

    with pytest.raises(RunFolderError, match=r"run/ledger.jsonl is not the file any more.*it was moved or replaced"):
        in_turns(1, train, folder, None, [Mover()])
    assert list(folder.rglob("*")) == []
    assert folder.exists() == replaced
    assert in_turns(1, train, moved, moved) == in_turns(1, train, tmp_path / "whole")
