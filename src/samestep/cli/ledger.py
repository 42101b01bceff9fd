"""`samestep ledger`: what a run recorded of its steps, and the first step in which two runs differ."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.text import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from samestep.train.contract_diff import Change
    from samestep.verify.ledger import Difference, Extent, FieldDifference, Ledger

SHOWN_STEPS = 20
SHOWN_NOTES = 5
MAX_ULPS = 2**24  # beyond, the number of floats between two says nothing to a reader

app = typer.Typer(no_args_is_help=True, help="Shows what a run recorded of its steps, and compares two runs.")
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
_RunArgument = typer.Argument(metavar="RUN", help="A run's folder, or a ledger.")


@app.command("diff")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run's folder, or a ledger.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: _Json = False,
) -> None:
    """Shows the first step in which two runs differ, and what differs; exit code 1 if there is one.

    Devices may differ, and how far the runs came; to the bit the same must be samples, learning rates, loss, gradient
    norm and state of every step that both have.
    """
    from samestep.errors import UsageError
    from samestep.verify.ledger import compare, extent

    ledgers = [_read(path) for path in (a, b)]
    reach = extent(*ledgers)
    if reach.common == 0:
        counts = " and ".join(f"{len(ledger.steps)} in {path}" for ledger, path in zip(ledgers, (a, b), strict=True))
        raise UsageError(f"got ledgers without a step in common ({counts}); name two runs that took the same steps")
    difference = compare(*ledgers)
    changes = _contract_changes(a, b)
    if as_json:
        print(json.dumps(_diff_as_json(a, b, ledgers, reach, difference, changes)))
    else:
        _print_diff(a, b, ledgers, reach, difference, changes)
    if difference is not None:
        raise typer.Exit(1)


@app.command("show")
def show(
    run: Annotated[Path, _RunArgument],
    last: Annotated[int, typer.Option(min=1, metavar="N", help="How many of the last lines.")] = SHOWN_STEPS,
    events: Annotated[bool, typer.Option("--events", help="Events instead of steps.")] = False,
    as_json: _Json = False,
) -> None:
    """Shows the last steps of a run and what happened meanwhile, or its last events."""
    ledger = _read(run)
    steps = [] if events else list(ledger.steps.values())[-last:]
    begin = steps[0]["step"] if steps else 0
    shown = [event for event in ledger.events if event["step"] >= begin][-last:]
    if as_json:
        facts = {"num_steps": len(ledger.steps), "num_events": len(ledger.events)}
        print(json.dumps({**facts, "steps": steps, "events": shown, "notes": _notes(ledger)}))
        return
    console = _console()
    if steps:
        _print_steps(console, steps)
    if shown:
        _print_events(console, shown)
    if not steps and not shown:
        console.print("no event" if events else "no step yet")
    for note in _notes(ledger):
        console.print(f"note: {one_line(note)}", markup=False)


def _read(path: Path) -> "Ledger":
    """A ledger; what is none is bad usage."""
    from samestep.errors import DataError, UsageError
    from samestep.verify.ledger import read_ledger

    try:
        return read_ledger(path)
    except DataError as error:
        raise UsageError(str(error)) from error


def _contract_changes(a: Path, b: Path) -> "list[Change] | None":
    """The fields in which the contracts differ; None where one of them is not there."""
    from samestep.train.contract_diff import differences
    from samestep.verify.runs import read_contract

    contracts = [read_contract(path if path.is_dir() else path.parent) for path in (a, b)]
    return None if contracts[0] is None or contracts[1] is None else differences(contracts[0], contracts[1])


def _notes(ledger: "Ledger") -> list[str]:
    """What a reader should know of a ledger, besides its lines."""
    notes = ["the last line is unfinished, and left out"] if ledger.torn else []
    notes += [
        f"step {repeat.step} was taken twice and came out otherwise: {repeat.field} {_value(repeat.before)} before, "
        f"{_value(repeat.after)} after"
        for repeat in ledger.repeats_that_differ[:SHOWN_NOTES]
    ]
    notes += [*ledger.problems[:SHOWN_NOTES]]
    left = sum(max(0, len(some) - SHOWN_NOTES) for some in (ledger.repeats_that_differ, ledger.problems))
    return [*notes, f"{left} more like these"] if left else notes


def _headline(difference: "Difference | None", reach: "Extent") -> str:
    """The result of a comparison in one sentence."""
    if difference is None:
        states = [f"{_counted(reach.digests, 'checksum')} of the state"] if reach.digests else []
        states += ["the digest of the final state"] if reach.final else []
        tail = f", and in {' and '.join(states)}" if states else "; no checksum of the state was compared"
        return f"the same bits in {_counted(reach.common, 'step')}{tail}"
    names = [_name(change.field) for change in difference.fields]
    what = " and ".join((", ".join(names[:-1]), names[-1]) if len(names) > 1 else names)
    before = f"the {_counted(difference.agreed, 'step')} before it agree" if difference.agreed else "none is before it"
    if difference.agreed == 1:
        before = "the one before it agrees"
    return f"step {difference.step} is the first that differs, in {what}; {before}"


def _diff_as_json(
    a: Path,
    b: Path,
    ledgers: "list[Ledger]",
    reach: "Extent",
    difference: "Difference | None",
    changes: "list[Change] | None",
) -> dict[str, Any]:
    from dataclasses import asdict

    from samestep.verify.ledger import cause

    return {
        "a": str(a),
        "b": str(b),
        **asdict(reach),
        "difference": None if difference is None else {**asdict(difference), "cause": cause(difference)},
        "contract": None if changes is None else [asdict(change) for change in changes],
        "notes": {"a": _notes(ledgers[0]), "b": _notes(ledgers[1])},
    }


def _print_diff(
    a: Path,
    b: Path,
    ledgers: "list[Ledger]",
    reach: "Extent",
    difference: "Difference | None",
    changes: "list[Change] | None",
) -> None:
    from samestep.verify.ledger import cause

    console = _console()
    for letter, path, ledger, alone in (("A", a, ledgers[0], reach.only_a), ("B", b, ledgers[1], reach.only_b)):
        only = f", {alone:,} of them not in {'B' if letter == 'A' else 'A'}" if alone else ""
        console.print(f"{letter}: {one_line(path)}, {_counted(len(ledger.steps), 'step')}{only}", markup=False)
        for note in _notes(ledger):
            console.print(f"note: {letter}: {one_line(note)}", markup=False)
    _print_changes(console, changes)
    console.print(_headline(difference, reach), style="bold" if difference is None else "bold red", markup=False)
    if difference is not None:
        _print_fields(console, difference.fields)
        console.print(f"{cause(difference)}.", markup=False)


def _print_changes(console: "Console", changes: "list[Change] | None") -> None:
    """The fields in which the contracts differ."""
    from rich import box
    from rich.table import Table

    from samestep.train.contract_diff import decides, shown

    if changes is None:
        console.print("contract: not compared, since one of them cannot be read")
        return
    if not changes:
        console.print("contract: the same")
        return
    table = Table("contract", "A", "B", "decides", box=box.SIMPLE)
    for change in changes:
        values = (_cell(shown(change.before)), _cell(shown(change.after)))
        table.add_row(_cell(change.field), *values, decides(change.field) if change.breaks else "no bits, as a rule")
    console.print(table)


def _print_fields(console: "Console", fields: "tuple[FieldDifference, ...] | Any") -> None:
    """What differs in a step, and how far it is apart."""
    from rich import box
    from rich.table import Table

    table = Table("", "A", "B", "apart", box=box.SIMPLE)
    for change in fields:
        near = "" if change.ulps is None or change.ulps > MAX_ULPS else f"{change.ulps:,} ulp, "
        apart = "" if change.relative is None else f"{near}{change.relative:.2g} of it"
        table.add_row(_name(change.field), _cell(_value(change.a)), _cell(_value(change.b)), apart)
    console.print(table)


def _print_steps(console: "Console", steps: "list[Any]") -> None:
    """Steps, a row each."""
    from rich import box
    from rich.table import Table

    fields = ("step", "epoch", "position", "num_samples", "ids", "loss", "grad_norm", "lr", "world_size", "digest")
    used = [field for field in fields if any(step.get(field) is not None for step in steps)]
    table = Table(*(_name(field) for field in used), box=box.SIMPLE)
    for step in steps:
        mark = " skipped" if step.get("skipped") else ""
        cells = [_value(step.get(field), short=True) + (mark if field == "step" else "") for field in used]
        table.add_row(*map(_cell, cells))
    console.print(table)


def _print_events(console: "Console", events: "list[Any]") -> None:
    """Events, a row each."""
    from rich import box
    from rich.table import Table

    table = Table("time", "before step", "event", "", box=box.SIMPLE)
    for event in events:
        rest = {key: value for key, value in event.items() if key not in ("event", "step", "time")}
        words = ", ".join(
            f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in rest.items()
        )
        table.add_row(_cell(str(event.get("time", ""))), str(event["step"]), _cell(event["event"]), _cell(words))
    console.print(table)


def _name(field: str) -> str:
    """A field as people call it."""
    names = {"num_samples": "samples", "ids": "sample ids", "grad_norm": "gradient norm", "lr": "learning rate"}
    return {**names, "world_size": "devices", "digest": "state"}.get(field, field)


def _value(value: Any, short: bool = False) -> str:
    """A value of the ledger for people: numbers in decimal digits, all of them or six."""
    from samestep.verify.ledger import number

    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(_value(item, short) for item in value)
    known = number(value)
    if known is None:
        return value if isinstance(value, str) else json.dumps(value)
    return f"{known:.6g}" if short else repr(known)


def _cell(text: str) -> str:
    """What others wrote, for a table: without characters that control a terminal."""
    from rich.markup import escape

    return escape(one_line(text))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # nothing is folded or cut in a file or a pipe
    return console
