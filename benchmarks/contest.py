"""The contest: all entrants are started once and then train in turns, one at a time.

The processes of an entrant live as long as the contest and block on a socket between turns. In a turn one entrant
trains some steps and reports their time. At the end, also after Ctrl-C or an error, closing the sockets ends the
processes; those that remain are killed.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
from roster import Entrant, threads_of

START_SECONDS = 300.0
TURN_SECONDS = 300.0
END_SECONDS = 15.0
TAIL_LINES = 12


class EntrantError(Exception):
    """An entrant died or exceeded its time; the message has the end of its output."""


class Contestant:
    """One entrant with its processes.

    Args:
        entrant: the entrant to start.
        num_processes: the number of processes that train together.
        folder: its working directory.
        arguments: for its script: the workload, the data.

    Attributes:
        frozen: whether its processes are stopped by a signal between turns, because they would use a core.
    """

    def __init__(self, entrant: Entrant, num_processes: int, folder: Path, arguments: Sequence[str]) -> None:
        self.entrant, self.num_processes = entrant, num_processes
        self.name = f"{entrant.name} with {num_processes} process{'es' * (num_processes > 1)}"
        self._address = folder / "gate"
        self.frozen = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._address))
        self._listener.listen()
        self._lines: list[tuple[socket.socket, IO[str]]] = []
        self._output = folder / "output"
        self._known: dict[int, psutil.Process] = {}
        command = entrant.command(num_processes, *arguments, "--gate", str(self._address))
        threads = str(threads_of(num_processes))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(entrant.benchmarks), str(entrant.checkout / "src"), *_paths()]),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TMPDIR": str(folder),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self.started = time.perf_counter()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> float:
        """Waits until all its processes are ready; returns the seconds from the start.

        Raises:
            EntrantError: it died, or took too long.
        """
        while len(self._lines) < self.num_processes:
            self._await(self._listener, self.started + START_SECONDS)
            line, _ = self._listener.accept()
            self._lines.append((line, line.makefile("r", encoding="ascii")))
        self._hear(self.started + START_SECONDS)
        seconds = time.perf_counter() - self.started
        self.processes()
        return seconds

    def take_turn(self, num_steps: int) -> float:
        """Runs a number of steps; returns the microseconds per step of the slowest process.

        Raises:
            EntrantError: it died, or took too long.
        """
        if self.frozen:
            self._signal(signal.SIGCONT)
        for line, _ in self._lines:
            with contextlib.suppress(ConnectionError):
                line.sendall(f"go {num_steps}\n".encode("ascii"))
        seconds = max(self._hear(time.perf_counter() + TURN_SECONDS))
        if self.frozen:
            self._signal(signal.SIGSTOP)
        return seconds / num_steps * 1e6

    def freeze(self) -> None:
        """Stops its processes by a signal, now and between all later turns."""
        self.frozen = True
        self._signal(signal.SIGSTOP)

    def processes(self) -> list[psutil.Process]:
        """Its living processes: the command and all its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (root := psutil.Process(self._process.pid), *root.children(recursive=True)):
                self._known.setdefault(process.pid, process)
        return [process for process in self._known.values() if _is_alive(process)]

    def cpu_seconds(self) -> float:
        """The processor time used by its processes."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def cut(self) -> None:
        """Closes its sockets, which ends its processes."""
        if self.frozen:
            self._signal(signal.SIGCONT)
        self.processes()
        for line, text in self._lines:
            text.close()
            line.close()
        self._listener.close()
        if not self._lines:
            self._process.terminate()

    def end(self) -> None:
        """Waits for the end of its processes, and kills those that remain."""
        _, left = psutil.wait_procs(self.processes(), timeout=END_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=END_SECONDS)
        self._process.wait()

    def _hear(self, deadline: float) -> list[float]:
        """Reads one message from each process: its seconds."""
        seconds = []
        for line, text in self._lines:
            self._await(line, deadline)
            try:
                said = text.readline().split()
            except ConnectionError:
                said = []
            if len(said) != 2:
                raise EntrantError(f"{self.name} died:\n{self._last_words()}")
            pid = int(said[0])
            with contextlib.suppress(psutil.NoSuchProcess):
                self._known.setdefault(pid, psutil.Process(pid))
            seconds.append(float(said[1]))
        return seconds

    def _signal(self, signum: signal.Signals) -> None:
        """Sends a signal to all its processes."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def _await(self, source: socket.socket, deadline: float) -> None:
        """Waits until something can be read."""
        while not select.select([source], [], [], 0.2)[0]:
            if self._process.poll() is not None:
                raise EntrantError(f"{self.name} ended with code {self._process.returncode}:\n{self._last_words()}")
            if time.perf_counter() > deadline:
                raise EntrantError(f"{self.name} did not come back in time:\n{self._last_words()}")

    def _last_words(self) -> str:
        """The end of its output, after the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-TAIL_LINES:]) or "(it said nothing)"


@contextlib.contextmanager
def contest(
    entrants: Sequence[tuple[Entrant, int]], arguments: Sequence[str], folder: Path, at_once: int = 2
) -> Iterator[tuple[list[Contestant], list[tuple[Entrant, int, str]]]]:
    """Starts entrants; yields the ready ones, and the failed ones with the reason. Ends all of them.

    Args:
        entrants: entrants with their numbers of processes.
        arguments: arguments of all scripts.
        folder: the parent of their working directories.
        at_once: the number of entrants that start at the same time.
    """
    ready: list[Contestant] = []
    failed: list[tuple[Entrant, int, str]] = []
    everyone: list[Contestant] = []
    rising: list[Contestant] = []
    waiting = list(entrants)
    try:
        while waiting or rising:
            while waiting and len(rising) < at_once:
                entrant, num_processes = waiting.pop(0)
                own = folder / str(len(everyone))
                own.mkdir()
                contestant = Contestant(entrant, num_processes, own, arguments)
                everyone.append(contestant)
                rising.append(contestant)
            contestant = rising.pop(0)
            try:
                contestant.wait_until_ready()
                ready.append(contestant)
            except EntrantError as error:
                failed.append((contestant.entrant, contestant.num_processes, str(error)))
        yield ready, failed
    finally:
        end_all(everyone)


def end_all(contestants: Sequence[Contestant]) -> None:
    """Ends entrants: closes all sockets first, then waits for each."""
    for contestant in contestants:
        contestant.cut()
    for contestant in contestants:
        contestant.end()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder for sockets, data and the files of entrants."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def busy_while_paused(contestants: Sequence[Contestant], seconds: float) -> dict[str, float]:
    """The percentage of a core that each entrant uses while all of them wait."""
    before = {contestant.name: contestant.cpu_seconds() for contestant in contestants}
    start = time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - start
    return {c.name: round((c.cpu_seconds() - before[c.name]) / elapsed * 100, 1) for c in contestants}


def rotated(things: Sequence[Any], number: int) -> list[Any]:
    """The sequence rotated by a number of places: each round begins with another entrant."""
    start = number % max(len(things), 1)
    return [*things[start:], *things[:start]]


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _paths() -> list[str]:
    """The entries of PYTHONPATH."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
