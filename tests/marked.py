"""Runs as real programs, marked by a variable that all their processes inherit: nothing of them may be left."""

import os
import random
import signal
import socket
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

MARK = "SAMESTEP_TEST_MARK"
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
SECONDS = 120.0


@dataclass
class Marked:
    """A folder for scripts and the variables of programs that are started in it."""

    folder: object
    variables: dict

    def script(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def wait_for(self, name):
        """Waits until the run has written a file."""
        deadline = time.monotonic() + SECONDS
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.02)

    def processes(self):
        """Every living process of the runs, whatever its parent is."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.variables[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_until_gone(self, seconds):
        """Waits until no process of the runs is left; returns those that are."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def free_port():
    """A free port, none of those that the system gives to outgoing connections: one could take it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


@contextmanager
def marked(kind, tmp_path, seconds, **variables):
    """Makes a `Marked` of this kind, and checks at the end that neither processes nor temporary files are left."""
    temporary, folder = tmp_path / "temporary", tmp_path / "work"
    temporary.mkdir()
    folder.mkdir()
    clean = {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
    runs = kind(folder, {**clean, MARK: uuid.uuid4().hex, "TMPDIR": str(temporary), **variables})
    yield runs
    left = runs.wait_until_gone(seconds)
    for process in left:
        process.send_signal(signal.SIGKILL)
    assert not left, f"processes of the run are left: {left}"
    files = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache
    assert not files, "temporary files of the run are left"
