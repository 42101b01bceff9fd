"""The program `samestep`, also called by `python -m samestep`: starts what takes longest, then the command."""

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from samestep.comm.environment import read_environment, torchrun_defaults
from samestep.devices.portable import chosen_portable, portable_variables, why_not_portable
from samestep.errors import UsageError
from samestep.launcher.os_processes import EarlyServer, held_signals, open_standard_streams, server_variables

WITH_WORKERS = ("run", "train")
WITHOUT_SERVER = ("--help", "--nnodes", "--num-threads", "--rdzv", "--start-method")
"""Options of runs that have no fork server, or one with other variables."""


def main() -> None:
    """Runs the command, whose fork server, if it will need one, imports torch meanwhile."""
    open_standard_streams()
    server = None
    starts = _starts_workers(sys.argv[1:])
    if starts or not {*sys.argv[1:2]} & {*WITH_WORKERS}:  # torchrun, and a rank, have handlers of their own
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                signal.signal(signum, _stop)  # an exception, which ends the child processes of a command
    try:
        if starts:
            with held_signals():
                portable = portable_variables("cpu", _is_portable(sys.argv[1:]))
                server = EarlyServer({**server_variables(1), **portable})
        from samestep.cli.main import main as run_command

        run_command(server)
    finally:
        if server is not None:
            server.close()


def _is_portable(words: Sequence[str]) -> bool:
    """Whether the workers of a command line most likely have portable kernels; as above."""
    asked = False if "--no-portable" in words else True if "--portable" in words else None
    on_cpus = "cpu" in " ".join(words) or not any(Path("/dev").glob("nvidia[0-9]*"))
    with suppress(UsageError):
        by_default = on_cpus and (words[0] == "train" or "samestep.recipes." in " ".join(words))
        return bool(chosen_portable("cpu", asked, by_default)) and why_not_portable("cpu") is None
    return False


def _stop(signum: int, _frame: FrameType | None) -> NoReturn:
    """Ends the program as the supervisor does."""
    if signum == signal.SIGHUP:  # a terminal that is closed sends two, and the second would cut the clean-up short
        signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)


def _starts_workers(words: Sequence[str]) -> bool:
    """Whether a command line most likely starts workers of this machine; a wrong guess costs time and nothing else."""
    if sys.platform != "linux" or len(words) < 2 or words[0] not in WITH_WORKERS:
        return False
    if any(word.replace("_", "-").startswith(WITHOUT_SERVER) for word in words):
        return False
    try:
        return read_environment().launcher == "none" and not torchrun_defaults()
    except UsageError:  # the command reports it
        return False


if __name__ == "__main__":
    main()
