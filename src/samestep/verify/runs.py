"""Finding runs: what lies below a folder, in what state each is, and how far it came; whatever has become of it.

Only what is needed of each file is parsed, so that a folder of long runs is listed at once.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from samestep.errors import DataError
from samestep.train.checkpoint.manifest import MAX_FACTS_BYTES, parse_json, read_small
from samestep.train.paths import (
    CHECKPOINT_FOLDER,
    CONTRACT_FILE,
    FACTS_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    RESULT_FILE,
    is_locked,
)
from samestep.train.runlog.ledger import from_line, is_whole
from samestep.verify.ledger import number

RECENT_SECONDS = 120.0
_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "wrong", "mse", "mae", "rmse", "nll", "bpb", "ppl")

_TURNS = ("start", "resume", "stop", "end")

State = Literal["finished", "running", "running?", "stopped", "crashed"]


@dataclass(frozen=True)
class RunSummary:
    """A run at a glance.

    Attributes:
        path: its folder.
        state: "finished"; "stopped": by a signal, after a checkpoint; "running": neither, and a process holds its lock;
            else "crashed". Where the file system has no locks, "running?" if something was written in the last two
            minutes.
        recipe: what was trained: the recipe's name, or the script's; None where the contract does not say.
        steps: updates done.
        epochs: epochs done.
        epochs_planned: None where the contract does not say.
        loss: of the last step.
        metric: name and best value of the metric that an evaluation measures; None without one.
        world_sizes: numbers of devices, in the order in which the run had them.
        changed: when something was last written, in seconds since 1970.
        size_bytes: of all its files.
        checkpoint: the newest one that a resume would look at first; None if there is none.
        problems: what could not be read, as sentences.
    """

    path: Path
    state: State
    recipe: str | None = None
    steps: int = 0
    epochs: int = 0
    epochs_planned: int | None = None
    loss: float | None = None
    metric: tuple[str, float] | None = None
    world_sizes: tuple[int, ...] = ()
    changed: float = 0.0
    size_bytes: int = 0
    checkpoint: str | None = None
    problems: tuple[str, ...] = ()


@dataclass
class _Progress:
    """What the ledger and the metrics of a run tell, while they are read."""

    steps: int = 0
    loss: float | None = None
    turn: str | None = None
    world_sizes: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    epochs: int = 0
    evals: dict[str, list[float]] = field(default_factory=dict)


def find_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder and in the folders right below it, newest first; a folder that is a run is the only one."""
    if not folder.is_dir():
        raise DataError(f"no folder {folder}; name one with runs in it, such as runs")
    if is_run(folder):
        return [summarize(folder)]
    runs = [summarize(entry) for entry in sorted(_folders(folder)) if is_run(entry)]
    return sorted(runs, key=lambda run: run.changed, reverse=True)


def is_run(folder: Path) -> bool:
    """Whether a folder has what a run leaves: a contract or a ledger."""
    return any((folder / name).is_file() for name in (CONTRACT_FILE, LEDGER_FILE))


def read_contract(folder: Path) -> dict[str, Any] | None:
    """The contract of a run; None where there is none that can be read."""
    return _read_json(folder / CONTRACT_FILE)


def summarize(folder: Path) -> RunSummary:
    """A run at a glance; what cannot be read is left out, and said."""
    problems: list[str] = []
    contract = read_contract(folder)
    if contract is None:
        problems.append(f"{CONTRACT_FILE} cannot be read")
        contract = {}
    progress = _Progress()
    for name, look in ((LEDGER_FILE, _look_at_ledger), (METRICS_FILE, _look_at_metrics)):
        try:
            look(folder / name, progress)
        except FileNotFoundError:
            pass
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror or error}")
    if progress.damaged:
        problems.append(f"{LEDGER_FILE}: damaged lines: {len(progress.damaged)} (line {progress.damaged[0]} first)")
    changed, size = _changed_and_size(folder)
    planned = contract.get("epochs")
    return RunSummary(
        path=folder,
        state=_state(folder, progress.turn, changed),
        recipe=_name(contract),
        steps=progress.steps,
        epochs=progress.epochs,
        epochs_planned=planned if isinstance(planned, int) else None,
        loss=progress.loss,
        metric=_best(progress.evals),
        world_sizes=tuple(progress.world_sizes),
        changed=changed,
        size_bytes=size,
        checkpoint=newest_checkpoint(folder),
        problems=tuple(problems),
    )


def _folders(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir())


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _entry(line: bytes) -> dict[str, Any]:
    """The object that a line holds; an empty one if it holds none."""
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _look_at_ledger(path: Path, progress: _Progress) -> None:
    """Events are parsed, and of the steps the first and the last."""
    first = last = b""
    with path.open("rb") as file:
        for place, line in enumerate(file, 1):
            if not line.endswith(b"\n") or not (line := line.strip()):
                continue
            if not is_whole(line):
                progress.damaged.append(place)
            elif b'"event"' in line:
                event = from_line(line) or {}
                _add_world_size(progress, event)
                progress.turn = event["event"] if event.get("event") in _TURNS else progress.turn
            else:
                first, last = first or line, line
    step = from_line(last) or {}
    if not progress.world_sizes:
        for entry in (from_line(first) or {}, step):
            _add_world_size(progress, entry)
    if isinstance(step.get("step"), int):
        progress.steps = step["step"] + 1
        progress.loss = number(step.get("loss"))


def _add_world_size(progress: _Progress, entry: dict[str, Any]) -> None:
    size = entry.get("world_size")
    if isinstance(size, int) and progress.world_sizes[-1:] != [size]:
        progress.world_sizes.append(size)


def _look_at_metrics(path: Path, progress: _Progress) -> None:
    """Lines that end an epoch hold its number and what the evaluation measured."""
    with path.open("rb") as file:
        for line in file:
            if b'"epoch"' not in line and b'/eval"' not in line:
                continue
            for tag, value in _entry(line).items():
                if isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                if tag == "epoch":
                    progress.epochs = int(value)
                elif tag.endswith("/eval"):
                    progress.evals.setdefault(tag.removesuffix("/eval"), []).append(float(value))


def _best(evals: dict[str, list[float]]) -> tuple[str, float] | None:
    """The best value of the first metric that is no loss, else of the loss."""
    names = [name for name in evals if name != "loss"] or list(evals)
    if not names:
        return None
    values = [value for value in evals[names[0]] if math.isfinite(value)]
    smaller = any(part in names[0].lower() for part in _SMALLER_IS_BETTER)
    return None if not values else (names[0], min(values) if smaller else max(values))


def _name(contract: dict[str, Any]) -> str | None:
    """What was trained: the recipe, else the script among the words of the command."""
    if isinstance(contract.get("recipe"), str):
        return str(contract["recipe"])
    command = contract.get("command")
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    return next((Path(word).name for word in words if word.endswith(".py")), None)


def _state(folder: Path, turn: str | None, changed: float) -> State:
    """Ledgers tell how a run ended; a result that is as new as the ledger tells it where no event does.

    Of a run that did not end the lock tells whether it is under way.
    """
    if turn == "stop":
        return "stopped"
    if turn == "end" or _time(folder / RESULT_FILE) >= max(_time(folder / LEDGER_FILE), 1.0):
        return "finished"
    locked = is_locked(folder)
    if locked is None:
        return "running?" if time.time() - changed < RECENT_SECONDS else "crashed"
    return "running" if locked else "crashed"


def _time(path: Path) -> float:
    """When a file was last written, in seconds since 1970; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def newest_checkpoint(folder: Path) -> str | None:
    """The name of the whole checkpoint of the highest step in a run's folder; None without one."""
    names = [entry.name for entry in _folders(folder / CHECKPOINT_FOLDER) if entry.name.startswith("step-")]
    return max(names, key=lambda name: (len(name), name), default=None)


def checkpoint_contract(checkpoint: Path) -> dict[str, Any]:
    """The contract under which a checkpoint was written; empty where its files do not tell."""
    try:
        contract = parse_json(read_small(checkpoint / FACTS_FILE, MAX_FACTS_BYTES))["run"]["rest"]["contract"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return contract if isinstance(contract, dict) else {}


def _changed_and_size(folder: Path) -> tuple[float, int]:
    """When a file was last written, and the bytes of all files."""
    changed, size = 0.0, 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.stat(os.path.join(parent, name), follow_symlinks=False)
                size += status.st_size
                changed = max(changed, status.st_mtime)
    return changed, size
