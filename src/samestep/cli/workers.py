"""The options that say where workers run and how they start: the same for `samestep train`, `run` and `verify`."""

from typing import Annotated

import typer

from samestep.recipes.options import MAX_THREADS

_HELP = "CPU threads a worker; part of what decides the bits; 1 by default."

Devices = Annotated[
    str | None,
    typer.Option(
        metavar="SPEC", help='auto (the default), 4 (how many), "0,4" (which), cuda:0, cpu:2, free:2 (idle ones).'
    ),
]
NumThreads = Annotated[int, typer.Option(min=1, max=MAX_THREADS, help=_HELP, show_default=False)]
NumThreadsOrRecorded = Annotated[int | None, typer.Option(help=_HELP)]
"""None is what a run that goes on had, else one; checked with the recipe's other options."""
StartMethod = Annotated[
    str | None, typer.Option(metavar="fork|spawn", help="How workers are started; fork where it is safe.")
]
