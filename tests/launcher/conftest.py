"""Runs are started as real programs, `samestep run` among them."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_commands import SAMESTEP, start
from forked_pool import forked_pool
from marked import SECONDS, Marked, marked

import samestep
from samestep.launcher.worker_pool import ServerPool

MAIN = Path(samestep.__file__).with_name("__main__.py")
RUN = (
    "import runpy, signal, sys;"
    "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a background job's is ignored
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass
class Starter(Marked):
    """Starts `samestep run` in a folder of its own, as a fork of a process that has torch, where that is the same."""

    def start(self, *arguments, command=(*SAMESTEP, "run"), stdout=subprocess.PIPE):
        return start((*command, *arguments), self.folder, self.variables, stdout=stdout, stderr=subprocess.PIPE)

    def start_program(self, program, *arguments):
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(program), *map(str, arguments)],
            cwd=self.folder,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments):
        process = self.start(*arguments)
        try:
            stdout, stderr = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.fixture
def starter(tmp_path):
    with marked(Starter, tmp_path, 1.0) as started:
        yield started


@pytest.fixture
def same_descriptors():
    """For runs that are supervised by the test's own process: no descriptor of it stays open."""
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    yield
    if before:
        assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def forks(monkeypatch):
    """Fork servers are forks of this process, which has imported torch."""
    monkeypatch.setattr(ServerPool, "executed", lambda variables, preload, *_: forked_pool(None, variables, preload))
