"""`samestep report`: what came of a run, or of several: in the terminal, as a picture and as a page."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.extras import is_installed, missing

if TYPE_CHECKING:
    from samestep.report.story import Story

PAGE_FILE = "report.html"
PICTURE_FILE = "report.png"


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are laid over each other.")
    ],
    out: Annotated[
        Path | None, typer.Option(help=f"Where {PAGE_FILE} and {PICTURE_FILE} go; the first run's folder by default.")
    ] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead.")] = False,
) -> None:
    """Tells what came of runs: curves, throughput, where the time goes, events, and what the ledger proves.

    Writes one HTML page that needs neither network nor server, and a picture. A run may be under way.
    """
    from samestep.report.story import gather

    story = gather(runs)
    folder = runs[0] if out is None else out
    page = folder / PAGE_FILE
    picture = folder / PICTURE_FILE if is_installed("matplotlib") else None
    _write(story, page, picture)
    if as_json:
        print(
            json.dumps(
                story.as_json() | {"page": str(page), "picture": picture and str(picture)}, allow_nan=False, default=str
            )
        )
    else:
        _print(story, page, picture)
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


def _write(story: "Story", page: Path, picture: Path | None) -> None:
    from samestep.report.page import make_page
    from samestep.report.picture import draw_report
    from samestep.report.writing import write_whole

    write_whole(page, make_page(story).encode(errors="backslashreplace"))
    if picture is None:
        print(f"samestep: {missing('matplotlib', PICTURE_FILE)}", file=sys.stderr)
    else:
        draw_report(picture, story)


def _print(story: "Story", page: Path, picture: Path | None) -> None:
    from rich.console import Console

    from samestep.report.terminal import print_story

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # nothing is folded or cut in a file or a pipe
    print_story(story, console, (page,) if picture is None else (page, picture))
