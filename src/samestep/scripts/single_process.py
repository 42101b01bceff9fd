"""Runs a single-process script on several processes, unchanged: connects the ranks and applies all patches."""

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from traceback import walk_stack
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import record_function

from samestep.callsite import is_own_file, is_script_file
from samestep.comm.environment import RANK_VARIABLES, Environment, chosen_profile, read_environment
from samestep.engine.diagnosis import advise_replacement, nondeterministic_operation
from samestep.engine.forward_backward import backward_on_this_thread
from samestep.errors import PeerLostError, UsageError
from samestep.launcher.job import run_module, run_script
from samestep.patch import Patch, applied, late_dynamo
from samestep.scripts import auto_wrap, backward, data_parallel, loading, output, seeding
from samestep.scripts.files import patches as files
from samestep.scripts.loading import Rank0Iterator
from samestep.scripts.shared_script import SharedScript, activated, connect_script, fixed_benchmark, num_visible
from samestep.scripts.simulated.cuda import mark
from samestep.scripts.simulated.devices import own_accelerator, simulated_devices
from samestep.scripts.spawning import watching_torchrun
from samestep.scripts.split_forward import forward, regions

DELAY_SECONDS = 0.2
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
    """Runs a script (kind "script") or a module (kind "module") as this rank: the entry of `samestep run`'s workers."""
    script, environment = connect_script(num_microbatches), read_environment()
    place = None if num_microbatches is None else environment  # for logical devices
    # The script must find the environment of `python script.py`: no trace of ranks.
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        with (
            applied(watching_torchrun(target, place, seed)),
            patched(script, simulated=simulated, seed=seed, wrap=wrap),
            _profiled(environment),
        ):
            if kind == "module":
                run_module(target, tuple(argv))
            else:
                run_script(target, tuple(argv))
    except (Exception, SystemExit) as error:
        if isinstance(error, KeyError) and error.args and error.args[0] in READ_BY_RANKS:
            error.add_note(f"samestep: {DEALS_WITH_RANKS}")
        if (operation := nondeterministic_operation(error)) is not None:
            error.add_note(
                f"samestep: it runs scripts on deterministic kernels, so that bits are equal on any devices: "
                f"{advise_replacement(operation)}, or run the script without samestep"
            )
        # All ranks raise an error of the script; the launcher is to receive that of rank 0, which has the terminal.
        if script.rank > 0 and error is not script.own_failure and not isinstance(error, PeerLostError):
            time.sleep(DELAY_SECONDS)
        raise
    finally:
        os.environ.update(hidden)


@contextmanager
def patched(
    script: SharedScript, *, simulated: bool = False, seed: int | None = None, wrap: str | None = None
) -> Iterator[None]:
    """Runs a block on this thread as a single-process script; without a seed it begins with 0."""
    is_script_file(__file__)  # looks up where libraries lie while os.stat is still Python's own
    # A patch of a function that is patched already calls the one before it, so the order decides who calls whom.
    with ExitStack() as stack:
        stack.enter_context(activated(script))
        # Before all others: what they import may import torch._dynamo, which must find torch as it is.
        stack.enter_context(applied(late_dynamo()))
        # The devices come next, since others take their functions for torch's: those of `seeding` share a seed among
        # the ranks and pass it on to the devices' own. Of torch.nn they hold the plain `Module.__call__`, which
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
        stack.enter_context(output.script_streams(script))
        # These are independent of each other. `files` exchanges the name of a lock, so all ranks must come by here.
        for part in (output, data_parallel, backward, seeding, files, loading):
            stack.enter_context(applied(part.patches(script)))
        # From here on the run's own group is hidden; what is samestep's own has been connected.
        stack.enter_context(applied([*_process_group(script), _environment(script)]))
        stack.enter_context(auto_wrap.shared_out(script, wrap))
        # At last, as the generators are seeded here: nothing may draw from them before the script does. Its setters are
        # outside those of `seeding`, which count on one frame between them and the caller.
        stack.enter_context(seeding.seeded(script, seed))
        yield


def _process_group(script: SharedScript) -> list[Patch]:
    """Hides the run's process group from the script, and refuses one of its own."""
    if not dist.is_available():
        return []

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "the script starts a process group of its own; run it as torchrun would: samestep run --multi-process …"
        )

    def never() -> bool:
        return False

    return [
        Patch(dist, "init_process_group", refuse),
        Patch(dist, "is_initialized", never),
        Patch(dist, "is_torchelastic_launched", never),
    ]


def _environment(script: SharedScript) -> Patch:
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


@contextmanager
def _profiled(environment: Environment) -> Iterator[None]:
    """Traces some steps, each ending with `optimizer.step()`, if the environment asks for a profile.

    torch.profiler itself marks data loaders and optimizers; wrapped forwards and the exchange are marked here.
    """
    folder = chosen_profile()
    if folder is None:
        yield
        return
    from samestep.run.profile import StepTrace, trace_path  # not needed without a profile

    trace = StepTrace(trace_path(Path(folder), environment.rank))
    hook = register_optimizer_step_post_hook(lambda *_: trace.step())
    patches = (
        _marked(Rank0Iterator, "__next__", "data"),
        _marked(forward, "chunked_forward", "forward", (data_parallel.__name__,)),
        _marked(SharedScript, "gather", "exchange"),
        _marked(regions.PieceSums, "finish", "exchange"),
        _marked(regions, "join_pieces", "exchange", ("samestep.scripts.split_forward.regions",)),
    )
    try:
        with applied(patches):
            yield
    finally:
        hook.remove()
        trace.close()


def _marked(owner: Any, name: str, phase: str, aliases: tuple[str, ...] = ()) -> Patch:
    """The patch that records calls of a function as a range in the trace."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(phase):
            return function(*args, **kwargs)

    return Patch(owner, name, call, aliases)
