"""The speaker: what the leading rank prints reaches the terminal, even after the one started as rank 0 is lost."""

import codecs
import contextlib
import sys
from typing import Literal

from samestep.launcher.workers import Worker

Stream = Literal["stdout", "stderr"]


class Speaker:
    """Passes on what the worker prints that leads in rank 0's place, to this process's stream of the same name."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._decoders: dict[Stream, codecs.IncrementalDecoder] = {}

    def follow(self, leader: Worker) -> None:
        """Passes on what the leader prints from now on; one that was started as rank 0 prints by itself."""
        if leader is not self._worker and leader.place.rank > 0:
            self._worker = leader
            decoder = codecs.getincrementaldecoder("utf-8")
            self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}

    def hear(self, worker: Worker, data: bytes, name: Stream) -> None:
        """Passes on what a worker has printed, if it is the leader."""
        if worker is self._worker and data:
            stream = sys.stdout if name == "stdout" else sys.stderr
            with contextlib.suppress(BrokenPipeError):
                stream.write(self._decoders[name].decode(data))
                stream.flush()
