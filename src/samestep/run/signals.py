"""Signals: the first Ctrl-C, SIGTERM or SIGHUP lets the step under way end, the second ends the program at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from samestep.comm.environment import read_environment
from samestep.comm.heartbeat import STOPS_ON_REQUEST
from samestep.comm.membership import Membership


@contextmanager
def stopping_on_request(membership: Membership) -> Iterator[None]:
    """Lets a request to stop wait for the end of the step; see `Requests.stop`.

    Under a supervisor the request comes by its heartbeat page. Else it is a signal, in the main thread, unless the
    program handles that signal itself. Nested calls change nothing.
    """
    heartbeat = membership.heartbeat
    if heartbeat.page is not None:
        before = heartbeat.flags
        heartbeat.set_flags(before | STOPS_ON_REQUEST)
        try:
            yield
        finally:
            heartbeat.set_flags(heartbeat.flags & ~STOPS_ON_REQUEST | before & STOPS_ON_REQUEST)
        return
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends: Any = signal.SIG_DFL
    defaults = ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, ends), (signal.SIGHUP, ends))
    ours: dict[int, Any] = {signum: old for signum, old in defaults if signal.getsignal(signum) == old}
    # One of all ranks that a terminal's Ctrl-C reaches.
    speaks = read_environment().local_rank == 0

    def request(signum: int, _frame: FrameType | None) -> None:
        # The system's, which also ends what hangs; but of a terminal that is closed come two: the shell's and its own.
        signal.signal(signum, signal.SIG_IGN if signum == signal.SIGHUP else ours[signum])
        heartbeat.ask_to_stop(signum)
        # Without it descriptor 2 was closed, and is another file's by now.
        if speaks and sys.__stderr__ is not None:
            with suppress(OSError, ValueError):  # not print, which may be under way
                os.write(sys.__stderr__.fileno(), b"samestep: stopping after this step; once more to end at once\n")

    for signum in ours:
        signal.signal(signum, request)
    try:
        yield
    finally:
        for signum, old in ours.items():
            signal.signal(signum, old)
