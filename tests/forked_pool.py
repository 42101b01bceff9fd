"""A fork server that is a fork of this process, which has imported what its workers would import for seconds."""

import os
import socket
import warnings

from samestep.launcher import os_processes, worker
from samestep.launcher.forkserver import serve
from samestep.launcher.worker_pool import ServerPool


def forked_pool(call, variables, preload=()):
    """The pool of a fork server whose workers call a function of this process in place of their job, if it is given."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    with warnings.catch_warnings(), theirs, os_processes.held_signals():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's about threads
        pid = os.fork()
        if pid == 0:
            _serve(ours, theirs, parent, call, variables)
    return ServerPool(pid, ours, preload)


def _serve(ours, theirs, parent, call, variables):
    code = 1
    try:
        ours.close()
        os.environ.update(variables)
        os.setsid()
        if call is not None:
            worker.run_program = lambda job, fds: call()
        instruction = serve(theirs, parent)
        code = worker.work(instruction) if instruction is not None else 0
    finally:
        os._exit(code)
