"""The supervisor: starts the workers of a job, from the command line or a notebook, until one attempt succeeds.

Whatever ends it, no process, port or file of the run is left: it uses pipes instead of files, only the store process
holds the listening socket, and workers end with their parent.

`supervise` makes what outlives an attempt: the pool with its fork server, the display, the tokens of shared devices and
the pipe of requests to stop. A `Monitor` and a `HeartbeatPage` are of one attempt. All of it runs in one thread and
needs no torch: signals, the output and the ends of workers are descriptors that the monitor selects from.
"""

import ast
import contextlib
import inspect
import itertools
import os
import pickle
import signal
import sys
import tempfile
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Literal, Protocol

import cloudpickle

from samestep.checks import check_choice, check_number, check_type
from samestep.comm.environment import read_environment
from samestep.comm.heartbeat import HeartbeatPage
from samestep.devices.selection import AUTO_CPU_WORKERS, Selection, cpu_workers_for, select
from samestep.errors import UsageError, WorkerError
from samestep.launcher import os_processes
from samestep.launcher.job import (
    RESUME_HINT,
    TRAINING,
    Assignment,
    Job,
    Outcome,
    Policy,
    assign,
    process_variables,
    stated_microbatches,
    write_payload,
)
from samestep.launcher.monitor import Display, Monitor, make_event
from samestep.launcher.os_processes import EarlyServer
from samestep.launcher.worker_pool import Pool, ServerPool
from samestep.launcher.worker_states import Restarts, make_log_dir
from samestep.text import counted

StartMethod = Literal["fork", "spawn"]


class Machines(Protocol):
    """The machines of a run; this one leads. `launcher.machines` has it."""

    stops: int  # a descriptor with the signals that others were sent

    def assign(self, run_id: str, attempt: int, requests: int | None) -> Sequence[Assignment]:
        """Waits until enough machines are there; the places of their workers, by rank."""


def supervise(
    job: Job,
    selection: Selection,
    open_pool: Callable[[], Pool] | None = None,
    early: EarlyServer | None = None,
    fds: Mapping[str, int] | None = None,
    machines: Machines | None = None,
) -> Outcome:
    """Runs a job on the selected devices, and on other machines' devices, one worker process each; waits for its end.

    Logical devices that are restarted go on without the device on which the first failed, if another is left.

    `open_pool` makes the worker pool, by default with a fork server: `early`, if it is given. `fds` are further
    descriptors for all workers.

    In the main thread, the first SIGINT, SIGTERM or SIGHUP lets the workers finish their step if all of them can, else
    it is forwarded to them; a second one, SIGHUP excepted, kills them.
    """
    os_processes.open_standard_streams()
    method = resolve_start_method(job.start_method, job.num_threads)
    if open_pool is None:
        variables = process_variables(selection, job.num_threads)
        open_pool = partial(ServerPool.executed, variables, job.preload, method, early)
    if machines is None:
        job.policy.check_devices(selection.count, job.logical_devices or selection.count)
    make_log_dir(job.log_dir)
    restarts = Restarts(job.policy.max_restarts)
    events: list[Mapping[str, Any]] = []
    run_id = uuid.uuid4().hex
    # The requests first, and so given back last: a signal that comes while the pool is opened or closed is not lost.
    with (
        stop_requests() as requests,
        contextlib.closing(Display(job.quiet, job.lines_to)) as display,
        contextlib.ExitStack() as until,
    ):
        for sentence in () if job.quiet else selection.notes:
            display.notify(sentence)
        tokens, sockets = dict[str, int](), ""
        if job.logical_devices is not None:  # the locks of a file without a name, if ranks may share a device
            tokens["devices"] = until.enter_context(tempfile.TemporaryFile()).fileno()
        with contextlib.suppress(OSError):
            sockets = until.enter_context(os_processes.temporary_folder("samestep-"))
        # One fork server for all attempts, unless it is itself what broke: it imports torch once.
        pool = open_pool()
        for attempt in itertools.count():
            again = False
            try:
                if machines is None:
                    places: Sequence[Assignment] = assign(job, selection, run_id, attempt)
                else:
                    places = machines.assign(run_id, attempt, requests)
            except BaseException:
                pool.close()
                raise
            # Anew for each attempt: flags and quorums of the one before must not be taken for its own.
            page = HeartbeatPage.create(len(places))
            monitor = Monitor(job, pool, page, display, restarts, {**(fds or {}), **tokens})
            try:
                if requests is not None:
                    monitor.listen_for_stop(requests)
                if machines is not None:
                    monitor.listen_for_stop(machines.stops)
                for place in places:
                    monitor.start(replace(place, sockets=sockets))
                outcome = monitor.run()
                events += monitor.events
                again = monitor.may_restart and restarts.use_one_after(monitor.ended_by)
            finally:
                # The pool before the monitor: when the monitor reads the pipes for the last time all processes have
                # ended, and everything that they wrote is there.
                if monitor.is_broken or not again:
                    pool.close()
                monitor.close()
                page.close()
            if not again:
                break
            where = ""
            if job.logical_devices is not None and machines is None:
                selection, where = _without(selection, monitor.failed_device, job.policy)
            display.notify(
                f"{outcome.failure}\nsamestep: all workers start again{where} ({restarts.used} of {restarts.limit})"
            )
            events.append(make_event("restart", attempt=attempt + 1))
            if monitor.is_broken:
                pool = open_pool()
    if restarts.refusal:
        sentence = f"{restarts.refusal}; when its cause is fixed: {RESUME_HINT}"
        outcome = replace(outcome, failure=f"{outcome.failure}\n{sentence}")
    return replace(outcome, events=tuple(events))


def _without(selection: Selection, failed: int | None, policy: Policy) -> tuple[Selection, str]:
    """The selection without a device, unless another is not left, and the words that say so."""
    left = selection.count - 1
    if failed is None or left < policy.min_devices:
        return selection, ""
    words = f" on {counted(left, 'device')}, without {selection.label(failed)}"
    return selection.only(*(index for index in range(selection.count) if index != failed)), words


def resolve_start_method(start_method: str | None, num_threads: int) -> StartMethod:
    """The start method to use."""
    check_number("num_threads", num_threads, 1)
    if start_method is not None:
        check_choice("start_method", start_method, ("fork", "spawn"))
    if start_method == "fork" and sys.platform != "linux":
        raise UsageError(f"on {sys.platform} a fork breaks libraries; use start_method='spawn' (--start-method spawn)")
    return "fork" if start_method != "spawn" and sys.platform == "linux" else "spawn"


@contextlib.contextmanager
def stop_requests() -> Iterator[int | None]:
    """Turns SIGINT, SIGTERM and SIGHUP, unless ignored, into bytes on a pipe.

    Yields the pipe's read end; None outside the main thread, which alone receives signals in Python.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    # A handler runs between any two instructions, so it only writes a byte; the monitor reads it like any other event.
    # The pipe must not block it: with a full one there are requests enough.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def write_number(signum: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(writer, bytes([signum]))

    before = {}
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) not in (signal.SIG_IGN, None):
            before[signum] = signal.signal(signum, write_number)
    try:
        yield reader
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(writer)
        os.close(reader)


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    devices: str | int = "auto",
    num_threads: int = 1,
    start_method: StartMethod | None = None,
) -> Any:
    """Calls a function in one worker process a device, and returns rank 0's result.

    The workers are clean processes, whose state does not depend on this process's. They import the function as a
    program does, or get it by value if they cannot: a closure, or a function of a notebook's cell or of the program
    itself, with copies of what it uses.

    Args:
        fn: the function; every worker calls it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        devices: as for `samestep run --devices`; "auto" without an accelerator is a worker a core, at most as many
            as microbatches, if the function itself calls `samestep.Run` with a number that is written out.
        num_threads: CPU threads a worker.
        start_method: "fork" or "spawn"; None for fork on Linux.

    Returns:
        Rank 0's return value, which must be picklable. Tensors should be on the CPU: a tensor on a GPU would initialise
        the GPU in this process.

    Raises:
        UsageError: the function or an argument cannot be sent to another process; or this is a worker already.
        DeviceError: the devices do not exist.
        WorkerError: a worker failed; the message holds its rank, device and traceback.
        KeyboardInterrupt: the run was interrupted.
    """
    if read_environment().launcher != "none":
        raise UsageError("launch() starts workers and this is a worker already; call the function itself")
    check_type("fn", fn, callable(fn), "a function, which launch() calls in every worker")
    method = resolve_start_method(start_method, num_threads)
    selection = select(devices, cpu_workers=_cpu_workers(fn))
    variables = process_variables(selection, num_threads)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    try:
        content = cloudpickle.dumps(partial(fn, *args, **(kwargs or {})))
    except Exception as error:  # of whatever `__reduce__` the values have
        raise UsageError(
            f"workers are new processes, and {name} or an argument cannot be sent to them "
            f"({type(error).__name__}: {error}); open files and make locks, iterators and the like within {name}"
        ) from error
    with tempfile.TemporaryFile() as payload, tempfile.TemporaryFile() as answer:
        write_payload(payload, content)
        fds = {"answer": answer.fileno(), "payload": payload.fileno()}
        open_pool = partial(ServerPool.executed, variables, TRAINING, method)
        job = Job("function", f"{fn.__module__}:{name}", num_threads=num_threads, relay=True)
        outcome = supervise(job, selection, open_pool, fds=fds)
        if outcome.exit_code == 128 + signal.SIGINT and outcome.failure is None:
            raise KeyboardInterrupt
        if outcome.exit_code != 0:
            raise WorkerError(outcome.failure or f"the workers were stopped (exit code {outcome.exit_code})")
        answer.seek(0)
        content = answer.read()
        if not content:
            raise WorkerError(f"rank 0 ended its process in {name} (os._exit?), so there is no result; let it return")
        return pickle.loads(content)


def _cpu_workers(fn: Callable[..., Any]) -> int:
    """The CPU workers that a function can use, by its source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(fn)))
        stated = stated_microbatches(ast.walk(ast.parse(source)))
    except (OSError, TypeError, SyntaxError):  # not from a file or a cell, no function, or a lambda amid other code
        stated = None
    return AUTO_CPU_WORKERS if stated is None else cpu_workers_for(stated)
