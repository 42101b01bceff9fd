"""The command line's front door: registers the commands, and turns errors into sentences."""

import errno
import os
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from samestep.cli import ledger
from samestep.cli.devices import devices
from samestep.cli.doctor import doctor
from samestep.cli.estimate import estimate
from samestep.cli.export import export
from samestep.cli.options import SPELLINGS
from samestep.cli.profile import profile
from samestep.cli.replay import replay
from samestep.cli.report import report
from samestep.cli.run import CONTEXT_SETTINGS, run
from samestep.cli.runs import runs
from samestep.cli.train import train
from samestep.cli.verify import verify
from samestep.errors import SamestepError, UsageError
from samestep.text import readable
from samestep.version import __version__

app = typer.Typer(
    name="samestep",
    help="One training step, any devices, the same model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={**SPELLINGS},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One training step, any devices, the same model."""


app.command("devices")(devices)
app.command("train")(train)
app.command("run", context_settings=CONTEXT_SETTINGS)(run)
app.command("verify", context_settings=CONTEXT_SETTINGS)(verify)
app.command("estimate")(estimate)
app.command("replay")(replay)
app.command("profile")(profile)
app.command("report")(report)
app.command("runs")(runs)
app.command("doctor")(doctor)
app.command("export")(export)
app.add_typer(ledger.app, name="ledger")


def main() -> None:
    """Runs the command; 0 done, 1 a failure, 2 bad usage, 128 + signal when stopped by one."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a name that is no UTF-8 can be printed
    try:
        if any("\0" in word for word in sys.argv):
            raise UsageError("got a word with a NUL character in it, which no name and no value has")
        code = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except SamestepError as error:
        print(f"samestep: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None:
            raise
        reason = f"{os.fsdecode(error.filename)}: {error.strerror}; name another file or folder"
        print(f"samestep: error: {readable(reason)}", file=sys.stderr)
        sys.exit(2 if error.errno == errno.ENAMETOOLONG else 1)
    except Exception as error:
        # A usage error of click, or of the copy of it inside newer versions of typer: it is recognised by its methods.
        if not hasattr(error, "show") or not hasattr(error, "exit_code"):
            raise
        if hasattr(error, "message"):
            error.message = readable(error.message)
        error.show()
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
