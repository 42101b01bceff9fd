"""Worker pools: start, signal and end worker processes through a fork server, without importing torch.

The pool knows a worker by its slot from the moment that its start is commanded (`_running`), and its process from the
`started` event on (`_pids`). When the socket ends, the server has: its workers end with it, by the system, and nothing
can tell their exit codes any more.
"""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import psutil

from samestep.comm.events import EventParser
from samestep.comm.heartbeat import HeartbeatPage
from samestep.launcher import os_processes
from samestep.launcher.job import Assignment, Instruction
from samestep.launcher.os_processes import EarlyServer, ServerProcess
from samestep.launcher.worker_states import describe_ending, read_available

CLOSE_SECONDS = 5.0
STARTER = -1  # in place of a slot: the process that starts the workers here; on machine N, STARTER - N


class Group(NamedTuple):
    """The process group of a worker, its data workers included, as the operating system reports it."""

    has_stopped: bool = False  # a signal has stopped one of its processes
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class WorkerEvent:
    """The end of a worker, with -N for signal N and None for an unknown code; without a slot, of the run, by `text`.

    With a slot, `text` says how the worker's machine was lost.
    """

    slot: int | None
    code: int | None = None
    text: str = ""


class Pool(Protocol):
    """The workers of a run, as the monitor sees them: on this machine (`ServerPool`) or on several."""

    def start(self, instruction: Instruction) -> None:
        """Starts one worker; the caller may close the instruction's descriptors afterwards."""

    def fileno(self) -> int:
        """A descriptor that is readable while `poll_events` has events to return."""

    def poll_events(self) -> list[WorkerEvent]:
        """The events since the last call, without waiting."""

    def signal(self, slot: int, signum: int) -> None:
        """Signals a worker, or kills those of a starter."""

    def starters(self) -> Sequence[int]:
        """The processes that start workers: `STARTER`, and those of other machines."""

    def groups(self) -> Mapping[int, Group]:
        """The process group of each worker, by slot, and of each starter."""

    def post(self, page: HeartbeatPage) -> None:
        """Shares what this machine's page has; called after each look at the workers."""

    def newcomers(self) -> Sequence[Assignment]:
        """Places on machines that have come since the last call, and may join."""

    def kill(self) -> None:
        """Kills all processes of the run."""

    def close(self) -> None:
        """Ends all processes of the run."""


class ServerPool:
    """The workers of a fork server, by their slots; it leads a session of its own and is reached by a socket."""

    def __init__(self, pid: int, control: socket.socket, preload: Sequence[str] = ()) -> None:
        # psutil knows when the process began, so it is not mistaken for a later one with the same id.
        self._server = psutil.Process(pid)
        self._control = control
        self._parser = EventParser()
        self._running: set[int] = set()
        self._pids: dict[int, int] = {}
        self.is_lost = self._broken = False
        self._code: int | None = None  # of the server
        control.setblocking(False)
        self._send({"command": "preload", "modules": list(preload)}, [])

    @classmethod
    def executed(
        cls,
        variables: Mapping[str, str],
        preload: Sequence[str] = (),
        start_method: str = "fork",
        early: EarlyServer | None = None,
    ) -> "ServerPool":
        """A server that is a new program; it imports modules and forks, or starts each worker as a program."""
        process = early.take_server(variables) if early is not None and start_method == "fork" else None
        process = process or ServerProcess.start(variables, start_method)
        return cls(process.pid, process.control, preload if start_method == "fork" else ())

    def start(self, instruction: Instruction) -> None:
        """Starts one worker by the fork server; the caller may close the instruction's descriptors afterwards."""
        self._running.add(instruction.assignment.slot)
        names, fds = list(instruction.fds), list(instruction.fds.values())
        self._send({"command": "start", "instruction": asdict(instruction), "names": names}, fds)

    def fileno(self) -> int:
        """A descriptor that is readable while `poll_events` has events to return."""
        return self._control.fileno()

    def poll_events(self) -> list[WorkerEvent]:
        """The events since the last call, without waiting."""
        data = None if self.is_lost else read_available(self._control.fileno())
        found = [self._read(message) for message in self._parser.feed(data or b"")]
        if data is None:
            if not self.is_lost:
                self.is_lost = True
                self._wait(CLOSE_SECONDS)
            if self._running and not self._broken:
                found.append(WorkerEvent(None, text=f"the starter of the workers {describe_ending(self._code)}"))
            found += [WorkerEvent(slot) for slot in sorted(self._running)]
            self._running.clear()
        return [item for item in found if item is not None]

    def signal(self, slot: int, signum: int) -> None:
        """Signals a worker through the fork server: only the parent knows whether its process id is still its own."""
        # Messages are read in order: a worker whose start was commanded before is there when this one is read.
        if self._pids:
            self._send({"command": "signal", "slot": slot, "signal": signum}, [])
        elif self._running:
            self.kill()  # it still imports torch, and no worker has been started

    def post(self, page: HeartbeatPage) -> None:
        """Does nothing: the workers have the page."""

    def newcomers(self) -> Sequence[Assignment]:
        return ()

    def starters(self) -> Sequence[int]:
        return (STARTER,)

    def groups(self) -> dict[int, Group]:
        """The process group of each worker, by slot, and of `STARTER`, by a look at all processes of the machine."""
        slots = {self._server.pid: STARTER, **{pid: slot for slot, pid in self._pids.items()}}
        found: dict[int, Group] = {}
        for pid in psutil.pids():
            with contextlib.suppress(psutil.Error, OSError):
                if (slot := slots.get(os.getpgid(pid))) is not None:
                    process, (has_stopped, seconds) = psutil.Process(pid), found.get(slot, Group())
                    stops, used = process.status() == psutil.STATUS_STOPPED, sum(process.cpu_times()[:2])
                    found[slot] = Group(has_stopped or stops, seconds + used)
        return found

    def close(self) -> None:
        """Closes the socket, upon which the fork server ends all processes; kills them if it does not."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        if self._running or not self._wait(CLOSE_SECONDS):
            self.kill()
        for group in self._pids.values():
            os_processes.sweep_group(group)
        self._control.close()

    def kill(self) -> None:
        server = [] if self._wait(0) else [self._server.pid]
        for group in (*server, *self._pids.values()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        self._wait(CLOSE_SECONDS)

    def _wait(self, seconds: float) -> bool:
        """Waits for the end of the fork server; False if the time is up."""
        with contextlib.suppress(psutil.TimeoutExpired):
            code = self._server.wait(seconds)
            self._code = -signal.SIGKILL if code is None else int(code)  # None if other code has reaped it
            return True
        return False

    def _read(self, message: dict[str, Any]) -> WorkerEvent | None:
        """The event of a message from the fork server."""
        if message.get("event") == "started":
            self._pids[message["slot"]] = message["pid"]
            return None
        if message.get("event") == "exited":
            self._pids.pop(message["slot"], None)
            self._running.discard(message["slot"])
            return WorkerEvent(message["slot"], message["code"])
        self._broken = True
        return WorkerEvent(None, text=str(message.get("text", "")))

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        """Sends a command; `poll_events` reports a fork server that has ended."""
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            # Else a command that the socket's buffer cannot hold would be cut. The descriptors go with its first byte.
            self._control.setblocking(True)
            sent = socket.send_fds(self._control, [data], fds) if fds else 0
            self._control.sendall(data[sent:])
            self._control.setblocking(False)
