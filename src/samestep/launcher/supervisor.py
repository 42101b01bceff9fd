"""The supervisor: runs a job on some devices from start to end. It never imports torch.

Whatever happens, no process, port or file of the run is left: pipes instead of files, a listening socket that only the
store keeper holds, workers that end with their parent.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, Literal

from samestep.comm.heartbeat_page import HeartbeatPage
from samestep.devices.selection import Selection
from samestep.errors import UsageError
from samestep.launcher.assignment import assign, process_variables
from samestep.launcher.crew import Crew, ForkCrew, SpawnCrew
from samestep.launcher.display import Display
from samestep.launcher.job import Job, Outcome
from samestep.launcher.policy import Policy
from samestep.launcher.restarts import Restarts
from samestep.launcher.starting import Starter, make_log_dir
from samestep.launcher.watch import Watch, make_event

StartMethod = Literal["fork", "spawn"]


def supervise(
    job: Job,
    selection: Selection,
    *,
    threads: int = 1,
    start_method: str | None = None,
    policy: Policy | None = None,
    grace_seconds: float = 10.0,
) -> Outcome:
    """Runs a job on the selected devices, one worker process each, and waits for its end.

    The first SIGINT or SIGTERM lets the workers finish their step, where they do so when asked to, else it is forwarded
    to them; a second one kills them; both only where this is the main thread. Where the workers can go on without one
    that is lost, they do. Whatever happens, no process, port or file of the run is left.

    Args:
        job: what to run.
        selection: the devices.
        threads: CPU threads a worker; part of what decides the bits.
        start_method: "fork" (from a process that imported torch once) or "spawn"; None takes fork where it is safe.
        policy: what is done about workers that are lost; `Policy()` if None.
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
        policy=policy,
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
    policy: Policy | None = None,
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
        policy: what is done about workers that are lost.
        grace_seconds: how long workers may take to end when they are asked to.
        relay: print what rank 0 prints by `sys.stdout` of this process, which may be a notebook's, instead of letting
            it write to this process's descriptors.
        fds: further descriptors for all workers, by name.
    """
    policy = policy or Policy()
    policy.check_devices(selection.count)
    log_dir = make_log_dir(job.log_dir)
    restarts = Restarts(policy.max_restarts)
    events: list[Mapping[str, Any]] = []
    run_id = uuid.uuid4().hex
    with stop_requests() as requests, contextlib.closing(Display(job.quiet, job.lines_to)) as display:
        crew = open_crew()
        for attempt in itertools.count():
            again = False
            page = HeartbeatPage.create(selection.count)
            watch = Watch(crew, page, display, job, policy, restarts, grace_seconds)
            try:
                if requests is not None:
                    watch.listen_for_stop(requests)
                starter = Starter(watch, job.restarted() if attempt else job, log_dir, relay, fds or {})
                for place in assign(selection, threads, run_id, attempt=attempt, max_restarts=policy.max_restarts):
                    starter.start(place)
                outcome = watch.run(starter.start)
                events += watch.events
                again = watch.may_restart and restarts.take_after(watch.ending)
            finally:
                if watch.is_broken or not again:
                    crew.close()
                watch.close()
                page.close()
            if not again:
                break
            display.say(f"{outcome.failure}\nsamestep: all workers start again ({restarts.used} of {restarts.limit})")
            events.append(make_event("restart", attempt=attempt + 1))
            if watch.is_broken:
                crew = open_crew()
    if restarts.why_not:
        sentence = f"{restarts.why_not}; when its cause is mended: {job.resume_hint}"
        outcome = replace(outcome, failure=f"{outcome.failure}\n{sentence}")
    return replace(outcome, events=tuple(events))


@contextlib.contextmanager
def stop_requests() -> Iterator[int | None]:
    """Turns SIGINT, SIGTERM and SIGHUP into bytes on a pipe; those that this process ignores stay ignored.

    Yields the pipe's read end; None outside the main thread, where Python has no signals.
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
        os.close(reader)
