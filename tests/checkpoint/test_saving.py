"""Saving beside training: what is written is the state at the call, errors are raised where they can be dealt with."""

import os
import shutil
import threading

import pytest
import torch
from checkpoint_writers import is_state_of, snapshot_of
from torch import nn

from samestep import files as run_files
from samestep.checkpoint.async_save import CheckpointSaver, to_host_copy
from samestep.checkpoint.storage import Snapshot, list_checkpoints, newest_checkpoint, read_checkpoint, write_checkpoint
from samestep.errors import RunFolderError


def save(saver, step, size=5000):
    snapshot = snapshot_of(step, size)
    saver.save(Snapshot(step, saver.to_host_copy(snapshot.files), snapshot.facts))


class Gate:
    """Facts that hold the writer up while they are turned into JSON, until they are let through."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()

    def facts(self):
        gate = self

        class Waiting(dict):
            def items(self):
                gate.entered.set()
                assert gate.opened.wait(60)
                return super().items()

        return Waiting(a=1)


def test_what_was_saved_is_told_and_loads(tmp_path):
    saver = CheckpointSaver(tmp_path, keep=2)
    assert saver.poll() == []
    for step in (10, 20, 30):
        save(saver, step)
    saver.close()
    done = saver.poll()
    assert [(saved.name, saved.step) for saved in done] == [(f"step-{step:08d}", step) for step in (10, 20, 30)]
    assert all(saved.seconds > 0 for saved in done)
    assert saver.poll() == []
    assert [step for step, _ in list_checkpoints(tmp_path)] == [20, 30]
    assert is_state_of(newest_checkpoint(tmp_path).snapshot, 30)
    saver.close()


def test_training_goes_on_while_the_writer_writes_and_does_not_change_what_it_writes(tmp_path):
    gate, saver = Gate(), CheckpointSaver(tmp_path)
    model = nn.Linear(3, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saver.save(Snapshot(1, saver.to_host_copy({"model": model.state_dict()}), gate.facts()))
    assert gate.entered.wait(60)
    assert saver.poll() == []
    with torch.no_grad():
        model.weight.fill_(7)
    second = saver.to_host_copy({"model": model.state_dict()})
    assert (second["model"]["weight"] == 7).all()
    gate.opened.set()
    saver.save(Snapshot(2, second, {}))
    saver.close()
    assert [saved.step for saved in saver.poll()] == [1, 2]
    found = newest_checkpoint(tmp_path, before=1)
    assert all(torch.equal(found.snapshot.files["model"][name], value) for name, value in before.items())
    assert (newest_checkpoint(tmp_path).snapshot.files["model"]["weight"] == 7).all()


def test_a_second_save_waits_for_the_first(tmp_path):
    gate, saver = Gate(), CheckpointSaver(tmp_path)
    saver.save(Snapshot(1, {}, gate.facts()))
    assert gate.entered.wait(60)
    second = threading.Thread(target=saver.save, args=(Snapshot(2, {}, {}),))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert list_checkpoints(tmp_path) == []
    gate.opened.set()
    second.join(60)
    assert [step for step, _ in list_checkpoints(tmp_path)][:1] == [1]
    saver.close()


@pytest.mark.parametrize("facts", [{"a": 1}, {"a": 0}], ids=["equal", "other"])
def test_a_writer_that_comes_second_leaves_an_equal_checkpoint_of_the_first_and_replaces_another(tmp_path, facts):
    gate, saver = Gate(), CheckpointSaver(tmp_path)
    saver.save(Snapshot(1, {}, gate.facts()))
    assert gate.entered.wait(60)
    first = write_checkpoint(tmp_path, Snapshot(1, {}, facts)).stat().st_ino
    gate.opened.set()
    saver.close()
    assert read_checkpoint(tmp_path / "step-00000001").facts == {"a": 1}
    assert ((tmp_path / "step-00000001").stat().st_ino == first) == (facts == {"a": 1})
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]


def addresses(files):
    return {tensor.data_ptr() for tensors in files.values() for tensor in tensors.values()}


def test_repeated_copies_use_the_memory_of_earlier_ones_that_are_written(tmp_path):
    gate, saver = Gate(), CheckpointSaver(tmp_path)
    state = snapshot_of(1).files
    first = saver.to_host_copy(state)
    saver.save(Snapshot(1, first, gate.facts()))
    assert gate.entered.wait(60)
    busy, second = addresses(first), saver.to_host_copy(state)
    assert not addresses(second) & busy, "the writer still reads the first copy"
    gate.opened.set()
    saver.save(Snapshot(2, second, {}))
    seen = busy | addresses(second)
    for step in range(3, 8):
        copied = saver.to_host_copy(snapshot_of(step).files)
        assert addresses(copied) <= seen
        saver.save(Snapshot(step, copied, snapshot_of(step).facts))
    saver.close()
    assert is_state_of(newest_checkpoint(tmp_path).snapshot, 7)


def test_memory_is_used_again_only_where_it_fits():
    first = to_host_copy({"a": {"x": torch.ones(2, 3), "y": torch.ones(4), "z": torch.ones(2, 2)}})
    kept = {name: tensor.data_ptr() for name, tensor in first["a"].items()}
    other = {"x": torch.zeros(2, 3), "y": torch.zeros(4).double(), "z": torch.zeros(2, 2).t(), "new": torch.zeros(1)}
    second = to_host_copy({"a": other}, reuse=first)
    assert second["a"].keys() == other.keys()
    assert all(second["a"][name].dtype == value.dtype for name, value in other.items())
    assert all(second["a"][name].stride() == value.stride() for name, value in other.items())
    assert all((tensor == 0).all() for tensor in second["a"].values())
    assert second["a"]["x"].data_ptr() == kept["x"]
    assert second["a"]["y"].data_ptr() != kept["y"]


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 5).t(),
        torch.tensor(3),
        torch.empty(0, 2),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(6)[::2],
        torch.ones(1).expand(5),
        nn.Parameter(torch.ones(2)),
        torch.ones(3, dtype=torch.float8_e4m3fn),
    ],
    ids=lambda value: f"{tuple(value.shape)}-{value.stride()}-{value.dtype}",
)
def test_a_host_copy_has_the_values_and_strides_and_no_graph(value):
    copy = to_host_copy({"a": {"v": value}})
    again = to_host_copy({"a": {"v": value}}, reuse=copy)["a"]["v"]
    copy = copy["a"]["v"]
    assert again.data_ptr() == copy.data_ptr()
    assert torch.equal(copy.to(torch.complex64), value.detach().to(torch.complex64))
    assert not copy.requires_grad
    if value.untyped_storage().nbytes() == value.numel() * value.itemsize:
        assert copy.stride() == value.stride()
    else:
        assert copy.is_contiguous()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_from_a_cuda_device_is_complete_used_again_and_holds_no_pinned_memory():
    device = torch.device("cuda")
    value = torch.randn(64, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    expected = value.cpu()
    copies = to_host_copy({"a": {"v": value, "w": torch.ones(3)}})
    value.zero_()
    assert not copies["a"]["v"].is_pinned()
    assert torch.equal(copies["a"]["v"], expected)
    assert to_host_copy({"a": {"v": value}}, reuse=copies)["a"]["v"].data_ptr() == copies["a"]["v"].data_ptr()


def test_an_error_of_the_writer_is_raised_once_by_the_next_call_and_the_saver_goes_on(tmp_path):
    folder = tmp_path / "checkpoints"
    saver = CheckpointSaver(folder)
    folder.write_text("in the way")
    save(saver, 1)
    with pytest.raises(RunFolderError, match=r"choose another folder by run_dir \(--run-dir\)"):
        saver.close()
    save(saver, 2)
    with pytest.raises(RunFolderError):
        save(saver, 3)
    folder.unlink()
    assert saver.poll() == []
    save(saver, 4)
    saver.close()
    assert [saved.step for saved in saver.poll()] == [4]
    shutil.rmtree(folder)
    save(saver, 5)
    saver.close()
    assert is_state_of(newest_checkpoint(folder).snapshot, 5)


def test_what_cannot_be_written_is_tried_again_and_each_failure_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "MAX_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(run_files, "CHECKPOINT_RETRIES", 100_000)
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    saver, told = CheckpointSaver(folder), []
    save(saver, 1)
    while not told:
        told = saver.failures()
    folder.unlink()
    saver.close()
    assert [saved.step for saved in saver.poll()] == [1]
    assert is_state_of(newest_checkpoint(folder).snapshot, 1)
    assert told[0].startswith(f"cannot write {folder}/step-00000001: ")
    assert told[0].endswith("trying again in 0 s (retry 1 of 100000)")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_run_that_is_moved_away_while_a_checkpoint_is_written_is_not_made_anew(
    tmp_path, monkeypatch, is_first, replaced
):
    monkeypatch.setattr(run_files, "MAX_WAIT_SECONDS", 0.0)
    run = tmp_path / "run"
    run.mkdir()
    saver, gate = CheckpointSaver(run / "checkpoints"), Gate()
    if not is_first:
        save(saver, 1)
        saver.close()
    saver.save(Snapshot(2, {}, gate.facts()))
    assert gate.entered.wait(60)
    run.rename(tmp_path / "moved")
    if replaced:
        run.mkdir()
    gate.opened.set()
    with pytest.raises(RunFolderError, match="is not there any more: it was removed, moved or replaced"):
        saver.close()
    assert list(run.rglob("*")) == []
    assert run.exists() == replaced


def test_a_run_that_is_removed_between_two_checkpoints_is_not_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "MAX_WAIT_SECONDS", 0.0)
    run = tmp_path / "run"
    run.mkdir()
    saver = CheckpointSaver(run / "checkpoints")
    save(saver, 1)
    saver.close()
    shutil.rmtree(run)
    save(saver, 2)
    with pytest.raises(RunFolderError, match="is not there any more: it was removed, moved or replaced"):
        saver.close()
    assert not run.exists()


def test_an_error_that_stays_is_raised_after_three_retries(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "MAX_WAIT_SECONDS", 0.0)
    (tmp_path / "file").write_text("")
    saver = CheckpointSaver(tmp_path / "file")
    save(saver, 1)
    with pytest.raises(RunFolderError, match=r"choose another folder by run_dir \(--run-dir\)"):
        saver.close()
    assert [said.split("(")[-1] for said in saver.failures()] == [f"retry {n} of 3)" for n in (1, 2, 3)]


def test_facts_that_are_no_json_are_told_too(tmp_path):
    saver = CheckpointSaver(tmp_path)
    saver.save(Snapshot(1, {}, {"a": object()}))
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.close()
    assert os.listdir(tmp_path) == []
