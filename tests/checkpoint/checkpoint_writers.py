"""Writers of checkpoints in processes of their own, to be killed or to meet errors."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch

from samestep.checkpoint.async_save import CheckpointSaver
from samestep.checkpoint.storage import Snapshot, write_checkpoint
from samestep.errors import RunFolderError

REFUSED = 3
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")


def snapshot_of(step, size=5000):
    """The state that a step leads to: a function of the step alone."""
    generator = torch.Generator().manual_seed(step)
    files = {
        "model": {"weight": torch.randn(size, generator=generator), "bias": torch.randn(7, generator=generator).half()},
        "optimizer": {"step": torch.tensor(float(step)), "momentum": torch.randn(size // 7, generator=generator)},
    }
    return Snapshot(step, files, {"epoch": step // 10, "text": f"state after {step} steps", "lr": [0.1 / (step + 1)]})


def is_state_of(snapshot, step, size=5000):
    """Whether a snapshot is what was written for this step."""
    expected = snapshot_of(step, size)
    tensors = {file: list(entries) for file, entries in expected.files.items()}
    return (
        (snapshot.step, snapshot.facts) == (step, expected.facts)
        and {file: sorted(entries) for file, entries in snapshot.files.items()}
        == {file: sorted(entries) for file, entries in tensors.items()}
        and all(
            torch.equal(snapshot.files[file][name], expected.files[file][name])
            for file, names in tensors.items()
            for name in names
        )
    )


def write_steps(folder, first, last, keep, size=5000):
    for step in range(first, last):
        write_checkpoint(Path(folder), snapshot_of(step, size), keep)


def save_steps(folder, first, last, keep, size=5000):
    saver = CheckpointSaver(Path(folder), keep)
    for step in range(first, last):
        snapshot = snapshot_of(step, size)
        saver.save(Snapshot(step, saver.to_host_copy(snapshot.files), snapshot.facts))
    saver.close()


def replacement_of(step):
    """Another content of the checkpoint of this step: the best state, after an evaluation."""
    snapshot = snapshot_of(step)
    return Snapshot(step, snapshot.files, {"evaluated": True}, is_best=True)


def write_until(folder, step, keep, number, error, replace=False):
    """Writes; at the `number`th operation on a file it is killed, or, if there is an error's number, meets that."""
    count = 0

    def audit(event, arguments):
        nonlocal count
        if event in EVENTS and isinstance(arguments[0], str) and arguments[0].startswith(folder):
            count += 1
            if count == number:
                if not error:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(error, os.strerror(error))

    sys.addaudithook(audit)
    write_checkpoint(Path(folder), replacement_of(step) if replace else snapshot_of(step), keep, replace)


def write_within(folder, step, keep, limit):
    """Writes where no file may be longer than the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        write_checkpoint(Path(folder), snapshot_of(step), keep)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)  # stderr is a file too


def main(name, arguments):
    """Does a job in a process of its own: calls a function with arguments, a list in JSON."""
    torch.set_num_threads(1)
    try:
        globals()[name](*json.loads(arguments))
    except RunFolderError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
