"""Saving checkpoints: by a thread while training goes on; if the state is sharded, by all ranks while training waits.

The guarantees are the same: the folder gets its name when the files of all ranks are on the disk and in the manifest.

The methods of a saver are called by the thread that trains. Its own thread touches the snapshot and the folder alone,
and hands over a result or an error, which `_reap` takes, and sentences on failed attempts, by a deque.
"""

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.local_shards import split_files, unsharded
from samestep.checkpoint.storage import Snapshot, begin_checkpoint, complete_checkpoint, write_checkpoint
from samestep.checkpoint.verified_files import Written, part_name, write_part
from samestep.comm.buckets import dense_strides
from samestep.comm.communicator import Communicator
from samestep.comm.exceptions import on_main, raise_together
from samestep.engine.sharded_state import LocalShard
from samestep.errors import RunFolderError
from samestep.files import retrying, writing

HostFiles = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written: its folder's name, the step, and how long writing took."""

    name: str
    step: int
    seconds: float


class CheckpointSaver:
    """Writes checkpoints in a thread on rank 0, at most one at a time; a failed one is tried again.

    Training waits while the state is copied to host memory, and goes on while the copy is written: what is being
    written must not change, and the model does with the next step. A save is
    `saver.save(Snapshot(step, saver.to_host_copy(files), facts))`. An error of the writer is raised by the next `save`,
    `poll` or `close`, once; the saver stays usable.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self._folder, self._keep = folder, keep
        # By device and inode: a folder that was moved away and made anew has the same name.
        self._parent = _identity(folder.parent)
        self._failures: deque[str] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._writing: Future[SavedCheckpoint] | None = None
        self._buffers: list[HostFiles] = []
        self._in_use: frozenset[int] = frozenset()  # the ids of the tensors that the thread reads
        self._done: list[SavedCheckpoint] = []
        self._error: BaseException | None = None

    def to_host_copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> HostFiles:
        """`to_host_copy` into memory of earlier copies, at most two; if saved, a copy holds until it is written."""
        self._reap(wait=False)
        # Two suffice: one that the thread reads, and one for the next state.
        for number, buffers in enumerate(self._buffers):
            if not any(id(tensor) in self._in_use for tensors in buffers.values() for tensor in tensors.values()):
                self._buffers[number] = to_host_copy(files, reuse=buffers)
                return self._buffers[number]
        self._buffers.append(to_host_copy(files))
        return self._buffers[-1]

    def save(self, snapshot: Snapshot) -> None:
        """Has a snapshot written, which must not change until then; waits for an earlier one under way."""
        # Two at a time would share the disk, and the older state might be named `latest` by the slower one.
        self._reap(wait=True)
        self._raise_error()
        self._in_use = frozenset(id(tensor) for tensors in snapshot.files.values() for tensor in tensors.values())
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samestep checkpoint")
        self._writing = self._pool.submit(self._write, snapshot)

    def poll(self) -> list[SavedCheckpoint]:
        """The checkpoints that were finished since the last call; does not wait."""
        self._reap(wait=False)
        self._raise_error()
        done, self._done = self._done, []
        return done

    def failures(self) -> list[str]:
        """A sentence on each failed attempt since the last call that is followed by another."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def close(self) -> None:
        """Waits until the last one is written and ends the thread; `poll` still returns it."""
        self._reap(wait=True)
        self._buffers = []
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._raise_error()

    def _write(self, snapshot: Snapshot) -> SavedCheckpoint:
        began, parent = time.monotonic(), self._folder.parent

        def attempt() -> Path:
            # A run that was moved away would be made anew.
            if self._parent not in (None, _identity(parent)):
                raise RunFolderError(f"{parent} is not there any more: it was removed, moved or replaced")
            return write_checkpoint(self._folder, snapshot, self._keep, replace=True)

        path = retrying(attempt, self._failures.append)
        return SavedCheckpoint(path.name, snapshot.step, time.monotonic() - began)

    def _reap(self, wait: bool) -> None:
        """Takes the result of the last write if it has ended, or waits until it has."""
        if self._writing is None or not (wait or self._writing.done()):
            return
        # Not raised here: `to_host_copy` comes by, too, which is not the place for an error of an earlier write.
        self._error = self._writing.exception()
        if self._error is None:
            self._done.append(self._writing.result())
        self._writing, self._in_use = None, frozenset()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a folder from another of its name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


@torch.no_grad()
def to_host_copy(files: Mapping[str, Mapping[str, Tensor]], reuse: HostFiles | None = None) -> HostFiles:
    """Copies tensors to host memory, none of it pinned: torch would never give it back.

    Dense tensors keep their strides, others become contiguous. The tensors of `reuse`, an earlier result, are
    overwritten if dtype, shape and strides are the same.
    """
    copies: HostFiles = {}
    for file, tensors in files.items():
        memory = (reuse or {}).get(file, {})
        copies[file] = {}
        for name, tensor in tensors.items():
            copies[file][name] = _host_memory(tensor, memory.get(name)).copy_(tensor)
    return copies


def _host_memory(tensor: Tensor, earlier: Tensor | None) -> Tensor:
    """Memory for a copy: the earlier one if it fits."""
    if dense_strides(tensor) == tensor.stride():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    else:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if earlier is not None and _form(earlier) == _form(made):
        return earlier
    return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="cpu")


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


# Sharded states: every rank writes its local shards at the same time, and rank 0 completes the folder.


@torch.no_grad()
def with_rows(state: Snapshot, communicator: Communicator) -> Snapshot:
    """A state whose local shards are rows (slices of dim 0), which files of shards hold; else without local shards.

    If they begin within rows (ZeRO-1), all tensors are gathered, one at a time, in the host memory of rank 0, which
    writes. A collective call.
    """
    if all(_has_rows(shard) for of_file in split_files(state.files)[1].values() for shard in of_file.values()):
        return state
    files: dict[str, dict[str, Any]] = {file: dict(tensors) for file, tensors in state.files.items()}
    for tensors in files.values():
        for name, value in list(tensors.items()):
            # A collective call: also on ranks that do not keep it.
            whole = unsharded(value, communicator)
            if communicator.rank == 0:
                tensors[name] = whole.cpu() if isinstance(value, LocalShard) else whole
            else:
                del tensors[name]
    return replace(state, files=files)


def has_local_shards(state: Snapshot) -> bool:
    """Whether ranks write files of shards of a state; the same on all ranks."""
    return bool(split_files(state.files)[1])


def write_sharded(
    communicator: Communicator, folder: Path, state: Snapshot, keep: int = 3, replaces: bool = False
) -> Path:
    """Writes a checkpoint in a collective call, which returns when it is complete."""
    state = with_rows(state, communicator)
    whole, shards = split_files(state.files)
    # Every rank has to know the temporary folder. None if a good checkpoint of this step is kept: no rank writes then.
    with ExitStack() as until:
        begun = on_main(communicator, lambda: begin_checkpoint(until, folder, state.step, replaces))
        name = communicator.share_value(begun and str(begun.relative_to(folder)))
        temporary = None if name is None else folder / name
        parts = {} if temporary is None else _write_parts(communicator, temporary, shards)
        snapshot = replace(state, files=whole)
        path = on_main(
            communicator, lambda: str(complete_checkpoint(folder, snapshot, temporary, parts, keep, replaces))
        )
        return folder / Path(communicator.share_value(path)).name


@torch.no_grad()
def _write_parts(
    communicator: Communicator, temporary: Path, shards: Mapping[str, Mapping[str, LocalShard]]
) -> dict[str, Written]:
    """Writes this rank's files of shards; the files of all ranks by name."""
    rank, ranks = communicator.rank, communicator.world_size
    mine, error = [], None
    try:
        if not temporary.is_dir():
            raise RunFolderError(
                f"rank {rank} does not see {temporary}, which rank 0 has made: every rank writes its part "
                "of the state there; give a folder on a file system that all of them share, by run_dir (--run-dir)"
            )
        with writing(temporary):
            for file, own in shards.items():
                mine.append(write_part(temporary / part_name(file, rank, ranks), own, rank))
    except RunFolderError as failure:
        error = failure
    # Before the exchange: a rank without its file has no checksum to send.
    raise_together(communicator, error)
    rows = communicator.gather_values([(written.size, written.sha256) for written in mine])
    return {
        part_name(file, other, ranks): Written(*facts)
        for other, row in enumerate(rows)
        for file, facts in zip(shards, row, strict=True)
    }


def _has_rows(shard: LocalShard) -> bool:
    """Whether every rank has whole rows."""
    row = max(1, shard.shape[1:].numel())
    return all(cut % row == 0 for cut in shard.sharding.cuts)
