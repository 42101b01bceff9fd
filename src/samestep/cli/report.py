"""`samestep report`: runs in the terminal, as a page, and their losses as a picture."""

from pathlib import Path
from typing import Annotated

import typer

from samestep.checkpoint.run_folder import PICTURE_FILE
from samestep.extras import is_installed, missing
from samestep.text import json_text, make_console, notify

PAGE_FILE = "report.html"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders; several are laid over each other."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help=f"The folder for {PAGE_FILE} and {PICTURE_FILE}; the first run's folder by default."),
    ] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead.")] = False,
) -> None:
    """Reports on runs: curves, throughput, where the time goes, events, and what the ledger proves.

    Writes one HTML page that needs neither network nor server, and a picture of the losses. A run may be under way.
    """
    from samestep.errors import RunFolderError
    from samestep.files import make_folder, replacing
    from samestep.report.page import loss_table, make_page
    from samestep.report.run_summary import make_report
    from samestep.runs.curves import draw_losses

    found = make_report(runs)
    folder = runs[0] if output is None else output
    page, picture = folder / PAGE_FILE, folder / PICTURE_FILE
    written = [page]
    try:
        make_folder(folder)
        with replacing(page) as temporary:
            temporary.write_bytes(make_page(found).encode(errors="backslashreplace"))
        if is_installed("matplotlib"):
            draw_losses(picture, [run.name for run in found.runs], loss_table(found.runs))
            written.append(picture)
        else:
            notify(missing("matplotlib", PICTURE_FILE))
    except RunFolderError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise RunFolderError(f"cannot write to {folder}: {reason}; choose another folder with --output") from error
    if as_json:
        files = {"page": str(page), "picture": str(picture) if picture in written else None}
        print(json_text(found.as_json() | files, default=str))
    else:
        from samestep.report.terminal import print_report

        print_report(found, make_console(), written)
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
