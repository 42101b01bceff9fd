"""Worker pools: start, signal and reap worker processes, by a fork server or by spawn, without importing torch here."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from samestep.comm.channel import EventParser
from samestep.launcher import process_tree
from samestep.launcher.assignment import Instruction
from samestep.launcher.failures import describe_ending
from samestep.launcher.store import open_listener

CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class WorkerEvent:
    """A worker ended, with -N for signal N and None for an unknown code; without a slot, `text` broke the run."""

    slot: int | None
    code: int | None = None
    text: str = ""


class WorkerPool(Protocol):
    """Starts and ends the workers of a run; they are known by their slots."""

    def start(self, instruction: Instruction) -> None:
        """Starts one worker; the caller may close its descriptors afterwards."""
        ...

    def fileno(self) -> int | None:
        """A descriptor that is readable when `poll_events` has something to return; None if it must be called often."""
        ...

    def poll_events(self) -> list[WorkerEvent]:
        """The events since the last call; never waits."""
        ...

    def signal(self, slot: int, signum: int) -> None:
        """Signals a worker."""
        ...

    def abort(self, slot: int) -> None:
        """Has a worker, even a stopped one, write its stacks and end."""
        ...

    def is_stopped(self, slot: int) -> bool:
        """Whether a signal has stopped a worker."""
        ...

    def kill(self) -> None:
        """Kills every worker at once."""
        ...

    def close(self) -> None:
        """Ends all that is left, with its descendants, and waits for it."""
        ...


@dataclass
class Child:
    """A direct child process, of `subprocess` or not."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        if self.code is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == 0:
                    return None
                self.code = os.waitstatus_to_exitcode(status)
                return self.code
            self.code = -signal.SIGKILL  # it was reaped elsewhere
        return self.code

    def wait(self, seconds: float) -> bool:
        """Waits for the end; False if it did not come in time."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


class ForkPool:
    """Workers forked by a fork server, the leader of its own session, at the other end of a socket."""

    def __init__(self, child: Child, control: socket.socket) -> None:
        self._child = child
        self._control = control
        self._parser = EventParser()
        self._running: set[int] = set()
        self._pids: dict[int, int] = {}
        self._lost = self._broken = False
        control.setblocking(False)

    @classmethod
    def executed(cls, variables: Mapping[str, str], preload: Sequence[str] = ()) -> "ForkPool":
        """A fork server that is a new program and imports some modules before it forks."""
        ours, theirs = socket.socketpair()
        with theirs, process_tree.held_signals():
            program = [sys.executable, "-P", "-m", "samestep.launcher.forkserver"]
            arguments = [*program, str(theirs.fileno()), str(os.getpid()), *preload, process_tree.TITLE_ROOM]
            process = subprocess.Popen(
                arguments, env={**os.environ, **variables}, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        return cls(_detach(process), ours)

    @classmethod
    def forked(cls, call: Callable[[], Any], variables: Mapping[str, str]) -> "ForkPool":
        """A fork server that is a fork of this process; its workers call a function of this process."""
        from samestep.launcher.forkserver import serve_forked

        ours, theirs = socket.socketpair()
        parent = os.getpid()
        with warnings.catch_warnings(), theirs, process_tree.held_signals():
            # Python 3.12 warns of a fork while threads run, and notebooks always have some.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if pid == 0:
                ours.close()
                os.environ.update(variables)
                serve_forked(theirs, parent, call)
        return cls(Child(pid), ours)

    def start(self, instruction: Instruction) -> None:
        """Sends the instruction and its descriptors to the fork server."""
        self._running.add(instruction.assignment.slot)
        names, fds = list(instruction.fds), list(instruction.fds.values())
        self._send({"command": "start", "instruction": instruction.to_json(), "names": names}, fds)

    def fileno(self) -> int | None:
        """The socket."""
        return self._control.fileno()

    def poll_events(self) -> list[WorkerEvent]:
        """Reads the fork server's messages."""
        if self._lost:
            return []
        data = b""
        closed = False
        with contextlib.suppress(BlockingIOError):
            try:
                while received := self._control.recv(65_536):
                    data += received
                closed = True
            except ConnectionError:
                closed = True
        found = [self._read(message) for message in self._parser.feed(data)]
        if closed:
            self._lost = True
            self._child.wait(CLOSE_SECONDS)
            if self._running and not self._broken:
                found.append(WorkerEvent(None, text=f"the starter of the workers {describe_ending(self._child.code)}"))
            found += [WorkerEvent(slot) for slot in sorted(self._running)]
            self._running.clear()
        return [item for item in found if item is not None]

    def signal(self, slot: int, signum: int) -> None:
        """Has the fork server signal it: only the parent knows whether the process id is still that worker's."""
        if self._pids:
            self._send({"command": "signal", "slot": slot, "signal": signum}, [])
        elif self._running:
            self.kill()  # it still imports torch, and no worker has been started

    def abort(self, slot: int) -> None:
        """Has the fork server do it."""
        self._send({"command": "abort", "slot": slot}, [])

    def is_stopped(self, slot: int) -> bool:
        """Asks the system."""
        return process_tree.is_stopped(self._pids.get(slot))

    def close(self) -> None:
        """Closes the socket, upon which the fork server ends all; kills all if it does not."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        if self._running or not self._child.wait(CLOSE_SECONDS):
            self.kill()
        for group in self._pids.values():
            process_tree.sweep_group(group)
        self._control.close()

    def kill(self) -> None:
        """Kills the fork server and the workers."""
        for group in (self._child.pid, *self._pids.values()):
            if group != self._child.pid or self._child.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
        self._child.wait(CLOSE_SECONDS)

    def _read(self, message: dict[str, Any]) -> WorkerEvent | None:
        """The event of one message of the fork server."""
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
        """Sends a command; a fork server that is gone shows in `poll_events`."""
        data = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._control.setblocking(True)
            sent = socket.send_fds(self._control, [data], fds) if fds else 0
            self._control.sendall(data[sent:])
            self._control.setblocking(False)


@dataclass
class SpawnPool:
    """Workers that are programs of their own, and a store process; `variables` are added to their environment."""

    variables: Mapping[str, str]
    _port: int = 0
    _attempt: int = 0
    _store: Child | None = None
    _workers: dict[int, Child] = field(default_factory=dict)

    def start(self, instruction: Instruction) -> None:
        """Starts the worker's program; before the first of an attempt the store, empty again."""
        if self._store is not None and instruction.assignment.attempt != self._attempt:
            os.kill(self._store.pid, signal.SIGKILL)
            self._store.wait(CLOSE_SECONDS)
            self._store = None
        self._attempt = instruction.assignment.attempt
        if self._store is None:
            with open_listener() as listener:
                self._port = listener.getsockname()[1]
                self._store = self._run("store", listener.fileno(), (listener.fileno(),), {})
        fds = instruction.fds
        with tempfile.TemporaryFile() as file:
            place = Instruction(instruction.assignment, instruction.job, self._port, fds)
            file.write(json.dumps(place.to_json()).encode())
            file.flush()
            passed = (file.fileno(), *fds.values())
            self._workers[instruction.assignment.slot] = self._run("worker", file.fileno(), passed, fds)

    def fileno(self) -> int | None:
        """None: child processes are polled."""
        return None

    def poll_events(self) -> list[WorkerEvent]:
        """Polls the processes."""
        found = []
        for slot, child in list(self._workers.items()):
            code = child.poll()
            if code is not None:
                del self._workers[slot]
                process_tree.sweep_group(child.pid)
                found.append(WorkerEvent(slot, code))
        if self._store is not None and self._store.code is None and self._store.poll() is not None:
            found.append(WorkerEvent(None, text=f"the process that hosts the store ended ({self._store.code})"))
        return found

    def signal(self, slot: int, signum: int) -> None:
        """Signals a worker that is not reaped."""
        child = self._workers.get(slot)
        if child is not None and child.poll() is None:
            os.kill(child.pid, signum)

    def abort(self, slot: int) -> None:
        """Signals a worker that is not reaped."""
        child = self._workers.get(slot)
        if child is not None and child.poll() is None:
            process_tree.abort_process(child.pid)

    def is_stopped(self, slot: int) -> bool:
        """Asks the system."""
        child = self._workers.get(slot)
        return child is not None and process_tree.is_stopped(child.pid)

    def kill(self) -> None:
        """Kills the workers; `poll_events` reports them."""
        for child in self._workers.values():
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills what is left, the store too."""
        if self._store is not None:
            self._workers[-1] = self._store
        self.kill()
        for child in self._workers.values():
            child.wait(CLOSE_SECONDS)
            process_tree.sweep_group(child.pid)
        self._workers.clear()

    def _run(self, module: str, fd: int, passed: tuple[int, ...], fds: Mapping[str, int]) -> Child:
        """Starts one of our modules as a program that leads a process group of its own."""
        with process_tree.held_signals():
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    f"samestep.launcher.{module}",
                    str(fd),
                    str(os.getpid()),
                    process_tree.TITLE_ROOM,
                ],
                env={**os.environ, **self.variables},
                pass_fds=tuple(set(passed)),
                stdout=fds.get("stdout"),
                stderr=fds.get("stderr"),
                start_new_session=True,
            )
        return _detach(process)


def _detach(process: "subprocess.Popen[bytes]") -> Child:
    """Takes a process over from `subprocess`, which would warn that nobody waited for it."""
    process.returncode = 0
    return Child(process.pid)
