"""The supervisor: runs a job on some devices from start to end. It never imports torch.

Whatever happens, no process, port or file of the run is left: pipes instead of files, a listening socket that only the
store keeper holds, workers that end with their parent.
"""

import contextlib
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Literal

from samestep.devices.selection import Selection
from samestep.errors import RunFolderError, UsageError
from samestep.launcher.assignment import Assignment, Instruction, assign, process_variables
from samestep.launcher.crew import Crew, ForkCrew, SpawnCrew
from samestep.launcher.display import Display
from samestep.launcher.job import Job, Outcome
from samestep.launcher.pipes import relay_to
from samestep.launcher.watch import Watch

StartMethod = Literal["fork", "spawn"]


def supervise(
    job: Job,
    selection: Selection,
    *,
    threads: int = 1,
    start_method: str | None = None,
    grace_seconds: float = 10.0,
) -> Outcome:
    """Runs a job on the selected devices, one worker process each, and waits for its end.

    The first SIGINT or SIGTERM is forwarded to the workers, a second one kills them; both only where this is the main
    thread. Whatever happens, no process, port or file of the run is left.

    Args:
        job: what to run.
        selection: the devices.
        threads: CPU threads a worker; part of what decides the bits.
        start_method: "fork" (from a process that imported torch once) or "spawn"; None takes fork where it is safe.
        grace_seconds: how long workers may take to end when they are asked to.

    Raises:
        UsageError: the arguments cannot be.
        RunFolderError: the log folder cannot be written.
    """
    variables = process_variables(selection, threads)
    method = resolve_start_method(start_method, threads)
    return supervise_crew(
        lambda: ForkCrew.executed(variables, job.preload) if method == "fork" else SpawnCrew(variables),
        job,
        selection,
        threads=threads,
        grace_seconds=grace_seconds,
    )


def resolve_start_method(start_method: str | None, threads: int) -> StartMethod:
    """Checks the arguments of a start.

    Raises:
        UsageError: the start method does not exist here, or `threads` is no count.
    """
    if threads < 1:
        raise UsageError(f"got {threads} threads; a worker needs 1 or more (--threads)")
    if sys.platform == "win32":
        raise UsageError("several processes can be started on Linux and macOS; on Windows use WSL")
    if start_method not in (None, "fork", "spawn"):
        raise UsageError(f"got the start method {start_method!r}; it is fork or spawn (--start-method)")
    if start_method == "fork" and sys.platform != "linux":
        raise UsageError(f"the system libraries of {sys.platform} do not survive a fork; use --start-method spawn")
    return "fork" if start_method != "spawn" and sys.platform == "linux" else "spawn"


def supervise_crew(
    open_crew: Callable[[], Crew],
    job: Job,
    selection: Selection,
    *,
    threads: int,
    grace_seconds: float = 10.0,
    relay: bool = False,
    fds: Mapping[str, int] | None = None,
) -> Outcome:
    """`supervise` with a crew of the caller's choice.

    Args:
        open_crew: makes what starts the workers; it is closed at the end.
        job: what to run.
        selection: the devices.
        threads: CPU threads a worker.
        grace_seconds: how long workers may take to end when they are asked to.
        relay: print what rank 0 prints by `sys.stdout` of this process, which may be a notebook's, instead of letting
            it write to this process's descriptors.
        fds: further descriptors for all workers, by name.
    """
    log_dir = _make_log_dir(job.log_dir)
    with _stop_requests() as requests:
        crew = open_crew()
        watch = Watch(crew, Display(job.quiet, job.lines_to), grace_seconds)
        try:
            if requests is not None:
                watch.listen_for_stop(requests)
            for place in assign(selection, threads, uuid.uuid4().hex):
                _start(watch, place, job, log_dir, relay, fds or {})
            return watch.run()
        finally:
            crew.close()
            watch.close()


def _start(
    watch: Watch, place: Assignment, job: Job, log_dir: Path | None, relay: bool, fds: Mapping[str, int]
) -> None:
    """Starts one worker, with pipes for what it has to say."""
    log = None if log_dir is None or place.rank == 0 else str(log_dir / f"rank-{place.rank}.log")
    worker = watch.add_worker(place, log)
    with contextlib.ExitStack() as theirs:

        def pipe(handle: Callable[[int], bool]) -> int:
            reader, writer = os.pipe()
            theirs.callback(os.close, writer)
            watch.listen(reader, handle)
            return writer

        given = {**fds, "events": pipe(lambda fd: watch.read_events(worker, fd))}
        if log is None:
            given["words"] = pipe(lambda fd: watch.read_tail(worker, fd))
        else:
            given["words"] = _open_log(log)
            theirs.callback(os.close, given["words"])
        if place.rank > 0:
            given["stdout"] = given["stderr"] = given["words"]
        elif relay:
            given["stdout"], given["stderr"] = pipe(relay_to("stdout")), pipe(relay_to("stderr"))
        watch.crew.start(Instruction(place, job, 0, given))


def _make_log_dir(log_dir: str | None) -> Path | None:
    """The log folder, made if it is not there."""
    if log_dir is None:
        return None
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot make the log folder {log_dir}: {error.strerror}; choose another folder (--log-dir, --run-dir)"
        raise RunFolderError(reason) from error
    return Path(log_dir)


def _open_log(path: str) -> int:
    """A worker's log, empty."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    except OSError as error:
        reason = f"cannot write the log {path}: {error.strerror}; choose another folder (--log-dir)"
        raise RunFolderError(reason) from error


@contextlib.contextmanager
def _stop_requests() -> Iterator[int | None]:
    """Turns SIGINT, SIGTERM and SIGHUP into bytes on a pipe; those that this process ignores stay ignored.

    Yields the pipe's read end, which the caller closes; None outside the main thread, where Python has no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def note(signum: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(writer, bytes([signum]))

    before = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) not in (signal.SIG_IGN, None):
            before[signum] = signal.signal(signum, note)
    try:
        yield reader
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(writer)
