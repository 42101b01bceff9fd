"""Stopping: the first Ctrl-C or SIGTERM lets the step under way end, the second ends the program at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from samestep.comm.board import STOPS_ON_REQUEST
from samestep.comm.team import Team


@contextmanager
def stopping_on_request(team: Team) -> Iterator[None]:
    """Makes this rank one that stops after a step; see `Team.stop`.

    Under a supervisor the request comes by its board. Else it is a signal, in the main thread, unless the program
    handles that signal itself. Inside another one of its kind it changes nothing.
    """
    pulse = team.pulse
    if pulse.board is not None:
        before = pulse.flags
        pulse.set_flags(before | STOPS_ON_REQUEST)
        try:
            yield
        finally:
            pulse.set_flags(pulse.flags & ~STOPS_ON_REQUEST | before & STOPS_ON_REQUEST)
        return
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = {signum: old for signum, old in defaults.items() if signal.getsignal(signum) == old}

    def request(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, ours[signal.Signals(signum)])
        team.ask_to_stop(signum)
        if team.rank == 0:
            os.write(2, b"samestep: stopping after this step; once more to end at once\n")  # print may be under way

    for signum in ours:
        signal.signal(signum, request)
    try:
        yield
    finally:
        for signum, old in ours.items():
            signal.signal(signum, old)
