"""The ledger's writer: a line a step, by which runs are compared and replayed."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch.optim import Optimizer

from samestep.data.batch import Batch
from samestep.engine.result import StepResult
from samestep.train.writing import append_whole, open_unbuffered

GATHERED_BYTES = 8192


class LedgerWriter:
    """Appends to a ledger, a JSON object a line; floats as hexadecimal digits, so that no bit is lost.

    Lines are gathered and written whole: a full disk leaves no half of one.

    Args:
        path: the file, appended to.

    Raises:
        RunFolderError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = bytearray()
        self._file = open_unbuffered(path, "ab")

    def write(self, entry: dict[str, Any]) -> None:
        """Appends one entry, sooner or later.

        Raises:
            RunFolderError: what had gathered could not be written; the file then ends with the line before.
        """
        self._waiting += (json.dumps(entry) + "\n").encode()
        if len(self._waiting) >= GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hands what was written to the system; raises as `write` does."""
        data, self._waiting = bytes(self._waiting), bytearray()
        append_whole(self._file, self._path, data)

    def close(self) -> None:
        """Flushes and closes the file; a second call does nothing."""
        try:
            self.flush()
        finally:
            self._file.close()

    def __enter__(self) -> "LedgerWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def ledger_entry(
    result: StepResult, batch: Batch | None, learning_rates: Sequence[float], world_size: int
) -> dict[str, Any]:
    """What the ledger says of a step.

    Args:
        result: of the step; its scalars are fetched.
        batch: the loader's batch, or None for a batch of the user's own.
        learning_rates: one a parameter group, as used in the step.
        world_size: devices that took part.
    """
    known = batch is not None and batch.epoch >= 0
    ids = batch.ids() if batch is not None and batch.ids is not None else None
    return {
        "step": result.step,
        "epoch": batch.epoch if known and batch is not None else None,
        "position": batch.position if known and batch is not None else None,
        "num_samples": result.num_samples,
        "ids": None if ids is None else ids_hash(ids),
        "loss": result.loss.hex(),
        "grad_norm": result.grad_norm.hex(),
        "lr": [float(rate).hex() for rate in learning_rates],
        "skipped": result.skipped,
        "world_size": world_size,
    }


def ids_hash(ids: np.ndarray) -> str:
    """The first 64 bits of SHA-256 over the sample ids as little-endian 64-bit integers, in order."""
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:16]


def learning_rates(optimizers: Sequence[Optimizer]) -> list[float]:
    """The learning rate of every parameter group."""
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
