"""The network of this machine: a free port, the loopback, and whether the host's name leads back to it.

gloo takes the address that the host's name resolves to, unless GLOO_SOCKET_IFNAME names an interface (torch,
`ProcessGroupGloo::createDefaultDevice`); the loopback is no use to other nodes.
"""

import ipaddress
import socket
from collections.abc import Callable, Sequence

from samestep.comm.environment import LOOPBACK
from samestep.doctor.findings import Finding, bad, good, note

WORD = b"samestep"
SECONDS = 5.0


def check_loopback(address: str = LOOPBACK) -> Finding:
    """Whether a port can be had, and reached, on the loopback address."""
    name = "loopback"
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(SECONDS)
            port = server.getsockname()[1]
            with socket.create_connection((address, port), SECONDS) as ours:
                theirs, _ = server.accept()
                with theirs:
                    theirs.settimeout(SECONDS)
                    ours.sendall(WORD)
                    received = theirs.recv(len(WORD), socket.MSG_WAITALL)
    except OSError as error:
        advice = "let programs listen on and connect to 127.0.0.1: look at the firewall, and at `ip addr show lo`"
        return bad(name, f"ranks cannot connect on {address}: {error.strerror or error}", advice)
    if received != WORD:
        return bad(name, f"what was sent over {address} did not arrive", "look at the firewall")
    return good(name, f"a free port on {address} can be had and reached")


def check_host_name(
    name: str, addresses: Sequence[str], is_ours: Callable[[str], bool], *, has_interface: bool, num_nodes: int
) -> Finding:
    """Whether the host's name leads back to this host, as gloo needs it.

    Args:
        name: of this host.
        addresses: what it resolves to; none where it does not.
        is_ours: whether an address is one of this host's.
        has_interface: whether GLOO_SOCKET_IFNAME says what to use instead.
        num_nodes: on how many hosts ranks run.
    """
    label = "host name"
    found = f"{name} is {', '.join(addresses)}" if addresses else f"{name} resolves to no address"
    if has_interface:
        return good(label, f"{found}; GLOO_SOCKET_IFNAME says what gloo uses")
    advice = "name it in /etc/hosts, or set GLOO_SOCKET_IFNAME to this host's network interface (`ip addr`)"
    if addresses and is_ours(addresses[0]):
        if num_nodes > 1 and ipaddress.ip_address(addresses[0]).is_loopback:
            return bad(label, f"{found}: other nodes cannot reach it", advice)
        return good(label, found)
    if addresses:
        found += ", which is not this host's"
    if num_nodes > 1:
        return bad(label, found, advice)
    return note(label, found, f"gloo of other programs needs it (samestep's own launcher does not): {advice}")


def resolve(name: str) -> list[str]:
    """The addresses that a name resolves to, in their order; none where it does not."""
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(row[4][0]).partition("%")[0] for row in rows))


def is_own_address(address: str) -> bool:
    """Whether an address is one of this host's: whether it can be listened at."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def host_name() -> str:
    """This host's name."""
    return socket.gethostname()
