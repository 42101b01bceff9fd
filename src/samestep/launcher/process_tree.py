"""Process trees: processes that end with their parent, leave no grandchildren, and have a title in `ps`.

Linux has this in the kernel (prctl(2): PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER); elsewhere a thread polls the parent.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import resource

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.5
SWEEP_SECONDS = 1.0
TITLE_ROOM = " " * 128
"""The last argument of a program whose title is set: the title overwrites the memory of its command line."""

_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_START = 45  # of the command line in memory: field 48 of /proc/self/stat, counted from the first after the name


def open_standard_streams() -> None:
    """Opens the null device as each standard stream that was closed, in this process and those that it starts."""
    # Else the next pipe or socket takes its number, and with it what is printed there.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - until the end
            os.set_inheritable(stream.fileno(), stream.fileno() <= 2)  # the lowest number that is free
            setattr(sys, name, stream)


def end_with_parent(parent: int, signum: int) -> None:
    """Makes the system send this process a signal when its parent, of this id, ends."""
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
    """Blocks requests to stop, in this process and those started meanwhile; returns the previous mask."""
    # A new process has its parent's handlers until it sets its own; a request in between would be lost. Linux keeps a
    # blocked signal pending even while it is ignored.
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS))


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """`hold_signals` while a process is started."""
    before = hold_signals()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_signals() -> None:
    """Delivers the signals that `hold_signals` kept pending."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _REQUESTS)


def sweep_group(group: int) -> None:
    """Ends the rest of a process group whose leader has ended; returns at once if it is empty."""
    # SIGTERM first: it ends data loader workers, while Python's resource tracker ignores it and removes the shared
    # memory that a killed process left in /dev/shm.
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


def send_signal(pid: int, signum: int) -> None:
    """Signals a process; SIGABRT also wakes a stopped one, so that its `faulthandler` writes the stacks."""
    if signum != signal.SIGABRT:
        os.kill(pid, signum)
        return
    if sys.platform == "linux":  # no core file
        with contextlib.suppress(OSError):
            hard = resource.prlimit(pid, resource.RLIMIT_CORE)[1]
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, hard))
    os.kill(pid, signal.SIGABRT)
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """A temporary folder, removed by a process of its own once this one has left it or ended, whatever ends it."""
    folder = tempfile.mkdtemp(prefix=prefix)
    # Again until it is gone: workers that are being ended with their parent may still write to it.
    command = ["sh", "-c", 'read _; while [ -e "$0" ]; do rm -rf -- "$0" 2>&-; done', folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield folder


def set_title(title: str, short: str) -> None:
    """Sets this process's command line and name (15 bytes at most) in `ps` and `top`; on Linux, else nothing."""
    assert " " not in short, "Python looks for its number of threads by the spaces of /proc/self/stat"
    with contextlib.suppress(OSError, ValueError, IndexError):
        Path("/proc/self/comm").write_text(short)
        line = Path("/proc/self/cmdline").read_bytes()
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_START])
        memory = os.open("/proc/self/mem", os.O_RDWR)
        try:
            # Memory is written only if it holds the command line at the address in /proc.
            if line.endswith(b"\0") and os.pread(memory, len(line), start) == line:
                # The last byte stays 0, which shows the kernel that the line has not grown into the environment.
                os.pwrite(memory, os.fsencode(title)[: len(line) - 1].ljust(len(line), b"\0"), start)
        finally:
            os.close(memory)


def _prctl(option: int, value: int) -> None:
    """Calls prctl(2), which cannot fail with these options on any kernel since 3.4."""
    ctypes.CDLL(None).prctl(ctypes.c_int(option), ctypes.c_ulong(value), 0, 0, 0)


def _watch_parent(parent: int, signum: int) -> None:
    """Sends this process the signal once its parent has changed."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signum)
