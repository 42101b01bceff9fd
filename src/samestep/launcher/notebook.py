"""Workers for notebooks: `launch` calls a function on every device and returns rank 0's result."""

import io
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

from samestep.comm.environment import read_environment
from samestep.devices.selection import select
from samestep.errors import UsageError, WorkerError
from samestep.launcher.assignment import process_variables
from samestep.launcher.job import Job
from samestep.launcher.program import write_payload
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
    of the program itself, runs in forks of this process, which needs Linux and a process that has used no accelerator.

    Args:
        fn: the function; every worker calls it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        devices: as for `samestep run --devices`.
        num_threads: CPU threads a worker.
        start_method: "fork" or "spawn"; None for fork if it is safe.

    Returns:
        Rank 0's return value, which must be picklable. Tensors should be on the CPU: a tensor on a GPU would initialise
        the GPU in this process.

    Raises:
        UsageError: the function can be neither imported by the workers nor forked, or this is a worker already.
        DeviceError: the devices do not exist.
        WorkerError: a worker failed; the message holds its rank, device and traceback.
        KeyboardInterrupt: the run was interrupted.
    """
    if read_environment().launcher != "none":
        raise UsageError("launch() starts workers and this is a worker already; call the function itself")
    if not callable(fn):
        raise UsageError(f"got {type(fn).__name__} as fn; launch() needs a function")
    method = resolve_start_method(start_method, num_threads)
    selection = select(devices)
    variables = process_variables(selection, num_threads)
    arguments = _pickle_by_name(fn, tuple(args), dict(kwargs or {}))
    with tempfile.TemporaryFile() as payload, tempfile.TemporaryFile() as answer:
        fds = {"answer": answer.fileno()}
        open_pool: Callable[[], WorkerPool]
        if arguments is None:
            _check_fork(fn, method)
            open_pool = partial(ServerPool.forked, partial(fn, *args, **(kwargs or {})), variables)
        else:
            write_payload(payload, arguments)
            fds["payload"] = payload.fileno()
            open_pool = partial(ServerPool.executed, variables, start_method=method)
        job = Job("function", f"{fn.__module__}:{getattr(fn, '__qualname__', type(fn).__qualname__)}")
        outcome = supervise(job, selection, num_threads=num_threads, open_pool=open_pool, relay=True, fds=fds)
        if outcome.exit_code == 128 + signal.SIGINT and outcome.failure is None:
            raise KeyboardInterrupt
        if outcome.exit_code != 0:
            raise WorkerError(outcome.failure or f"the workers were stopped (exit code {outcome.exit_code})")
        answer.seek(0)
        content = answer.read()
        return pickle.loads(content) if content else None  # empty if rank 0 ended by sys.exit()


def _pickle_by_name(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """The pickled arguments, if a clean process can import the function and unpickle them, else None."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not isinstance(fn, FunctionType) or module is None or name is None or not _is_importable(module):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not fn:
        return None
    content = io.BytesIO()
    try:
        _ByName(content).dump((args, kwargs))
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return content.getvalue()


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


def _check_fork(fn: Callable[..., Any], method: StartMethod) -> None:
    """Raises UsageError if a function without an importable name cannot run in forks of this process."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    mend = f"move {name} and what it is given into a .py file and import it from there"
    if method == "spawn":
        raise UsageError(f"spawned workers import the function by name, and {name} (or an argument) has none; {mend}")
    torch = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            raise UsageError(
                f"this process uses {kind} already, so it cannot be forked, and {name} (or an argument) has no name "
                f"that workers could import; {mend}, or restart and launch before the first use of {kind}"
            )
