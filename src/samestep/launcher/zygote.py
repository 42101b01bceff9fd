"""The zygote: a process with one thread that imports torch once and forks the workers from there.

It talks with the supervisor in JSON lines over a Unix socket. It is told `{"command": "start", "instruction": …,
"names": […]}`, with the worker's descriptors attached to the message in the order of `names`, and `{"command":
"signal", "slot": s, "signal": n}` or `{"command": "abort", "slot": s}`. It tells `started` (slot, pid), `exited` (slot,
code; -N for signal N) and `broken` (text). When the socket closes, or the supervisor dies, it ends the workers and
itself.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.comm.channel import EventParser
from samestep.launcher import lifeline
from samestep.launcher.assignment import Instruction
from samestep.launcher.job import Job
from samestep.launcher.store import keep_store, open_listener
from samestep.launcher.title import set_title
from samestep.launcher.worker import leave, work

# The first optimizer imports torch._dynamo, 800 modules: once here, instead of in every worker.
PRELOADED = ("torch", "torch.distributed", "torch._dynamo", "samestep.train.run")
GRACE_SECONDS = 2.0
MAX_FDS = 64


class ForkError(RuntimeError):
    """The zygote is no place to fork from: it has threads, or holds an accelerator."""


@dataclass
class Zygote:
    """What the zygote knows; everything happens on its one thread."""

    control: socket.socket
    wake: int
    listener: socket.socket
    port: int
    keeper: int = 0
    attempt: int = 0
    workers: dict[int, int] = field(default_factory=dict)  # slot by process id
    name: str = ""  # of the run
    parser: EventParser = field(default_factory=EventParser)
    received: deque[int] = field(default_factory=deque)

    def tell(self, event: str, **fields: Any) -> None:
        """Tells the supervisor something; that it is gone shows when we listen."""
        with contextlib.suppress(OSError):
            self.control.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")


def serve(control: socket.socket, supervisor: int, preload: Sequence[str] = ()) -> Instruction | None:
    """Forks workers as the supervisor commands.

    Args:
        control: the socket to the supervisor.
        supervisor: its process id.
        preload: modules to import before the first fork, besides those that every worker needs.

    Returns:
        None in the zygote, when the run is over; in each new worker its instruction.
    """
    wake, zygote = -1, None
    try:
        wake = _install_signals()
        lifeline.release_signals()
        lifeline.end_with_parent(supervisor, signal.SIGTERM)
        lifeline.adopt_orphans()
        for name in (*PRELOADED, *preload):
            if _is_there(name):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # the workers share these pages as long as nobody writes to them
        listener = open_listener()
        zygote = Zygote(control, wake, listener, listener.getsockname()[1])
        _fork_keeper(zygote)
        return _loop(zygote)
    except BaseException as error:
        # Without this a broken installation of torch would look like a worker that died.
        reason = str(error) if isinstance(error, ForkError) else traceback.format_exc()
        text = json.dumps({"event": "broken", "text": reason})
        with contextlib.suppress(OSError):
            control.sendall(text.encode() + b"\n")
        if zygote is not None:
            _end_all(zygote)
        return None


def main() -> None:
    """The zygote as a program: the socket's descriptor, the supervisor's process id, modules, and room for a title."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    instruction = serve(control, int(sys.argv[2]), sys.argv[3:-1])
    if instruction is None:
        os._exit(0)  # the run waits for us, and there is nothing to tidy up
    leave(work(instruction))


def serve_forked(control: socket.socket, supervisor: int, call: Callable[[], Any]) -> None:
    """The zygote in a fork of the caller's own process; never returns, lest the caller's program go on twice.

    Args:
        control: the socket to the supervisor.
        supervisor: its process id.
        call: what every worker calls.
    """
    code = 1
    try:
        os.setsid()
        instruction = serve(control, supervisor)
        code = work(instruction, call) if instruction is not None else 0
    finally:
        os._exit(code)


def _loop(zygote: Zygote) -> Instruction | None:
    """Serves until the supervisor is gone or says so."""
    while True:
        ready, _, _ = select.select([zygote.control.fileno(), zygote.wake], [], [])
        if zygote.wake in ready and signal.SIGTERM in os.read(zygote.wake, 512):
            break
        _reap(zygote)
        if zygote.control.fileno() in ready:
            try:
                data, fds, _, _ = socket.recv_fds(zygote.control, 65_536, MAX_FDS)
            except OSError:
                break
            if not data:
                break
            for fd in fds:
                os.set_inheritable(fd, False)
            zygote.received.extend(fds)
            for message in zygote.parser.feed(data):
                if message.get("command") in ("signal", "abort"):
                    _signal(zygote, message["slot"], message.get("signal"))
                    continue
                instruction = _start(zygote, message)
                if instruction is not None:
                    return instruction
    _end_all(zygote)
    return None


def _start(zygote: Zygote, message: dict[str, Any]) -> Instruction | None:
    """Forks one worker; returns its instruction in the worker, None in the zygote."""
    if not zygote.name:
        zygote.name = Job.from_json(message["instruction"]["job"]).name
        set_title(f"samestep fork server {zygote.name}", "samestep fork")
    attempt = message["instruction"]["assignment"]["attempt"]
    if attempt != zygote.attempt:
        zygote.attempt = attempt
        _renew_store(zygote)
    fds = {name: zygote.received.popleft() for name in message["names"]}
    instruction = Instruction.from_json({**message["instruction"], "port": zygote.port, "fds": fds})
    parent = os.getpid()
    lifeline.hold_signals()
    pid = _fork()
    if pid == 0:
        _become_worker(zygote, parent)
        return instruction
    lifeline.release_signals()
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    for fd in set(fds.values()):
        os.close(fd)
    slot = instruction.assignment.slot
    zygote.workers[pid] = slot
    zygote.tell("started", slot=slot, pid=pid)
    return None


def _become_worker(zygote: Zygote, parent: int) -> None:
    """Gives up in a new worker what belongs to the zygote; must not raise, for then it would act as a second one."""
    try:
        lifeline.end_with_parent(parent, signal.SIGKILL)
        os.setpgid(0, 0)
        waker = signal.set_wakeup_fd(-1)
        zygote.control.close()
        for fd in (zygote.wake, waker, *zygote.received):
            os.close(fd)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _fork_keeper(zygote: Zygote) -> None:
    """Forks the store keeper, the only one that holds the listening socket from then on."""
    parent = os.getpid()
    zygote.keeper = _fork()
    if zygote.keeper == 0:
        try:
            lifeline.end_with_parent(parent, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            zygote.control.close()
            for fd in zygote.received:
                os.close(fd)
            keep_store(zygote.listener)
        finally:
            traceback.print_exc()
            os._exit(1)
    zygote.listener.close()


def _renew_store(zygote: Zygote) -> None:
    """Gives workers that start again an empty store: torch's own rendezvous would find the addresses of the dead."""
    keeper, zygote.keeper = zygote.keeper, 0
    if keeper:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
    zygote.listener = open_listener()
    zygote.port = zygote.listener.getsockname()[1]
    _fork_keeper(zygote)


def _fork() -> int:
    """Forks, if this process is one that can be forked."""
    count = num_threads()
    if count != 1:
        raise ForkError(f"the starter process has {count} threads and must have one; use --start-method spawn")
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            raise ForkError(f"an imported module initialised {name} before the workers; use --start-method spawn")
    return os.fork()


def num_threads() -> int:
    """Threads of this process: the kernel's count where it tells, else Python's."""
    with contextlib.suppress(FileNotFoundError):
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def _signal(zygote: Zygote, slot: int, signum: int | None) -> None:
    """Signals a worker, or aborts it if the signal is None; one that was reaped already is left alone."""
    for pid, owner in zygote.workers.items():
        if owner == slot:
            with contextlib.suppress(ProcessLookupError):
                if signum is None:
                    lifeline.abort_process(pid)
                else:
                    os.kill(pid, signum)


def _reap(zygote: Zygote) -> None:
    """Reaps what ended, with what it left behind, and tells the supervisor."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == zygote.keeper:
            zygote.keeper = 0
            zygote.tell("broken", text=f"the process that hosts the store ended ({os.waitstatus_to_exitcode(status)})")
        if pid in zygote.workers:
            slot = zygote.workers.pop(pid)
            lifeline.sweep_group(pid)
            zygote.tell("exited", slot=slot, code=os.waitstatus_to_exitcode(status))


def _end_all(zygote: Zygote) -> None:
    """Ends the workers, with a short grace, then the store keeper."""
    for pid in zygote.workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while zygote.workers and time.monotonic() < deadline:
        select.select([zygote.wake], [], [], 0.05)
        with contextlib.suppress(BlockingIOError):
            os.read(zygote.wake, 512)
        _reap(zygote)
    left = (*zygote.workers, *([zygote.keeper] if zygote.keeper else []))
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    for pid in zygote.workers:
        lifeline.sweep_group(pid)


def _install_signals() -> int:
    """SIGCHLD and SIGTERM wake the loop: returns the descriptor on which their numbers arrive."""
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, lambda _signum, _frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return wake


def _is_there(name: str) -> bool:
    """Whether a module can be imported; torch always counts as one, so that its absence is told."""
    if not name.startswith("samestep."):
        return True
    return Path(__file__).resolve().parents[1].joinpath(*name.split(".")[1:]).with_suffix(".py").exists()


if __name__ == "__main__":
    main()
