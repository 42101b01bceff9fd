"""The estimate: all layouts with memory and time, and the recommended one with the reason."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from samestep.errors import UsageError
from samestep.estimate.hardware import GIB, Cluster
from samestep.estimate.layout import STRATEGIES
from samestep.estimate.memory import USABLE_SHARE
from samestep.estimate.search import SIMPLER_IF_WITHIN, Candidate, Request, Search, best_of, make_search
from samestep.estimate.workload import Workload
from samestep.text import counted

LEAST_GAIN = 1.25  # from which on fewer microbatches are advised
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a training on a cluster."""

    workload: Workload
    num_parameters: int
    flops: float  # of a sample's forward and backward
    cluster: Cluster
    request: Request
    candidates: Sequence[Candidate]  # from the simplest on
    chosen: Candidate
    reason: str
    advice: Sequence[str]

    def rate(self, candidate: Candidate) -> float:
        """The workload's units a second, of all devices together."""
        return candidate.layout.batch_size * self.workload.units / candidate.time.step

    def as_json(self) -> dict[str, Any]:
        """The object that `samestep estimate --json` prints: bytes, seconds, and units a second."""
        return {
            "model": self.workload.name,
            "parameters": self.num_parameters,
            "flops_per_sample": self.flops,
            "devices": {
                "kind": self.cluster.kind.name,
                "count": self.cluster.num_devices,
                "nodes": self.cluster.num_nodes,
                "memory": self.cluster.kind.memory_bytes,
            },
            "asked": asdict(self.request),
            "unit": self.workload.unit,
            "fits": self.chosen.fits,
            "recommended": self._row(self.chosen),
            "reason": self.reason,
            "advice": list(self.advice),
            "candidates": [self._row(candidate) for candidate in self.candidates],
        }

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "strategy": candidate.layout.strategy,
            **asdict(candidate.layout),
            "fits": candidate.fits,
            "memory": candidate.memory.as_json(),
            "seconds": candidate.time.as_json(),
            "units_per_second": self.rate(candidate),
        }


def estimate(workload: Workload, cluster: Cluster, request: Request) -> Estimate:
    """Estimates a training and recommends a layout; no device is touched, and nothing of the model's size allocated.

    Raises `UsageError` for impossible options, or a model that cannot be traced without data.
    """
    _check(request)
    search = make_search(workload, cluster, request)
    candidates = search.candidates()
    chosen = best_of(candidates)
    trace = search.traces.at(chosen.layout.microbatch_size, chosen.layout.is_checkpointed)
    return Estimate(
        workload=workload,
        num_parameters=trace.num_parameters,
        flops=float(trace.operations[:, 0].sum()) / chosen.layout.microbatch_size,
        cluster=cluster,
        request=request,
        candidates=candidates,
        chosen=chosen,
        reason=_reason(candidates, chosen, cluster),
        advice=_speed_advice(search, chosen) if chosen.fits else _memory_advice(search, chosen),
    )


def in_gib(num_bytes: float) -> str:
    """`1.5 GiB`, or MiB below a tenth of a GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _check(request: Request) -> None:
    sizes = {"--global-batch-size": request.batch_size, "--num-microbatches": request.num_microbatches}
    for option, value in {**sizes, "--mesh pipe": request.pipe}.items():
        if value is not None and value < 1:
            raise UsageError(f"got {option} {value}; it must be 1 or more")
    choices = (("--precision", request.precision, PRECISIONS), ("--strategy", request.strategy, STRATEGIES))
    for option, name, names in choices:
        if name is not None and name not in names:
            raise UsageError(f"got {option} {name!r}; it is one of {', '.join(names)}")
    if request.pipe is not None and (request.strategy not in (None, "pipeline") or request.shard_optimizer):
        other = "--shard-optimizer" if request.shard_optimizer else f"--strategy {request.strategy}"
        raise UsageError(f"got --mesh pipe and {other}; pipe goes with --strategy pipeline alone")
    if request.rate is not None and not 0 < request.rate < float("inf"):
        raise UsageError(f"got --rate {request.rate}; it must be above 0")


def _reason(candidates: Sequence[Candidate], chosen: Candidate, cluster: Cluster) -> str:
    """Why this layout, in a sentence."""
    layout, total = chosen.layout, chosen.memory.total
    recomputed = ", each block recomputed in the backward" if layout.is_checkpointed else ""
    if not chosen.fits:
        lacking = in_gib(total - USABLE_SHARE * cluster.kind.memory_bytes)
        nearest = f"{layout.strategy}{recomputed} comes nearest"
        return f"nothing fits: {nearest}, and lacks {lacking} of {in_gib(total)} on each device"
    fitting = [candidate for candidate in candidates if candidate.fits]
    too_large = next((each for each in candidates[: candidates.index(chosen)] if not each.fits), None)
    if len(candidates) == 1:
        why = "it fits, as asked for"
    elif len(fitting) == 1:
        why = "nothing else fits"
    elif chosen is candidates[0]:
        is_fastest = chosen.time.step <= min(candidate.time.step for candidate in fitting)
        margin = f"none is faster by {100 * (SIMPLER_IF_WITHIN - 1):.0f} %"
        why = f"it is the simplest, and {'the fastest' if is_fastest else margin}"
    else:
        why = "the fastest that fits"
        if too_large is not None:
            why += f"; {too_large.layout.strategy} would take {in_gib(too_large.memory.total)} a device"
    microbatches = counted(layout.num_microbatches, "microbatch")
    return f"{layout.strategy}, {microbatches} of {layout.microbatch_size}{recomputed}: {why}"


def _memory_advice(search: Search, chosen: Candidate) -> list[str]:
    """Changes that would make it fit."""
    request, layout, kind = search.request, chosen.layout, search.cluster.kind
    found = ["more devices (sharded state is divided among them), devices with more memory, or a smaller model"]
    if request.precision == "32-true" and kind.has_bfloat16:
        found.append("--precision bf16-mixed halves most activations")
    if layout.microbatch_size > 1 and request.num_microbatches is not None:
        count = min(2 * layout.num_microbatches, layout.batch_size)
        found.append(f"smaller microbatches: --num-microbatches {count}; activations shrink")
    if request.strategy is not None or request.pipe is not None:
        found.append("other strategies were ruled out by the options given")
    return found


def _speed_advice(search: Search, chosen: Candidate) -> list[str]:
    """The limits of the chosen layout."""
    kind, time, layout = search.cluster.kind, chosen.time, chosen.layout
    fewest = search.evaluate(replace(layout, num_microbatches=layout.data))
    times = time.step / fewest.time.step
    is_small = fewest.fits and times > LEAST_GAIN
    small = "fewer microbatches, since most of their time is the fixed cost of operations"
    spare = kind.memory_bytes - chosen.memory.total
    lacks_bfloat16 = search.request.precision == "bf16-mixed" and not kind.has_bfloat16
    waiting = f"{100 * time.exposed / time.step:.0f} % of a step waits for the exchange"
    advice = {
        f"{kind.name} multiplies bfloat16 at the rate of float32; --precision 16-mixed is faster": lacks_bfloat16,
        f"{waiting}: a larger batch, fewer devices, or a faster link": time.exposed > 0.1 * time.step,
        "the pipeline idles while it fills and drains: use a larger batch": time.bubble > 0.1 * time.step,
        f"{small}: --num-microbatches {layout.data} makes a step {times:.1f} times as fast, with other bits": is_small,
        f"only {in_gib(max(spare, 0))} are left on each device: try it on one": spare < 0.1 * kind.memory_bytes,
    }
    return [text for text, applies in advice.items() if applies]
