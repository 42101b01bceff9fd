"""The command line's front door: registers the commands, and turns errors into sentences."""

import errno
import os
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from samestep.cli.options import SPELLINGS, Command, CommandGroup
from samestep.errors import SamestepError, UsageError
from samestep.files import NO_SPACE
from samestep.launcher.os_processes import EarlyServer
from samestep.text import discard, notify, readable
from samestep.version import __version__

COMMANDS = (
    *("verify", "explain", "run", "train", "devices", "doctor"),
    *("runs", "report", "replay", "ledger", "export", "audit", "attest"),
)
OPTIONS_FIRST = {"allow_interspersed_args": False, **SPELLINGS}  # those after the script are the script's
SETTINGS = {"run": OPTIONS_FIRST, "verify": OPTIONS_FIRST, "train": {"ignore_unknown_options": True, **SPELLINGS}}


class Commands(CommandGroup):
    """The commands; each module is imported when its command is asked for, as a start waits for every import."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            self.commands.update({name: self.get_command(ctx, name) for name in COMMANDS})  # to be suggested
        elif cmd_name not in self.commands:
            module = import_module(f"samestep.cli.{cmd_name}")
            own = getattr(module, "app", None)
            if own is None:
                own = typer.Typer(add_completion=False, rich_markup_mode="rich")
                kind = getattr(module, f"{cmd_name.title()}Command", Command)
                own.command(cmd_name, cls=kind, context_settings=SETTINGS.get(cmd_name))(getattr(module, cmd_name))
            command = typer.main.get_command(own)
            command.name = cmd_name
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)


app = typer.Typer(
    name="samestep",
    cls=Commands,
    help="One training step, any devices, the same model. Begin with: samestep verify train.py",
    no_args_is_help=True,
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
    """One training step, any devices, the same model. Begin with: samestep verify train.py"""


def main(server: EarlyServer | None = None) -> None:
    """Runs the command; 0 done, 1 a failure, 2 bad usage, 128 + signal when stopped by one."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a name that is no UTF-8 can be printed
    try:
        if any("\0" in word for word in sys.argv):
            raise UsageError("got a word with a NUL character in it, which no name and no value has")
        try:
            os.getcwd()
        except OSError as error:  # torch cannot be loaded there
            raise UsageError(f"the working folder cannot be used ({error.strerror}): change to another") from error
        code = app(prog_name="samestep", standalone_mode=False, obj=server)
        sys.stdout.flush()  # else a full disk would be met as the interpreter ends
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except SamestepError as error:
        notify(f"error: {error}")
        sys.exit(2 if _is_too_long(error.__cause__) else error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno not in {errno.EPIPE, *NO_SPACE}:
            raise
        if error.filename is None:
            discard(sys.stdout)  # which Python would try to write once more at its end, and exit with 120
        if error.errno == errno.EPIPE:  # of `| head`, say
            sys.exit(1)
        place = "what is printed cannot be written" if error.filename is None else os.fsdecode(error.filename)
        reason = f"{place}: {error.strerror}; name another file or folder"
        notify(f"error: {readable(reason)}")
        sys.exit(2 if _is_too_long(error) else 1)
    except Exception as error:
        # A usage error of click, or of the copy of it inside newer versions of typer: it is recognised by its methods.
        if not hasattr(error, "show") or not hasattr(error, "exit_code"):
            raise
        if hasattr(error, "message"):
            error.message = readable(error.message)
        error.show()
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _is_too_long(error: BaseException | None) -> bool:
    """Whether a name is longer than the file system takes, so that the user is to give another."""
    return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
