"""The table of all commands of the command line, by the words that call them."""

import typer

from samestep.cli.main import app


def commands(group, words=()):
    """Every command with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))
