"""Reads a run folder: contract, ledger and metrics, of finished, running and broken runs."""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.errors import DataError, UsageError
from samestep.train.curves import Curve
from samestep.train.paths import CONTRACT_FILE, LEDGER_FILE
from samestep.verify.ledger import Ledger, number, read_ledger
from samestep.verify.runs import is_run, read_objects

Epochs = dict[int, dict[str, float]]


def check_run(folder: Path) -> Path:
    """Returns the folder; raises `UsageError` if it is not that of a run."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "is not there"
    elif not is_run(folder):
        problem = f"is no run: it has no {CONTRACT_FILE} and no {LEDGER_FILE}"
    else:
        return folder
    raise UsageError(f"{folder} {problem}; give the folder of a run, such as runs/NAME")


def read_steps(folder: Path) -> Ledger:
    """The ledger of a run, an empty one if there is none yet."""
    try:
        return read_ledger(folder)
    except DataError as error:
        return Ledger({}, (), problems=() if isinstance(error.__cause__, FileNotFoundError) else (str(error),))


def read_metrics(path: Path) -> tuple[dict[str, Curve], Epochs]:
    """Curves by tag, and the values of each epoch; unreadable lines are skipped, later values of a step win."""
    values: dict[str, dict[int, float]] = {}
    epochs: Epochs = {}
    with suppress(OSError):  # `run_status` names it
        for line in read_objects(path):
            step = line.pop("step", None)
            if not is_step(step):
                continue
            numbers = {tag: found for tag, value in line.items() if (found := as_number(value)) is not None}
            epoch = numbers.pop("epoch", None)
            for tag, found in numbers.items():
                values.setdefault(tag, {})[step] = found
            if epoch is not None and epoch.is_integer() and 0 <= epoch < 2**53:
                epochs[int(epoch)] = {"step": step, **numbers}
    return {tag: Curve.of(by_step) for tag, by_step in values.items()}, dict(sorted(epochs.items()))


def ledger_curves(steps: Mapping[int, Mapping[str, Any]]) -> dict[str, Curve]:
    """Loss, gradient norm, learning rate and world size after each step, by the tags of the metrics."""
    values: dict[str, dict[int, float]] = {}
    for step, entry in steps.items():
        rates = entry.get("lr")
        fields = {"loss/train": entry.get("loss"), "grad_norm": entry.get("grad_norm")}
        fields |= {"lr": rates[0] if isinstance(rates, list) and rates else None, "world_size": entry.get("world_size")}
        for tag, value in fields.items():
            if (found := as_number(value)) is not None:
                values.setdefault(tag, {})[step + 1] = found
    return {tag: Curve.of(by_step) for tag, by_step in values.items()}


def is_step(value: Any) -> bool:
    """Whether a value of a file is a number of steps."""
    return type(value) is int and 0 <= value < 2**53


def as_number(value: Any) -> float | None:
    """A number as metrics and ledgers write it: JSON, "nan", "inf", "-inf" or hexadecimal digits; else None."""
    if type(value) is int:
        return float(value) if abs(value) < 2**1023 else None
    return value if type(value) is float else number(value)


def json_number(value: float | None) -> float | str | None:
    """A number for JSON, which lacks NaN and infinities: those become "nan", "inf" and "-inf"."""
    return value if value is None or math.isfinite(value) else str(value)
