"""The table of all commands by the words that call them, and the command or a script as a user calls it."""

import json
import os
import signal
import subprocess
import sys
import time

import forked
import psutil
import typer

from samestep.cli.main import app
from samestep.devices.portable import CAPS, PORTABLE_VARIABLE
from samestep.launcher.job import TRAINING
from samestep.launcher.os_processes import server_variables

PYTHON = (sys.executable,)
SAMESTEP = (*PYTHON, "-m", "samestep")
IMPORTED = ("torch.distributed", "samestep.cli.main", "samestep.launcher.forkserver", *TRAINING)
AT_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "ATEN_", "SAMESTEP_PORTABLE", "TORCH")
"""How variables begin that are read at Python's start, or while torch is imported."""
STACK_SECONDS = 5.0
COMMAND = """
    import json, os, runpy, signal, socket, sys
    from samestep.devices.portable import CAPS
    from samestep.launcher import forkserver
    from samestep.launcher.os_processes import ServerProcess, TITLE_ROOM, held_signals

    imported, real = json.loads(sys.argv.pop(1)), ServerProcess.start

    def start(variables, start_method="fork"):  # a fork server as a fork of this process, which has torch
        wanted = {**os.environ, **variables}
        if start_method != "fork" or any(wanted.get(name) != imported.get(name) for name in {*variables, *CAPS}):
            return real(variables, start_method)
        ours, theirs = socket.socketpair()
        parent, end = str(os.getpid()), theirs.detach()
        with held_signals():
            pid = os.fork()
            if not pid:
                try:
                    os.setsid()
                    signal.set_wakeup_fd(-1)
                    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                        signal.signal(signum, signal.SIG_DFL)
                    os.closerange(3, end), os.closerange(end + 1, 1 << 16)
                    os.environ.update(variables)
                    sys.argv[1:] = [str(end), parent, start_method, TITLE_ROOM]
                    forkserver.main()
                finally:
                    os._exit(1)
        os.close(end)
        return ServerProcess(pid, ours)

    ServerProcess.start = start
    runpy.run_module("samestep", run_name="__main__", alter_sys=True)
"""
SCRIPT = """
    import os, runpy, sys

    sys.argv.pop(0)
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def samestep(*words, cwd, command=SAMESTEP, timeout=240, **variables):
    """Runs the command with further environment variables; one that does not end fails with where its ranks are."""
    environment, words = {**os.environ, "COLUMNS": "200", **variables}, [*map(str, words)]
    if _may_be_forked(command, words, environment):
        return _forked(command, words, cwd, timeout, environment)
    words = [*map(str, command), *words]
    options = {"cwd": cwd, "env": environment, "text": True}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as running:
        try:
            stdout, stderr = running.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _show_stacks([running.pid])
            running.kill()
            stdout, stderr = running.communicate()
            raise AssertionError(f"{' '.join(words)} did not end within {timeout} s\n{stdout}\n{stderr}") from None
        except BaseException:
            running.kill()
            raise
    return subprocess.CompletedProcess(words, running.returncode, stdout, stderr)


def _may_be_forked(command, words, environment):
    """Whether a command is the same as a fork of a process that has imported torch."""
    first = words[0] if words else ""
    is_ours = command == SAMESTEP and first in ("run", "verify", "train") and "--portable" not in words
    if not (is_ours or (command == PYTHON and first.endswith(".py"))):
        return False
    others = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
    others -= {*forked.AT_IMPORT} if "FAKE_CUDA_DEVICES" in environment else {"OMP_NUM_THREADS"}
    return not any(name.startswith(AT_START) for name in others)


def start(command, cwd, environment, **streams):
    """Starts a program in a session of its own, and does not wait for it; by a fork where that is the same."""
    command = [*map(str, command)]
    head = SAMESTEP if tuple(command[:3]) == SAMESTEP else PYTHON
    words = command[len(head) :]
    if tuple(command[: len(head)]) != head or not _may_be_forked(head, words, environment):
        return subprocess.Popen(command, cwd=cwd, env=environment, text=True, start_new_session=True, **streams)
    program, before, caps = _as_fork(head, words, environment)
    return forked.Program(program, [*before, *words], IMPORTED, environment, cwd, streams, **caps)


def _as_fork(command, words, environment):
    """The program that runs a command, what precedes its words, and the variables with which torch is imported.

    For `train` on CPUs, these are for portable kernels.
    """
    is_portable = words[0] == "train" and "FAKE_CUDA_DEVICES" not in environment and "--no-portable" not in words
    caps = {PORTABLE_VARIABLE: "1", **CAPS} if is_portable else {}
    own = {name: environment.get(name) for name in ("OMP_NUM_THREADS", "PYTHONHASHSEED")}
    head = () if command == PYTHON else (json.dumps({**server_variables(1), **caps, **own}),)
    return SCRIPT if command == PYTHON else COMMAND, head, caps


def _forked(command, words, cwd, timeout, environment):
    """The same by a fork of a process that has imported torch."""
    program, head, caps = _as_fork(command, words, environment)
    process = (*head, *words), environment, cwd
    try:
        (found,) = forked.run_all(program, [process], timeout, IMPORTED, on_timeout=_show_stacks, **caps)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{words} did not end within {timeout} s\n{error.output}\n{error.stderr}") from None
    return subprocess.CompletedProcess(words, *found)


def _show_stacks(pids):
    """Ends commands whose ranks hang, by the signal at which they write their stacks."""
    for process in [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]:
        try:
            if "samestep worker" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGABRT)
        except psutil.Error:
            continue
    time.sleep(STACK_SECONDS)


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
