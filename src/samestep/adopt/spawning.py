"""The spawning: a script that starts its own ranks under `samestep run` is told so, where it would wait for ever.

A child inherits the variables of the worker that started it, among them that the launcher keeps the store where ranks
meet (TORCHELASTIC_USE_AGENT_STORE). Then no rank opens one (torch/distributed/rendezvous.py), and a process group at
another address, or with more ranks than were started, never comes about. Children that make no process group, such as
those of a data loader, and those that take the place of their parent's rank, are left alone.

Children import this module, so it imports torch only where a process group is made.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from samestep.adopt.table import Patch, applied
from samestep.errors import UsageError
from samestep.launcher.program import run_module, run_script

REFUSED = 173  # the exit code of a child that stopped before it would wait; no signal's, and hardly a script's
RENDEZVOUS = "torch.distributed.rendezvous"
Place = tuple[str, str, str]
Started = list[tuple[BaseProcess, str]]


def run_native(kind: str, target: str, argv: Sequence[str]) -> None:
    """Runs a script that deals with ranks itself: what `samestep run` starts in every worker.

    Args:
        kind: "script" or "module".
        target: the file, or the module's name.
        argv: its arguments.

    Raises:
        UsageError: the script starts ranks of its own, or has them meet where nobody keeps a store.
    """
    with watching_children(target):
        if kind == "module":
            run_module(target, tuple(argv))
        else:
            run_script(target, tuple(argv))


@contextmanager
def watching_children(program: str) -> Iterator[None]:
    """The time in which a process group that could never come about is an error, here and in child processes.

    Args:
        program: as messages name it.

    Raises:
        UsageError: one was about to be made; raised in place of what the script made of that.
    """
    place, started, start = _place(), Started(), BaseProcess.start

    def noted(process: BaseProcess) -> None:
        if process._target is not None:  # type: ignore[attr-defined]  # what run() calls, until start() is over
            process._target = partial(_in_child, place, process._target)  # type: ignore[attr-defined]
        _raise_for_refused(started, program)
        start(process)
        started[:] = [(child, line) for child, line in started if _exit_code(child) in (None, REFUSED)]
        started.append((process, _script_line()))

    def alone(port: str, *_: str) -> NoReturn:
        raise UsageError(
            f"{program} has its ranks meet at port {port}, and samestep keeps their store at port {place[0]}: "
            "leave MASTER_ADDR and MASTER_PORT as they are, and give init_process_group no address (init_method)"
        )

    try:
        with applied([Patch(BaseProcess, "start", noted), *_meeting(lambda port, *_: port == place[0], alone)]):
            yield
    finally:
        _raise_for_refused(started, program)


def _in_child(place: Place, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls what a child process is to do, with a watch on the process groups that it makes."""

    def leave(*_: str) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(REFUSED)  # past the script's own handlers: its parent has the word

    with applied(_meeting(lambda *own: own == place, leave)):
        return target(*args, **kwargs)


def _meeting(may_meet: Callable[..., bool], refuse: Callable[..., NoReturn]) -> list[Patch]:
    """Looks at every store that ranks are to meet at: `may_meet(port, rank, world_size)`, all as text."""
    package = sys.modules.get("torch.distributed")
    if package is None or not package.is_available():
        return []
    rendezvous = importlib.import_module(RENDEZVOUS)  # the package has a function of that name
    connect = getattr(rendezvous, "_create_c10d_store", None)
    if connect is None:
        return []

    def checked(hostname: str, port: int, rank: int, world_size: int, *rest: Any, **options: Any) -> Any:
        own = (str(port), str(rank), str(world_size))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not may_meet(*own):
            refuse(*own)
        return connect(hostname, port, rank, world_size, *rest, **options)

    return [Patch(rendezvous, "_create_c10d_store", checked)]


def _place() -> Place:
    """This worker's port, rank and world size, as its variables say."""
    port, rank, world_size = (os.environ.get(name, "") for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
    return port, rank, world_size


def _exit_code(child: BaseProcess) -> int | None:
    """How a child ended; None while it runs."""
    try:
        return child.exitcode
    except ValueError:  # it was closed, after it had ended
        return 0


def _raise_for_refused(started: Started, program: str) -> None:
    """Raises a `UsageError` if a child stopped because it was about to wait for ever."""
    line = next((line for child, line in started if _exit_code(child) == REFUSED), None)
    if line is None:
        return
    count = os.environ.get("WORLD_SIZE", "1")
    place = f" ({line})" if line else ""
    raise UsageError(
        f"{program} starts its ranks itself{place}, and samestep has started {count} of them already: start it with "
        "plain python; or drop the spawn and let samestep start the workers: call the function that it starts once, "
        'with int(os.environ["RANK"]) as the rank and int(os.environ["WORLD_SIZE"]) as the world size, and leave '
        "MASTER_ADDR and MASTER_PORT alone"
    ) from None


def _script_line() -> str:
    """The line of the script that is being executed."""
    from samestep.engine.site import script_line

    return script_line()
