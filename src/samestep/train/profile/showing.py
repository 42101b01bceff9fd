"""Showing a profile: the trace of all ranks is written, the table and the advice are printed."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.comm.recording import SKIPPED_STEPS
from samestep.errors import UsageError
from samestep.train.naming import PROFILE_FOLDER
from samestep.train.profile.advice import Advice, advise
from samestep.train.profile.files import TRACE_FILE, RankProfile, read_ranks, wait_for_ranks
from samestep.train.profile.numbers import HIDDEN, Numbers
from samestep.train.profile.trace import make_trace

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console

FEW_STEPS = 20
SHOWN = ("data", "compute", HIDDEN, "exchange exposed", "update", "ledger", "checkpoint", "script")
LABELS = {"script": "script, other", HIDDEN: "exchange hidden*"}


@dataclass(frozen=True)
class Profile:
    """A profile that has been put together.

    Attributes:
        folder: where it is.
        numbers: of all ranks.
        advice: what follows.
        notes: what is to be known of the numbers.
    """

    folder: Path
    numbers: Numbers
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The table and the advice, as `--json` prints them."""
        return {
            "folder": str(self.folder),
            "trace": str(self.folder / TRACE_FILE),
            **self.numbers.as_json(),
            "advice": [{"about": advice.about, "text": advice.text} for advice in self.advice],
            "notes": list(self.notes),
        }


def merge_profile(folder: Path) -> Profile:
    """Puts together what the ranks left, and writes their trace.

    Raises:
        UsageError: there is nothing to put together, or no room for the trace.
    """
    ranks = read_ranks(folder)
    path = folder / TRACE_FILE
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_text(json.dumps(make_trace(ranks)), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another --profile-dir") from error
    return _profile_of(folder, ranks)


def load_profile(folder: Path) -> Profile:
    """A profile that has been put together before; nothing is written.

    Args:
        folder: of the profile, or of the run that has it.

    Raises:
        UsageError: it is not there, or cannot be read.
    """
    place = folder / PROFILE_FOLDER
    if not place.is_dir():
        place = folder
    return _profile_of(place, read_ranks(place))


def _profile_of(folder: Path, ranks: Sequence[RankProfile]) -> Profile:
    """What the files of the ranks say."""
    numbers = Numbers.of(ranks)
    notes = _notes(ranks[0].facts, len(ranks), numbers.num_steps)
    return Profile(folder, numbers, tuple(advise(numbers)), tuple(notes))


def tell_profile(folder: Path, world_size: int, seconds: float) -> None:
    """Prints, to stderr, the profile of ranks that are about to end.

    Args:
        folder: of the profile.
        world_size: how many ranks there were.
        seconds: how long to wait for what they leave.

    Raises:
        UsageError: none has left anything.
    """
    wait_for_ranks(folder, world_size, seconds)
    print_profile(merge_profile(folder), sys.stderr)


def print_profile(profile: Profile, file: "TextIO | None" = None) -> None:
    """Prints the table and the advice."""
    from rich.console import Console

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = 160  # nothing is folded in a file or a pipe
    _print_table(profile.numbers, console)
    for advice in profile.advice:
        console.print(f"{'✓' if advice.about == 'nothing' else '→'} {advice.text}", markup=False)
    for note in profile.notes:
        console.print(note, markup=False, style="dim")
    console.print(f"{'trace':<8} {profile.folder / TRACE_FILE}", markup=False)


def _print_table(numbers: Numbers, console: "Console") -> None:
    """A row a kind, two columns for the slowest rank and two for the one in the middle."""
    from rich import box
    from rich.table import Table

    columns = [("slowest", numbers.slowest)]
    if len(numbers.ranks) > 1:
        columns.append(("median", numbers.middle))
    steps = f"{numbers.num_steps:,} step{'s' if numbers.num_steps > 1 else ''}"
    table = Table(f"ms a step, median of {steps}", box=box.SIMPLE)
    for name, rank in columns:
        table.add_column(f"rank {rank.rank} ({name})" if len(columns) > 1 else "ms", justify="right")
        table.add_column("share", justify="right")
    for kind in SHOWN:
        cells = [
            cell for _, rank in columns for cell in (f"{rank.median_ms(kind):.3f}", f"{100 * rank.share(kind):.1f} %")
        ]
        table.add_row(LABELS.get(kind, kind), *cells, style="dim" if kind == HIDDEN else "")
    table.add_row("step", *[cell for _, rank in columns for cell in (f"{rank.step_ms:.3f}", "")], style="bold")
    console.print(table)
    limit = numbers.slowest.limit_ms
    console.print("* beside the backward: a part of compute, not added to it", style="dim")
    console.print(
        f"step {numbers.slowest.step_ms:.3f} ms = {numbers.ratio:.2f} × the compute limit, {limit:.3f} ms: forward, "
        f"backward and update of rank {numbers.slowest.rank}",
        markup=False,
    )


def _notes(facts: Mapping[str, Any], num_ranks: int, num_steps: int) -> list[str]:
    """What is to be known of the numbers."""
    notes = [str(note) for note in facts.get("notes", ())]
    if num_steps < FEW_STEPS:
        notes.append(f"of few steps: a run of more than {FEW_STEPS + SKIPPED_STEPS} says more")
    missing = facts["world_size"] - num_ranks
    if missing > 0:
        ranks = "1 rank" if missing == 1 else f"{missing} ranks"
        notes.append(f"of {facts['world_size']} ranks {num_ranks} left a profile: {ranks} did not come to an end")
    return notes
