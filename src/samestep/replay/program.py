"""The program of a recorded run: what is to be run again, found in the run's record, and run in this process."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.launcher.job import Job
from samestep.launcher.program import run_program

RECIPE_JOB = "samestep.recipes.job:train"
_FLAGS = ("-m", "--module", "--adopt", "--no-adopt")


@dataclass(frozen=True)
class Program:
    """What made a run.

    Attributes:
        job: to run.
        folder: in which it ran; None where that is not known, or it is gone.
    """

    job: Job
    folder: Path | None

    @property
    def is_recipe(self) -> bool:
        """Whether it is a recipe of `samestep train`."""
        return self.job.kind == "function"

    def run(self) -> None:
        """Runs it as it ran, with its own arguments and in its own folder; puts back what that changes."""
        with _place_of_its_own(self.folder):
            run_program(self.job, {})


def program_of(record: Mapping[str, Any], run: Path) -> Program:
    """The program of a run."""
    recorded_folder = record.get("working_folder")
    folder = Path(recorded_folder) if isinstance(recorded_folder, str) and Path(recorded_folder).is_dir() else None
    recipe_job = record.get("job")
    if isinstance(recipe_job, Mapping) and "recipe" in recipe_job:
        own = {name: value for name, value in recipe_job.items() if name not in ("shares", "spares")}
        return Program(Job("function", RECIPE_JOB, kwargs=own), folder)
    command = record.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    found = _program_in(words)
    if found is None:
        said = f"its command was {' '.join(words)}" if words else "it recorded no command"
        raise UsageError(
            f"{run} does not say which program made it: {said}. A replay needs a run of samestep train, or of a script "
            "with samestep.Trainer(…, run_dir=…) that was started as python SCRIPT or samestep run SCRIPT"
        )
    kind, target, arguments = found
    if kind == "module":
        return Program(Job("module", target, tuple(arguments)), folder)
    if not ((folder or Path()) / target).is_file():
        where = recorded_folder if folder is not None else Path.cwd()
        raise UsageError(
            f"the script that made {run} is not there any more: {target} in {where}; put it back, or replay from the "
            "folder that holds it"
        )
    return Program(Job("script", str((folder or Path()) / target), tuple(arguments)), folder)


def _program_in(words: Sequence[str]) -> tuple[str, str, Sequence[str]] | None:
    """Kind, target and arguments in a command: `python train.py …`, `python -m …` or `samestep run … train.py …`."""
    if len(words) < 2:
        return None
    starter, rest = Path(words[0]).name, list(words[1:])
    if starter.startswith("python") and rest[:2] == ["-m", "samestep"]:
        starter, rest = "samestep", rest[2:]
    if starter == "samestep":
        return _after_run(rest[1:]) if rest[:1] == ["run"] else None
    if not starter.startswith("python"):
        return None
    if rest[0] == "-m":
        return ("module", rest[1], rest[2:]) if len(rest) > 1 else None
    return None if rest[0].startswith("-") else ("script", rest[0], rest[1:])


def _after_run(words: Sequence[str]) -> tuple[str, str, Sequence[str]] | None:
    """The program behind the options of `samestep run`: each but the flags has a value."""
    kind, position = "script", 0
    while position < len(words) and words[position].startswith("-"):
        option = words[position]
        kind = "module" if option in ("-m", "--module") else kind
        position += 1 if option in _FLAGS or "=" in option else 2
    if position >= len(words):
        return None
    return kind, words[position], words[position + 1 :]


@contextmanager
def _place_of_its_own(folder: Path | None) -> Iterator[None]:
    """Lets a program have its arguments, search path, main module and working folder."""
    before = sys.argv, sys.path[:], sys.modules["__main__"], os.getcwd()
    try:
        if folder is not None:
            os.chdir(folder)
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before[:3]
        os.chdir(before[3])
