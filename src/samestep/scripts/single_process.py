"""Runs a single-process script, unchanged: one process, the driver, runs it, and the others compute chunks for it.

All processes of the run enter `run_single_process`. After `_driver` they part: a worker has served until the script's
end, and returns; the driver goes on, hides from the script that there is a run (variables, process group), patches what
`patched` lists, in its order, and runs the script. Forwards of modules (`auto_wrap`, `data_parallel`) lead to the
workers, and their backwards; everything else happens as under python, in this process.
"""

import atexit
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from traceback import walk_stack
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from samestep.callsite import is_own_file, is_script_file
from samestep.comm.environment import RANK_VARIABLES, Environment, read_environment
from samestep.comm.events import Channel
from samestep.engine.diagnosis import advise_replacement, nondeterministic_operation
from samestep.engine.forward_backward import backward_on_this_thread
from samestep.errors import UsageError
from samestep.launcher.job import run_module, run_script
from samestep.launcher.worker import exit_code_of
from samestep.patch import Patch, applied, late_dynamo
from samestep.scripts import auto_wrap, backward, data_parallel, output, seeding
from samestep.scripts.multi_process import watching_torchrun
from samestep.scripts.script_state import (
    ScriptState,
    activated,
    alone,
    connect_script,
    fixed_benchmark,
    num_visible,
)
from samestep.scripts.simulated.cuda import mark
from samestep.scripts.simulated.devices import own_accelerator, simulated_devices

READ_BY_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
START_NONE = ("torch", "transformers")  # libraries that ask for ranks, as for a message, and start them by others alone
DEALS_WITH_RANKS = (
    "the script runs as one for a single process, without these variables; if it deals with ranks, or a library of its "
    "does, give --multi-process"
)


def run_single_process(
    kind: str,
    target: str,
    argv: Sequence[str],
    num_microbatches: int | None = None,
    seed: int | None = None,
    wrap: str | None = None,
    simulated: bool = False,
) -> None:
    """Runs a script (kind "script") or a module (kind "module"), or computes for it: in each process of the run."""
    environment = read_environment()
    script = _driver(connect_script(num_microbatches), environment)
    if script is None:
        return
    place = None if num_microbatches is None else environment  # for logical devices
    # The script must find the environment of `python script.py`: no trace of ranks.
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        with (
            applied(watching_torchrun(target, place, seed)),
            patched(script, simulated=simulated, seed=seed, wrap=wrap),
        ):
            if kind == "module":
                run_module(target, tuple(argv))
            else:
                run_script(target, tuple(argv))
    except (Exception, SystemExit) as error:
        # On one machine the supervisor sees the driver's exit code, and ends the run by it.
        if script.driver is not None and environment.local_world_size < environment.world_size:
            script.driver.has_failed = not isinstance(error, SystemExit) or exit_code_of(error)[0] != 0
        if isinstance(error, KeyError) and error.args and error.args[0] in READ_BY_RANKS:
            error.add_note(f"samestep: {DEALS_WITH_RANKS}")
        if (operation := nondeterministic_operation(error)) is not None:
            error.add_note(
                f"samestep: it runs scripts on deterministic kernels, so that bits are equal on any devices: "
                f"{advise_replacement(operation)}, or run the script without samestep"
            )
        raise
    finally:
        os.environ.update(hidden)


def _driver(script: ScriptState, environment: Environment) -> ScriptState | None:
    """The state of the process that runs the script; None in a worker, when the driver has ended."""
    # With cloudpickle, which other workers do not load.
    from samestep.scripts.split_forward.driver import Driver, end
    from samestep.scripts.workers.effects import refuse_effects
    from samestep.scripts.workers.link import Link
    from samestep.scripts.workers.pickling import note_libraries
    from samestep.scripts.workers.serve import Worker

    # The workers are reached by the link alone: to all else this process is one by itself, as under python.
    link, own = Link(script.communicator), alone(script)
    refuse_effects(lambda: own.in_chunk and own.is_own_thread())
    if link.rank > 0:
        # A worker runs code of the script's, which must find the same torch.
        with patched(own, simulated=script.communicator.device.type == "cpu"):
            for name in RANK_VARIABLES:
                os.environ.pop(name, None)
            Worker(own, link, is_beside=environment.rank == environment.local_rank).serve()
        return None
    own.driver = Driver(link)
    note_libraries()
    # Before the script registers functions of its own: those run first, and their forwards still find the workers.
    atexit.register(end, own.driver)
    return own


@contextmanager
def patched(
    script: ScriptState, *, simulated: bool = False, seed: int | None = None, wrap: str | None = None
) -> Iterator[None]:
    """Runs a block on this thread as a single-process script; without a seed it begins with 0."""
    is_script_file(__file__)  # looks up where libraries lie while os.stat is still Python's own
    # A patch of a function that is patched already calls the one before it, so the order decides who calls whom.
    with ExitStack() as stack:
        stack.enter_context(activated(script))
        # Before all others: what they import may import torch._dynamo, which must find torch as it is.
        stack.enter_context(applied(late_dynamo()))
        # The devices come next, since others take their functions for torch's: `seeding`'s functions pass a seed on
        # to the devices' own. Of torch.nn they hold the plain `Module.__call__`, which
        # `wrapping` replaces: modules that TorchScript runs are never shared out.
        count = functools.partial(num_visible, script)
        if simulated:
            stack.enter_context(simulated_devices(count, script.notice))
            patches = [Patch(script, "mark", mark), Patch(script, "on_device", torch.cuda.device)]
            stack.enter_context(applied(patches))
        elif script.communicator.device.type != "cpu":
            stack.enter_context(own_accelerator(count, script.communicator.device))
            stack.enter_context(applied(fixed_benchmark(script.notice)))
        stack.enter_context(backward_on_this_thread(script.communicator.device))
        # Before the script, and what its libraries make for it, can keep a reference to a stream.
        stack.enter_context(output.script_streams())
        # These are independent of each other.
        for part in (data_parallel, backward, seeding):
            stack.enter_context(applied(part.patches(script)))
        stack.enter_context(applied(output.patches()))
        # From here on the run's own group is hidden; what is samestep's own has been connected.
        stack.enter_context(applied([*_process_group(), _environment(script), _saved()]))
        stack.enter_context(auto_wrap.shared_out(script, wrap))
        # At last, as the generators are seeded here: nothing may draw from them before the script does.
        stack.enter_context(seeding.seeded(script, seed))
        yield


def _process_group() -> list[Patch]:
    """Hides the run's process group from the script, and refuses one of its own."""
    if not dist.is_available():
        return []

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError("the script starts a process group; run it as torchrun would: samestep run --multi-process …")

    def never() -> bool:
        return False

    return [
        Patch(dist, "init_process_group", refuse),
        Patch(dist, "is_initialized", never),
        Patch(dist, "is_torchelastic_launched", never),
    ]


def _saved() -> Patch:
    """Tells the supervisor what the script has saved, from which a user may go on after a failure."""
    save = torch.save

    @functools.wraps(save)
    def told(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        save(obj, f, *args, **kwargs)
        channel = Channel.from_environment() if isinstance(f, str | os.PathLike) else None
        if channel is not None:
            channel.send("saved", path=os.path.abspath(os.fspath(f)))

    return Patch(torch, "save", told, aliases=("torch.serialization",))


def _environment(script: ScriptState) -> Patch:
    """Has a line name the first library that asks for ranks when it is called: it may be one that starts them."""
    owner = type(os.environ)
    read, readers = owner.__getitem__, list[str]()

    def getitem(environment: Any, name: str) -> str:
        if name in READ_BY_RANKS and not readers:
            lines = [(frame, frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe(1))]
            frame, file, line = next(each for each in lines if not each[1].startswith("<frozen "))
            # Many libraries ask while they are imported, to know whose messages to show.
            is_import = any("importlib" in each for _, each, _ in lines)
            library = str(frame.f_globals.get("__name__")).partition(".")[0]
            if not (is_import or is_own_file(file) or library in START_NONE):
                readers.append(file)
                script.notice(f"{file}, line {line}, reads {name}: {DEALS_WITH_RANKS}")
        return read(environment, name)

    return Patch(owner, "__getitem__", getitem)
