"""The lifeline: processes that end when their parent does, and that leave no grandchildren behind.

Linux has it in the kernel (prctl(2): PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER); elsewhere a thread looks at the parent.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

if sys.platform != "win32":
    import resource

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.5
SWEEP_SECONDS = 1.0

_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_with_parent(parent: int, signum: int) -> None:
    """Sends this process a signal when its parent is gone.

    Args:
        parent: the parent's process id, as the parent itself knows it.
        signum: the signal.
    """
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:  # it died before the call
            os.kill(os.getpid(), signum)
    else:
        threading.Thread(target=_watch_parent, args=(parent, signum), daemon=True).start()


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans, so that it can reap them; Linux only."""
    if sys.platform == "linux":
        _prctl(PR_SET_CHILD_SUBREAPER, 1)


def hold_signals() -> set[int]:
    """Keeps requests to stop pending, here and in a process that is started meanwhile; returns the mask from before.

    A new process has its parent's handlers until it sets its own; a request in between would be lost. Linux keeps a
    blocked signal even where it is ignored at the moment.
    """
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS))


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """`hold_signals` for as long as it takes to start a process."""
    before = hold_signals()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_signals() -> None:
    """Lets through what `hold_signals` kept."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _REQUESTS)


def sweep_group(group: int) -> None:
    """Ends what is left of a process group whose leader is gone; returns at once if that is nothing.

    SIGTERM first: it ends data loader workers, while Python's resource tracker ignores it and removes the shared
    memory that a killed process left in /dev/shm.
    """
    deadline = time.monotonic() + SWEEP_SECONDS
    signum = int(signal.SIGTERM)
    while True:
        try:
            os.killpg(group, signum)
        except (ProcessLookupError, PermissionError):
            return
        signum = 0
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            return
        time.sleep(0.01)


def abort_process(pid: int) -> None:
    """Has a process write its stacks, as `faulthandler` does, and end; also one that is stopped.

    Where the system can say so (Linux), it writes no core file.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            hard = resource.prlimit(pid, resource.RLIMIT_CORE)[1]
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, hard))
    os.kill(pid, signal.SIGABRT)
    os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int | None) -> bool:
    """Whether a signal has stopped a process; False for one that nobody knows."""
    if pid is None:
        return False
    import psutil  # the workers, who import this module too, start faster without

    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _prctl(option: int, value: int) -> None:
    """Calls prctl(2); it cannot fail with these options on any kernel since 3.4."""
    ctypes.CDLL(None).prctl(ctypes.c_int(option), ctypes.c_ulong(value), 0, 0, 0)


def _watch_parent(parent: int, signum: int) -> None:
    """Waits until the parent is another one."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signum)
