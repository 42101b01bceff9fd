"""The tables: a replay for people, in the terminal."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from samestep.replay.statistics import Statistics, pooled
from samestep.replay.views import Activation, Check, MicrobatchView, NonFinite, Place, Replay, StepView
from samestep.train.contract_diff import decides, shown
from samestep.verify.ledger import number

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_IDS = 12


def print_replay(console: "Console", replay: Replay, *, by_microbatch: bool) -> None:
    """Prints a replay."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False)

    _print_check(console, say, replay)
    for note in replay.notes:
        say(f"note: {note}")
    view = replay.view
    say("")
    say(_headline(view), "bold")
    say(f"samples: {_ids(view.samples, 'rows of the batch; they have no ids')}")
    if view.error is not None:
        say(f"the step raised: {view.error}", "red")
    if view.nonfinite is not None:
        say(f"first value that is not finite: {in_words(view.nonfinite)}", "bold red")
    console.print(_microbatches(view.microbatches))
    console.print(_parameters(view))
    console.print(_modules(view.microbatches, by_microbatch))
    if replay.saved is not None:
        say(f"saved in {replay.saved}")


def in_words(found: NonFinite) -> str:
    """Where a value that is not finite is."""
    place = "" if found.microbatch is None else f", microbatch {found.microbatch}"
    sample = "" if found.sample is None else f", sample {found.sample}"
    return f"{found.value} in {found.where}{place}{sample}"


def verdict(check: Check) -> str:
    """How the steps compare with the ledger, in a sentence."""
    if check.compared == 0:
        return "nothing was compared: the ledger has none of these steps"
    states = f", {check.digests} checksum{'' if check.digests == 1 else 's'} of the state" if check.digests else ""
    counted = f"{check.compared} step{'' if check.compared == 1 else 's'}{states}"
    if check.differs is not None:
        return f"step {check.differs} is not what was recorded ({check.tier} was asked of {counted})"
    if check.same_bits:
        return f"same bits as recorded ({counted})"
    return f"as recorded, up to rounding: {check.relative:.1e} of it at most ({counted})"


def _print_check(console: "Console", say: Callable[..., None], replay: Replay) -> None:
    check, last = replay.check, replay.view.step
    steps = f"step {last}" if check.first == last else f"steps {check.first} … {last}"
    start = "the beginning" if replay.start is None else replay.start
    style = "bold green" if replay.holds else "bold red"
    say(f"{steps} of {replay.run} replayed from {start} on {replay.device}: {verdict(check)}", style)
    if check.fields:
        table = Table("", "recorded", "replayed", "apart", box=box.SIMPLE)
        for field in check.fields:
            apart = "" if field.ulps is None else f"{field.ulps:,} ulp, {field.relative:.2g} of it"
            table.add_row(field.field, escape(_recorded(field.a)), escape(_recorded(field.b)), apart)
        console.print(table)
    if check.reason is not None:
        say(f"{check.reason}.")
    if check.differs is not None and not any(change.breaks for change in replay.changes):
        say("No field of the contract that decides the bits has changed: the record, the data or the code has.")
    if replay.changes:
        table = Table("contract", "recorded", "now", "decides", box=box.SIMPLE)
        for change in replay.changes:
            reason = decides(change.field) if change.breaks else "no bits, as a rule"
            table.add_row(escape(change.field), escape(shown(change.before)), escape(shown(change.after)), reason)
        console.print(table)


def _headline(view: StepView) -> str:
    where = "" if view.epoch is None else f", epoch {view.epoch + 1}, after {view.position} of its samples"
    parts = [f"step {view.step}{where}: {view.num_samples} samples"]
    if view.loss is not None and view.grad_norm is not None:
        parts += [f"loss {view.loss:.6g}", f"gradient norm {view.grad_norm:.6g}"]
    parts.append(f"learning rate {', '.join(f'{rate:.4g}' for rate in view.lr)}")
    if view.skipped:
        parts.append("update left out")
    if view.digest is not None:
        parts.append(f"state {view.digest}")
    return ", ".join(parts)


def _microbatches(microbatches: Sequence[MicrobatchView]) -> Table:
    table = Table("microbatch", "samples", "loss", "gradient norm", "ids", box=box.SIMPLE)
    for microbatch in microbatches:
        numbers = (_short(microbatch.loss), _short(microbatch.grad_norm))
        table.add_row(str(microbatch.microbatch), str(len(microbatch.samples)), *numbers, _ids(microbatch.samples, ""))
    return table


def _parameters(view: StepView) -> Table:
    table = Table("parameter", "shape", "norm", "gradient norm", "update / norm", "not finite", box=box.SIMPLE)
    for one in view.parameters:
        gradient = "none" if one.grad_norm is None else _short(one.grad_norm)
        bad = f"[red]{one.nonfinite:,}[/red]" if one.nonfinite else ""
        table.add_row(
            escape(one.name), _shape(one.shape), _short(one.norm), gradient, _short(one.update_ratio, ".2e"), bad
        )
    return table


def _modules(microbatches: Sequence[MicrobatchView], by_microbatch: bool) -> Table:
    table = Table("module", "type", *(["microbatch"] if by_microbatch else []), "shape", box=box.SIMPLE)
    for title in ("min", "mean", "max", "std", "zeros", "not finite", "peak in", "gradient norm"):
        table.add_column(title)
    rows = _rows_by_microbatch(microbatches) if by_microbatch else _rows_pooled(microbatches)
    for name, kind, microbatch, found, peak, gradient in rows:
        cells = [_short(value) if found.finite else "-" for value in (found.min, found.mean, found.max, found.std)]
        zeros = f"{found.zeros / found.elements:.1%}" if found.elements else "-"
        bad = f"[red]{found.nonfinite:,}[/red]" if found.nonfinite else ""
        where = [str(microbatch)] if by_microbatch else []
        table.add_row(escape(name), kind, *where, _shape(found.shape), *cells, zeros, bad, peak, gradient)
    return table


def _rows_by_microbatch(microbatches: Sequence[MicrobatchView]) -> Iterable[tuple[str, str, int, Statistics, str, str]]:
    """What went in and came out, and its gradient, a row for each microbatch."""
    for microbatch in microbatches:
        for one in microbatch.activations:
            for found, sample, suffix in (
                (one.forward, one.sample, ""),
                (one.backward, one.gradient_sample, " gradient"),
            ):
                if found is not None:
                    peak = "" if sample is None else f"sample {sample}"
                    norm = _short(found.norm) if suffix else ""
                    yield one.place.name + suffix, one.place.type, microbatch.microbatch, found, peak, norm


def _rows_pooled(microbatches: Sequence[MicrobatchView]) -> Iterable[tuple[str, str, int, Statistics, str, str]]:
    """What came out of each module, of all microbatches together."""
    places: dict[Place, list[tuple[int, Activation]]] = {}
    for microbatch in microbatches:
        for one in microbatch.activations:
            if one.place.side == "output" and one.forward is not None:
                places.setdefault(one.place, []).append((microbatch.microbatch, one))
    for place, found in places.items():
        forward = [one.forward for _, one in found if one.forward is not None]
        backward = [one.backward for _, one in found if one.backward is not None]
        number_of, worst = max(found, key=lambda entry: _size(entry[1].forward))
        peak = f"microbatch {number_of}" + ("" if worst.sample is None else f", sample {worst.sample}")
        norm = _short(pooled(backward).norm) if backward else ""
        name = place.name.replace(".output", "", 1)
        yield name, place.type, number_of, pooled(forward), peak, norm


def _size(found: Statistics | None) -> tuple[bool, float]:
    """Chooses the microbatch that a pooled row points to: the one that is not finite, else the largest peak."""
    return (False, 0.0) if found is None else (found.bad is not None, abs(found.peak))


def _ids(samples: Sequence[int] | None, without: str) -> str:
    if samples is None:
        return without
    more = f" … ({len(samples):,})" if len(samples) > SHOWN_IDS else ""
    return ", ".join(map(str, samples[:SHOWN_IDS])) + more


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _short(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)


def _recorded(value: object) -> str:
    """A value of the ledger for people."""
    if isinstance(value, list):
        return ", ".join(map(_recorded, value))
    known = number(value)
    return str(value) if known is None else repr(known)
