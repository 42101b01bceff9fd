"""Nodes played by agents on this machine, started as real programs; nothing of them may be left."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

MARK = "SAMESTEP_TEST_MARK"
SECONDS = 120.0
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ended:
    """What came of one program."""

    code: int
    stdout: str
    stderr: str

    @property
    def digest(self) -> str:
        """The digest that `samestep train` printed."""
        return next(line.split()[1] for line in self.stdout.splitlines() if line.startswith("digest"))


@dataclass
class Nodes:
    """Starts `samestep` as the agents of nodes, in one folder, as if all saw the same file system."""

    folder: Path
    variables: dict[str, str]
    port: int
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"localhost:{self.port}"

    def script(self, text: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def start(self, *arguments: str | Path, prefix: Sequence[str] = (), **variables: str) -> "subprocess.Popen[str]":
        """Starts `samestep ARGUMENTS`."""
        return self.start_program([*prefix, sys.executable, "-m", "samestep", *map(str, arguments)], **variables)

    def start_program(self, command: Sequence[str], **variables: str) -> "subprocess.Popen[str]":
        number = len(self.started)
        with open(self.folder / f"out-{number}", "w") as out, open(self.folder / f"err-{number}", "w") as err:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.variables, **variables},
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def end_of(self, process: "subprocess.Popen[str]") -> Ended:
        """Waits for the end of a program."""
        code = process.wait(timeout=SECONDS)
        number = self.started.index(process)
        return Ended(code, *((self.folder / f"{name}-{number}").read_text() for name in ("out", "err")))

    def run(self, *arguments: str | Path, **variables: str) -> Ended:
        return self.end_of(self.start(*arguments, **variables))

    def start_all(
        self, count: int, before: Sequence[str], after: Sequence[str | Path]
    ) -> list["subprocess.Popen[str]"]:
        """Starts `samestep BEFORE --nnodes COUNT … AFTER` on so many nodes, which have numbers."""
        meeting = ["--nnodes", str(count), "--master-addr", "localhost", "--master_port", str(self.port)]
        return [self.start(*before, *meeting, "--node-rank", str(rank), *after) for rank in range(count)]

    def run_all(self, count: int, before: Sequence[str], after: Sequence[str | Path]) -> list[Ended]:
        return [self.end_of(process) for process in self.start_all(count, before, after)]

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """Every process of the nodes that is alive, wherever it was reparented to."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.variables[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    temporary, folder = tmp_path / "temporary", tmp_path / "work"
    temporary.mkdir()
    folder.mkdir()
    variables = {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
    source = str(Path(__file__).resolve().parents[2] / "src")
    variables |= {MARK: uuid.uuid4().hex, "TMPDIR": str(temporary), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    started = Nodes(folder, variables, free_port())
    yield started
    deadline = time.monotonic() + 3.0
    while (left := started.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.send_signal(signal.SIGKILL)
    for child in started.started:
        child.wait(timeout=10)
    assert not left, f"processes of the nodes are left: {left}"
    files = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    assert not files, "temporary files of the nodes are left"
    with socket.create_server(("", started.port)):  # nobody listens there any more
        pass
