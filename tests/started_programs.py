"""Programs that tests start in a folder, watch, and run once more in their own process."""

import os
import runpy
import sys
import time
from subprocess import PIPE

from cli_commands import PYTHON, start

from samestep.runs.ledger import from_line

SECONDS = 120
UNBLOCKED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it\n"


class Programs:
    """Starts `train.py` in a folder, once or as ranks of several; `close` kills what is still there."""

    def __init__(self, folder, program):
        self.folder, self._started = folder, []
        (folder / "train.py").write_text(UNBLOCKED + program)

    def start(self, *words, command=("train.py",), **variables):
        environment, pipes = (
            {**os.environ, "OMP_NUM_THREADS": "1", **variables},
            dict.fromkeys(("stdout", "stderr"), PIPE),
        )
        self._started.append(start([*PYTHON, *command, *words], self.folder, environment, **pipes))
        return self._started[-1]

    def wait_for(self, *names):
        """Until these files are there."""
        deadline = time.monotonic() + SECONDS
        while not all((self.folder / name).exists() for name in names):
            for process in self._started:
                assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def entries(self, name="run"):
        """The entries of a run's ledger."""
        return [from_line(line) for line in (self.folder / name / "ledger.jsonl").read_bytes().splitlines()]

    def here(self, *words):
        """The digest of the program when it is run in this process, to its end."""
        before = os.getcwd(), sys.argv
        os.chdir(self.folder)
        sys.argv = ["train.py", *words]
        try:
            names = runpy.run_path("train.py")
        finally:
            os.chdir(before[0])
            sys.argv = before[1]
        names["run"].close()
        return names["trainer"].digest

    def close(self):
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
