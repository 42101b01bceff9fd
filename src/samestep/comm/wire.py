"""The wire between the supervisors of several machines: JSON lines over TCP, in both directions, without blocking.

Nothing that arrives is executed or unpickled. Who does not speak this language is not a machine of the run.
"""

import contextlib
import errno
import json
import socket
import threading
import time
from typing import Any

from samestep.comm.events import EventParser

BACKLOG = 1024
LOOPBACKS = ("localhost", "ip6-localhost", "::1")
MAX_READ = 1 << 20
"""Bytes read at a time, and those that may wait to be sent before the sender should pause."""


class Wire:
    """One end of a connection; a thread may keep it alive while another one is busy.

    Attributes:
        is_open: whether the other end was there at the last look.
        heard_at, sent_at: when something last came, and was last sent, on the clock of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._parser = EventParser()
        self._unsent = bytearray()
        self._lock = threading.RLock()  # of what is unsent
        self._line_size = 0  # of what has come of a message that is not complete
        self.is_open = True
        self.heard_at = self.sent_at = time.monotonic()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be sent that the sender should pause."""
        return len(self._unsent) > MAX_READ

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, **message: Any) -> None:
        """Sends a message, or keeps what the connection does not take yet."""
        with self._lock:
            self._unsent += json.dumps(message).encode() + b"\n"
            self.flush()

    def keep_alive(self, seconds: float) -> None:
        """Sends what waits, and an empty message if nothing was sent for so long."""
        if time.monotonic() - self.sent_at >= seconds:
            self.send()
        else:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            try:
                while self._unsent and self.is_open:
                    del self._unsent[: self._connection.send(self._unsent)]
                    self.sent_at = time.monotonic()
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()  # nobody takes it; what the other end said last is still to be read

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come since the last call."""
        messages: list[dict[str, Any]] = []
        size = 0
        try:
            while self.is_open and size < MAX_READ:
                data = self._connection.recv(65_536)
                self.is_open, self.heard_at = bool(data), time.monotonic()
                messages += self._parser.feed(data)
                size += len(data)
                end = data.rfind(b"\n") + 1
                self._line_size = len(data) - end + (0 if end else self._line_size)
                if self._line_size > MAX_READ:  # no message is as long
                    self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        return messages

    def finish(self) -> None:
        """Tells the other end that no more will come; the connection is open until that one closes its own."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with self._lock:  # else a thread could send to what gets its number next
            self.is_open = False
            self._connection.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address of a host, which is this machine.

    It listens at all addresses if the name has none that other machines can reach: a machine's own name often resolves
    to its loopback address, and the name of a service to the address of a proxy.
    """
    is_loopback = host in LOOPBACKS or host.startswith("127.")
    with contextlib.suppress(socket.gaierror):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A name's IPv4 address first: machines without IPv6 reach it, too.
        for family, _, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
            if not is_loopback and (address[0] in LOOPBACKS or str(address[0]).startswith("127.")):
                continue
            try:
                return socket.create_server(address, family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)
