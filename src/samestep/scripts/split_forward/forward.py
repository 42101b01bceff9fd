"""The wrapped forward, as scripts and their wrappers call it.

Two ways in: the arguments of a whole batch are cut here (`chunked_forward`, of a DataParallel and of plain scripts), or
they come cut (`given_forward`, of `parallel_apply`). Without workers all chunks run in this process, also under plain
python, and have the same bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from samestep.errors import UsageError
from samestep.scripts.script_state import ScriptState
from samestep.scripts.split_forward.chunks import already_cut, cut


def chunked_forward(
    script: ScriptState,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_microbatches: int,
    dim: int = 0,
    scatter: str = "tensors",
    device_ids: Sequence[int] = (),
    output_device: int = 0,
) -> Any:
    """Runs a module's forward in chunks, split over the processes. Tier `bitwise` in their number.

    With one microbatch, inside another wrapped forward, or off the script's main thread the module is simply called.
    """
    if num_microbatches == 1 or not script.may_meet():
        return module(*args, **kwargs)
    with torch._C.DisableTorchFunction():  # simulated devices do not matter here
        chunks = cut(args, kwargs, num_microbatches, dim, scatter)
    return _shared(script, module, chunks, dim, device_ids, [output_device], scatter == "batch")


def given_forward(
    script: ScriptState,
    module: nn.Module,
    calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    device_ids: Sequence[int],
) -> list[Any]:
    """Runs a module's forward on chunks that the script cut itself, split over the processes. Tier `bitwise`."""
    if not script.may_meet():
        return [module(*args, **kwargs) for args, kwargs in calls]
    results: list[Any] = _shared(script, module, already_cut(calls), None, device_ids, device_ids, False)
    return results


def _shared(script: ScriptState, *args: Any) -> Any:
    """`shared_forward`; outside of `samestep run` without workers, if this process is the only one."""
    from samestep.scripts.split_forward.shared_forward import shared_forward  # with cloudpickle

    if script.driver is None:
        if script.world_size > 1:
            raise UsageError(
                f"this process is one of {script.world_size} that all run the script (torchrun, --multi-process), and "
                "a forward is shared out by a script that runs once: start it by samestep run --devices …"
            )
        from samestep.scripts.split_forward.driver import Driver
        from samestep.scripts.workers.link import Link

        script.driver = Driver(Link(script.communicator))
    return shared_forward(script, *args)
