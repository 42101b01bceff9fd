"""The program `samestep`, also called by `python -m samestep`: starts what takes longest, then the command."""

import sys
from collections.abc import Sequence

from samestep.comm.environment import read_environment, torchrun_defaults
from samestep.errors import UsageError
from samestep.launcher.server_process import EarlyServer, server_variables

WITH_WORKERS = ("run", "train")
WITHOUT_SERVER = ("--help", "--nnodes", "--num-threads", "--rdzv", "--start-method")
"""Options of runs that have no fork server, or one with other variables."""


def main() -> None:
    """Runs the command, whose fork server, if it will need one, imports torch meanwhile."""
    server = EarlyServer(server_variables(1)) if _starts_workers(sys.argv[1:]) else None
    try:
        from samestep.cli.main import main as run_command

        run_command(server)
    finally:
        if server is not None:
            server.close()


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
