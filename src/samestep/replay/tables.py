"""Prints a replay as tables."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from samestep.replay.difference_tables import changes_table, fields_table
from samestep.replay.statistics import Statistics, pooled
from samestep.replay.views import Activation, Check, MicrobatchView, NonFinite, Place, Replay, StepView
from samestep.text import counted, make_table, print_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN_IDS = 12
_Row = tuple[str, str, str, Statistics, str, str]


def print_replay(console: "Console", replay: Replay, *, by_microbatch: bool) -> None:
    """Prints a replay; the modules with a row for each microbatch, or one for all together."""

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
        say("No field of the contract that decides the bits has changed: the record, the data or the code has.")
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
    if replay.saved is not None:
        say(f"saved in {replay.saved}")


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
        return f"step {check.differs} is not what was recorded ({check.tier} was asked of {compared})"
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
    rows = _rows_by_microbatch(microbatches) if by_microbatch else _rows_pooled(microbatches)
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


def _rows_pooled(microbatches: Sequence[MicrobatchView]) -> Iterable[_Row]:
    """A row for each output, of all microbatches together; it names that of the worst value."""
    places: dict[Place, list[tuple[Statistics, int, Activation]]] = {}
    for microbatch in microbatches:
        for one in microbatch.activations:
            if one.place.side == "output" and one.forward is not None:
                places.setdefault(one.place, []).append((one.forward, microbatch.microbatch, one))
    for place, found in places.items():
        backward = [one.backward for _, _, one in found if one.backward is not None]
        _, number_of, worst = max(found, key=lambda entry: (entry[0].bad is not None, abs(entry[0].peak)))
        peak = f"microbatch {number_of}" + ("" if worst.sample is None else f", sample {worst.sample}")
        norm = _short(pooled(backward).norm) if backward else ""
        name = place.name.replace(".output", "", 1)
        yield name, place.type, "", pooled([forward for forward, _, _ in found]), peak, norm


def _ids(samples: Sequence[int]) -> str:
    more = f" … ({len(samples):,})" if len(samples) > SHOWN_IDS else ""
    return ", ".join(map(str, samples[:SHOWN_IDS])) + more


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _bad(count: int) -> str:
    return f"[red]{count:,}[/red]" if count else ""


def _short(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)
