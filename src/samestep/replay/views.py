"""The views: what a replay saw of a step, as plain values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from samestep.replay.statistics import Statistics
from samestep.train.contract_diff import Change
from samestep.verify.ledger import FieldDifference

Tier = Literal["bitwise", "allclose"]
ROOT = "(model)"


@dataclass(frozen=True)
class Place:
    """A tensor that goes into or comes out of a module.

    Attributes:
        module: its name in the model; "(model)" for the model itself.
        type: of the module.
        call: which call of the module for this microbatch, from 0.
        side: "input" or "output".
        number: which of the tensors of that side, from 0.
    """

    module: str
    type: str
    call: int
    side: Literal["input", "output"]
    number: int

    @property
    def name(self) -> str:
        """Such as `conv1.output`, `block.input.1`, `head#2.output` for the third call."""
        again = f"#{self.call}" if self.call else ""
        return f"{self.module}{again}.{self.side}" + (f".{self.number}" if self.number else "")


@dataclass(frozen=True)
class Activation:
    """What was at a place, in one microbatch.

    Attributes:
        place: where.
        forward: of the values; None for what is not dense.
        backward: of the gradient of the microbatch's loss (its sum over samples, times the loss scale); None without
            one.
        sample: the sample of `forward.row`: its id, or its row in the batch where samples have no ids. None where dim 0
            is not that of the samples.
        gradient_sample: the same of `backward.row`.
    """

    place: Place
    forward: Statistics | None
    backward: Statistics | None
    sample: int | None
    gradient_sample: int | None


@dataclass(frozen=True)
class NonFinite:
    """The first value that was not finite.

    Attributes:
        direction: "state" (before the step), "batch", "forward", "loss", "backward" or "sum" (over the microbatches).
        where: in words.
        value: "nan", "inf" or "-inf".
        module: the module in which it came up; None where it was in none.
        microbatch: the microbatch; None where it was in none.
        sample: its id, or its row in the batch where samples have no ids; None where that cannot be told.
    """

    direction: Literal["state", "batch", "forward", "loss", "backward", "sum"]
    where: str
    value: str
    module: str | None = None
    microbatch: int | None = None
    sample: int | None = None


@dataclass(frozen=True)
class MicrobatchView:
    """One microbatch of the step.

    Attributes:
        microbatch: its number.
        samples: ids, or rows in the batch where samples have no ids.
        total: the sum of the loss; None if the microbatch raised.
        count: what it is divided by.
        grad_norm: of the gradient of the microbatch's own mean loss; None if the microbatch raised.
        activations: in the order of the forward.
    """

    microbatch: int
    samples: Sequence[int]
    total: float | None
    count: float | None
    grad_norm: float | None
    activations: Sequence[Activation]

    @property
    def loss(self) -> float | None:
        """The microbatch's mean loss."""
        return None if self.total is None or self.count is None else ratio(self.total, self.count)


@dataclass(frozen=True)
class ParameterView:
    """One parameter in the step.

    Attributes:
        name: in the model.
        shape: its own.
        norm: its 2-norm before the step.
        grad_norm: of the gradient of the mean loss over the batch, before clipping; None where no microbatch used it.
        nonfinite: elements of that gradient that are not finite.
        update_norm: of what the step added to it; None if the step did not end.
    """

    name: str
    shape: Sequence[int]
    norm: float
    grad_norm: float | None
    nonfinite: int
    update_norm: float | None

    @property
    def update_ratio(self) -> float | None:
        """The size of the update relative to the parameter."""
        return None if self.update_norm is None else ratio(self.update_norm, self.norm)


@dataclass(frozen=True)
class StepView:
    """The step that was asked for.

    Attributes:
        step: its number, from 0.
        epoch: from 0; None where it is not known.
        position: samples of the epoch before it; None where it is not known.
        samples: ids of the whole batch in order, or None where samples have no ids.
        num_samples: of the batch.
        loss: the mean over the batch; None if the step raised.
        grad_norm: before clipping; None if the step raised.
        lr: of each parameter group.
        skipped: whether the update was left out.
        digest: the checksum of the state after the step, 16 hexadecimal digits; None if the step raised.
        error: what the step raised, in words; None if it ended well.
        nonfinite: the first value that was not finite, if one was.
        microbatches: in order; those that ran.
        parameters: in the model's order.
    """

    step: int
    epoch: int | None
    position: int | None
    samples: Sequence[int] | None
    num_samples: int
    loss: float | None
    grad_norm: float | None
    lr: Sequence[float]
    skipped: bool
    digest: str | None
    error: str | None
    nonfinite: NonFinite | None
    microbatches: Sequence[MicrobatchView]
    parameters: Sequence[ParameterView]


@dataclass(frozen=True)
class Check:
    """How the replayed steps compare with the recorded ones.

    Attributes:
        tier: what was asked of them: "bitwise" where nothing has changed that decides the bits, else "allclose".
        first: the first step that was replayed.
        compared: how many steps were compared.
        digests: after how many of them a checksum of the state was, too.
        differs: the first step that is not what was recorded, by the tier; None if all are.
        fields: what differs in it.
        relative: the largest relative difference of a loss or gradient norm in all steps; 0 if all are the same bits.
        same_bits: whether all that was compared is the same to the bit.
        reason: where to look, if a step differs.
    """

    tier: Tier
    first: int
    compared: int
    digests: int
    differs: int | None
    fields: Sequence[FieldDifference]
    relative: float
    same_bits: bool
    reason: str | None


@dataclass(frozen=True)
class Replay:
    """What came of a replay.

    Attributes:
        run: the run's folder.
        device: on which it was replayed.
        start: the name of the checkpoint it began with; None for the beginning of the run.
        view: the step that was asked for.
        check: how the steps up to and with it compare with the ledger.
        changes: between the contract of the recorded run and that of the replay.
        notes: what else should be known, as sentences.
        saved: the folder with the tensors; None if none were asked for.
    """

    run: str
    device: str
    start: str | None
    view: StepView
    check: Check
    changes: Sequence[Change]
    notes: Sequence[str]
    saved: str | None

    @property
    def holds(self) -> bool:
        """Whether the recorded run is what its ledger says, as far as was compared."""
        return self.check.differs is None

    def as_json(self) -> dict[str, Any]:
        """A JSON object; numbers that are not finite are "nan", "inf" and "-inf"."""
        value = asdict(self)
        for microbatch, view in zip(value["view"]["microbatches"], self.view.microbatches, strict=True):
            microbatch["loss"] = view.loss
            for entry, activation in zip(microbatch["activations"], view.activations, strict=True):
                entry["place"]["name"] = activation.place.name
        for entry, parameter in zip(value["view"]["parameters"], self.view.parameters, strict=True):
            entry["update_ratio"] = parameter.update_ratio
        plain: dict[str, Any] = _plain({**value, "holds": self.holds})
        return plain


def ratio(part: float, whole: float) -> float:
    """A quotient; NaN of a whole of zero."""
    return part / whole if whole else math.nan


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
