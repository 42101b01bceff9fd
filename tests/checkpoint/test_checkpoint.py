"""Checkpoints: what is loaded is what was written, whatever happens to the writer, the disk and the files."""

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import forked
import pytest
import torch
from checkpoint_writers import REFUSED, is_state_of, snapshot_of
from safetensors.torch import load_file

from samestep import files as run_files
from samestep.checkpoint import storage, verified_files
from samestep.checkpoint.packing import DTYPES
from samestep.checkpoint.resume import named_checkpoint
from samestep.checkpoint.storage import (
    Snapshot,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from samestep.errors import CheckpointError, RunFolderError, UsageError
from samestep.patch import Patch, applied

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


NOWHERE = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
WRITER = "import sys; from checkpoint_writers import main; main(*sys.argv[1:])"


def job(name, *arguments):
    """The arguments, environment and folder of a process that does a job of checkpoint_writers.py."""
    words = [str(argument) if isinstance(argument, Path) else argument for argument in arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    return (name, json.dumps(words)), variables, str(Path(__file__).parent)


def outcomes(*jobs):
    """The exit codes of jobs that run at once, and what they write to stderr."""
    found = forked.run_all(WRITER, [job(*each) for each in jobs], 240, ("checkpoint_writers",))
    return [status for status, *_ in found], "".join(stderr for *_, stderr in found)


def names_in(folder):
    return sorted(os.listdir(folder))


def steps_in(folder):
    return [step for step, _ in list_checkpoints(folder)]


def flip(path, position, mask=1):
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path):
    folder = tmp_path / "runs" / "a" / "checkpoints"
    path = write_checkpoint(folder, snapshot_of(1200))
    assert path == folder / "step-00001200"
    assert names_in(path) == FILES
    assert names_in(folder) == ["latest", "step-00001200"]
    assert (folder / "latest").read_text() == "step-00001200\n"
    assert verify_checkpoint(path) is None
    assert is_state_of(read_checkpoint(path), 1200)
    found = newest_checkpoint(folder)
    assert (found.path, found.skipped) == (path, ())
    assert is_state_of(found.snapshot, 1200)


def every_dtype():
    data = torch.arange(96, dtype=torch.uint8)
    tensors = {str(dtype): data.clone().view(dtype).reshape(2, -1) for dtype in DTYPES if dtype != torch.bool}
    tensors["bool"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 3, dtype=torch.int64)
    tensors["größe 😀"] = torch.ones(5, dtype=torch.int8)
    return tensors


def same_bytes(one, other):
    facts = [(t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).tolist()) for t in (one, other)]
    return facts[0] == facts[1]


def test_files_of_tensors_are_safetensors_for_every_dtype(tmp_path):
    tensors = every_dtype()
    path = write_checkpoint(tmp_path, Snapshot(1, {"model": tensors, "none": {}}, None))
    by_library = load_file(path / "model.safetensors")
    by_us = read_checkpoint(path).files
    assert by_library.keys() == by_us["model"].keys() == tensors.keys()
    assert by_us["none"] == load_file(path / "none.safetensors") == {}
    assert all(same_bytes(by_library[name], value) for name, value in tensors.items())
    assert all(same_bytes(by_us["model"][name], value) for name, value in tensors.items())


def test_tensors_of_any_strides_are_stored_row_by_row(tmp_path):
    value = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    views = {
        "channels last": value,
        "transposed": value[0, 0].t(),
        "gaps": value[..., ::2],
        "expanded": torch.ones(1).expand(9),
    }
    path = write_checkpoint(tmp_path, Snapshot(1, {"a": views}, {}))
    back = read_checkpoint(path).files["a"]
    assert all(torch.equal(back[name], view) and back[name].is_contiguous() for name, view in views.items())


def test_what_is_read_is_in_memory_of_its_own(tmp_path):
    path = write_checkpoint(tmp_path, snapshot_of(1))
    tensors = [tensor for file in read_checkpoint(path).files.values() for tensor in file.values()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.data_ptr() % 16 == 0 and tensor.storage_offset() == 0 for tensor in tensors)
    shutil.rmtree(path)
    assert all(torch.isfinite(tensor).all() for tensor in tensors)


def damages(seed, count, path):
    """(file, position, what to do with the bytes) at seeded places over all files."""
    choose = random.Random(seed)
    for number in range(count):
        file = path / FILES[number % len(FILES)]
        position = choose.randrange(file.stat().st_size)
        mask = 1 << choose.randrange(8)
        kind = choose.choice(["flip", "flip", "truncate"])
        yield file, kind, position, mask


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_never_taken_for_good_and_the_one_before_is_used(tmp_path, count):
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        path = write_checkpoint(folder, snapshot_of(step, size=300))
    whole = {name: (path / name).read_bytes() for name in FILES}
    for file, kind, position, mask in damages(count, count, path):
        data = bytearray(whole[file.name])
        if kind == "flip":
            data[position] ^= mask
        file.write_bytes(data if kind == "flip" else data[:position])
        found = newest_checkpoint(folder)
        place = f"{kind} at {position} of {file.name}"
        assert is_state_of(found.snapshot, 1, size=300), place
        assert len(found.skipped) == 1, place
        assert found.skipped[0].startswith(f"{path} is no good checkpoint: "), place
        assert file.name in found.skipped[0], place
        assert verify_checkpoint(path) == found.skipped[0], place
        with pytest.raises(CheckpointError, match="is no good checkpoint"):
            read_checkpoint(path)
        file.write_bytes(whole[file.name])
    assert newest_checkpoint(folder).skipped == ()


def test_a_flip_of_any_byte_of_the_manifest_is_noticed(tmp_path):
    path = write_checkpoint(tmp_path, Snapshot(1, {}, {}))
    data = (path / "manifest.json").read_bytes()
    for position, byte in enumerate(data):
        other_space = {0x0A: 0x0A ^ 0x20, 0x20: 0x20 ^ 0x0A}  # JSON would not mind
        flip(path / "manifest.json", position, mask=other_space.get(byte, 0x20))
        assert verify_checkpoint(path) is not None, position
        (path / "manifest.json").write_bytes(data)
    for other in (data + b"\n", b"", data[:-1], b" " + data, data.replace(b"\n", b"\r\n")):
        (path / "manifest.json").write_bytes(other)
        assert verify_checkpoint(path) is not None


def test_without_the_checksums_a_flipped_byte_would_pass(tmp_path):
    path = write_checkpoint(tmp_path, snapshot_of(1))
    flip(path / "model.safetensors", -1)
    assert "model.safetensors is damaged" in verify_checkpoint(path)
    with applied([Patch(verified_files, "matches", lambda found, written: True)]):
        assert verify_checkpoint(path) is None
        assert not is_state_of(read_checkpoint(path), 1)
    flip(path / "model.safetensors", -1)
    flip(path / "manifest.json", -6)
    assert verify_checkpoint(path) is not None
    as_it_is = Patch(verified_files, "manifest_bytes", lambda manifest: (path / "manifest.json").read_bytes())
    with applied([Patch(verified_files, "matches", lambda found, written: True), as_it_is]):
        assert verify_checkpoint(path) is None


def test_a_header_that_lies_is_damage_and_no_crash(tmp_path):
    path = tmp_path / "a.safetensors"

    def read(header, data=b"\0" * 8):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        whole = path.read_bytes()
        return verified_files.read_tensors(path, verified_files.Written(len(whole), hashlib.sha256(whole).hexdigest()))

    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert read({"a": good})["a"].tolist() == [0, 0]
    lies = [
        b"{",
        b"[" * 100_000,
        {"a": {**good, "shape": [3]}},
        {"a": {**good, "shape": [-1, -2]}},
        {"a": {**good, "data_offsets": [8, 16]}},
        {"a": good, "b": {"dtype": "U8", "shape": [0, 2**62, 2**62], "data_offsets": [8, 8]}},
        {},
    ]
    for header in lies:
        with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read \("):
            read(header)
    for data in (b"", b"\xff" * 8, b"\0" * 7):
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            verified_files.read_tensors(path, verified_files.Written(len(data), hashlib.sha256(data).hexdigest()))


def test_what_is_missing_is_named(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3, 4):
        write_checkpoint(folder, snapshot_of(step), keep=9)
    (folder / "step-00000004" / "manifest.json").unlink()
    (folder / "step-00000003" / "optimizer.safetensors").unlink()
    shutil.rmtree(folder / "step-00000002")
    (folder / "step-00000002").mkdir()
    told = []
    found = newest_checkpoint(folder, tell=told.append)
    assert found.path.name == "step-00000001"
    assert found.skipped == tuple(told)
    assert told == [
        f"{folder}/step-00000004 is no good checkpoint: it has no manifest.json, which is written last",
        f"{folder}/step-00000003 is no good checkpoint: optimizer.safetensors: No such file or directory",
        f"{folder}/step-00000002 is no good checkpoint: it has no manifest.json, which is written last",
    ]
    assert "there is no such folder" in verify_checkpoint(folder / "step-00000009")
    with pytest.raises(CheckpointError, match="take another checkpoint, or a copy of this one"):
        read_checkpoint(folder / "step-00000003")


def test_where_nothing_is_good_nothing_is_found_and_that_is_told(tmp_path):
    folder = tmp_path / "checkpoints"
    assert newest_checkpoint(folder) is None
    assert list_checkpoints(folder) == []
    flip(write_checkpoint(folder, snapshot_of(1)) / "state.json", 0)
    told = []
    assert newest_checkpoint(folder, tell=told.append) is None
    assert len(told) == 1


def test_the_newest_up_to_a_step_is_found(tmp_path):
    for step in (5, 10, 20, 123456789):
        write_checkpoint(tmp_path, snapshot_of(step), keep=9)
    assert [newest_checkpoint(tmp_path, before).path.name for before in (None, 20, 19, 10, 5)] == [
        "step-123456789",
        "step-00000020",
        "step-00000010",
        "step-00000010",
        "step-00000005",
    ]
    assert newest_checkpoint(tmp_path, 4) is None
    assert steps_in(tmp_path) == [5, 10, 20, 123456789]


def test_a_checkpoint_can_be_copied_and_moved(tmp_path):
    path = write_checkpoint(tmp_path / "a", snapshot_of(3))
    copy = shutil.copytree(path, tmp_path / "kept for the paper")
    moved = path.rename(tmp_path / "step-00000003")
    assert verify_checkpoint(copy) is None
    assert is_state_of(read_checkpoint(moved), 3)
    renamed = moved.rename(tmp_path / "step-00000004")
    assert "it holds step 3, which is not what its name says" in verify_checkpoint(renamed)


def with_manifest(path, **changes):
    """Writes a manifest with other content and a checksum that is right."""
    content = {**json.loads((path / "manifest.json").read_bytes()), **changes}
    del content["checksum"]
    head = (json.dumps(content, indent=2).removesuffix("\n}") + ',\n  "checksum": "').encode()
    (path / "manifest.json").write_bytes(head + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n')


@pytest.mark.parametrize(
    ("version", "remedy"), [(1, "read it by the samestep that wrote it, or start anew"), (3, "upgrade samestep")]
)
def test_another_format_is_refused_with_a_sentence(tmp_path, version, remedy):
    for step in (1, 2):
        path = write_checkpoint(tmp_path, snapshot_of(step))
    with_manifest(path)
    assert verify_checkpoint(path) is None
    with_manifest(path, version=version)
    assert newest_checkpoint(tmp_path).skipped == (
        f"{path} is no good checkpoint: its format has version {version}, and this samestep reads 2: {remedy}",
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "another"},
        {"files": {"../step-00000001/state.json": {"size": 1, "sha256": ""}}},
        {"files": {"a": {"size": -1, "sha256": ""}}},
        {"files": {"a": 1}},
        {"files": []},
        {"step": None},
        {"version": "x"},
        {"files": {"a\0b": {"size": 1, "sha256": ""}}},
        {"files": {"\ud800": {"size": 1, "sha256": ""}}},
        {"files": {"a": {"size": float("inf"), "sha256": ""}}},
        {"more": [[]] * 3 + [json.loads("[" * 300 + "]" * 300)]},
    ],
    ids=str,
)
def test_a_manifest_of_something_else_is_refused(tmp_path, changes):
    path = write_checkpoint(tmp_path, snapshot_of(1))
    with_manifest(path, **changes)
    assert "manifest.json is not the manifest of a checkpoint" in verify_checkpoint(path)


@pytest.mark.parametrize(
    "text",
    [b"{", b'"\xff"', b"[" * 200_000 + b"]" * 200_000, b"[" * 300 + b"]" * 300, b"9" * 5000, b"NaN"],
    ids=["no JSON", "not UTF-8", "200,000 levels", "300 levels", "5,000 digits", "NaN"],
)
def test_facts_that_cannot_be_read_make_a_checkpoint_bad_and_the_one_before_is_used(tmp_path, text):
    good, bad = (write_checkpoint(tmp_path, snapshot_of(step)) for step in (1, 2))
    (bad / "state.json").write_bytes(text)
    files = json.loads((bad / "manifest.json").read_text())["files"]
    files["state.json"] = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    with_manifest(bad, files=files)
    assert verify_checkpoint(bad) is None
    found = newest_checkpoint(tmp_path)
    assert found.path == good
    assert found.skipped[0].startswith(f"{bad} is no good checkpoint: state.json cannot be read (")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["endless", "pipe", "folder"])
def test_a_checkpoint_is_made_of_regular_files(tmp_path, name, kind):
    good, bad = (write_checkpoint(tmp_path, snapshot_of(step)) for step in (1, 2))
    (bad / name).unlink()
    if kind == "endless":
        (bad / name).symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(bad / name)
    else:
        (bad / name).mkdir()
    found = newest_checkpoint(tmp_path)
    why = "is a symbolic link, and none is followed in a run's folder" if kind == "endless" else "is no regular file"
    assert (found.path, found.skipped) == (good, (f"{bad} is no good checkpoint: {name}: it {why}",))
    assert verify_checkpoint(bad) == found.skipped[0]


def test_a_manifest_of_any_size_is_not_read_whole(tmp_path):
    path = write_checkpoint(tmp_path, snapshot_of(1))
    os.truncate(path / "manifest.json", 1 << 40)
    assert verify_checkpoint(path) == (
        f"{path} is no good checkpoint: manifest.json: it has {1 << 40} bytes, and can have {1 << 26} at most"
    )


def test_older_ones_are_removed_beyond_those_to_keep(tmp_path):
    for step in range(6):
        write_checkpoint(tmp_path, snapshot_of(step), keep=3)
    assert names_in(tmp_path) == ["latest", "step-00000003", "step-00000004", "step-00000005"]
    write_checkpoint(tmp_path, snapshot_of(6), keep=1)
    assert names_in(tmp_path) == ["latest", "step-00000006"]
    with pytest.raises(UsageError, match=r"got keep=0; it must be 1 or more"):
        write_checkpoint(tmp_path, snapshot_of(7), keep=0)


def test_incomplete_ones_do_not_count_among_those_to_keep_and_newer_ones_stay(tmp_path):
    for step in (1, 2, 3, 4, 9):
        write_checkpoint(tmp_path, snapshot_of(step), keep=9)
    (tmp_path / "step-00000004" / "state.json").write_text("{")
    write_checkpoint(tmp_path, snapshot_of(5), keep=2)
    assert steps_in(tmp_path) == [3, 4, 5, 9]


def test_a_good_checkpoint_of_the_same_step_is_kept_and_a_damaged_one_replaced(tmp_path):
    path = write_checkpoint(tmp_path, snapshot_of(2))
    before = path.stat().st_ino
    write_checkpoint(tmp_path, snapshot_of(2))
    assert path.stat().st_ino == before
    flip(path / "model.safetensors", 100)
    write_checkpoint(tmp_path, snapshot_of(2))
    assert path.stat().st_ino != before
    assert is_state_of(read_checkpoint(path), 2)
    assert names_in(tmp_path) == ["latest", "step-00000002"]


MAKER = """
import os, pathlib, sys, time
from samestep.files import staging
with staging(pathlib.Path(sys.argv[1])) as folder:
    (folder / "half of it").mkdir()
    if sys.argv[2] == "forks" and os.fork() == 0:
        time.sleep(600)
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def staged(folder, kind="", *, within=()):
    """The folder that another process is about to fill, in a namespace of its own if it is to be."""
    place = tempfile.mkdtemp(dir=folder.parent)  # moved from there: each maker removes what others left beside it
    command = [*within, sys.executable, "-c", MAKER, place, kind]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        if not (line := process.stdout.readline()):
            pytest.skip(f"{' '.join(within)} does not run here")
        made = Path(line.split()[0])
        yield made.rename(folder / made.name), process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def age(path):
    os.utime(path, (time.time() - 2 * 86400,) * 2)
    return path


def of_another_system(path):
    return path.rename(path.with_name(f".tmp-{'0' * 8}-{path.name[-8:]}"))


def killed(folder):
    """The folder that a process has left."""
    with staged(folder) as (path, _):
        return path


WRITERS = {  # of something in the folder, whatever it is
    "a checkpoint": lambda folder: write_checkpoint(folder, snapshot_of(1)),
    "a file": lambda folder: run_files.write_json(folder / "facts.json", 1),
    "a name": lambda folder: storage.point_to(folder, "latest", "step-00000001"),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_writer_removes_what_killed_ones_have_left(tmp_path, write):
    left = [killed(tmp_path), age(of_another_system(killed(tmp_path)))]
    unlocked = killed(tmp_path)
    (unlocked / "lock").unlink()
    age(unlocked)
    assert all((each / "half of it").is_dir() for each in [*left, unlocked])
    write(tmp_path)
    assert [name for name in names_in(tmp_path) if name.startswith(".tmp-")] == []


@pytest.mark.parametrize("called", ["pathlib.Path.open", "fcntl.flock"])
def test_what_a_writer_leaves_that_is_killed_before_it_has_locked_its_folder_is_removed(tmp_path, called):
    once = "import fcntl, os, pathlib, sys; from samestep.files import staging\n"
    once += f"with staging(pathlib.Path(sys.argv[1])): {called} = lambda *_, **__: os.kill(os.getpid(), 9)\n"
    maker = subprocess.run([sys.executable, "-c", once + MAKER, tmp_path, ""], stdin=subprocess.DEVNULL, timeout=60)
    assert maker.returncode == -signal.SIGKILL
    assert len(names_in(tmp_path)) == 1
    run_files.remove_leftovers(tmp_path)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("place", ["mkdir", "open"])
def test_a_folder_that_another_process_takes_for_a_leftover_is_made_anew(tmp_path, monkeypatch, place):
    made, method = [], getattr(Path, place)

    def make(path, *arguments):
        result = method(path, *arguments)
        if path.parent == tmp_path or path.name == "lock":
            made.append(path if path.parent == tmp_path else path.parent)
            if len(made) < 3:
                run_files.remove_leftovers(tmp_path)
        return result

    monkeypatch.setattr(Path, place, make)
    with run_files.staging(tmp_path) as folder:
        assert [path for path in made if path.exists()] == [folder] == made[2:]
        assert names_in(folder) == ["lock"]


def test_a_folder_is_made_anew_while_another_process_is_removing_it(tmp_path, monkeypatch):
    flock, asked = fcntl.flock, []

    def held_by_another(file, kind):
        asked.append(Path(file.name).parent)
        if len(asked) == 1:
            raise BlockingIOError(errno.EWOULDBLOCK, "held")
        return flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", held_by_another)
    with run_files.staging(tmp_path) as folder:
        assert [folder] == asked[1:]
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_others_write_and_what_cannot_be_judged_stays(tmp_path, write):
    elsewhere, unlocked = of_another_system(killed(tmp_path)), killed(tmp_path)
    (unlocked / "lock").unlink()
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "file").touch()
    link = tmp_path / f".tmp-{'0' * 8}-{'1' * 8}"
    link.symlink_to("users")
    age(tmp_path / "users")
    (tmp_path / ".tmp-something").write_text("not ours")
    with staged(tmp_path) as (long, _), staged(tmp_path) as (other, _), run_files.staging(tmp_path) as own:
        kept = {age(long), age(of_another_system(other)), own, elsewhere, unlocked, link, tmp_path / ".tmp-something"}
        write(tmp_path)
        assert {path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")} == kept
        assert (long / "half of it").is_dir()
    assert (tmp_path / "users" / "file").exists()


def test_what_a_process_writes_in_another_pid_namespace_stays(tmp_path):
    with staged(tmp_path, within=("unshare", "--pid", "--fork", "--mount-proc")) as (path, _):
        write_checkpoint(tmp_path, snapshot_of(1))
        assert (path / "half of it").is_dir()
    write_checkpoint(tmp_path, snapshot_of(2))
    assert not path.exists()


def test_a_fork_that_outlives_a_killed_writer_keeps_what_it_left_until_it_ends(tmp_path):
    with staged(tmp_path, "forks") as (path, process):
        process.kill()
        process.wait()
        write_checkpoint(tmp_path, snapshot_of(1))
        assert (path / "half of it").is_dir()
    write_checkpoint(tmp_path, snapshot_of(2))
    assert not path.exists()


def test_a_program_that_a_writer_starts_does_not_hold_its_lock(tmp_path):
    with run_files.staging(tmp_path) as folder:
        program = subprocess.Popen(["sleep", "600"], close_fds=False)
        shutil.copytree(folder, copy := tmp_path / f"{folder.name[:-8]}{'0' * 8}")
        (copy / "lock").unlink()
        os.link(folder / "lock", copy / "lock")
    run_files.remove_leftovers(tmp_path)
    program.kill()
    program.wait()
    assert names_in(tmp_path) == []


def test_twin_without_locks_nothing_is_removed_before_it_is_a_day_old(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    left = killed(tmp_path)
    monkeypatch.setattr(fcntl, "flock", flock)
    with run_files.staging(tmp_path) as folder:
        assert not (folder / "lock").exists()  # which would be taken for one that nobody holds
        run_files.remove_leftovers(tmp_path)
        assert {left, folder} == set(tmp_path.iterdir())
    assert left.is_dir()
    age(left)
    run_files.remove_leftovers(tmp_path)
    assert names_in(tmp_path) == []


def assert_all_is_good(folder, allowed, size=5000):
    """The newest checkpoint is one of the states that were written, and every other one is good too."""
    found = newest_checkpoint(folder)
    assert found.skipped == ()
    assert found.snapshot.step in allowed
    assert is_state_of(found.snapshot, found.snapshot.step, size)
    assert [verify_checkpoint(path) for _, path in list_checkpoints(folder)] == [None] * len(list_checkpoints(folder))


def test_a_writer_killed_at_any_operation_on_files_loses_nothing(tmp_path):
    number, ends = 0, []
    for step in (1, 2, 3):
        write_checkpoint(tmp_path / "before", snapshot_of(step))
    while not ends or ends[-1] != 0:
        number += 1
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        ends += outcomes(("write_until", folder, 4, 2, number, 0))[0]
        assert_all_is_good(folder, {3, 4})
        write_checkpoint(folder, snapshot_of(4), keep=2)
        assert names_in(folder) == ["latest", "step-00000003", "step-00000004"], number
        assert (folder / "latest").read_text() == "step-00000004\n"
    assert set(ends[:-1]) == {-signal.SIGKILL}
    assert len(ends) > 12


@pytest.mark.parametrize("number_of_error", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)])
def test_an_error_at_any_operation_on_files_loses_nothing(tmp_path, number_of_error):
    number, ends = 0, []
    for step in (1, 2):
        write_checkpoint(tmp_path / "before", snapshot_of(step))
    while number < max((n for n, end in enumerate(ends, 1) if end), default=0) + 3:
        number += 1
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        end, said = outcomes(("write_until", folder, 3, 2, number, number_of_error))
        ends += end
        assert_all_is_good(folder, {2, 3})
        if ends[-1]:
            assert not [name for name in names_in(folder) if name.startswith(".tmp")], number
    assert set(ends) == {0, REFUSED}, said
    assert len(ends) > 12


@pytest.mark.parametrize("number_of_error", [0, errno.ENOSPC])
def test_a_writer_stopped_while_it_replaces_a_checkpoint_leaves_the_old_or_the_new_one(tmp_path, number_of_error):
    number, ends, facts, aside = 0, [], [], 0
    write_checkpoint(tmp_path / "before", Snapshot(4, snapshot_of(4).files, {"evaluated": False}, is_best=True))
    while number < 9 or any(ends[-9:]):  # some errors, such as those of a removal, do not end a writer
        number += 1
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        end, said = outcomes(("write_until", folder, 4, 1, number, number_of_error, True))
        ends += end
        found = newest_checkpoint(folder)
        assert (found.snapshot.step, found.skipped) == (4, ()), number
        best = named_checkpoint(folder / "best")
        assert read_checkpoint(best).facts == found.snapshot.facts, number
        assert read_checkpoint(named_checkpoint(folder / "step-00000004")).facts == found.snapshot.facts, number
        facts.append(found.snapshot.facts["evaluated"])
        aside += best.name.endswith(".replaced")
        write_checkpoint(folder, snapshot_of(5), keep=3)
        assert names_in(folder) == ["best", "latest", "step-00000004", "step-00000005"], number
        assert read_checkpoint(folder / "step-00000004").facts == found.snapshot.facts, number
    assert set(ends) == {0, REFUSED if number_of_error else -signal.SIGKILL}, said
    assert set(facts) == {False, True}
    assert number_of_error or facts == sorted(facts), "the new one is there from one operation on"
    assert aside == 1


@pytest.mark.parametrize(
    ("function", "count"),
    [
        ("write_steps", 2),
        ("save_steps", 1),
        pytest.param("write_steps", 15, marks=pytest.mark.slow),
        pytest.param("save_steps", 15, marks=pytest.mark.slow),
    ],
)
def test_a_writer_killed_at_any_moment_leaves_a_newest_good_checkpoint(tmp_path, function, count):
    folder, size = tmp_path / "checkpoints", 300_000
    write_checkpoint(folder, snapshot_of(1, size))
    choose = random.Random(f"{function} {count}")
    for _ in range(count):
        first = steps_in(folder)[-1] + 1
        words, variables, place = job(function, folder, first, first + 10_000, 2, size)
        with forked.Program(WRITER, words, ("checkpoint_writers",), variables, place, NOWHERE) as writer:
            time.sleep(0.02 + 0.2 * choose.random())
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        assert_all_is_good(folder, range(first - 1, first + 10_000), size)


def test_two_writers_in_one_folder_do_not_harm_each_other(tmp_path):
    same, apart = tmp_path / "same", tmp_path / "apart"
    assert outcomes(*[("write_steps", same, 1, 15, 3)] * 2) == ([0, 0], "")
    assert_all_is_good(same, {14})
    assert set(steps_in(same)) <= {11, 12, 13, 14}
    assert outcomes(("write_steps", apart, 1, 15, 2), ("write_steps", apart, 101, 115, 2)) == ([0, 0], "")
    assert_all_is_good(apart, {114})
    write_checkpoint(apart, snapshot_of(115))
    assert not [name for name in names_in(apart) if name.startswith(".tmp")]


@pytest.mark.parametrize("limit", [0, -4, 30_000])
def test_a_file_that_may_not_grow_is_an_error_that_says_what_to_do(tmp_path, limit):
    folder = tmp_path / "checkpoints"
    write_checkpoint(folder, snapshot_of(1))
    before = names_in(folder)
    if limit < 0:  # so many bytes too few for the largest file
        limit += (folder / "step-00000001" / "model.safetensors").stat().st_size
    fits = limit == 30_000
    ends, said = outcomes(("write_within", folder, 2, 1, limit))
    assert ends == [0 if fits else REFUSED]
    assert_all_is_good(folder, {2 if fits else 1})
    if not fits:
        assert names_in(folder) == before
        assert said == (
            f"cannot write {folder}/step-00000002: File too large; free some space, or choose another folder by"
            " run_dir (--run-dir)\n"
        )


def test_a_removed_folder_is_made_again_and_a_file_in_its_place_is_named(tmp_path):
    folder = tmp_path / "checkpoints"
    write_checkpoint(folder, snapshot_of(1))
    shutil.rmtree(folder)
    write_checkpoint(folder, snapshot_of(2))
    assert steps_in(folder) == [2]
    shutil.rmtree(folder)
    folder.write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write .*: (File exists|Not a directory); choose another folder"):
        write_checkpoint(folder, snapshot_of(3))
    assert list_checkpoints(folder) == []
