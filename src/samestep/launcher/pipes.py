"""The supervisor's side of pipes: reading what is there, and passing it on to this process's own streams."""

import codecs
import os
import sys
from collections.abc import Callable
from typing import Literal

MAX_READ = 1 << 20


def relay_to(name: Literal["stdout", "stderr"]) -> Callable[[int], bool]:
    """A handler that prints what it reads by this process's stream of that name."""
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
