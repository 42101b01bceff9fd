"""The forecast: the layouts weighed, the one that is recommended with the reason, and how far it scales."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from samestep.errors import UsageError
from samestep.forecast.devices import Machines
from samestep.forecast.memory import USABLE_SHARE
from samestep.forecast.search import SIMPLER_IF_WITHIN, Candidate, Point, Search, Wish, in_gib
from samestep.forecast.subject import Subject

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class Forecast:
    """What will become of a training.

    Attributes:
        subject: the model's name.
        unit: what speed is told in.
        units: of them in a sample.
        num_parameters: elements.
        flops: floating-point operations of a sample's forward and backward.
        machines: the devices.
        wish: what was asked for.
        candidates: every layout weighed, from the simplest on.
        chosen: the one that is recommended.
        reason: why, in a sentence.
        advice: what would help, where nothing fits; what else is worth knowing.
        curve: the chosen layout on other numbers of devices.
    """

    subject: str
    unit: str
    units: int
    num_parameters: int
    flops: float
    machines: Machines
    wish: Wish
    candidates: Sequence[Candidate]
    chosen: Candidate
    reason: str
    advice: Sequence[str]
    curve: Sequence[Point]

    def rate(self, candidate: Candidate) -> float:
        """Units a second of all devices together."""
        return candidate.layout.batch_size * self.units / candidate.time.step

    def as_json(self) -> dict[str, Any]:
        """What `samestep plan --json` prints: bytes, seconds, and units a second."""
        return {
            "model": self.subject,
            "parameters": self.num_parameters,
            "flops_per_sample": self.flops,
            "devices": {
                "kind": self.machines.kind.name,
                "count": self.machines.num_devices,
                "nodes": self.machines.num_nodes,
                "memory": self.machines.kind.memory_bytes,
            },
            "asked": asdict(self.wish),
            "unit": self.unit,
            "fits": self.chosen.fits,
            "recommended": self._row(self.chosen),
            "reason": self.reason,
            "advice": list(self.advice),
            "candidates": [self._row(candidate) for candidate in self.candidates],
            "curve": [
                {
                    "devices": point.num_devices,
                    "same_batch": None if point.same_batch is None else self._row(point.same_batch),
                    "larger_batch": self._row(point.larger_batch),
                }
                for point in self.curve
            ],
        }

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        layout = candidate.layout
        return {
            "strategy": layout.strategy,
            **asdict(layout),
            "fits": candidate.fits,
            "memory": candidate.memory.as_json(),
            "seconds": candidate.time.as_json(),
            "units_per_second": self.rate(candidate),
        }


def forecast(subject: Subject, machines: Machines, wish: Wish) -> Forecast:
    """Works out memory and time of a training, and which layout to take.

    Nothing of the model's size is allocated, and no device is touched.

    Args:
        subject: what is trained.
        machines: the devices.
        wish: what was asked for; what it leaves open is searched.

    Raises:
        UsageError: options that cannot be, or a model that cannot be traced without data.
    """
    _check(wish)
    search = Search(subject, machines, wish)
    candidates = search.candidates()
    chosen = search.best(candidates)
    trace = search.trace_of(chosen.layout)
    return Forecast(
        subject=subject.name,
        unit=subject.unit,
        units=subject.units,
        num_parameters=trace.num_parameters,
        flops=float(trace.operations[:, 1].sum()) / chosen.layout.microbatch_size,
        machines=machines,
        wish=wish,
        candidates=candidates,
        chosen=chosen,
        reason=_reason(candidates, chosen, machines),
        advice=_advice(search, candidates, chosen),
        curve=search.curve(chosen),
    )


def _check(wish: Wish) -> None:
    if wish.batch_size < 1:
        raise UsageError(f"got --global-batch-size {wish.batch_size}; it must be 1 or more")
    if wish.precision not in PRECISIONS:
        raise UsageError(f"got --precision {wish.precision!r}; it is one of {', '.join(PRECISIONS)}")
    for name in ("num_microbatches", "tensor", "pipe"):
        value = getattr(wish, name)
        if value is not None and value < 1:
            raise UsageError(f"got --{name.replace('_', '-')} {value}; it must be 1 or more")
    if wish.measured_seconds is not None and wish.rate is not None:
        raise UsageError("got --measured-step-seconds and --rate, which say the same; leave one of them out")
    for name, value in (("measured-step-seconds", wish.measured_seconds), ("rate", wish.rate)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"got --{name} {value}; it must be above 0")


def _reason(candidates: Sequence[Candidate], chosen: Candidate, machines: Machines) -> str:
    """Why this layout, in a sentence."""
    limit = USABLE_SHARE * machines.kind.memory_bytes
    strategy, microbatches = chosen.layout.strategy, chosen.layout.num_microbatches
    again = ", each block computed a second time in the backward" if chosen.layout.is_checkpointed else ""
    if not chosen.fits:
        return (
            f"nothing fits: {strategy}{again} comes nearest, and lacks {in_gib(chosen.memory.total - limit)} of "
            f"{in_gib(chosen.memory.total)} on each device"
        )
    fitting = [candidate for candidate in candidates if candidate.fits]
    simpler = candidates[: candidates.index(chosen)]
    too_large = [candidate for candidate in simpler if not candidate.fits]
    if len(fitting) == 1 and len(candidates) > 1:
        why = "nothing else fits"
    elif chosen is candidates[0]:
        fastest = chosen.time.step <= min(candidate.time.step for candidate in fitting)
        why = (
            "it is the simplest, and the fastest"
            if fastest
            else f"it is the simplest, and none is faster by {100 * (SIMPLER_IF_WITHIN - 1):.0f} %"
        )
    elif too_large:
        need = too_large[0]
        why = f"the fastest that fits; {need.layout.strategy} would take {in_gib(need.memory.total)} a device"
    else:
        why = "the fastest that fits"
    if len(candidates) == 1:
        why = "it fits, as asked for"
    return f"{strategy}, {microbatches} microbatches of {chosen.layout.microbatch_size}{again}: {why}"


def _advice(search: Search, candidates: Sequence[Candidate], chosen: Candidate) -> list[str]:
    """What would help where nothing fits, and what limits the speed where something does."""
    wish, layout, kind = search.wish, chosen.layout, search.machines.kind
    found = []
    if not chosen.fits:
        enlarged = search.fitting_devices()
        if enlarged is not None:
            again = " and activation checkpointing" if enlarged.layout.is_checkpointed else ""
            found.append(
                f"{enlarged.layout.num_devices} × {kind.name} would do, by {enlarged.layout.strategy}{again}, with "
                f"{in_gib(enlarged.memory.total)} on each"
            )
        if wish.precision == "32-true" and kind.has_bfloat16:
            found.append("--precision bf16-mixed halves most activations")
        if layout.microbatch_size > 1 and wish.num_microbatches is not None:
            found.append(
                f"more microbatches: --num-microbatches {min(2 * layout.num_microbatches, layout.batch_size)}; "
                "activations shrink"
            )
        if wish.strategy is not None or wish.tensor is not None or wish.pipe is not None:
            found.append("other strategies were ruled out by the options given")
        if not found:
            found.append(
                f"no number of {kind.name} up to 1,024 does; take devices with more memory, or a smaller model"
            )
        return found
    if wish.precision == "bf16-mixed" and not kind.has_bfloat16:
        found.append(
            f"{kind.name} has no bfloat16: products run at the rate of float32; --precision 16-mixed is faster"
        )
    share = chosen.time.exposed / chosen.time.step
    if share > 0.1:
        found.append(
            f"{100 * share:.0f} % of a step waits for the exchange: a larger batch, fewer devices, or a faster link"
        )
    if layout.pipe > 1 and chosen.time.bubble > 0.1 * chosen.time.step:
        found.append("the pipeline idles while it fills and drains: a larger batch has more micro-batches")
    spare = kind.memory_bytes - chosen.memory.total
    if spare < 0.1 * kind.memory_bytes:
        found.append(f"only {in_gib(max(spare, 0))} are left on each device: try it on one before renting all")
    return found
