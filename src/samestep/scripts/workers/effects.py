"""Effects of a chunk on the world outside: each process that computes chunks would have them, so they are refused.

By an audit hook, which sees effects wherever they come from, without a patch; Python never takes one away, so it asks
each time whether a chunk runs. What a library does for itself (caches, temporary files) is left to it.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from samestep.callsite import is_script_file
from samestep.errors import UsageError

WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
LIBRARY = f"{os.path.dirname(os.__file__)}{os.sep}"  # Python's own, whose functions open files for their callers
REFUSED = {
    "open": "opens a file for writing",
    "os.mkdir": "makes a folder",
    "os.remove": "removes a file",
    "os.rename": "renames a file",
    "shutil.rmtree": "removes a folder",
    "subprocess.Popen": "starts a program",
    "os.fork": "starts a process",
    "sqlite3.connect": "opens a database",
    "socket.connect": "connects to an address",
}
"""Events of Python's audit hooks (docs.python.org, "Audit events table"), and what they are in words."""


def refuse_effects(is_in_chunk: Callable[[], bool]) -> None:
    """Raises, from now on, where the script's own code has such an effect within a chunk. It cannot be undone."""

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event in REFUSED and is_in_chunk() and not (event == "open" and not _writes(arguments)) and _is_by_script():
            what = repr(arguments[0]) if arguments and isinstance(arguments[0], str) else ""
            raise UsageError(
                f"the forward of a module that is computed in chunks {REFUSED[event]} {what}: every chunk would, on "
                "whichever device it runs; do it outside of the module, with what the forward returns"
            )

    sys.addaudithook(look)


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    return any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & WRITES)


def _is_by_script() -> bool:
    """Whether the script's code has called what raised the event, perhaps by a function of Python's own library."""
    # The line that has called, past this function and the hook.
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return is_script_file(frame.f_code.co_filename)


def _is_pythons(filename: str) -> bool:
    return filename.startswith(("<frozen", LIBRARY)) and "-packages" not in filename
