"""`samestep ledger`: the recorded steps and events of a run, and the first step in which two runs differ."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from samestep.checkpoint.contract_diff import ContractChange, differences
from samestep.cli.options import Command, CommandGroup
from samestep.errors import DataError, UsageError
from samestep.runs.ledger import (
    Extent,
    Ledger,
    LedgerDifference,
    cause,
    changes_table,
    compare,
    extent,
    field_name,
    fields_table,
    ledger_value,
    read_ledger,
)
from samestep.runs.run_list import read_contract
from samestep.text import counted, json_text, make_console, make_table, print_table

if TYPE_CHECKING:
    from rich.console import Console


SHOWN_STEPS = 20
SHOWN_NOTES = 5

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Shows what a run recorded of its steps, and compares two runs.",
)
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
_RunArgument = typer.Argument(metavar="RUN", help="A run's folder, or a ledger.")


@dataclass(frozen=True)
class _LedgerComparison:
    paths: tuple[Path, Path]
    ledgers: tuple[Ledger, Ledger]
    extent: Extent
    difference: LedgerDifference | None
    changes: list[ContractChange] | None  # of the contracts; None if one of them cannot be read


@app.command("diff", cls=Command)
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run's folder, or a ledger.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: _Json = False,
) -> None:
    """Shows the first step in which two runs differ, and what differs; exit code 1 if there is one.

    Devices may differ, and how far the runs came; to the bit the same must be samples, learning rates, loss, gradient
    norm and state of every step that both have.
    """
    ledgers = read_or_refuse(a), read_or_refuse(b)
    reach = extent(*ledgers)
    if reach.common == 0:
        counts = " and ".join(f"{len(ledger.steps)} in {path}" for ledger, path in zip(ledgers, (a, b), strict=True))
        raise UsageError(f"got ledgers without a step in common ({counts}); name two runs that took the same steps")
    before, after = (read_contract(path if path.is_dir() else path.parent) for path in (a, b))
    changes = None if before is None or after is None else differences(before, after)
    found = _LedgerComparison((a, b), ledgers, reach, compare(*ledgers), changes)
    if as_json:
        print(json_text(_as_json(found)))
    else:
        _print_comparison(found)
    if found.difference is not None:
        raise typer.Exit(1)


@app.command("show", cls=Command)
def show(
    run: Annotated[Path, _RunArgument],
    last: Annotated[int, typer.Option(min=1, metavar="N", help="How many of the last lines.")] = SHOWN_STEPS,
    events: Annotated[bool, typer.Option("--events", help="Events instead of steps.")] = False,
    as_json: _Json = False,
) -> None:
    """Shows the last steps of a run with the events meanwhile, or its last events."""
    ledger = read_or_refuse(run)
    steps = [] if events else list(ledger.steps.values())[-last:]
    begin = steps[0]["step"] if steps else 0
    shown = [event for event in ledger.events if event["step"] >= begin - 1][-last:]
    if as_json:
        facts = {"num_steps": len(ledger.steps), "num_events": len(ledger.events)}
        print(json_text({**facts, "steps": steps, "events": shown, "notes": _notes(ledger)}))
        return
    console = make_console()
    if steps:
        _print_steps(console, steps)
    if shown:
        _print_events(console, shown)
    if not steps and not shown:
        console.print("no event" if events else "no step yet")
    for note in _notes(ledger):
        console.print(f"note: {note}", markup=False)


def read_or_refuse(path: Path) -> Ledger:
    """A ledger; raises a `UsageError` for a file that is none."""
    try:
        return read_ledger(path)
    except DataError as error:
        raise UsageError(str(error)) from error


def _notes(ledger: Ledger) -> list[str]:
    """Sentences on damaged lines and on steps that were taken twice with different results."""
    notes = ["the last line is unfinished, and left out"] if ledger.torn else []
    notes += [
        f"step {repeat.step} was taken twice and came out otherwise: {repeat.field} {ledger_value(repeat.before)} "
        f"before, {ledger_value(repeat.after)} after"
        for repeat in ledger.repeats_that_differ[:SHOWN_NOTES]
    ]
    notes += [*ledger.problems[:SHOWN_NOTES]]
    left = sum(max(0, len(some) - SHOWN_NOTES) for some in (ledger.repeats_that_differ, ledger.problems))
    return [*notes, f"{left} more like these"] if left else notes


def _headline(difference: LedgerDifference | None, reach: Extent) -> str:
    """The result of a comparison in one sentence."""
    if difference is None:
        states = [f"{counted(reach.digests, 'checksum')} of the state"] if reach.digests else []
        states += ["the digest of the final state"] if reach.final else []
        tail = f", and in {' and '.join(states)}" if states else "; no checksum of the state was compared"
        return f"the same bits in {counted(reach.common, 'step')}{tail}"
    names = [field_name(change.field) for change in difference.fields]
    what = " and ".join((", ".join(names[:-1]), names[-1]) if len(names) > 1 else names)
    before = f"the {counted(difference.agreed, 'step')} before it agree" if difference.agreed else "none is before it"
    if difference.agreed == 1:
        before = "the one before it agrees"
    return f"step {difference.step} is the first that differs, in {what}; {before}"


def _as_json(found: _LedgerComparison) -> dict[str, Any]:
    difference = found.difference
    return {
        "a": str(found.paths[0]),
        "b": str(found.paths[1]),
        **asdict(found.extent),
        "difference": None if difference is None else {**asdict(difference), "cause": cause(difference)},
        "contract": None if found.changes is None else [asdict(change) for change in found.changes],
        "notes": {name: _notes(ledger) for name, ledger in zip("ab", found.ledgers, strict=True)},
    }


def _print_comparison(found: _LedgerComparison) -> None:
    console, difference = make_console(), found.difference
    alone = found.extent.only_a, found.extent.only_b
    for letter, path, ledger, count in zip("AB", found.paths, found.ledgers, alone, strict=True):
        only = f", {count:,} of them not in {'B' if letter == 'A' else 'A'}" if count else ""
        console.print(f"{letter}: {path}, {counted(len(ledger.steps), 'step')}{only}", markup=False)
        for note in _notes(ledger):
            console.print(f"note: {letter}: {note}", markup=False)
    if found.changes:
        console.print(changes_table(found.changes, "A", "B"))
    else:
        same = "the same" if found.changes is not None else "not compared, since one of them cannot be read"
        console.print(f"settings: {same}")
    style = "bold" if difference is None else "bold red"
    console.print(_headline(difference, found.extent), style=style, markup=False)
    if difference is not None:
        console.print(fields_table(difference.fields, "A", "B"))
        console.print(f"{cause(difference)}.", markup=False)


def _print_steps(console: "Console", steps: "list[Any]") -> None:
    fields = ("step", "epoch", "position", "num_samples", "ids", "loss", "grad_norm", "lr", "world_size", "digest")
    used = [field for field in fields if any(step.get(field) is not None for step in steps)]
    table = make_table(*map(field_name, used))
    for step in steps:
        mark = " skipped" if step.get("skipped") else ""
        cells = [ledger_value(step.get(field), short=True) + (mark if field == "step" else "") for field in used]
        table.add_row(*map(escape, cells))
    spare = ("num_samples", "position", "world_size", "ids", "epoch", "lr")
    print_table(console, table, [field_name(field) for field in spare], "--json")


def _print_events(console: "Console", events: "list[Any]") -> None:
    table = make_table("time", "step", "event", "")
    for event in events:
        rest = {key: value for key, value in event.items() if key not in ("event", "step", "time")}
        if isinstance(digest := rest.get("digest"), str) and len(digest) > 16:
            rest["digest"] = f"{digest[:16]}…"  # --json has all of it
        words = ", ".join(
            f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in rest.items()
        )
        table.add_row(
            escape(str(event.get("time", ""))[:19].replace("T", " ")),
            str(event["step"]),
            escape(event["event"]),
            escape(words),
        )
    console.print(table)
