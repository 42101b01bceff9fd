"""The store process of a run on one machine: hosts torch's TCPStore, by which ranks meet, apart from every rank."""

import os
import signal
import socket
import sys
from typing import NoReturn

from samestep.comm.environment import LOOPBACK
from samestep.launcher import process_tree

LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def open_listener() -> socket.socket:
    """A socket that listens on a free port of the loopback address."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(1024)
    return listener


def host_store(listener: socket.socket) -> NoReturn:
    """Hosts the store until a signal ends the process."""
    import torch.distributed as dist

    process_tree.set_title("samestep store", "samestep store")
    port = listener.getsockname()[1]
    stderr = os.dup(2)
    if LOG_LEVEL not in os.environ:
        # The store survives garbage at its port, but logs a C++ stack for it. The port may have garbage already.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    try:
        # The name keeps the store, and its port, alive.
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    except BaseException:
        os.dup2(stderr, 2)
        raise
    os.close(stderr)
    while store is not None:
        signal.pause()
    raise AssertionError("the store is held")


def main() -> NoReturn:
    """The store as a program of its own: its arguments begin with the socket's descriptor and the parent's id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process_tree.release_signals()
    process_tree.end_with_parent(int(sys.argv[2]), signal.SIGKILL)
    os.set_inheritable(int(sys.argv[1]), False)
    host_store(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
