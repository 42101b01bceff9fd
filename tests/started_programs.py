"""Programs that tests start in a folder, watch, and run once more in their own process."""

import os
import runpy
import subprocess
import sys
import time

from samestep.runs.ledger import from_line

SECONDS = 120
_UNBLOCKED = (  # a shell may start what it runs with SIGINT ignored
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


class Programs:
    """Starts `train.py` in a folder, once or as ranks of several; `close` kills what is still there."""

    def __init__(self, folder, program):
        self.folder, self._started = folder, []
        (folder / "train.py").write_text(program)

    def start(self, *words, command=("-c", _UNBLOCKED, "train.py"), **variables):
        process = subprocess.Popen(
            [sys.executable, *command, *words],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

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
