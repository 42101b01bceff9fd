"""A program with `samestep run` as its only command, for tests to start and to kill."""

import sys

import typer

from samestep.cli.run import CONTEXT_SETTINGS, run
from samestep.errors import SamestepError


def main() -> None:
    app = typer.Typer()
    app.command(context_settings=CONTEXT_SETTINGS)(run)
    try:
        app()
    except SamestepError as error:
        print(f"samestep: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
