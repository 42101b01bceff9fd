"""The gate: where an entrant waits between two steps until it is its turn, and where its steps are timed.

Every process of an entrant holds a gate and calls `step()` after each optimizer step. After the warm-up it says over a
Unix socket that it is ready, and sleeps there. "go 20" lets 22 steps run: the first two are not timed, since caches
are cold after a pause; then it tells how long the others took, and sleeps again. An end of the line ends the process,
so no entrant outlives the benchmark.
"""

import os
import socket
import time

SETTLING_STEPS = 2
STEPS_BETWEEN_LINES = 100


class Gate:
    """One process's end of the line.

    Args:
        address: the path of the benchmark's socket; None to run freely and print the time of a step now and then.
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
        """To be called after each finished step: a decrement, unless a turn begins or ends."""
        self._left -= 1
        if self._left == 0:
            self._turn()

    def _turn(self) -> None:
        """The steps that were allowed are done: start the clock, or tell the time and wait."""
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
        """Tells the time and sleeps until the next turn; returns how many steps it is for."""
        try:
            line.sendall(f"{os.getpid()} {seconds:.9f}\n".encode("ascii"))
            said = self._said.readline().split()
        except ConnectionError:
            said = []
        if len(said) != 2:
            # The benchmark is over, or gone. Nothing of the frameworks' own ends must run: it would wait for others.
            os._exit(0)
        return int(said[1])
