"""The profile of an adopted script: torch.profiler's trace, a step ending with every `optimizer.step()`.

torch.profiler itself marks data loaders and optimizers; wrapped forwards and the exchange are marked here.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import record_function

from samestep.comm.environment import Environment, chosen_profile
from samestep.scripts import parallel
from samestep.scripts.adoption import Adoption
from samestep.scripts.loading.rank0_loader import SoloIterator
from samestep.scripts.patch import Patch, applied
from samestep.scripts.wrapped import exchange, forward
from samestep.train.profile import StepTrace, trace_path


@contextmanager
def profiled(environment: Environment) -> Iterator[None]:
    """Traces some steps of the adopted script that runs in it, if the environment asks for a profile."""
    folder = chosen_profile()
    if folder is None:
        yield
        return
    trace = StepTrace(trace_path(Path(folder), environment.rank))
    hook = register_optimizer_step_post_hook(lambda *_: trace.step())
    wrapped = "samestep.scripts.wrapped"
    patches = (
        _marked(SoloIterator, "__next__", "data"),
        _marked(forward, "chunked_forward", "forward", (parallel.__name__,)),
        _marked(Adoption, "hand_out", "exchange"),
        _marked(exchange, "sum_pieces", "exchange", (f"{wrapped}.regions", "samestep.scripts.tutorial_api")),
        _marked(exchange, "join_pieces", "exchange", (f"{wrapped}.regions", f"{wrapped}.results")),
    )
    try:
        with applied(patches):
            yield
    finally:
        hook.remove()
        trace.close()


def _marked(owner: Any, name: str, phase: str, aliases: tuple[str, ...] = ()) -> Patch:
    """The patch by which a function shows as a range in the trace."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(phase):
            return function(*args, **kwargs)

    return Patch(owner, name, call, aliases)
