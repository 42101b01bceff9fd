"""The result of a check; all results as a table or as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TextIO

from samestep.text import counted

State = Literal["good", "note", "bad"]
STYLES: dict[State, str] = {"good": "green", "note": "yellow", "bad": "bold red"}
RANKS = "ranks"
FILE_WIDTH, NAME_WIDTH = 160, 34


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str  # the subject of the check
    state: State
    found: str  # a sentence without its full stop
    advice: str = ""  # the remedy; never empty if the state is "bad"
    area: str = RANKS  # the section of the table
    numbers: Mapping[str, float] = field(default_factory=dict)  # by name and unit, such as "latency_us"

    def __post_init__(self) -> None:
        """Asserts that a fault comes with its remedy."""
        assert self.state != "bad" or self.advice, f"{self.name}: a bad result needs advice"


def good(name: str, found: str) -> Result:
    """As it should be."""
    return Result(name, "good", found)


def note(name: str, found: str, advice: str = "") -> Result:
    """Works, but not as a user might expect."""
    return Result(name, "note", found, advice)


def bad(name: str, found: str, advice: str) -> Result:
    """Must be mended before training."""
    return Result(name, "bad", found, advice)


def is_good(results: Iterable[Result]) -> bool:
    """Whether no result is bad."""
    return all(result.state != "bad" for result in results)


def as_object(results: Sequence[Result]) -> dict[str, Any]:
    """The results as a JSON object."""
    return {"good": is_good(results), "findings": [asdict(result) for result in results]}


def from_objects(values: Iterable[Mapping[str, Any]]) -> list[Result]:
    """The results of JSON objects, which may have further fields."""
    names = [each.name for each in fields(Result)]
    return [Result(**{name: value[name] for name in names}) for value in values]


def print_results(results: Sequence[Result], file: TextIO | None = None) -> None:
    """Prints the table, readable with and without colour, and a line with the totals."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for area in dict.fromkeys(result.area for result in results):
        console.print(f"\n{area}", style="bold", markup=False)
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=max(map(len, STYLES)))
        table.add_column(width=min(NAME_WIDTH, max(len(result.name) for result in results)), overflow="fold")
        table.add_column(overflow="fold")
        for result in results:
            if result.area == area:
                text = Text(result.found)
                if result.advice and result.state != "good":
                    text.append(f"\n→ {result.advice}", style=STYLES[result.state])
                table.add_row(Text(result.state, style=STYLES[result.state]), Text(result.name), text)
        console.print(table)
    numbers = {state: sum(result.state == state for result in results) for state in STYLES}
    total = f"{numbers['bad']} bad" if numbers["bad"] else "nothing is bad"
    total += f": {numbers['good']} good, {counted(numbers['note'], 'note')}"
    console.print(f"\n{total}", markup=False, style=STYLES["bad" if numbers["bad"] else "good"])
