"""The channel from a worker to its supervisor: events, one JSON object a line over an inherited pipe.

Every write is at most PIPE_BUF bytes, which POSIX makes atomic (`write`, "Pipe or FIFO"): several threads and forked
children of a worker may send without a lock. A longer event travels in parts, which the reader joins.

Events: `progress` (epoch, epochs, step, steps, loss, samples_per_second), `line` (text), `beat` (step), `result`
(value), `saved` (path), `failed` (type, message, traceback, user_error, exit_code, peer_lost).
"""

import json
import os
import select
import stat
import threading
import time
from collections.abc import Mapping
from typing import Any

from samestep.comm.environment import read_settings

PATIENCE_SECONDS = 5.0
MAX_OPEN_PARTS = 64
MAX_READS = 64

_DROPPABLE = frozenset({"progress", "beat"})
_ENVELOPE_SIZE = 120

Event = dict[str, Any]


class Channel:
    """The write end of a worker's pipe, which becomes non-blocking: a stopped supervisor must not stop the training."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> "Channel | None":
        """The channel to the supervisor that started this process; None without one."""
        fd = read_settings(variables).fds.get("events")
        try:
            return cls(fd) if fd is not None and stat.S_ISFIFO(os.fstat(fd).st_mode) else None
        except OSError:
            return None

    def send(self, event: str, **fields: Any) -> None:
        """Sends one event.

        `progress` and `beat` are dropped while the pipe is full; the others wait for at most `PATIENCE_SECONDS`. The
        end of the supervisor is no error here.
        """
        deadline = time.monotonic() + (0.0 if event in _DROPPABLE else PATIENCE_SECONDS)
        for line in _lines({"event": event, **fields}):
            if not self._write(line, deadline):
                return

    def _write(self, line: bytes, deadline: float) -> bool:
        """Writes one line, whole or not at all."""
        while True:
            try:
                os.write(self.fd, line)
                return True
            except BlockingIOError:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                # poll, unlike select, takes descriptors above 1023; POLLOUT may be set with less than a line free.
                poll = select.poll()
                poll.register(self.fd, select.POLLOUT)
                poll.poll(min(remaining, 0.1) * 1000)
                time.sleep(0.001)
            except OSError:
                return False


class EventParser:
    """Parses the bytes of one pipe, as they come, into events; skips lines that are not an event."""

    def __init__(self) -> None:
        self._rest = b""
        self._parts: dict[str, list[str]] = {}

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for line in lines if (event := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> Event | None:
        """One line: an event, or a part of one."""
        value = _decode(line)
        if value is None or "part" not in value:
            return value
        name, text = str(value["part"]), str(value.get("text", ""))
        pieces = self._parts.setdefault(name, [])
        pieces.append(text)
        if value.get("last"):
            del self._parts[name]
            return _decode("".join(pieces).encode())
        if len(self._parts) > MAX_OPEN_PARTS:  # of a worker that was killed between two parts
            del self._parts[next(iter(self._parts))]
        return None


def read_events(fd: int, parser: EventParser) -> list[Event] | None:
    """The events in a non-blocking pipe now; None at its end."""
    events: list[Event] = []
    for _ in range(MAX_READS):  # not until it is empty: a worker that never stops sending would block the supervisor
        try:
            data = os.read(fd, 65_536)
        except BlockingIOError:
            return events
        except OSError:  # the pipe was closed under us, by another thread of the supervisor
            return events or None
        if not data:
            return events or None
        events += parser.feed(data)
    return events


def _lines(event: Event) -> list[bytes]:
    """The lines, each at most PIPE_BUF bytes, that carry an event."""
    text = json.dumps(event)
    if len(text) < select.PIPE_BUF:
        return [text.encode() + b"\n"]
    # Unique among the writers of the pipe, whose parts may lie between each other.
    name = f"{threading.get_native_id():x}.{time.monotonic_ns():x}"
    size = (select.PIPE_BUF - _ENVELOPE_SIZE) // 2  # JSON within JSON: quotes and backslashes double
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    last = len(pieces) - 1
    return [
        json.dumps({"part": name, "last": index == last, "text": piece}).encode() + b"\n"
        for index, piece in enumerate(pieces)
    ]


def _decode(line: bytes) -> Event | None:
    """A JSON object, or None for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
