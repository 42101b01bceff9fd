"""Ranks pass by `main_first` in their order; the first one dies in it: `main_first_script.py JSON`."""

import json
import os
import signal
import sys
from pathlib import Path

from samestep.comm.environment import read_settings
from samestep.run.run import Run


def main():
    run = Run(32, 8, 3)
    slot = read_settings().slot
    with run.main_first():
        with (Path(json.loads(sys.argv[1])["folder"]) / "log").open("a") as log:
            log.write(f"{slot}\n")
        if slot == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    run.barrier()


if __name__ == "__main__":
    main()
