"""The options that say how a script is taken: the same for `samestep run` and `samestep verify`."""

from typing import Annotated

import typer

Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m`.")]
Wrap = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:DIM]",
        help="Share out this variable or class of a script that wraps nothing itself; its batches lie along DIM, or 0.",
    ),
]
Adopt = Annotated[
    bool | None,
    typer.Option(
        "--adopt/--no-adopt",
        help="Run SCRIPT as if alone, and share its DataParallel out; or leave ranks to it, as torchrun does. "
        "By default SCRIPT is read to find out.",
        show_default=False,
    ),
]
