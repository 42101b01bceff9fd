"""Checkpoints of a sharded state: any strategy resumes from them on any number of devices."""

import hashlib
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from state_programs import NUM_STEPS, loaded_after_a_forward, own_loop, read_by_torch, train

from samestep import files as run_files
from samestep.checkpoint.async_save import write_sharded
from samestep.checkpoint.storage import Snapshot, newest_checkpoint, read_checkpoint, verify_checkpoint
from samestep.checkpoint.verified_files import Manifest, Written, manifest_bytes, part_name, read_manifest
from samestep.engine.sharded_state import LocalShard, by_rows
from samestep.errors import RunFolderError
from samestep.files import retrying
from samestep.runs.ledger import from_line

ONE, SHARDED_2, SHARDED_3, ZERO1 = ("replicate", 1), ("sharded", 2), ("sharded", 3), ("zero1", 2)
PAIRS = [(SHARDED_2, SHARDED_3), (SHARDED_3, ONE), (ONE, SHARDED_2), (ZERO1, SHARDED_3), (SHARDED_3, ZERO1)]


@pytest.fixture(scope="module")
def recorded(worlds, tmp_path_factory):
    """`recorded(strategy, D)`: the folder of a run with a checkpoint of every other step, and its result."""
    runs = {}

    def get(strategy, world_size):
        if (strategy, world_size) not in runs:
            folder = tmp_path_factory.mktemp("sharded") / "run"
            results = worlds(world_size).run(train, strategy, "two, in groups", folder)
            assert all(result == results[0] for result in results)
            runs[strategy, world_size] = folder, results[0]
        return runs[strategy, world_size]

    return get


def checkpoint(folder, step=4):
    return folder / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize(
    ("saved", "taken_up"), [pytest.param(a, b, id=f"{a[0]} {a[1]} - {b[0]} {b[1]}") for a, b in PAIRS]
)
def test_a_run_resumed_in_mid_epoch_ends_as_the_one_that_was_not(worlds, recorded, saved, taken_up):
    undisturbed = recorded("replicate", 1)[1]
    folder, result = recorded(*saved)
    assert result == undisturbed
    strategy, world_size = taken_up
    results = worlds(world_size).run(train, strategy, "two, in groups", None, checkpoint(folder))
    assert results == [undisturbed] * world_size
    assert ledger(folder) == ledger(recorded("replicate", 1)[0])


def ledger(folder):
    """The rows of the ledger by step, but for fields about the ranks."""
    rows = [from_line(row) for row in (folder / "ledger.jsonl").read_bytes().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("world_size", "seconds")} for row in rows if "loss" in row]


def test_each_rank_writes_its_shards_alone(recorded):
    path = checkpoint(recorded("sharded", 3)[0])
    parts = [load_file(path / part_name("model", rank, 3)) for rank in range(3)]
    assert [part["wide.weight"].shape[0] for part in parts] == [501, 501, 499]
    assert ["gain.gain" in part for part in parts] == [True, False, False]
    assert sorted(load_file(path / "model.safetensors")) == [
        *("frozen.calls", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var")
    ]
    assert not list(path.glob(".metadata"))


def test_the_reader_of_torch_distributed_checkpoint_reads_it(recorded):
    path = checkpoint(recorded("sharded", 3)[0])
    files = read_checkpoint(path).files
    expected = {**files["model"], **files["optimizer"]}
    found = read_by_torch(path, expected)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_checkpoints_of_equal_runs_are_equal_files(worlds, recorded, tmp_path):
    worlds(2).run(train, "sharded", "two, in groups", tmp_path / "again")
    paths = [checkpoint(folder) for folder in (recorded("sharded", 2)[0], tmp_path / "again")]
    first, second = (
        {name: file for name, file in read_manifest(path).files.items() if "shard-" in name} for path in paths
    )
    assert first == second
    assert len(first) == 4


def test_a_loop_without_a_trainer_goes_on_from_it(worlds, references, tmp_path):
    expected = references(own_loop, "replicate", tmp_path / "whole")
    assert worlds(3).run(own_loop, "sharded", tmp_path / "other", None, 2) == [None] * 3
    assert worlds(2).run(own_loop, "sharded", tmp_path / "other", tmp_path / "other") == [expected] * 2


def test_parameters_that_were_unsharded_before_a_checkpoint_was_loaded_are_not_used_after(worlds, references, tmp_path):
    expected = references(loaded_after_a_forward, "replicate", tmp_path / "one")
    assert worlds(2).run(loaded_after_a_forward, "kept", tmp_path / "other") == [expected] * 2


def test_a_damaged_part_makes_the_checkpoint_bad_and_the_one_before_is_taken(worlds, recorded, tmp_path):
    folder, result = recorded("sharded", 2)
    broken, before = checkpoint(folder, 8), tmp_path / "kept"
    part = broken / part_name("optimizer", 1, 2)
    before.write_bytes(part.read_bytes())
    last = checkpoint(folder, NUM_STEPS)
    last.rename(tmp_path / "last")
    try:
        flip_a_bit(part)
        said = verify_checkpoint(broken)
        assert said is not None
        assert part.name in said
        found = newest_checkpoint(folder / "checkpoints")
        assert found.path == checkpoint(folder, 6)
        assert worlds(3).run(train, "sharded", "two, in groups", None, folder) == [result] * 3
    finally:
        part.write_bytes(before.read_bytes())
        (tmp_path / "last").rename(last)
    assert verify_checkpoint(broken) is None


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def sealed(path):
    """Writes the manifest of the files as they are now."""
    old = read_manifest(path)
    files = {}
    for name in old.files:
        data = (path / name).read_bytes()
        files[name] = Written(len(data), hashlib.sha256(data).hexdigest())
    (path / "manifest.json").write_bytes(manifest_bytes(Manifest(old.step, files)))


def copied(recorded, tmp_path):
    path = tmp_path / checkpoint(recorded("sharded", 3)[0]).name
    shutil.copytree(checkpoint(recorded("sharded", 3)[0]), path)
    return path


def test_twin_a_part_in_another_ranks_place_is_no_checkpoint_although_its_checksums_are_right(recorded, tmp_path):
    path = copied(recorded, tmp_path)
    first, second = (path / part_name("model", rank, 3) for rank in (0, 1))
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    sealed(path)
    with pytest.raises(ValueError, match="does not have the rows of"):
        read_checkpoint(path)


def test_twin_a_part_that_is_missing_is_noticed_although_the_manifest_does_not_name_it(recorded, tmp_path):
    path = copied(recorded, tmp_path)
    manifest = read_manifest(path)
    files = {name: file for name, file in manifest.files.items() if name != part_name("model", 2, 3)}
    (path / "manifest.json").write_bytes(manifest_bytes(Manifest(manifest.step, files)))
    with pytest.raises(ValueError, match="do not belong to one set"):
        read_checkpoint(path)


def test_twin_a_bit_flipped_before_it_was_written_ends_in_another_digest(worlds, recorded, tmp_path):
    path = copied(recorded, tmp_path)
    flip_a_bit(path / part_name("model", 1, 3))
    sealed(path)
    for result in worlds(2).run(train, "sharded", "two, in groups", None, path):
        assert result[0] != recorded("sharded", 3)[1][0]


@pytest.mark.parametrize("strategy", ["sharded", pytest.param("zero1", marks=pytest.mark.slow)])
def test_by_the_clock_of_rank_0_all_ranks_write_after_the_same_step(worlds, tmp_path, strategy):
    options = {"checkpoint_steps": None, "checkpoint_minutes": 1e-9}
    worlds(2).run(train, strategy, "adam", tmp_path / "run", None, options)
    steps = [int(path.name[5:]) for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))]
    assert steps == [2, 4, 6, 8, 9]
    assert all(verify_checkpoint(path) is None for path in (tmp_path / "run" / "checkpoints").glob("step-*"))


def test_the_weights_that_are_left_are_those_of_one_device(recorded):
    one, *others = (
        load_file(recorded(*run)[0] / "weights.safetensors") for run in (ONE, ("sharded", 1), SHARDED_3, ZERO1)
    )
    for weights in others:
        assert weights.keys() == one.keys()
        assert all(torch.equal(weights[name], one[name]) for name in one)


def written(communicator):
    """A state with one sharded tensor, and its shard."""
    sharding = by_rows(torch.Size([4, 2]), communicator.world_size)
    shard = LocalShard(sharding.part(torch.arange(8.0).view(4, 2), communicator.rank).clone(), sharding)
    return Snapshot(1, {"model": {"weight": shard}}, {})


def write_without_a_folder(communicator, folder):
    """The error when rank 1 does not see the folder that rank 0 made."""
    state = written(communicator)
    write_sharded(communicator, folder, state)
    place = folder if communicator.rank == 0 else folder / "elsewhere"
    try:
        write_sharded(communicator, place, replace(state, step=2))
    except RunFolderError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def write_at_the_second_attempt(communicator, folder):
    """The messages when rank 1 does not see the folder that rank 0 made, the first time."""
    places = iter([folder if communicator.rank == 0 else folder / "elsewhere", folder])
    messages, before = [], run_files.MAX_WAIT_SECONDS
    run_files.MAX_WAIT_SECONDS = 0.0
    state = written(communicator)
    retrying(lambda: write_sharded(communicator, next(places), state), messages.append)
    run_files.MAX_WAIT_SECONDS = before
    return messages


def test_a_shard_that_cannot_be_written_is_an_error_on_all_ranks_and_leaves_what_was_good(worlds, tmp_path):
    for message in worlds(2).run(write_without_a_folder, tmp_path / "checkpoints"):
        assert message.startswith("RunFolderError: rank 1 does not see")
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def test_a_shard_that_cannot_be_written_once_is_written_by_all_ranks_at_the_next_attempt(worlds, tmp_path):
    folder = tmp_path / "checkpoints"
    messages, *others = worlds(2).run(write_at_the_second_attempt, folder)
    assert others == [messages]
    (message,) = messages
    assert "rank 1 does not see" in message
    assert "trying again in 0 s (retry 1 of 3)" in message
    assert newest_checkpoint(folder).snapshot.step == 1
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]
