"""Finding runs below a folder, with the state and the progress of each, damaged or not.

Only the lines that are needed of each file are parsed, so that a folder of long runs is listed at once.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from samestep.checkpoint.run_folder import (
    CHECKPOINT_FOLDER,
    CONTRACT_FILE,
    LEDGER_FILE,
    is_locked,
)
from samestep.errors import DataError
from samestep.files import read_lines, read_object, reason
from samestep.runs.ledger import from_line, is_step, is_whole, number

RECENT_SECONDS = 120.0
AUDIT = "an audit found wrong bits"
_STATE_EVENTS = ("start", "resume", "stop", "end")

State = Literal["finished", "running", "running?", "stopped", "crashed"]


@dataclass
class RunStatus:
    """The state and the progress of a run.

    It is "stopped" if a signal stopped it after a checkpoint, "running" if it neither stopped nor finished and a
    process holds its lock, and else "crashed". If the file system has no locks, it is "running?" if something was
    written in the last two minutes.
    """

    path: Path
    state: State = "crashed"
    program: str | None = None  # the script's name, or the module's
    steps: int = 0  # updates done
    loss: float | None = None  # of the last step
    world_sizes: tuple[int, ...] = ()  # numbers of devices, in the order in which the run had them
    changed: float = 0.0  # when something was last written, in seconds since 1970
    checkpoint: str | None = None  # the newest one
    problems: tuple[str, ...] = ()  # files that cannot be read and what audits found, as sentences


def find_runs(folder: Path) -> list[RunStatus]:
    """The runs in a folder and in the folders right below it, newest first; a folder that is a run is the only one."""
    if not folder.is_dir():
        raise DataError(f"no folder {folder}; name one with runs in it, such as runs")
    if is_run(folder):
        return [run_status(folder)]
    runs = [run_status(entry) for entry in sorted(_folders(folder)) if is_run(entry)]
    return sorted(runs, key=lambda run: run.changed, reverse=True)


def is_run(folder: Path) -> bool:
    """Whether a folder has a contract or a ledger, as every run leaves them."""
    return any((folder / name).is_file() for name in (CONTRACT_FILE, LEDGER_FILE))


def read_contract(folder: Path) -> dict[str, Any] | None:
    """The contract of a run; None if there is none that can be read."""
    try:
        return read_object(folder / CONTRACT_FILE)
    except (OSError, ValueError):
        return None


def run_status(folder: Path) -> RunStatus:
    """The state and the progress of a run; files that cannot be read are left out, and named."""
    problems: list[str] = []
    run = RunStatus(folder, program=_program(try_object(folder / CONTRACT_FILE, problems)))
    last_event = None
    try:
        last_event, damaged, found = _read_ledger(folder / LEDGER_FILE, run)
        problems += found
        if damaged:
            problems.append(f"{LEDGER_FILE}: damaged lines: {len(damaged)} (line {damaged[0]} first)")
    except OSError as error:
        problems += unreadable(LEDGER_FILE, error)
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                run.changed = max(run.changed, os.stat(os.path.join(parent, name), follow_symlinks=False).st_mtime)
    run.state = _state(folder, last_event, run.changed)
    run.checkpoint = newest_checkpoint_name(folder)
    run.problems = tuple(problems)
    return run


def unreadable(name: str, error: Exception) -> list[str]:
    """A sentence about a file that cannot be read; a run may be without it."""
    return (
        []
        if isinstance(error, FileNotFoundError) and name != CONTRACT_FILE
        else [f"{name} cannot be read: {reason(error)}"]
    )


def _folders(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir())


def try_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """The JSON object in a file; empty, with a problem, if it cannot be read."""
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        problems += unreadable(path.name, error)
        return {}


def found_by_audit(event: Mapping[str, Any]) -> str:
    """What an audit found, by its event."""
    return f"{AUDIT}: {event.get('found')}"


def _read_ledger(path: Path, run: RunStatus) -> tuple[Any, list[int], list[str]]:
    """Reads all events, and of the steps the first and the last.

    Returns the last event, the numbers of damaged lines, and what audits found.
    """
    # A ledger may have millions of steps: of these only the checksums are looked at, but for the first and the last.
    first = last = b""
    last_event, damaged, found, sizes = None, [], [], list[Any]()
    for place, line in enumerate(read_lines(path), 1):
        if not (line := line.strip()):
            continue
        if not is_whole(line):
            damaged.append(place)
        elif b'"event"' in line:
            event = from_line(line) or {}
            sizes.append(event.get("world_size"))
            found += [found_by_audit(event)] if event.get("event") == "audit" else []
            last_event = event["event"] if event.get("event") in _STATE_EVENTS else last_event
        else:
            first, last = first or line, line
    step = from_line(last) or {}
    if not any(isinstance(size, int) for size in sizes):
        sizes = [entry.get("world_size") for entry in (from_line(first) or {}, step)]
    sizes = [size for size in sizes if isinstance(size, int)]
    run.world_sizes = tuple(size for index, size in enumerate(sizes) if index == 0 or size != sizes[index - 1])
    if is_step(step.get("step")):
        run.steps, run.loss = step["step"], number(step.get("loss"))
    return last_event, damaged, found


def _program(contract: dict[str, Any]) -> str | None:
    """The script or module among the words of the command."""
    command = contract.get("command")
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    if words[1:2] == ["-m"] and len(words) > 2:
        return words[2].rpartition(".")[2]
    return next((Path(word).name for word in words if word.endswith(".py")), None)


def _state(folder: Path, last_event: Any, changed: float) -> State:
    """The state by the ledger's last event, else by the lock."""
    if last_event == "stop":
        return "stopped"
    if last_event == "end":
        return "finished"
    locked = is_locked(folder)
    if locked is None:
        return "running?" if time.time() - changed < RECENT_SECONDS else "crashed"
    return "running" if locked else "crashed"


def newest_checkpoint_name(folder: Path) -> str | None:
    """The name of the whole checkpoint of the highest step in a run's folder; None without one."""
    # By length first: beyond eight digits a number is longer, and as text would come too early.
    # Not the folders of a writer that was killed, `step-….replaced`.
    found = (entry.name for entry in _folders(folder / CHECKPOINT_FOLDER) if entry.name.startswith("step-"))
    names = [name for name in found if name.removeprefix("step-").isdecimal()]
    return max(names, key=lambda name: (len(name), name), default=None)
