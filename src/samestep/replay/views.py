"""The result of a replay as plain values: the step, its microbatches, parameters and activations, and the check."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from samestep.replay.statistics import Statistics
from samestep.train.contract_diff import Change
from samestep.verify.ledger import FieldDifference

Tier = Literal["bitwise", "allclose"]
Side = Literal["input", "output"]
Direction = Literal["state", "batch", "forward", "loss", "backward", "sum"]
ROOT = "(model)"  # the name of the model itself among its modules


@dataclass(frozen=True)
class Place:
    """A tensor that goes into or comes out of a module."""

    module: str
    type: str  # the module's class
    call: int  # of the module in this microbatch, from 0
    side: Side
    number: int  # of the tensor among those of its side, from 0
    name: str = field(init=False)  # such as conv1.output, block.input.1, head#2.output (the third call)

    def __post_init__(self) -> None:
        again = f"#{self.call}" if self.call else ""
        number = f".{self.number}" if self.number else ""
        object.__setattr__(self, "name", f"{self.module}{again}.{self.side}{number}")


@dataclass(frozen=True)
class Activation:
    """The values at a place in one microbatch, and the gradient of the microbatch's summed loss times the loss scale.

    A sample is an id, or a row of the batch if samples have no ids; None if dim 0 is not that of the samples.
    """

    place: Place
    forward: Statistics | None  # None for a tensor that is not dense
    backward: Statistics | None  # None without a gradient
    sample: int | None  # that of `forward.row`
    gradient_sample: int | None  # that of `backward.row`


@dataclass(frozen=True)
class NonFinite:
    """The first value that was not finite; "state" is before the step, "sum" the sum over the microbatches."""

    direction: Direction
    where: str
    value: str  # "nan", "inf" or "-inf"
    module: str | None = None
    microbatch: int | None = None
    sample: int | None = None


@dataclass(frozen=True)
class MicrobatchView:
    """One microbatch of the step; total, count, loss and gradient norm are None if it raised."""

    microbatch: int
    samples: Sequence[int]  # ids, or rows of the batch if samples have no ids
    total: float | None
    count: float | None
    grad_norm: float | None  # of the gradient of the microbatch's own mean loss
    activations: Sequence[Activation]  # in the order of the forward
    loss: float | None = field(init=False)  # total / count

    def __post_init__(self) -> None:
        is_known = self.total is not None and self.count is not None
        object.__setattr__(self, "loss", ratio(self.total or 0.0, self.count or 0.0) if is_known else None)


@dataclass(frozen=True)
class ParameterView:
    """One parameter in the step; the gradient is that of the mean loss over the batch, before clipping."""

    name: str
    shape: Sequence[int]
    norm: float  # before the step
    grad_norm: float | None  # None if no microbatch used the parameter
    nonfinite: int  # elements of the gradient that are not finite
    update_norm: float | None  # of the difference that the step made; None if it raised
    update_ratio: float | None  # update_norm / norm


@dataclass(frozen=True)
class StepView:
    """The step that was replayed; loss, gradient norm and digest are None if it raised."""

    step: int
    epoch: int | None  # from 0; None if unknown
    position: int | None  # samples of the epoch before the step; None if unknown
    samples: Sequence[int] | None  # the batch's ids in order; None if samples have no ids
    num_samples: int
    loss: float | None
    grad_norm: float | None  # before clipping
    lr: Sequence[float]
    skipped: bool
    digest: str | None  # the checksum of the state after the step, 16 hexadecimal digits
    error: str | None  # the exception that the step raised, in words
    nonfinite: NonFinite | None
    microbatches: Sequence[MicrobatchView]
    parameters: Sequence[ParameterView]


@dataclass(frozen=True)
class Check:
    """The comparison of the replayed steps with the ledger: `bitwise` unless something that decides bits changed."""

    tier: Tier
    first: int  # the first step that was replayed
    compared: int  # steps that were compared
    digests: int  # steps after which the checksums of the state were compared
    differs: int | None  # the first step that differs, by the tier
    fields: Sequence[FieldDifference]  # that differ in it
    relative: float  # the largest relative difference of a loss or gradient norm
    same_bits: bool
    reason: str | None  # where to look, if a step differs


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    run: str
    device: str
    start: str | None  # the checkpoint's name; None for the beginning of the run
    view: StepView
    check: Check
    changes: Sequence[Change]  # from the recorded run's contract to that of the replay
    notes: Sequence[str]
    saved: str | None  # the folder with the tensors

    @property
    def holds(self) -> bool:
        """Whether all steps that were compared are as recorded."""
        return self.check.differs is None

    def as_json(self) -> dict[str, Any]:
        """A JSON object; numbers that are not finite are "nan", "inf" and "-inf"."""
        plain: dict[str, Any] = _plain({**asdict(self), "holds": self.holds})
        return plain


def ratio(part: float, whole: float) -> float:
    """A quotient; NaN of a whole of zero."""
    return part / whole if whole else math.nan


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
