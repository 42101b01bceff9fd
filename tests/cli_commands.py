"""The table of all commands by the words that call them, and the command as a user calls it."""

import os
import signal
import subprocess
import sys

import psutil
import typer

from samestep.cli.main import app

SAMESTEP = (sys.executable, "-m", "samestep")


def samestep(*words, cwd, command=SAMESTEP, timeout=240, **variables):
    """Runs the command with further environment variables; one that does not end fails with where its ranks are."""
    environment = {**os.environ, "COLUMNS": "200", **variables}
    words = [*map(str, (*command, *words))]
    options = {"cwd": cwd, "env": environment, "text": True}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as running:
        try:
            stdout, stderr = running.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            stdout, stderr = _ended(running)
            raise AssertionError(f"{' '.join(words)} did not end within {timeout} s\n{stdout}\n{stderr}") from None
        except BaseException:
            running.kill()
            raise
    return subprocess.CompletedProcess(words, running.returncode, stdout, stderr)


def _ended(running):
    """Ends a command whose ranks hang, by the signal at which they write their stacks; what it printed."""
    for process in psutil.Process(running.pid).children(recursive=True):
        try:
            if "samestep worker" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGABRT)
        except psutil.Error:
            continue
    try:
        return running.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        running.kill()
        return running.communicate()


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
