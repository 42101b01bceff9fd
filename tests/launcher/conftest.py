"""Runs are started as real programs, marked by a variable that all their processes inherit: nothing may be left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

MARK = "SAMESTEP_TEST_MARK"
SECONDS = 60.0


@dataclass
class Starter:
    """Starts `samestep run` in a folder of its own."""

    folder: Path
    mark: str
    variables: dict[str, str]

    def script(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        program = Path(__file__).with_name("samestep_run.py")
        return self.start_program(program, *arguments)

    def start_program(self, program: str | Path, *arguments: str | Path) -> "subprocess.Popen[str]":
        code = (
            "import runpy, signal, sys;"
            "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a background job's is ignored
            "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code, str(program), *map(str, arguments)],
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        try:
            stdout, stderr = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def wait_for(self, name: str) -> None:
        """Waits until the run has written a file."""
        deadline = time.monotonic() + SECONDS
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """Every process of our runs that is alive, wherever it was reparented to."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_until_gone(self, seconds: float) -> list[psutil.Process]:
        """Waits until no process of our runs is left; returns those that are."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    mark = uuid.uuid4().hex
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    ours = ("RANK", "WORLD_SIZE", "PYTHONPATH")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    folder = tmp_path / "work"
    folder.mkdir()
    started = Starter(folder, mark, {**variables, MARK: mark, "TMPDIR": str(temporary)})
    yield started
    left = started.wait_until_gone(1.0)
    for process in left:
        process.send_signal(signal.SIGKILL)
    assert not left, "processes of the run are left"
    names = [path.name for path in temporary.iterdir()]
    files = [name for name in names if not name.startswith("torchinductor_")]  # that is torch's own cache
    assert not files, "temporary files of the run are left"


@pytest.fixture
def same_descriptors() -> Iterator[None]:
    """For runs that are supervised by the test's own process: no descriptor of it stays open."""
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    yield
    if before:
        assert set(os.listdir("/proc/self/fd")) == before
