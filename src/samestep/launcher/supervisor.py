"""The supervisor: runs a job on the devices of this machine from start to end, without importing torch.

Whatever ends it, no process, port or file of the run is left: it uses pipes instead of files, only the store process
holds the listening socket, and workers end with their parent.
"""

import contextlib
import itertools
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from samestep.comm.heartbeat_page import HeartbeatPage
from samestep.devices.selection import Selection
from samestep.errors import UsageError
from samestep.launcher import process_tree
from samestep.launcher.assignment import assign, process_variables
from samestep.launcher.display import Display
from samestep.launcher.failures import Restarts
from samestep.launcher.job import Job, Outcome, Policy
from samestep.launcher.monitor import Monitor, make_event
from samestep.launcher.server_process import EarlyServer
from samestep.launcher.worker_pool import ServerPool, WorkerPool
from samestep.launcher.workers import make_log_dir
from samestep.text import counted
from samestep.train.atomic_io import remove_leftovers

StartMethod = Literal["fork", "spawn"]


def supervise(
    job: Job,
    selection: Selection,
    *,
    num_threads: int = 1,
    start_method: str | None = None,
    policy: Policy | None = None,
    open_pool: Callable[[], WorkerPool] | None = None,
    early: EarlyServer | None = None,
    relay: bool = False,
    fds: Mapping[str, int] | None = None,
    logical_devices: int | None = None,
) -> Outcome:
    """Runs a job on the selected devices, one worker process each, and waits for its end.

    With `logical_devices` there are as many workers, whatever the number of devices. Restarted, they go on without the
    device on which the first failed, if another is left.

    In the main thread, the first SIGINT, SIGTERM or SIGHUP lets the workers finish their step if all of them can, else
    it is forwarded to them; a second one, SIGHUP excepted, kills them.
    """
    process_tree.open_standard_streams()
    method, variables = resolve_start_method(start_method, num_threads), process_variables(selection, num_threads)
    if open_pool is None:
        open_pool = partial(ServerPool.executed, variables, job.preload, method, early)
    policy = policy or Policy()
    num_workers = logical_devices or selection.count
    policy.check_devices(selection.count, num_workers)
    log_dir = make_log_dir(job.log_dir)
    restarts = Restarts(policy.max_restarts)
    events: list[Mapping[str, Any]] = []
    run_id = uuid.uuid4().hex
    with (
        stop_requests() as requests,
        contextlib.closing(Display(job.quiet, job.lines_to)) as display,
        _token_file(logical_devices) as tokens,
    ):
        pool = open_pool()
        for attempt in itertools.count():
            again = False
            page = HeartbeatPage.create(num_workers)
            attempted = job.restarted() if attempt else job
            monitor = Monitor(
                pool,
                page,
                display,
                attempted,
                policy,
                restarts,
                log_dir,
                relay,
                {**(fds or {}), **tokens},
            )
            try:
                if requests is not None:
                    monitor.listen_for_stop(requests)
                for place in assign(
                    selection,
                    num_threads,
                    run_id,
                    logical_devices=logical_devices,
                    attempt=attempt,
                    max_restarts=policy.max_restarts,
                ):
                    monitor.start(place)
                outcome = monitor.run()
                events += monitor.events
                again = monitor.may_restart and restarts.take_after(monitor.ended_by)
            finally:
                if monitor.is_broken or not again:
                    pool.close()
                monitor.close()
                page.close()
                with contextlib.suppress(OSError):
                    remove_leftovers(Path(tempfile.gettempdir()))  # of workers, see `worker.work`
            if not again:
                break
            where = ""
            if logical_devices is not None:
                selection, where = _without(selection, monitor.failed_device, policy)
            display.notify(
                f"{outcome.failure}\nsamestep: all workers start again{where} ({restarts.used} of {restarts.limit})"
            )
            events.append(make_event("restart", attempt=attempt + 1))
            if monitor.is_broken:
                pool = open_pool()
    if restarts.refusal:
        sentence = f"{restarts.refusal}; when its cause is mended: {job.resume_hint}"
        outcome = replace(outcome, failure=f"{outcome.failure}\n{sentence}")
    return replace(outcome, events=tuple(events))


def _without(selection: Selection, failed: int | None, policy: Policy) -> tuple[Selection, str]:
    """The selection without a device, unless another is not left, and the words that say so."""
    left = selection.count - 1
    if failed is None or left < policy.min_devices:
        return selection, ""
    words = f" on {counted(left, 'device')}, without {selection.label(failed)}"
    return selection.only(*(index for index in range(selection.count) if index != failed)), words


@contextlib.contextmanager
def _token_file(logical_devices: int | None) -> Iterator[dict[str, int]]:
    """The descriptor of a file without a name whose locks are the tokens of devices, if ranks may share one."""
    if logical_devices is None:
        yield {}
        return
    with tempfile.TemporaryFile() as file:
        yield {"devices": file.fileno()}


def resolve_start_method(start_method: str | None, num_threads: int) -> StartMethod:
    """The start method to use."""
    if num_threads < 1:
        raise UsageError(f"got num_threads={num_threads}; it must be 1 or more (--num-threads)")
    if sys.platform == "win32":
        raise UsageError("several processes can be started on Linux and macOS; on Windows use WSL")
    if start_method not in (None, "fork", "spawn"):
        raise UsageError(f"got start_method={start_method!r}; it is 'fork' or 'spawn' (--start-method)")
    if start_method == "fork" and sys.platform != "linux":
        raise UsageError(
            f"the system libraries of {sys.platform} do not survive a fork; use start_method='spawn' "
            "(--start-method spawn)"
        )
    return "fork" if start_method != "spawn" and sys.platform == "linux" else "spawn"


@contextlib.contextmanager
def stop_requests() -> Iterator[int | None]:
    """Turns SIGINT, SIGTERM and SIGHUP, unless ignored, into bytes on a pipe.

    Yields the pipe's read end; None outside the main thread, which alone receives signals in Python.
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
