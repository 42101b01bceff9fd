"""Commands: programs that the script starts are started by rank 0, and a person is asked there."""

import builtins
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from samestep.adopt.files.desk import Desk, Way
from samestep.adopt.table import Patch

COMMANDS = (
    (os, "system"),
    (subprocess, "run"),
    (subprocess, "call"),
    (subprocess, "check_call"),
    (subprocess, "check_output"),
    (subprocess, "getoutput"),
    (subprocess, "getstatusoutput"),
)


def patches(desk: Desk) -> list[Patch]:
    """The table, and `input`. `subprocess.Popen` and `os.popen` stay: each rank starts its own."""
    places = [*COMMANDS, (builtins, "input")]
    return [Patch(owner, name, _once(desk, getattr(owner, name))) for owner, name in places]


def _once(desk: Desk, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that rank 0 calls for the script; what it returns or raises there, it does on all ranks."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, *args, **kwargs)
        if desk.way(sys._getframe(1), None) is not Way.TOGETHER:
            return call()
        return desk.together(f"a call of {original.__name__}", call)

    return replacement
