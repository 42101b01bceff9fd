"""What a script holds beside its tensors: the plain numbers in its frames, and files that an earlier run has written.

No cause of the table is read from them, but where none explains a difference they show where to look: a counter that
begins elsewhere, or a checkpoint that one run leaves to the next.
"""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any

from samestep.callsite import is_script_file, script_frames, script_line
from samestep.text import listed
from samestep.verify.causes.evidence import Facts
from samestep.verify.recording import Recording

MAX_NUMBERS = 200
MAX_SHOWN = 6


def record_numbers(facts: Facts) -> None:
    """Records the numbers in the script's frames at a step, by name, the innermost frame's first."""
    found: dict[str, float] = {}
    for frame in script_frames(sys._getframe()):
        for name, value in _numbers(frame):
            if len(found) < MAX_NUMBERS:
                found.setdefault(name, value)
    facts.add("numbers", line=script_line(), of=found)


def _numbers(frame: FrameType) -> Iterator[tuple[str, float]]:
    """The finite numbers among a frame's variables, the attributes of its `self`, and its module's variables."""
    held = [("", dict(frame.f_locals)), ("", dict(frame.f_globals))]
    owner = frame.f_locals.get("self")
    if owner is not None and is_script_file(getattr(sys.modules.get(type(owner).__module__), "__file__", None) or ""):
        held.insert(1, ("self.", dict(getattr(owner, "__dict__", {}))))
    for prefix, variables in held:
        for name, value in variables.items():
            if type(value) in (bool, int, float) and math.isfinite(value) and not name.startswith("__"):
                yield f"{prefix}{name}", value


def watch_files(facts: Facts, first_began: float, began: float) -> None:
    """Records, until the process ends, the script's lines that read a file which an earlier run has written.

    Args:
        first_began: when the first of the runs began, in seconds since the epoch.
        began: when this one did.
    """

    def seen(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], str | bytes | os.PathLike) or args[2] & os.O_ACCMODE:
            return
        with suppress(OSError):
            path = os.fsdecode(args[0])
            if not path.endswith(".pyc") and first_began <= os.stat(path).st_mtime < began and (line := script_line()):
                facts.add_once("earlier_file", file=path, line=line)

    sys.addaudithook(seen)


def files_left(runs: Sequence[Recording]) -> Iterator[str]:
    """The files of earlier runs that runs have read, as sentences."""
    for run in runs:
        for fact in islice(run.facts("earlier_file", 0), 1):
            yield (
                f"{run.label} read {fact['file']} at {fact['line']}, which an earlier one of these runs had written: "
                "it goes on where that one ended. Remove the file first, and have each run write into a folder of its "
                "own, for which {folder} stands in an argument of the script"
            )


def numbers_apart(ours: Recording, theirs: Recording, step: int) -> Iterator[str]:
    """The numbers of the script that differ between two runs in a step (counted from 1), as a sentence."""
    pair = [
        next((fact for fact in run.facts("numbers", 0) if fact["step"] == step - 1), None) for run in (ours, theirs)
    ]
    if pair[0] is None or pair[1] is None:
        return
    first, second, sizes = pair[0]["of"], pair[1]["of"], (ours.world_size, theirs.world_size)
    both = [(name, first[name], second[name]) for name in first if name in second and first[name] != second[name]]
    other = [each for each in both if each[1:] != sizes]
    other.sort(key=lambda each: isinstance(each[1], float))  # counters come before what is computed of them
    if other:
        shown = [f"{name} is {a:.9g} on {ours.label} and {b:.9g} on {theirs.label}" for name, a, b in other]
        yield f"in step {step}, at {pair[0]['line']}, these numbers of the script differ: {listed(shown, MAX_SHOWN)}"
