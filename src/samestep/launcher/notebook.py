"""Workers for notebooks: `launch` calls a function on every device and returns rank 0's result."""

import ast
import inspect
import io
import os
import pickle
import signal
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import cloudpickle

from samestep.comm.environment import read_environment
from samestep.devices.selection import AUTO_CPU_WORKERS, cpu_workers_for, select
from samestep.errors import UsageError, WorkerError
from samestep.launcher.assignment import process_variables
from samestep.launcher.job import TRAINING, Job
from samestep.launcher.program import stated_microbatches, write_payload
from samestep.launcher.supervisor import StartMethod, resolve_start_method, supervise
from samestep.launcher.worker_pool import ServerPool, WorkerPool


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    devices: str | int = "auto",
    num_threads: int = 1,
    start_method: StartMethod | None = None,
) -> Any:
    """Calls a function in one worker process a device, and returns rank 0's result.

    A function that can be imported by name runs in clean processes. A closure, or a function of a notebook's cell or
    of the program itself, runs in forks of this process, which share its memory. Where it cannot be forked (not on
    Linux, or once it has used a GPU or asked for one), clean processes get the function by value, with copies of what
    it uses.

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
        UsageError: this process cannot be forked, and the function uses what cannot be sent to another one; or this is
            a worker already.
        DeviceError: the devices do not exist.
        WorkerError: a worker failed; the message holds its rank, device and traceback.
        KeyboardInterrupt: the run was interrupted.
    """
    if read_environment().launcher != "none":
        raise UsageError("launch() starts workers and this is a worker already; call the function itself")
    if not callable(fn):
        raise UsageError(f"got {type(fn).__name__} as fn; launch() needs a function")
    method = resolve_start_method(start_method, num_threads)
    selection = select(devices, cpu_workers=_cpu_workers(fn))
    variables = process_variables(selection, num_threads)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    call = partial(fn, *args, **(kwargs or {}))
    content = _pickle_by_name(call)
    if content is None and method == "spawn":
        content = _pickle_by_value(call, name, "with start_method='spawn'")
    elif content is None and _forks_break(selection.kind):
        content = _pickle_by_value(call, name, "from a process that has used a GPU or asked for one")
    with tempfile.TemporaryFile() as payload, tempfile.TemporaryFile() as answer:
        fds = {"answer": answer.fileno()}
        open_pool: Callable[[], WorkerPool] = partial(ServerPool.forked, call, variables, TRAINING)
        if content is not None:
            write_payload(payload, content)
            fds["payload"] = payload.fileno()
            open_pool = partial(ServerPool.executed, variables, TRAINING, method)
        job = Job("function", f"{fn.__module__}:{name}")
        outcome = supervise(job, selection, num_threads=num_threads, open_pool=open_pool, relay=True, fds=fds)
        if outcome.exit_code == 128 + signal.SIGINT and outcome.failure is None:
            raise KeyboardInterrupt
        if outcome.exit_code != 0:
            raise WorkerError(outcome.failure or f"the workers were stopped (exit code {outcome.exit_code})")
        answer.seek(0)
        content = answer.read()
        return pickle.loads(content) if content else None  # empty if rank 0 ended by sys.exit()


def _cpu_workers(fn: Callable[..., Any]) -> int:
    """The CPU workers that a function can use, by its source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(fn)))
        stated = stated_microbatches(ast.walk(ast.parse(source)))
    except (OSError, TypeError, SyntaxError):  # not from a file or a cell, no function, or a lambda amid other code
        stated = None
    return AUTO_CPU_WORKERS if stated is None else cpu_workers_for(stated)


def _pickle_by_name(call: partial[Any]) -> bytes | None:
    """The pickled call, if a clean process can import its function and unpickle its arguments, else None."""
    if not isinstance(call.func, FunctionType):
        return None
    content = io.BytesIO()
    try:
        _ByName(content).dump(call)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return content.getvalue()


def _pickle_by_value(call: partial[Any], name: str, when: str) -> bytes:
    """The pickled call with the code of functions and classes that a clean process cannot import."""
    try:
        return bytes(cloudpickle.dumps(call))
    except Exception as error:  # of whatever `__reduce__` the values have
        raise UsageError(
            f"{when} workers start as new processes, and {name} or an argument cannot be sent to them "
            f"({type(error).__name__}: {error}); open files and make locks, iterators and the like within {name}"
        ) from error


class _ByName(pickle.Pickler):
    """A pickler that refuses functions and classes that a clean process cannot import."""

    def reducer_override(self, value: Any) -> Any:
        """Refuses functions and classes of modules that cannot be imported."""
        if isinstance(value, type | FunctionType) and not _is_importable(value.__module__):
            raise pickle.PicklingError(f"{value.__qualname__} is defined in {value.__module__}")
        return NotImplemented


def _is_importable(module: str) -> bool:
    """Whether a clean process with the same search path finds a module."""
    if module == "__main__":
        return False
    top = module.partition(".")[0]
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)


def _forks_break(kind: str) -> bool:
    """Whether forks of this process break, or cannot use devices of a kind."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.cuda.is_initialized():
        return True
    # `torch.cuda.is_available()` starts the driver too, without which forks could not do. torch has no public name for
    # that, and only a fork can tell.
    is_broken = getattr(getattr(torch, kind, None), "_is_in_bad_fork", None)
    if is_broken is None:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's about threads, which notebooks always have
        pid = os.fork()
    if pid == 0:
        os._exit(is_broken())
    return os.waitpid(pid, 0)[1] != 0
