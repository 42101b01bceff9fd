"""The fork server: a process with one thread that imports torch once and forks the workers.

With the start method "spawn" it imports nothing, and starts each worker as a new program, as it does, too, if threads
or an initialised accelerator would not survive a fork. Its first child hosts the store, torch's TCPStore by which ranks
connect, apart from every rank.

It exchanges JSON lines with the supervisor over a Unix socket. Commands are `{"command": "preload", "modules": […]}`,
`{"command": "start", "instruction": …, "names": […]}`, with the worker's descriptors attached to the message in the
order of `names`, and `{"command": "signal", "slot": s, "signal": n}`. Events are `started` (slot, pid), `exited` (slot,
code; -N for signal N) and `broken` (text). When the socket closes, or the supervisor dies, it ends the workers and
itself.

A worker is forked in the midst of the server's loop, and returns from it: `_start`, `_loop` and `serve` have its
instruction there, and None in the server. So a worker runs at the bottom of the stack of `main`, without a frame
of the server above it, and what that does after `serve` is done by workers as well.

No worker and no store may keep a descriptor of the server: the supervisor takes the end of the socket for the end of
the server, and whatever is written to the wake-up pipe, for a signal to the server.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from samestep.comm.environment import LOOPBACK
from samestep.comm.events import EventParser
from samestep.launcher import os_processes
from samestep.launcher.job import Instruction, Job
from samestep.launcher.worker import leave, work
from samestep.text import notify

# Less than `CLOSE_SECONDS` of the pool, after which the supervisor kills the server while it still ends its workers.
GRACE_SECONDS = 2.0
# A message has eight at most (`Instruction`); the kernel closes those for which a read has no room, without an error.
MAX_FDS = 64
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass
class ForkServer:
    """The fork server's state, used by its one thread."""

    control: socket.socket
    wake: int  # becomes readable upon a signal
    waker: int  # the end to which signals are written; at the fork asyncio takes it away, since Python 3.12
    forks: bool
    port: int = 0  # of the store
    store: int = 0
    attempt: int = 0
    workers: dict[int, int] = field(default_factory=dict)  # slot by process id
    name: str = ""  # of the run
    parser: EventParser = field(default_factory=EventParser)
    received: deque[int] = field(default_factory=deque)


def serve(control: socket.socket, supervisor: int, forks: bool = True) -> Instruction | None:
    """Starts workers as the supervisor commands; returns None in the server, its instruction in a forked worker."""
    server = None
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os_processes.release_signals()
        os_processes.end_with_parent(supervisor, signal.SIGTERM)
        os_processes.adopt_orphans()
        if forks:
            gc.disable()  # takes a tenth of an import's time, and leaves holes in the pages that the workers share
            importlib.import_module("torch.distributed")
        # After the imports: until then SIGTERM ends a server that is a new program at once, if the supervisor dies
        # while torch is imported.
        server = ForkServer(control, *_install_signals(), forks)
        _start_store(server)
        return _loop(server)
    except BaseException:
        # Otherwise a broken installation of torch would look like a worker that died.
        _send(control, "broken", text=traceback.format_exc())
        if server is not None:
            _end_all(server)
        return None


def main() -> None:
    """The server as a program; its arguments: socket, supervisor's process id, start method, title room.

    Or the store as a program; its arguments: "store", socket, parent's process id, title room.
    """
    if sys.argv[1] == "store":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os_processes.release_signals()
        os_processes.end_with_parent(int(sys.argv[3]), signal.SIGKILL)
        os.set_inheritable(int(sys.argv[2]), False)
        _host_store(socket.socket(fileno=int(sys.argv[2])))
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    instruction = serve(control, int(sys.argv[2]), sys.argv[3] == "fork")
    if instruction is None:
        os._exit(0)  # the run waits for this, and nothing is left to clean up
    leave(work(instruction))


def _send(control: socket.socket, event: str, **fields: Any) -> None:
    """Sends the supervisor an event; the loop detects that it has ended."""
    with contextlib.suppress(OSError):
        control.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")


def _loop(server: ForkServer) -> Instruction | None:
    """Serves until the supervisor ends or asks to stop."""
    while True:
        ready, _, _ = select.select([server.control.fileno(), server.wake], [], [])
        # At a SIGTERM, which the system sends when the supervisor dies; a SIGCHLD has only woken the loop.
        if server.wake in ready and signal.SIGTERM in os.read(server.wake, 512):
            break
        # At every turn: several SIGCHLD may be delivered as one.
        _reap(server)
        if server.control.fileno() in ready:
            try:
                data, fds, _, _ = socket.recv_fds(server.control, 65_536, MAX_FDS)
            except OSError:
                break
            if not data:
                break
            # Descriptors arrive in the order of the messages, but perhaps with an earlier read than the message's end:
            # they are queued, and each message takes as many as it names.
            for fd in fds:
                os.set_inheritable(fd, False)
            server.received.extend(fds)
            for message in server.parser.feed(data):
                if message["command"] == "preload":
                    for name in message["modules"]:
                        importlib.import_module(name)
                    continue
                if message["command"] == "signal":
                    _signal(server, message["slot"], message["signal"])
                    continue
                instruction = _start(server, message)
                if instruction is not None:
                    return instruction
    _end_all(server)
    return None


def _start(server: ForkServer, message: dict[str, Any]) -> Instruction | None:
    """Starts one worker; returns its instruction in a forked worker, None in the server."""
    # Here, and not when the server starts: an early one is started before the job is known.
    if not server.name:
        server.name = Job.from_json(message["instruction"]["job"]).name
        os_processes.set_title(f"samestep fork server {server.name}", "samestep-fork")
    attempt = message["instruction"]["assignment"]["attempt"]
    fds = {name: server.received.popleft() for name in message["names"]}
    listener = fds.pop("listener", None)
    if attempt != server.attempt or listener is not None:
        server.attempt = attempt
        # An empty one: in the old one torch's rendezvous would find the addresses of dead ranks.
        _start_store(server, None if listener is None else socket.socket(fileno=listener))
    instruction = Instruction.from_json({**message["instruction"], "port": server.port, "fds": fds})
    parent = os.getpid()
    os_processes.hold_signals()
    if _can_fork(server):
        gc.freeze()  # the workers share these pages as long as none of them writes to them
        pid = os.fork()
        if pid == 0:
            _become_worker(server, parent)
            return instruction
    else:
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(asdict(instruction)).encode())
            file.flush()
            hashes = {"PYTHONHASHSEED": str(1 + instruction.assignment.rank)} if instruction.job.own_hash_seeds else {}
            pid = _spawn("samestep.launcher.worker", fds=fds, fd=file.fileno(), variables=hashes)
    os_processes.release_signals()
    # Here and in the worker: whichever comes first, the group is there before it is signalled.
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    for fd in set(fds.values()):
        os.close(fd)
    slot = instruction.assignment.slot
    server.workers[pid] = slot
    _send(server.control, "started", slot=slot, pid=pid)
    return None


def _become_worker(server: ForkServer, parent: int) -> None:
    """Closes the fork server's descriptors in a new worker; must not raise, or a second fork server would run."""
    try:
        os_processes.end_with_parent(parent, signal.SIGKILL)
        os.setpgid(0, 0)
        gc.enable()
        # A fork shares the pipe: a SIGTERM to this worker would be read by the server, as its own, and end the run.
        signal.set_wakeup_fd(-1)
        server.control.close()
        for fd in (server.wake, server.waker, *server.received):
            os.close(fd)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _start_store(server: ForkServer, listener: socket.socket | None = None) -> None:
    """Starts the store process in place of an earlier one; from then on it alone holds the listening socket.

    It listens on the loopback address, unless it is given a socket that other machines reach.
    """
    # A process of its own, since rank 0 may be lost, and the others then need the store to connect anew.
    store, server.store = server.store, 0
    if store:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
    # Bound here: so the port is known to workers that are started before the store serves, and it keeps their
    # connections in its backlog until then.
    parent = os.getpid()
    listener = listener or socket.create_server((LOOPBACK, 0), backlog=1024)
    server.port = listener.getsockname()[1]
    if _can_fork(server):
        server.store = os.fork()
    else:
        server.store = _spawn("samestep.launcher.forkserver", "store", fd=listener.fileno())
    if server.store == 0:
        try:
            os_processes.end_with_parent(parent, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            # The server's handler does nothing but wake its loop: with it, the store would survive a SIGTERM.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            server.control.close()
            for fd in server.received:
                os.close(fd)
            _host_store(listener)
        finally:
            traceback.print_exc()
            os._exit(1)
    listener.close()


def _host_store(listener: socket.socket) -> NoReturn:
    """Hosts the store until a signal ends the process."""
    import torch.distributed as dist

    os_processes.set_title("samestep store", "samestep-store")
    port = listener.getsockname()[1]
    stderr = os.dup(2)
    if LOG_LEVEL not in os.environ:
        # The store survives garbage at its port, but logs a C++ stack for it. The port may have garbage already.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    try:
        # The reference keeps the store, and its port, alive.
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


def _spawn(
    module: str, *arguments: str, fd: int, fds: Mapping[str, int] | None = None, variables: Mapping[str, str] = {}
) -> int:
    """Starts a module as a program that leads a process group; returns its process id."""
    fds = fds or {}
    # -P: `-m` would put the working folder first on the search path, where a file of the user's may be named as a
    # module of Python's.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments, str(fd), str(os.getpid()), os_processes.TITLE_ROOM],
        pass_fds=tuple({fd, *fds.values()}),
        stdout=fds.get("stdout"),
        stderr=fds.get("stderr"),
        env={**os.environ, **variables},
        process_group=0,
    )
    process.returncode = 0  # `_reap` waits for it instead of `subprocess`
    return process.pid


def _can_fork(server: ForkServer) -> bool:
    """Whether the server forks; no more, from then on, once threads or an initialised accelerator would not survive."""
    if not server.forks:
        return False
    # By the system's count: `threading` does not know the threads that libraries start, such as OpenBLAS.
    count, cuda = len(os.listdir("/proc/self/task")), getattr(sys.modules.get("torch"), "cuda", None)
    reason = ""
    if count != 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        reason = f"has {count} threads{' (' + names + ')' if names else ''}"
    elif cuda is not None and cuda.is_initialized():
        reason = "has initialised CUDA, by a module that it imported,"
    if not reason:
        return True
    notify(
        f"the starter process {reason} and cannot fork, so each worker is started as a new program, which takes some "
        "seconds more: --start-method spawn does so without this line"
    )
    server.forks = False
    return False


def _signal(server: ForkServer, slot: int, signum: int) -> None:
    """Signals a worker that has not been reaped."""
    for pid, owner in server.workers.items():
        if owner == slot:
            with contextlib.suppress(ProcessLookupError):
                os_processes.send_signal(pid, signum)


def _reap(server: ForkServer) -> None:
    """Reaps ended processes with their groups, and reports them to the supervisor."""
    while True:
        try:
            # Of any child: by `adopt_orphans` also those that a worker has left behind.
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        if pid == server.store:
            server.store = 0
            _send(server.control, "broken", text=f"the process that hosts the store ended ({code})")
        if pid in server.workers:
            slot = server.workers.pop(pid)
            # Before the event, upon which a replacement may get the device: a data worker of this one may still use it.
            os_processes.sweep_group(pid)
            _send(server.control, "exited", slot=slot, code=code)


def _end_all(server: ForkServer) -> None:
    """Ends the workers, with a short grace, then the store."""
    for pid in server.workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while server.workers and time.monotonic() < deadline:
        select.select([server.wake], [], [], 0.05)
        with contextlib.suppress(BlockingIOError):
            os.read(server.wake, 512)
        _reap(server)
    left = (*server.workers, *([server.store] if server.store else []))
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    for pid in server.workers:
        os_processes.sweep_group(pid)


def _install_signals() -> tuple[int, int]:
    """Makes SIGCHLD and SIGTERM wake the loop; returns the ends of the pipe that their numbers are written to."""
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    # Empty handlers, but handlers of Python's: only for these is the number of a signal written to the pipe.
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, lambda _signum, _frame: None)
    return wake, waker


if __name__ == "__main__":
    main()
