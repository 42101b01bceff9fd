"""The program of a recorded run: found in the run's record, and run again in this process."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.launcher.job import Job
from samestep.launcher.program import run_program

RECIPE_JOB = "samestep.recipes.job:train"


@dataclass(frozen=True)
class Program:
    """The job that made a run, and its working folder; None if that is unknown or gone."""

    job: Job
    folder: Path | None

    @property
    def is_recipe(self) -> bool:
        """Whether it is a recipe of `samestep train`."""
        return self.job.kind == "function"

    def run(self) -> None:
        """Runs it with its own arguments in its own folder, and restores the state of the interpreter."""
        argv, path, main, folder = sys.argv, sys.path[:], sys.modules["__main__"], os.getcwd()
        try:
            if self.folder is not None:
                os.chdir(self.folder)
            run_program(self.job, {})
        finally:
            sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main
            os.chdir(folder)


def program_of(record: Mapping[str, Any], run: Path) -> Program:
    """The program in a run's record: a recipe's job, or a command such as ["python", "train.py", "--lr", "1"]."""
    recorded_folder = record.get("working_folder")
    folder = Path(recorded_folder) if isinstance(recorded_folder, str) and Path(recorded_folder).is_dir() else None
    recipe_job = record.get("job")
    if isinstance(recipe_job, Mapping) and "recipe" in recipe_job:
        own = {name: value for name, value in recipe_job.items() if name not in ("shares", "spares")}
        return Program(Job("function", RECIPE_JOB, kwargs=own), folder)
    command = record.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if words[:2] == ["python", "-m"] and len(words) > 2:
        return Program(Job("module", words[2], tuple(words[3:])), folder)
    if words[:1] != ["python"] or len(words) < 2 or words[1].startswith("-"):
        said = f"its command was {' '.join(words)}" if words else "it recorded no command"
        raise UsageError(
            f"{run} does not say which program made it: {said}. A replay needs a run of samestep train, or of a script "
            "with samestep.Trainer(…, run_dir=…) that was started as python SCRIPT or samestep run SCRIPT"
        )
    script = (folder or Path()) / words[1]
    if not script.is_file():
        where = recorded_folder if folder is not None else Path.cwd()
        raise UsageError(
            f"the script that made {run} is not there any more: {words[1]} in {where}; put it back, or replay from the "
            "folder that holds it"
        )
    return Program(Job("script", str(script), tuple(words[2:])), folder)
