"""The options that say what happens when a worker is lost: the same for `samestep train` and `samestep run`."""

from typing import Annotated

import typer

PANEL = "Lost workers"

MinDevices = Annotated[
    int,
    typer.Option("--min-devices", rich_help_panel=PANEL, metavar="N", help="With fewer devices left the run ends."),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        rich_help_panel=PANEL,
        metavar="N",
        help="How often all workers may be started again, from the newest checkpoint, when none is left to go on.",
    ),
]
HangTimeout = Annotated[
    float,
    typer.Option(
        "--hang-timeout-seconds",
        rich_help_panel=PANEL,
        metavar="SECONDS",
        help="A worker without a sign of life for so long is lost; its stack is kept in its log. 0 for never.",
    ),
]
Heal = Annotated[
    bool,
    typer.Option(
        "--heal/--no-heal",
        rich_help_panel=PANEL,
        help="Go on with the devices that are left when a worker is lost: the same bits.",
    ),
]
Replace = Annotated[
    bool,
    typer.Option(
        "--replace", rich_help_panel=PANEL, help="Start a new worker on the device of a lost one; counts as a restart."
    ),
]
