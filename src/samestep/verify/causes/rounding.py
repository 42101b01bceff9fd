"""The cause that changes bits only: sums that another number of devices adds up in another order."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep.text import listed
from samestep.verify.causes.evidence import Cause, Evidence, Facts, by_step, on_devices
from samestep.verify.wraps import DISTRIBUTED, Wrap


def fact_wraps(facts: Facts) -> list[Wrap]:
    """Records backwards between steps and large reductions."""

    def backward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        facts.count("backward")
        return inner(*args, **kwargs)

    def all_reduce(inner: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
            facts.add_once("exchange", by="torch.distributed.all_reduce")
        return inner(tensor, *args, **kwargs)

    def make_ddp(inner: Callable[..., None], self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner(self, module, *args, **kwargs)
        facts.add_once("exchange", by="DistributedDataParallel")

    found = [Wrap(torch.autograd, "backward", backward)]
    if dist.is_available():
        found.append(Wrap(dist, "all_reduce", all_reduce, DISTRIBUTED))
        found.append(Wrap(DistributedDataParallel, "__init__", make_ddp))
    return found


def _suspect(evidence: Evidence) -> str | None:
    return "; ".join(_signs(evidence)) or None if evidence.is_ddp else None


def _signs(evidence: Evidence) -> Iterator[str]:
    """The places at which runs on other devices add in other orders: in kernels, after backwards, in the exchange."""
    sizes = {}
    counts: dict[str, int] = {}
    for run in evidence.firsts:
        rows = {fact["rows"] for rank in range(run.world_size) for fact in run.facts("forward", rank)}
        sizes[on_devices(run)] = sorted(rows, reverse=True)
        steps = by_step(run, "backward", lambda fact: int(fact["times"]))
        counts[on_devices(run)] = max((sum(ranks[0]) for ranks in steps.values()), default=0)
    if len({tuple(rows) for rows in sizes.values()}) > 1:
        seen = ", ".join(f"{listed(rows)} on {devices}" for devices, rows in sizes.items())
        yield f"kernels add up by the number of samples, and the model was given this many at a time: {seen}"
    if len({*counts.values()}) > 1:
        seen = ", ".join(f"{count} on {devices}" for devices, count in counts.items())
        yield f"a device added up the gradients of this many backwards one after another: {seen}"
    for run, _, fact in evidence.facts("exchange"):
        if run.world_size > 1:
            yield f"gradients of {on_devices(run)} were added up by {fact['by']} in the backend's own order"
            return


ROUNDING = Cause(
    "rounding",
    "sums are added up in another order on another number of devices",
    "Hold such runs to rounding error (--tier allclose); or run the script as V ranks on any devices, by samestep run "
    "--logical-devices V, which adds along a fixed tree, as samestep.Run does.",
    _suspect,
)
