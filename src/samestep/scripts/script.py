"""The script: runs one under adoption, from the first patch to the last."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401 - the first optimizer imports it, and it looks at functions patched by then
import torch.distributed as dist

from samestep.comm.environment import read_environment
from samestep.engine.site import is_script_file
from samestep.errors import PeerLostError, UsageError
from samestep.launcher.program import run_module, run_script
from samestep.scripts import backward_check, output, parallel, profiling, seeding, wrapping
from samestep.scripts.active import activated, connect_adoption
from samestep.scripts.adoption import Adoption
from samestep.scripts.files import changes
from samestep.scripts.loading import choice
from samestep.scripts.patch import Patch, applied
from samestep.scripts.virtual.devices import virtual_devices
from samestep.scripts.virtual.real import own_accelerator

COURTESY_SECONDS = 0.2
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)


def run_adopted(
    kind: str,
    target: str,
    argv: Sequence[str],
    num_microbatches: int | None = None,
    seed: int | None = None,
    wrap: str | None = None,
    virtual: bool = False,
) -> None:
    """Runs a script as this rank of an adopted run: what `samestep run` starts in every worker.

    Args:
        kind: "script" or "module".
        target: the file, or the module's name.
        argv: its arguments.
        num_microbatches: chunks of a wrapped forward; None leaves it to the script.
        seed: of the generators at the start; None takes one that rank 0 draws.
        wrap: the variable or class to share out.
        virtual: whether accelerators are played by CPU workers.
    """
    adoption, environment = connect_adoption(num_microbatches), read_environment()
    # The script is to find what it finds under `python script.py`: no trace of ranks.
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        with adopted(adoption, virtual=virtual, seed=seed, wrap=wrap), profiling.profiled(environment):
            if kind == "module":
                run_module(target, tuple(argv))
            else:
                run_script(target, tuple(argv))
    except (Exception, SystemExit) as error:
        _let_the_first_rank_speak(adoption, error)
        raise
    finally:
        os.environ.update(hidden)


def _let_the_first_rank_speak(adoption: Adoption, error: BaseException) -> None:
    """What all ranks raise alike is told by rank 0, which has the terminal: the others are late."""
    if adoption.rank > 0 and error is not adoption.own_failure and not isinstance(error, PeerLostError):
        time.sleep(COURTESY_SECONDS)


@contextmanager
def adopted(
    adoption: Adoption, *, virtual: bool = False, seed: int | None = None, wrap: str | None = None
) -> Iterator[None]:
    """The time in which what runs on this thread is an adopted script.

    Args:
        adoption: what is known.
        virtual: whether accelerators are played by CPU workers.
        seed: seeds the generators at the start; None takes one that rank 0 draws.
        wrap: the variable or class to share out, for scripts that wrap nothing.
    """
    is_script_file(__file__)  # finds out where libraries are while os.stat is still Python's own
    with ExitStack() as stack:
        stack.enter_context(activated(adoption))
        if virtual:
            stack.enter_context(virtual_devices(adoption))
        elif adoption.communicator.device.type != "cpu":
            stack.enter_context(own_accelerator(adoption, adoption.communicator.device))
        stack.enter_context(output.script_streams(adoption))
        for part in (output, parallel, backward_check, seeding, changes, choice):
            stack.enter_context(applied(part.patches(adoption)))
        stack.enter_context(applied(_process_group(adoption)))
        stack.enter_context(wrapping.hinting(adoption) if wrap is None else wrapping.wrapped(adoption, wrap))
        stack.enter_context(seeding.seeded(adoption, seed))
        yield


def _process_group(adoption: Adoption) -> list[Patch]:
    """Hides our process group from the script, and refuses one of its own."""
    if not dist.is_available():
        return []

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "the script starts a process group of its own; run it as torchrun would: samestep run --no-adopt …"
        )

    def never() -> bool:
        return False

    return [
        Patch(dist, "init_process_group", refuse),
        Patch(dist, "is_initialized", never),
        Patch(dist, "is_torchelastic_launched", never),
    ]
