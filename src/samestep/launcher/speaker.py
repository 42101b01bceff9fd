"""The speaker: what the leading rank prints reaches the terminal, even after the one started as rank 0 is lost."""

import codecs
import contextlib
import os
import sys

from samestep.launcher.workers import Worker


class Speaker:
    """Passes on what the worker prints that leads in rank 0's place; standard output and error alike, to stdout."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def follow(self, leader: Worker) -> None:
        """Passes on what the leader prints from now on, and what its log has got since the last call."""
        if leader is not self._worker and leader.place.rank > 0:
            self.drain()
            self._worker = leader
            self._decoder.reset()
            if leader.log is not None:
                with contextlib.suppress(OSError):
                    self._offset = os.stat(leader.log).st_size
        self.drain()

    def hear(self, worker: Worker, data: bytes) -> None:
        """Passes on what a worker has printed, if it is the leader."""
        if worker is self._worker and data:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.write(self._decoder.decode(data))
                sys.stdout.flush()

    def drain(self) -> None:
        """Passes on what the leader's log has got since the last call."""
        if self._worker is None or self._worker.log is None:
            return
        with contextlib.suppress(OSError), open(self._worker.log, "rb") as file:
            file.seek(self._offset)
            data = file.read()
            self._offset += len(data)
            self.hear(self._worker, data)
