"""The result of a replay as plain values and as tables: step, microbatches, statistics of tensors, and the check."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.markup import escape
from torch import Tensor

from samestep.checkpoint.contract_diff import ContractChange
from samestep.engine.losses import wide_dtype
from samestep.runs.ledger import FieldDifference, changes_table, fields_table
from samestep.text import counted, finite, make_table, print_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclass(frozen=True)
class Statistics:
    """Statistics of a tensor; `zeros` to `peak` are over its finite elements."""

    shape: tuple[int, ...]
    dtype: str  # such as "float32"
    elements: int = 0
    nonfinite: int = 0  # elements that are NaN or infinite
    zeros: int = 0
    min: float = math.inf  # inf if no element is finite
    max: float = -math.inf
    mean: float = 0.0
    std: float = 0.0  # the root of the mean squared distance from the mean
    peak: float = 0.0  # the element of largest magnitude
    row: int | None = None  # index along dim 0 of the first element that is not finite, else of the peak
    bad: str | None = None  # the first element that is not finite: "nan", "inf" or "-inf"

    @property
    def finite(self) -> int:
        return self.elements - self.nonfinite

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements."""
        return math.hypot(self.mean, self.std) * math.sqrt(self.finite)


def measure(tensor: Tensor) -> Statistics | None:
    """The statistics of a tensor, in float64 if the device has it; None if it is not dense."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    with torch._C.DisableTorchFunction(), torch.no_grad():
        values = tensor.detach().resolve_conj().resolve_neg()
        flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
        shape, dtype, wide = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), wide_dtype(flat.device)
        found = _measured(flat.to(wide), shape, dtype)
    if found.row is None or tensor.ndim == 0:
        return replace(found, row=None)
    return replace(found, row=found.row // (flat.numel() // shape[0]))


def _measured(values: Tensor, shape: tuple[int, ...], dtype: str) -> Statistics:
    """The statistics of elements; `row` is a position among them."""
    is_finite = torch.isfinite(values)
    count = int(is_finite.sum())
    found = Statistics(shape, dtype, values.numel(), values.numel() - count)
    if count < values.numel():
        # Of equal values `argmax` takes the first; it knows no bools.
        first = int((~is_finite).to(torch.uint8).argmax())
        found = replace(found, row=first, bad=repr(float(values[first])))
    if count == 0:
        return found
    clean = torch.where(is_finite, values, 0.0)
    mean = float(clean.sum()) / count
    peak = int(clean.abs().argmax())
    return replace(
        found,
        zeros=int((values == 0).sum()),
        min=float(torch.where(is_finite, values, math.inf).amin()),
        max=float(torch.where(is_finite, values, -math.inf).amax()),
        mean=mean,
        std=math.sqrt(float(torch.where(is_finite, values - mean, 0.0).square().sum()) / count),
        peak=float(clean[peak]),
        row=peak if found.row is None else found.row,
    )


Tier = Literal["bitwise", "allclose"]
Side = Literal["input", "output"]
Direction = Literal["state", "batch", "forward", "loss", "backward", "sum"]
ROOT = "(model)"  # the name of the model itself among its modules


@dataclass(frozen=True)
class ModulePlace:
    """A tensor that goes into or comes out of a module."""

    module: str
    type: str  # the module's class
    call: int  # of the module in this microbatch, from 0
    side: Side
    number: int  # of the tensor among its side's tensors, from 0
    name: str = field(init=False)  # such as conv1.output, block.input.1, head#2.output (the third call)

    def __post_init__(self) -> None:
        again = f"#{self.call}" if self.call else ""
        number = f".{self.number}" if self.number else ""
        object.__setattr__(self, "name", f"{self.module}{again}.{self.side}{number}")


@dataclass(frozen=True)
class Activation:
    """The values at a place in one microbatch, and the gradient of the microbatch's summed loss times the loss scale.

    A sample is an id, or a row of the batch if samples have no ids; None if dim 0 does not run over samples.
    """

    place: ModulePlace
    forward: Statistics | None  # None for a tensor that is not dense
    backward: Statistics | None  # None without a gradient
    sample: int | None  # at `forward.row`
    gradient_sample: int | None  # at `backward.row`


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
    """One parameter in the step; the gradient is of the mean loss over the batch, clipped."""

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
    changes: Sequence[ContractChange]  # from the recorded run's contract to the replay's
    notes: Sequence[str]

    @property
    def holds(self) -> bool:
        """Whether all steps that were compared are as recorded."""
        return self.check.differs is None

    def as_json(self) -> dict[str, Any]:
        """A JSON object; numbers that are not finite are "nan", "inf" and "-inf"."""
        plain: dict[str, Any] = finite({**asdict(self), "holds": self.holds})
        return plain


def ratio(part: float, whole: float) -> float:
    """A quotient; NaN of a whole of zero."""
    return part / whole if whole else math.nan


SHOWN_IDS = 12
_Row = tuple[str, str, str, Statistics, str, str]


def print_replay(console: "Console", replay: Replay, *, by_microbatch: bool) -> None:
    """Prints a replay; the modules with a row for each microbatch, or for the one with their largest value alone."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False)

    check, view = replay.check, replay.view
    steps = f"step {view.step}" if check.first == view.step else f"steps {check.first} … {view.step}"
    style = "bold green" if replay.holds else "bold red"
    start = replay.start or "the beginning"
    say(f"{steps} of {replay.run} replayed from {start} on {replay.device}: {_verdict(check)}", style)
    if check.fields:
        console.print(fields_table(check.fields, "recorded", "replayed"))
    if check.reason is not None:
        say(f"{check.reason}.")
    if check.differs is not None and not any(change.breaks for change in replay.changes):
        say("No setting that decides the bits has changed: the record, the data or the code has.")
    if replay.changes:
        console.print(changes_table(replay.changes, "recorded", "now"))
    for note in replay.notes:
        say(f"note: {note}")
    say("")
    say(_headline(view), "bold")
    say(f"samples: {'rows of the batch; they have no ids' if view.samples is None else _ids(view.samples)}")
    if view.error is not None:
        say(f"the step raised: {view.error}", "red")
    if view.nonfinite is not None:
        say(f"first value that is not finite: {_in_words(view.nonfinite)}", "bold red")
    console.print(_microbatches(view.microbatches))
    console.print(_parameters(view))
    spare = ("peak in", "std", "min", "zeros", "type")
    print_table(console, _modules(view.microbatches, by_microbatch), spare, "--json")


def _in_words(found: NonFinite) -> str:
    microbatch = "" if found.microbatch is None else f", microbatch {found.microbatch}"
    sample = "" if found.sample is None else f", sample {found.sample}"
    return f"{found.value} in {found.where}{microbatch}{sample}"


def _verdict(check: Check) -> str:
    if check.compared == 0:
        return "nothing was compared: the ledger has none of these steps"
    states = f", {counted(check.digests, 'checksum')} of the state" if check.digests else ""
    compared = f"{counted(check.compared, 'step')}{states}"
    if check.differs is not None:
        how = "to the bit" if check.tier == "bitwise" else "up to rounding"
        return f"step {check.differs} is not what was recorded ({compared}, compared {how})"
    if check.same_bits:
        return f"same bits as recorded ({compared})"
    return f"as recorded, up to rounding: {check.relative:.1e} of it at most ({compared})"


def _headline(view: StepView) -> str:
    where = "" if view.epoch is None else f", epoch {view.epoch + 1}, after {view.position} of its samples"
    parts = [f"step {view.step}{where}: {counted(view.num_samples, 'sample')}"]
    if view.loss is not None and view.grad_norm is not None:
        parts += [f"loss {view.loss:.6g}", f"gradient norm {view.grad_norm:.6g}"]
    parts.append(f"learning rate {', '.join(f'{rate:.4g}' for rate in view.lr)}")
    parts += ["update left out"] if view.skipped else []
    parts += [f"state {view.digest}"] if view.digest is not None else []
    return ", ".join(parts)


def _microbatches(microbatches: Sequence[MicrobatchView]) -> "Table":
    table = make_table("microbatch", "samples", "loss", "gradient norm", "ids")
    for one in microbatches:
        numbers = (_short(one.loss), _short(one.grad_norm))
        table.add_row(str(one.microbatch), str(len(one.samples)), *numbers, _ids(one.samples))
    return table


def _parameters(view: StepView) -> "Table":
    table = make_table("parameter", "shape", "norm", "gradient norm", "update / norm", "not finite")
    for one in view.parameters:
        gradient = "none" if one.grad_norm is None else _short(one.grad_norm)
        ratio = _short(one.update_ratio, ".2e") if one.norm else "-"  # of what is zero, as biases at the beginning
        cells = (_shape(one.shape), _short(one.norm), gradient, ratio, _bad(one.nonfinite))
        table.add_row(escape(one.name), *cells)
    return table


def _modules(microbatches: Sequence[MicrobatchView], by_microbatch: bool) -> "Table":
    titles = ("min", "mean", "max", "std", "zeros", "not finite", "peak in", "gradient norm")
    table = make_table("module", "type", *(["microbatch"] if by_microbatch else []), "shape", *titles)
    rows = _rows_by_microbatch(microbatches) if by_microbatch else _rows_of_largest(microbatches)
    for name, kind, microbatch, found, peak, gradient in rows:
        cells = [_short(value) if found.finite else "-" for value in (found.min, found.mean, found.max, found.std)]
        zeros = f"{found.zeros / found.elements:.1%}" if found.elements else "-"
        where = [microbatch] if by_microbatch else []
        table.add_row(
            escape(name), kind, *where, _shape(found.shape), *cells, zeros, _bad(found.nonfinite), peak, gradient
        )
    return table


def _rows_by_microbatch(microbatches: Sequence[MicrobatchView]) -> Iterator[_Row]:
    """A row for each input, output and gradient of each microbatch."""
    for microbatch in microbatches:
        for one in microbatch.activations:
            for found, sample, suffix in (
                (one.forward, one.sample, ""),
                (one.backward, one.gradient_sample, " gradient"),
            ):
                if found is not None:
                    peak = "" if sample is None else f"sample {sample}"
                    norm = _short(found.norm) if suffix else ""
                    yield one.place.name + suffix, one.place.type, str(microbatch.microbatch), found, peak, norm


def _rows_of_largest(microbatches: Sequence[MicrobatchView]) -> Iterator[_Row]:
    """A row for each output, of the microbatch in which its value is the largest, or the first not finite."""
    places: dict[ModulePlace, list[tuple[Statistics, int, Activation]]] = {}
    for microbatch in microbatches:
        for one in microbatch.activations:
            if one.place.side == "output" and one.forward is not None:
                places.setdefault(one.place, []).append((one.forward, microbatch.microbatch, one))
    for place, rows in places.items():
        found, number, one = max(rows, key=lambda row: (row[0].bad is not None, abs(row[0].peak)))
        peak = f"microbatch {number}" + ("" if one.sample is None else f", sample {one.sample}")
        norm = "" if one.backward is None else _short(one.backward.norm)
        yield place.name.replace(".output", "", 1), place.type, "", found, peak, norm


def _ids(samples: Sequence[int]) -> str:
    more = f" … ({len(samples):,})" if len(samples) > SHOWN_IDS else ""
    return ", ".join(map(str, samples[:SHOWN_IDS])) + more


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _bad(count: int) -> str:
    return f"[red]{count:,}[/red]" if count else ""


def _short(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)
