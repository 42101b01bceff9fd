"""Reads a run folder: contract, ledger and metrics, of finished, running and broken runs."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samestep.errors import DataError, UsageError
from samestep.train.curves import Curve
from samestep.train.paths import CONTRACT_FILE, LEDGER_FILE
from samestep.verify.ledger import Ledger, number, read_ledger
from samestep.verify.runs import is_run

STEP = re.compile(rb'^\{"step": ?(\d+),(?! ?"event")', re.MULTILINE)

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


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file has none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_steps(folder: Path) -> tuple[Ledger, int]:
    """The ledger of a run, an empty one if there is none yet, and the number of steps that it records repeatedly.

    A run that continues under another contract does its steps anew: they do not count as repeated.
    """
    path = folder / LEDGER_FILE
    try:
        ledger = read_ledger(path)
    except DataError as error:
        return Ledger({}, (), problems=(str(error),) if path.exists() else ()), 0
    if any(event["event"] == "contract_change" and event["step"] not in (0, *ledger.steps) for event in ledger.events):
        return ledger, 0
    numbers = STEP.findall(path.read_bytes())
    return ledger, len(numbers) - len(set(numbers))


def read_metrics(path: Path) -> tuple[dict[str, Curve], Epochs]:
    """Curves by tag, and the values of each epoch; unreadable lines are skipped, later values of a step win."""
    values: dict[str, dict[int, float]] = {}
    epochs: Epochs = {}
    for line in _objects(path):
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


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file with one a line."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield value
