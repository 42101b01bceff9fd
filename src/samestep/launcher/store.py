"""The store keeper: a process that hosts the store at which the ranks meet, and outlives any of them.

It is given a socket that listens already, so the port is its own before anybody hears of it: no run takes another's.
"""

import os
import signal
import socket
import sys
from typing import NoReturn

from samestep.comm.environment import LOOPBACK
from samestep.launcher import lifeline
from samestep.launcher.title import set_title

LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def open_listener() -> socket.socket:
    """A socket that listens on a free port of the loopback address."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(1024)
    return listener


def keep_store(listener: socket.socket) -> NoReturn:
    """Hosts the store until a signal ends the process."""
    import torch.distributed as dist

    set_title("samestep store", "samestep store")
    port = listener.getsockname()[1]
    # The name keeps the store, and its port, alive.
    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    if LOG_LEVEL not in os.environ:
        # The store survives garbage at its port, but tells of it with a C++ stack, and nothing else is told from here.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    while store is not None:
        signal.pause()
    raise AssertionError("the store is held")


def main() -> NoReturn:
    """The keeper as a program of its own: its arguments begin with the socket's descriptor and the parent's id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline.release_signals()
    lifeline.end_with_parent(int(sys.argv[2]), signal.SIGKILL)
    os.set_inheritable(int(sys.argv[1]), False)
    keep_store(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
