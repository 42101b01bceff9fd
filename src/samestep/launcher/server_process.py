"""The fork server's process, which the command line starts before all else: torch loads while the rest gets ready."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.launcher import process_tree


@dataclass(frozen=True)
class ServerProcess:
    """A fork server, which leads a session of its own, and the socket by which it is reached."""

    pid: int
    control: socket.socket

    @classmethod
    def start(cls, variables: Mapping[str, str], start_method: str = "fork") -> "ServerProcess":
        """Starts a server as a new program, which imports torch at once if it is to fork."""
        ours, theirs = socket.socketpair()
        with theirs, process_tree.held_signals():
            program = [sys.executable, "-P", "-m", "samestep.launcher.forkserver"]
            process = subprocess.Popen(
                [*program, str(theirs.fileno()), str(os.getpid()), start_method, process_tree.TITLE_ROOM],
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

    def take(self, variables: Mapping[str, str]) -> ServerProcess | None:
        """Hands over the server, once; None, and its end, if it was started without one of these variables."""
        if any(variables.get(name) != value for name, value in self._variables.items()):
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
