"""Listening sockets: at one address of this machine, and at all only where that one is not known."""

import contextlib
import errno
import socket

BACKLOG = 1024
LOOPBACKS = ("localhost", "ip6-localhost", "::1")


def is_loopback(host: str) -> bool:
    """Whether a host, by its spelling, is the machine itself."""
    return host in LOOPBACKS or host.startswith("127.")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address of a host, which is this machine.

    It listens at all addresses if the host has none that other machines can reach and this one has: a machine's own
    name often leads to its loopback address, and a service's name to the address of what is before it.
    """
    with contextlib.suppress(socket.gaierror):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A name's IPv4 address first: machines without IPv6 reach it, too.
        for family, _, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
            if is_loopback(str(address[0])) and not is_loopback(host):
                continue
            try:
                return socket.create_server(address, family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)
