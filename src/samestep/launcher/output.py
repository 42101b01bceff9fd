"""Output of workers: pipes, what of it reaches this process's own streams, and the folder for logs."""

import codecs
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from samestep.errors import RunFolderError
from samestep.launcher.workers import Worker

MAX_READ = 1 << 20
Stream = Literal["stdout", "stderr"]


class StdoutRelay:
    """Prints by this process's streams the output of the worker that leads once the first rank 0 has failed."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._decoders: dict[Stream, codecs.IncrementalDecoder] = {}

    def follow(self, leader: Worker) -> None:
        """Relays the leader from now on; a worker that was started as rank 0 prints by itself."""
        if leader is not self._worker and leader.place.rank > 0:
            self._worker = leader
            decoder = codecs.getincrementaldecoder("utf-8")
            self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}

    def receive(self, worker: Worker, data: bytes, name: Stream) -> None:
        """Prints a worker's output if it is the leader."""
        if worker is self._worker and data:
            stream = sys.stdout if name == "stdout" else sys.stderr
            with contextlib.suppress(BrokenPipeError):
                stream.write(self._decoders[name].decode(data))
                stream.flush()


def relay_to(name: Stream) -> Callable[[int], bool]:
    """A handler of a descriptor that prints all that it reads by this process's stream of that name."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def relay(fd: int) -> bool:
        data = read_available(fd)
        stream = sys.stdout if name == "stdout" else sys.stderr
        stream.write(decoder.decode(data or b"", data is None))
        stream.flush()
        return data is not None

    return relay


def read_available(fd: int) -> bytes | None:
    """All that a pipe holds now; None at its end."""
    data = b""
    try:
        while len(data) < MAX_READ:
            received = os.read(fd, 65_536)
            if not received:
                return data or None
            data += received
    except BlockingIOError:
        pass
    except OSError:
        return data or None
    return data


def make_log_dir(log_dir: str | None) -> Path | None:
    """Makes the folder for logs if it is not there."""
    if log_dir is None:
        return None
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot make the log folder {log_dir}: {error.strerror}; choose another folder (--log-dir, --run-dir)"
        raise RunFolderError(reason) from error
    return Path(log_dir)


def begin_log(path: str, *, anew: bool) -> None:
    """Makes a worker's log, empty or to be appended to."""
    try:
        with open(path, "wb" if anew else "ab"):
            pass
    except OSError as error:
        reason = f"cannot write the log {path}: {error.strerror}; choose another folder (--log-dir)"
        raise RunFolderError(reason) from error
