"""The gate between two steps of an entrant: it blocks until the entrant's turn and measures its steps.

Each process of an entrant calls `Gate.step()` after each optimizer step. After the warm-up the gate reports over a Unix
socket that it is ready and blocks. On "go 20" it lets 22 steps run, of which the first two are not measured because
caches are cold after a pause, reports the time of the others and blocks again. When the socket closes the process ends,
so no entrant outlives the benchmark.
"""

import os
import socket
import time

SETTLING_STEPS = 2
STEPS_BETWEEN_LINES = 100


class Gate:
    """The gate of one process.

    Args:
        address: the path of the benchmark's socket; None to run without turns and print the time of steps.
        warm_up: steps before the first pause.
    """

    def __init__(self, address: str | None, warm_up: int) -> None:
        self._line: socket.socket | None = None
        if address is not None:
            self._line = socket.socket(socket.AF_UNIX)
            self._line.connect(address)
            self._said = self._line.makefile("r", encoding="ascii")
        self._timed = 0
        self._left = warm_up
        self._start = time.perf_counter()

    def step(self) -> None:
        """Counts a finished step: a decrement, unless a turn begins or ends."""
        self._left -= 1
        if self._left == 0:
            self._turn()

    def _turn(self) -> None:
        """Starts the clock after the settling steps, or reports the time and waits after a turn."""
        if self._timed:
            self._left, self._timed, self._start = self._timed, 0, time.perf_counter()
            return
        seconds = time.perf_counter() - self._start
        if self._line is None:
            print(f"{seconds / STEPS_BETWEEN_LINES * 1e6:.0f} microseconds a step", flush=True)
            self._timed = STEPS_BETWEEN_LINES
        else:
            self._timed = self._wait(self._line, seconds)
        self._left = SETTLING_STEPS

    def _wait(self, line: socket.socket, seconds: float) -> int:
        """Reports the time and blocks until the next turn; returns its number of steps."""
        try:
            line.sendall(f"{os.getpid()} {seconds:.9f}\n".encode("ascii"))
            said = self._said.readline().split()
        except ConnectionError:
            said = []
        if len(said) != 2:
            # The benchmark has ended. Exit handlers of the frameworks would wait for other processes.
            os._exit(0)
        return int(said[1])
