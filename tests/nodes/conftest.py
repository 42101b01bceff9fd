"""Nodes: agents on this machine, started as real programs in one folder, as if all had the same file system."""

import socket
import sys
import time
from dataclasses import dataclass, field

import pytest
from cli_commands import start
from marked import SECONDS, Marked, free_port, marked


@dataclass(frozen=True)
class Ended:
    """The end of one program."""

    code: int
    stdout: str
    stderr: str

    @property
    def digest(self):
        """The digest that `samestep train` printed."""
        return next(line.split()[1] for line in self.stdout.splitlines() if line.startswith("digest"))


@dataclass
class Nodes(Marked):
    """Starts `samestep` as the agents of nodes."""

    port: int = field(default_factory=free_port)
    started: list = field(default_factory=list)

    @property
    def endpoint(self):
        return f"localhost:{self.port}"

    def script(self, text, name="train.py"):
        return super().script(name, text)

    def start(self, *arguments, prefix=(), folder=None, **variables):
        """Starts `samestep ARGUMENTS`."""
        return self.start_program(
            [*prefix, sys.executable, "-m", "samestep", *map(str, arguments)], folder, **variables
        )

    def start_program(self, command, folder=None, **variables):
        number = len(self.started)
        with open(self.folder / f"out-{number}", "w") as out, open(self.folder / f"err-{number}", "w") as err:
            environment = {**self.variables, **variables}
            process = start(command, folder or self.folder, environment, stdout=out, stderr=err)
        self.started.append(process)
        return process

    def worker(self, rank):
        """The process of a rank, by its title."""
        title = f"samestep worker {rank}/"
        (found,) = [process for process in self.processes() if "".join(process.cmdline()).startswith(title)]
        return found

    def wait_for_text(self, name, text):
        """Waits until a program has written a text to the file of its output."""
        deadline = time.monotonic() + SECONDS
        while text not in (self.folder / name).read_text():
            assert time.monotonic() < deadline, f"{text!r} did not appear"
            time.sleep(0.05)

    def end_of(self, process):
        """Waits for the end of a program."""
        code = process.wait(timeout=SECONDS)
        number = self.started.index(process)
        return Ended(code, *((self.folder / f"{name}-{number}").read_text() for name in ("out", "err")))

    def run(self, *arguments, **variables):
        return self.end_of(self.start(*arguments, **variables))

    def start_all(self, count, before, after, **variables):
        """Starts `samestep BEFORE --nnodes COUNT … AFTER` on so many nodes, which have numbers."""
        meeting = ["--nnodes", str(count), "--master-addr", "localhost", "--master_port", str(self.port)]
        return [self.start(*before, *meeting, "--node-rank", str(rank), *after, **variables) for rank in range(count)]

    def run_all(self, count, before, after, **variables):
        return [self.end_of(process) for process in self.start_all(count, before, after, **variables)]


@pytest.fixture
def nodes(tmp_path):
    with marked(Nodes, tmp_path, 3.0, OMP_NUM_THREADS="1") as started:
        yield started
    for child in started.started:
        child.wait(timeout=10)
    with socket.create_server(("", started.port)):  # the port is free again
        pass
