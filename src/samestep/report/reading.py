"""Reading a run folder: what it holds, however far the run got."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import DataError, UsageError
from samestep.report.curves import Curve, as_number
from samestep.train.naming import CONTRACT_FILE, LEDGER_FILE
from samestep.verify.ledger import Ledger, read_ledger
from samestep.verify.runs import is_run

STEP = re.compile(rb'^\{"step": ?(\d+),(?! ?"event")', re.MULTILINE)


@dataclass
class Metrics:
    """What a run logged.

    Attributes:
        curves: by tag.
        epochs: what was logged after each epoch, by its number from 1.
    """

    curves: dict[str, Curve] = field(default_factory=dict)
    epochs: dict[int, dict[str, float]] = field(default_factory=dict)


def check_run(folder: Path) -> Path:
    """Returns the folder.

    Raises:
        UsageError: it is not that of a run.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "is not there"
        raise UsageError(f"{folder} {what}; give the folder of a run, such as runs/NAME")
    if not is_run(folder):
        missing = f"{CONTRACT_FILE} and no {LEDGER_FILE}"
        raise UsageError(f"{folder} is no run: it has no {missing}; give the folder of a run, such as runs/NAME")
    return folder


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_steps(folder: Path) -> tuple[Ledger, int]:
    """The ledger of a run, an empty one if there is none yet, and how many steps are in it more than once.

    A run that goes on under another contract does its steps anew: then none is said to be there again.
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


def read_metrics(path: Path) -> Metrics:
    """The metrics of a run; lines that cannot be read are passed over, of two for a step the later counts."""
    values: dict[str, dict[int, float]] = {}
    metrics = Metrics()
    for line in _objects(path):
        step = line.pop("step", None)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
            continue
        numbers = {tag: number for tag, value in line.items() if (number := as_number(value)) is not None}
        epoch = numbers.pop("epoch", None)
        for tag, number in numbers.items():
            values.setdefault(tag, {})[step] = number
        if epoch is not None and epoch.is_integer() and 0 <= epoch < 2**53:
            metrics.epochs[int(epoch)] = {"step": step, **numbers}
    metrics.curves = {tag: Curve.of(by_step) for tag, by_step in values.items()}
    metrics.epochs = dict(sorted(metrics.epochs.items()))
    return metrics


def ledger_curves(steps: Mapping[int, Mapping[str, Any]]) -> dict[str, Curve]:
    """What the ledger measures, by tags as in the metrics, after each step: loss, gradient norm, learning rate."""
    values: dict[str, dict[int, float]] = {"loss/train": {}, "grad_norm": {}, "lr": {}, "world_size": {}}
    for step, entry in steps.items():
        rates = entry.get("lr")
        found = {
            "loss/train": entry.get("loss"),
            "grad_norm": entry.get("grad_norm"),
            "lr": rates[0] if isinstance(rates, list) and rates else None,
            "world_size": entry.get("world_size"),
        }
        for tag, value in found.items():
            number = as_number(value)
            if number is not None:
                values[tag][step + 1] = number
    return {tag: Curve.of(by_step) for tag, by_step in values.items() if by_step}


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
