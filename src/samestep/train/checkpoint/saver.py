"""Asynchronous saving: the state is copied to host memory, and a thread writes it while training goes on."""

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from samestep.train.atomic_io import retrying
from samestep.train.checkpoint.packing import is_dense
from samestep.train.checkpoint.storage import Snapshot, check_keep, write_checkpoint

HostFiles = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written: its folder's name, the step, and how long writing took."""

    name: str
    step: int
    seconds: float


class CheckpointSaver:
    """Writes checkpoints in a thread on rank 0, at most one at a time; a failed one is tried again `retries` times.

    A save is `saver.save(Snapshot(step, saver.to_host_copy(files), facts))`. An error of the writer is raised by the
    next `save`, `poll` or `close`, once; the saver can be used on.
    """

    def __init__(self, folder: Path, keep: int = 3, retries: int = 0) -> None:
        check_keep(keep)
        self._folder, self._keep, self._retries = folder, keep, retries
        self._failures: deque[str] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._writing: Future[SavedCheckpoint] | None = None
        self._buffers: list[HostFiles] = []
        self._in_use: frozenset[int] = frozenset()  # the ids of the tensors that the thread reads
        self._done: list[SavedCheckpoint] = []
        self._error: BaseException | None = None

    def to_host_copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> HostFiles:
        """Copies tensors to host memory, as the function of the same name, into memory of earlier copies.

        A copy holds until the next call of this method; if it was given to `save`, until it is written. So there are
        at most two, and one if writing takes less than the time between two checkpoints.
        """
        self._reap(wait=False)
        for number, buffers in enumerate(self._buffers):
            if not any(id(tensor) in self._in_use for tensors in buffers.values() for tensor in tensors.values()):
                self._buffers[number] = to_host_copy(files, reuse=buffers)
                return self._buffers[number]
        self._buffers.append(to_host_copy(files))
        return self._buffers[-1]

    def save(self, snapshot: Snapshot) -> None:
        """Has a snapshot written; waits for an earlier one that is still being written.

        The tensors and facts must stay as they are until it is written.
        """
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
        began = time.monotonic()
        write = partial(write_checkpoint, self._folder, snapshot, self._keep)
        path = retrying(write, self._retries, self._failures.append)
        return SavedCheckpoint(path.name, snapshot.step, time.monotonic() - began)

    def _reap(self, wait: bool) -> None:
        """Takes the result of the last write if it has ended, or waits until it has."""
        if self._writing is None or not (wait or self._writing.done()):
            return
        self._error = self._writing.exception()
        if self._error is None:
            self._done.append(self._writing.result())
        self._writing, self._in_use = None, frozenset()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


@torch.no_grad()
def to_host_copy(files: Mapping[str, Mapping[str, Tensor]], reuse: HostFiles | None = None) -> HostFiles:
    """Copies tensors to host memory, pinned for those of a CUDA device, which are all waited for once.

    Dense tensors keep their strides, others become contiguous. The tensors of `reuse`, an earlier result, are
    overwritten if dtype, shape and strides are the same.
    """
    earlier = reuse or {}
    copies: HostFiles = {}
    devices: set[torch.device] = set()
    for file, tensors in files.items():
        memory = earlier.get(file, {})
        copies[file] = {}
        for name, tensor in tensors.items():
            host = _host_memory(tensor, memory.get(name))
            host.copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
            copies[file][name] = host
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _host_memory(tensor: Tensor, earlier: Tensor | None) -> Tensor:
    """Memory for a copy: the earlier one if it fits."""
    shape, dtype = tensor.shape, tensor.dtype
    if earlier is not None and earlier.dtype == dtype and earlier.shape == shape:
        stride = earlier.stride()
        if stride == tensor.stride() or (earlier.is_contiguous() and not is_dense(tensor)):
            return earlier
    if is_dense(tensor):
        return torch.empty_strided(shape, tensor.stride(), dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
