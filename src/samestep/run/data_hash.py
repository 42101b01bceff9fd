"""The hash of the data as read: SHA-256 of each sample of the first epoch, and of all of these in order of the ids.

The ranks exchange the hashes of a batch within the step on it: a lost rank takes none with it, a checkpoint has those
of all, and of a step that is repeated the last attempt counts.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.comm.membership import Membership
from samestep.data.batch import Batch, flattened, lacks_bytes
from samestep.data.nested import leaves
from samestep.engine.determinism import check_alike
from samestep.engine.observer import StepObserver
from samestep.engine.result import StepResult
from samestep.errors import UsageError

COLUMNS = 5  # of a sample: its id, and the 32 bytes of its hash, as 64-bit integers
PLAIN = (bool, int, float, complex, str, bytes, type(None))


class DataHash(StepObserver):
    """Hashes the samples that the steps of a trainer read until `end_epoch`; an observer of its training step."""

    def __init__(self, membership: Membership, reads: bool) -> None:
        self._membership, self._reads = membership, reads
        self._latest = np.empty((0, COLUMNS), np.int64)  # of the step under way
        self._rows = [self._latest]  # of each step before
        self._result: dict[str, Any] | None = None  # once it is final

    def on_batch(self, batch: Batch) -> None:
        """Hashes this rank's samples of a batch, and receives the hashes of the others."""
        if not self._reads:
            return
        rows, bounds = np.zeros((batch.length, COLUMNS), np.int64), batch.bounds(self._membership.num_microbatches)
        for index, value in batch.microbatches.items():
            start, end = bounds[index : index + 2]
            rows[start:end, 1:] = hash_samples(value, end - start)
        if (ranks := self._membership.world_size) > 1:
            gather, ours = self._membership.communicator.gather_rows, torch.from_numpy(rows)
            every = self._membership.heartbeat.call("exchange", lambda: gather(ours, [batch.length] * ranks)).numpy()
            # Rows of other ranks are zero here, or the same if several ranks share a model.
            rows = np.bitwise_or.reduce(every.reshape(ranks, *rows.shape))
        before = sum(map(len, self._rows))
        rows[:, 0] = np.arange(before, before + batch.length) if batch.ids is None else batch.ids()
        self._latest = rows

    def on_update(self, step: Any, result: StepResult) -> None:
        """Counts the samples of a step that has ended."""
        if self._reads:
            self._rows.append(self._latest)

    def end_epoch(self) -> None:
        """Ends the first epoch; later ones are not read."""
        if (found := summary(self.state())) is not None:
            self._result, self._reads, self._rows = {**found, "whole": True}, False, []

    def state(self) -> dict[str, Any] | None:
        """What checkpoints keep: the hashes so far, or the final result; None if there is neither."""
        return {"rows": torch.from_numpy(np.concatenate(self._rows))} if self._reads else self._result

    def load(self, state: dict[str, Any] | None, has_begun: bool) -> None:
        """Goes on from a state; of a first epoch that was begun without one no hash can be made."""
        if not self._reads:
            return
        if state is not None and summary(state) is not state:
            self._rows = [state["rows"].numpy()]
            return
        self._reads, self._result = not has_begun, summary(state)
        if state is None and has_begun:
            self._membership.notice("the data are not hashed: the run was begun without hash_data=True (--hash-data)")


def summary(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """The SHA-256 over (id, hash) of all samples by id, and their number; of a state that is final, or None, itself.

    Raises a `CheckpointError` if it has another form.
    """
    if state is None or "rows" not in state:
        check_alike("hash of the data", state, {"sha256": "", "samples": 0, "whole": True})
        return state
    count = len(state["rows"]) if isinstance(state["rows"], Tensor) else 0
    check_alike("hashes of samples", state, {"rows": torch.empty(count, COLUMNS, dtype=torch.int64)})
    rows = state["rows"].numpy()
    sha256 = hashlib.sha256(rows[np.argsort(rows[:, 0], kind="stable")].astype("<i8").tobytes()).hexdigest()
    return {"sha256": sha256, "samples": count, "whole": False}


def hash_samples(value: Any, count: int) -> np.ndarray:
    """SHA-256 of each of the samples in a microbatch of so many: [count, 4] int64.

    A sample is its rows of all tensors and arrays, and its entries of lists of as many values. Their places, dtypes and
    shapes, and all that is no row, count for each sample.
    """
    form, columns = hashlib.sha256(), list[list[Any]]()
    _collect(value, count, "", form, columns)
    samples = [form.copy() for _ in range(count)]
    for column in columns:
        for sample, entry in zip(samples, column, strict=True):
            sample.update(entry)
    return np.frombuffer(b"".join(sample.digest() for sample in samples), "<i8").reshape(count, COLUMNS - 1)


def _collect(value: Any, count: int, place: str, form: Any, columns: list[list[Any]]) -> None:
    """Adds the rows of what a value holds to the columns, and all else of it to the hash of the form."""
    shape: list[int] = list(getattr(value, "shape", ()))
    data: Any = None
    if isinstance(value, np.ndarray | np.generic):
        data = None if value.dtype.hasobject else value.tobytes()
    elif isinstance(value, Tensor) and not lacks_bytes(value):
        data = flattened(value.data.cpu()).view(torch.uint8).numpy()
    if data is not None:
        has_rows = shape[:1] == [count]
        form.update(f"{place} {value.dtype} {shape[has_rows:]} {has_rows}\n".encode())
        size = len(data) // count if has_rows else 0
        view = memoryview(data)
        columns += [[view[start * size : (start + 1) * size] for start in range(count)]] if has_rows else []
        form.update(b"" if has_rows else view)
    elif isinstance(value, list | tuple) and len(value) == count and not _has_rows(value, count):
        form.update(f"{place} samples\n".encode())
        columns.append([hash_samples(entry, 1).tobytes() for entry in value])
    elif isinstance(value, Mapping | list | tuple):
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            _collect(entry, count, f"{place}[{key!r}]", form, columns)
    elif isinstance(value, PLAIN):
        form.update(f"{place} {type(value).__name__} {value!r}\n".encode())
    else:
        raise UsageError(
            f"the batch has a {type(value).__name__} {place and f'at {place} '}that hash_data=True (--hash-data) cannot"
            " read; needed: dense tensors, arrays, numbers and strings in lists, tuples and mappings"
        )


def _has_rows(value: Any, count: int) -> bool:
    """Whether one of the tensors in a list has a row for each sample, or the list is a tuple with names."""
    return hasattr(value, "_fields") or any(list(getattr(leaf, "shape", ()))[:1] == [count] for leaf in leaves(value))
