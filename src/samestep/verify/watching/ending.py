"""The ending: how a program is ended after the last step that is watched, on every rank at the same point."""

import os
import time
from pathlib import Path

from samestep.verify.watching.jsonl_writer import JsonlWriter

PATIENCE_SECONDS = 20.0
_sleep = time.sleep
_open, _close, _exists, _exit = os.open, os.close, os.path.exists, os._exit


class WatchedEnough(BaseException):
    """Ends the program; no `Exception`, so that a script which catches its own failures lets it pass."""


class Ending:
    """Ends this rank when all ranks are there: one that left early would break a message that is still under way.

    Args:
        folder: where the ranks leave their marks.
        rank: this one.
        world_size: how many there are.
        writer: closed before a program that does not let go is ended.
    """

    def __init__(self, folder: str, rank: int, world_size: int, writer: JsonlWriter) -> None:
        self._marks = [str(Path(folder) / f"rank-{other}.done") for other in range(world_size)]
        self._rank = rank
        self._diary = writer
        self._num_tries = 0

    def mark(self) -> None:
        """Tells the other ranks that this one needs nothing more of them."""
        _close(_open(self._marks[self._rank], os.O_CREAT | os.O_WRONLY, 0o600))

    def end(self) -> None:
        """Waits for the others, then ends the program; the second time, if it went on, the process."""
        self._num_tries += 1
        if self._num_tries == 1:
            self.mark()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not all(_exists(mark) for mark in self._marks) and time.monotonic() < deadline:
                _sleep(0.01)
        if self._num_tries > 2:
            self._diary.close()
            _exit(0)
        raise WatchedEnough
