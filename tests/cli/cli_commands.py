"""The table of all commands by the words that call them, and the command as a user calls it."""

import os
import subprocess
import sys

import typer

from samestep.cli.main import app

SAMESTEP = (sys.executable, "-m", "samestep")


def samestep(*words, cwd, command=SAMESTEP, **variables):
    """Runs the command with further environment variables; a failure to end is a failure."""
    environment = {**os.environ, "COLUMNS": "200", **variables}
    words = [*map(str, (*command, *words))]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def write_table(path):
    """A table to fit, made by arithmetic: 200 rows; its path."""
    rows = [f"{i % 7},{(i * i) % 11},{(3 * i) % 5},{(i % 7) * 2 - (3 * i) % 5}" for i in range(200)]
    path.write_text("a,b,c,target\n" + "\n".join(rows) + "\n")
    return path


def commands(group, words=()):
    """Every command with the words that call it."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))
