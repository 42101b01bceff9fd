"""The hash of the data as read: SHA-256 of each sample of the first epoch, and of all of these in order of the ids.

A sample is hashed as its rows of the collated microbatch, as the step gets it, so that all that reads and changes it is
behind it. The ranks exchange the hashes of a batch within the step on it: a lost rank takes none with it, a checkpoint
has those of all, and of a step that is repeated the last attempt counts.
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


class DataHash(StepObserver):
    """Hashes the samples that the steps of a trainer read until `end_epoch`; an observer of its training step."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._rows: list[np.ndarray] = []  # [n, COLUMNS] int64 of each step
        self._latest = np.empty((0, COLUMNS), np.int64)  # of the step under way
        self._result: dict[str, Any] | None = None  # once it is final
        self._reads = True

    def on_batch(self, batch: Batch) -> None:
        """Hashes this rank's samples of a batch, and receives the hashes of the others."""
        if not self._reads:
            return
        membership, rows = self._membership, np.zeros((batch.length, COLUMNS), np.int64)
        bounds = batch.bounds(membership.num_microbatches)
        for index, value in batch.microbatches.items():
            start, end = bounds[index : index + 2]
            rows[start:end, 1:] = hash_samples(value, end - start)
        if (count := membership.world_size) > 1:
            carried, communicator = torch.from_numpy(rows), membership.communicator
            exchange = lambda: communicator.gather_rows(carried, [len(rows)] * count)  # noqa: E731 - called once
            every = membership.heartbeat.call("exchange", exchange).numpy().reshape(count, *rows.shape)
            rows = np.bitwise_or.reduce(every)  # those of other ranks are zero, or, of one model on several, the same
        before = sum(map(len, self._rows))
        rows[:, 0] = np.arange(before, before + batch.length) if batch.ids is None else batch.ids()
        self._latest = rows

    def on_update(self, step: Any, result: StepResult) -> None:
        """Counts the samples of a step that has ended."""
        if self._reads:
            self._rows.append(self._latest)

    def end_epoch(self) -> None:
        """Ends the first epoch; later ones are not read."""
        if self._reads and (found := summary(self.state())) is not None:
            self._result, self._rows, self._reads = {**found, "whole": True}, [], False

    def state(self) -> dict[str, Any] | None:
        """What checkpoints keep: the hashes so far, or the final result; None if there is neither."""
        if self._reads:
            return {"rows": torch.from_numpy(np.concatenate([self._latest[:0], *self._rows]))}
        return self._result

    def load(self, state: dict[str, Any] | None, has_begun: bool) -> None:
        """Goes on from a state; if a run that has begun has none, its first epoch cannot be hashed any more."""
        if state is not None:
            found = summary(state)
            self._reads = found is not state
            self._rows, self._result = ([state["rows"].numpy()], None) if self._reads else ([], found)
        elif has_begun and self._reads:
            self._reads = False
            self._membership.notice(
                "the data are not hashed: the first epoch was begun without hash_data=True (--hash-data)"
            )


def summary(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """SHA-256 over (id, hash) of all samples in order of their ids, their number, and whether the epoch was read whole.

    A state that is final, or None, is returned as it is. Raises a `CheckpointError` if it has another form.
    """
    if state is None or "rows" not in state:
        check_alike("hash of the data", state, {"sha256": "", "samples": 0, "whole": True})
        return state
    given = state["rows"]
    count = len(given) if isinstance(given, Tensor) and given.ndim else 0
    check_alike("hashes of samples", state, {"rows": torch.empty(count, COLUMNS, dtype=torch.int64)})
    rows = given.numpy()
    sha256 = hashlib.sha256(rows[np.argsort(rows[:, 0], kind="stable")].astype("<i8").tobytes()).hexdigest()
    return {"sha256": sha256, "samples": len(rows), "whole": False}


def hash_samples(value: Any, count: int) -> np.ndarray:
    """SHA-256 of each of the samples in a microbatch of so many: [count, 4] int64.

    A sample is the rows of all tensors and arrays, and the entries of lists of numbers or strings; their places, dtypes
    and shapes, and all that is no row, count for each sample.
    """
    form, columns = hashlib.sha256(), list[list[Any]]()
    _collect(value, count, "", form, columns)
    digests = []
    for entries in zip(*columns, strict=True) if columns else [()] * count:
        sample = form.copy()
        for entry in entries:
            sample.update(entry)
        digests.append(sample.digest())
    return np.frombuffer(b"".join(digests), "<i8").reshape(count, COLUMNS - 1)


def _collect(value: Any, count: int, place: str, form: Any, columns: list[list[Any]]) -> None:
    """Adds the rows of what a value holds to the columns, and all else of it to the hash of the form."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _collect(entry, count, f"{place}[{key!r}]", form, columns)
    elif isinstance(value, list | tuple) and not (len(value) == count and _is_of_samples(value, count)):
        for number, entry in enumerate(value):
            _collect(entry, count, f"{place}[{number}]", form, columns)
    elif isinstance(value, list | tuple):
        form.update(f"{place} samples\n".encode())
        columns.append([_digest(entry) for entry in value])
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
        _collect(value.tolist(), count, place, form, columns)
    elif isinstance(value, Tensor | np.ndarray | np.generic):
        has_rows = list(value.shape)[:1] == [count]
        shape = list(value.shape)[has_rows:]
        form.update(f"{place} {value.dtype} {shape} {has_rows}\n".encode())
        data = memoryview(_bytes_of(value, place))
        size = len(data) // count if has_rows else 0
        if has_rows:
            columns.append([data[start * size : (start + 1) * size] for start in range(count)])
        else:
            form.update(data)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        form.update(f"{place} {type(value).__name__} {value!r}\n".encode())
    else:
        raise UsageError(
            f"the batch has a {type(value).__name__}{place and f' at {place}'}, of which hash_data=True (--hash-data) "
            "knows no bytes; needed: tensors, arrays, numbers and strings in lists, tuples and mappings"
        )


def _is_of_samples(value: Any, count: int) -> bool:
    """Whether a list of as many entries as samples has one for each, and not the rows of all in each entry."""
    found = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0]
    return not hasattr(value, "_fields") and not any(leaf.shape[0] == count for leaf in found)


def _digest(value: Any) -> bytes:
    form = hashlib.sha256()
    _collect(value, -1, "", form, [])
    return form.digest()


def _bytes_of(value: Any, place: str) -> Any:
    """The bytes of a tensor or an array in the order of its elements."""
    if not isinstance(value, Tensor):
        return np.asarray(value).tobytes()
    if lacking := lacks_bytes(value):
        raise UsageError(
            f"the batch has a tensor{place and f' at {place}'} whose bytes hash_data=True (--hash-data) cannot read "
            f"({lacking}); needed: dense tensors"
        )
    return flattened(value.data.cpu()).view(torch.uint8).numpy()
