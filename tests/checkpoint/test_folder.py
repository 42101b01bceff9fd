"""The run folder: each file whole or not at all, and a sentence where it cannot be written."""

import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from train_programs import make_trainer, points
from worlds import in_turns

from samestep.checkpoint.export import write_weights
from samestep.checkpoint.run_folder import create_folder, is_signed, new_folder_name, signed
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


def test_new_names_are_below_runs_and_never_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        names.append(new_folder_name("lenet"))
        names[-1].mkdir(parents=True)
    assert len(set(names)) == 3
    assert all(name.parts[0] == "runs" and name.name.startswith("lenet-") for name in names)


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

    said = r"run(/ledger.jsonl is not the file| is not there) any more.*moved or replaced"  # by the first that writes
    with pytest.raises(RunFolderError, match=said):
        in_turns(1, train, folder, None, [Mover()])
    assert list(folder.rglob("*")) == []
    assert folder.exists() == replaced
    assert in_turns(1, train, moved, moved) == in_turns(1, train, tmp_path / "whole")


RECORD = {"command": ["python", "é\udc80.py"], "job": None, 2: {10: (1, float("nan")), 9: 1e300}, "seed": -0.0}


@pytest.fixture
def key(tmp_path, monkeypatch):
    """The place of a key that is not made yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "samestep" / "key"


def test_a_record_is_signed_by_a_key_that_the_first_run_makes_for_its_owner_alone(key, tmp_path):
    assert not is_signed(RECORD)
    assert not key.exists(), "a reader makes none"
    with ThreadPoolExecutor(8) as pool:  # runs that begin at once
        records = [*pool.map(signed, [RECORD] * 16)]
    assert len({record["signature"] for record in records}) == 1
    assert (os.listdir(key.parent), stat.S_IMODE(key.stat().st_mode), len(key.read_bytes())) == (["key"], 0o600, 32)
    write_json(tmp_path / "run.json", records[0])
    read = json.loads((tmp_path / "run.json").read_bytes())
    assert is_signed(records[0])
    assert is_signed(read), "it is the same as it is read again"
    assert is_signed({**read, "earlier_starts": [1]}), "which a loop's checkpoints have each of their own"
    assert key.read_bytes().hex() not in (tmp_path / "run.json").read_text()


@pytest.mark.parametrize(
    "edit",
    [
        *({"command": ["python", "x.py"]}, {"job": {"recipe": "gpt"}}, {"more": 1}, {"seed": 0.0}, {"signature": None}),
        *({"signature": "é"}, {"signature": 5}, {"signature": "0" * 64}),
    ],
)
def test_twin_an_edited_record_is_no_more_its_maker_s(key, edit):
    assert not is_signed({**signed(RECORD), **edit})


@pytest.mark.parametrize("spoil", ["readable", "short", "empty", "linked", "other", "gone"])
def test_a_key_that_may_be_another_s_signs_nothing(key, tmp_path, spoil):
    record = signed(RECORD)
    if spoil == "readable":
        key.chmod(0o640)
    elif spoil == "linked":
        key.rename(tmp_path / "key")
        key.symlink_to(tmp_path / "key")
    elif spoil == "gone":
        key.unlink()
    else:
        key.write_bytes({"short": key.read_bytes()[:31], "empty": b"", "other": bytes(32)}[spoil])
    assert not is_signed(record)
    if spoil not in ("other", "gone"):
        assert signed(RECORD)["signature"] is None


def test_a_home_that_cannot_be_written_stops_no_training_and_leaves_its_run_unsigned(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "state"))
    in_turns(1, lambda communicator: make_trainer(communicator, run_dir=tmp_path / "run").fit(points(), 1))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["signature"], is_signed(record)) == (None, False)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_signed(signed(record))
    assert (tmp_path / ".local/state/samestep/key").exists()
