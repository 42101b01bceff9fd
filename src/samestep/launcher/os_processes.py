"""Processes: trees that end with their parent, leave no grandchildren and have a title in `ps`; the fork server's.

Linux has this in the kernel (prctl(2): PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER); elsewhere a thread polls the parent.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import queues
from pathlib import Path
from typing import Any

from samestep.devices.portable import CAPS
from samestep.patch import Patch

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
    # Else a data worker whose rank was killed would become a child of init, and nothing would know of it any more.
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


def stay_on(cores: Sequence[int]) -> None:
    """Limits this process, and those that it starts, to the CPU cores among `cores` that it may use, if there are any.

    Host memory of another NUMA node than the GPU's is further from it: copies and launches take longer.
    """
    if hasattr(os, "sched_setaffinity") and (near := os.sched_getaffinity(0).intersection(cores)):
        os.sched_setaffinity(0, near)


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


class SentBatches(queues.Queue):  # type: ignore[type-arg]  # generic in the stubs alone
    """A queue by which a data worker that cannot send a batch ends: torch's loader then raises, and does not hang."""

    @staticmethod
    def _on_queue_feeder_error(error: Exception, item: Any) -> None:
        super(SentBatches, SentBatches)._on_queue_feeder_error(error, item)  # prints it
        data = sys.modules.get("torch.utils.data")
        if data is not None and data.get_worker_info() is not None:
            sys.stderr.flush()
            os._exit(1)


BATCHES_ARE_SENT = Patch(queues, "Queue", SentBatches)


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


@dataclass(frozen=True)
class ServerProcess:
    """A fork server, which leads a session of its own, and the socket by which it is reached."""

    pid: int
    control: socket.socket

    @classmethod
    def start(cls, variables: Mapping[str, str], start_method: str = "fork") -> "ServerProcess":
        """Starts a server as a new program, which imports torch at once if it is to fork."""
        ours, theirs = socket.socketpair()
        with theirs, held_signals():
            program = [sys.executable, "-P", "-m", "samestep.launcher.forkserver"]
            process = subprocess.Popen(
                [*program, str(theirs.fileno()), str(os.getpid()), start_method, TITLE_ROOM],
                env={**os.environ, **variables},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        process.returncode = 0  # or `subprocess` warns that it did not wait for it
        return cls(process.pid, ours)


class EarlyServer:
    """A server that was started before it is known whether, and with which variables, a run needs one."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._process: ServerProcess | None = ServerProcess.start(variables)

    def take_server(self, variables: Mapping[str, str]) -> ServerProcess | None:
        """Hands over the server, once; None, and its end, if it was started without one of these variables, or with
        caps of portable kernels that are not among them.
        """
        if any(variables.get(name) != self._variables.get(name) for name in {*self._variables, *CAPS}):
            self.close()
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        """Kills the server if no run has taken it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
            process.control.close()


def server_variables(num_threads: int) -> dict[str, str]:
    """The variables that must be set before a server imports torch."""
    # OpenBLAS starts threads when numpy is imported, after which the process must not fork. The order of a set of
    # strings depends on a hash that differs between processes, and so would a vocabulary made of a set.
    variables = {
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
    }
    return variables if "PYTHONHASHSEED" in os.environ else {**variables, "PYTHONHASHSEED": "0"}
