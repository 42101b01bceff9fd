"""The cluster: on how many nodes a run is, and where they meet, in torchrun's words. It never imports torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.comm.environment import MAX_PORT
from samestep.errors import UsageError

DEFAULT_PORT = 29_400
BACKENDS = ("c10d", "static")
SETTINGS = {"join_timeout": 600, "last_call_timeout": 10, "keep_alive_interval": 5, "keep_alive_max_attempt": 3}
"""What --rdzv-conf may set, in seconds but for the last, and what holds without it."""


@dataclass(frozen=True)
class Cluster:
    """The nodes of a run; one agent is started on each.

    Attributes:
        min_nodes: with fewer the run does not begin, and does not go on.
        max_nodes: with so many it begins at once.
        host: where they meet.
        port: its port there.
        run_id: tells runs that meet at the same place apart.
        node_rank: this node's place among them, where it was told; 0 hosts the meeting.
        settings: see `SETTINGS`.
    """

    min_nodes: int
    max_nodes: int
    host: str
    port: int
    run_id: str
    node_rank: int | None
    settings: Mapping[str, int]

    @property
    def endpoint(self) -> str:
        """The meeting's address as --rdzv-endpoint takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def nodes_in_words(self) -> str:
        """What --nnodes said: "2", "1:4"."""
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"


@dataclass(frozen=True)
class ClusterOptions:
    """What the user gave, None where nothing; the names are torchrun's."""

    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_backend: str | None = None
    rdzv_conf: str | None = None
    master_addr: str | None = None
    master_port: int | None = None


def cluster_of(options: ClusterOptions) -> Cluster | None:
    """The cluster that the options describe; None for this machine alone.

    Raises:
        UsageError: they cannot be, or contradict each other.
    """
    min_nodes, max_nodes = parse_nodes(options.nnodes or "1")
    if options.rdzv_endpoint is None and max_nodes == 1:
        return None
    if options.rdzv_backend is not None and options.rdzv_backend not in BACKENDS:
        raise UsageError(f"got --rdzv-backend {options.rdzv_backend}; needed: one of {', '.join(BACKENDS)}")
    host, port = _meeting_place(options)
    rank = options.node_rank
    if rank is not None and not 0 <= rank < max_nodes:
        raise UsageError(f"got --node-rank {rank} and --nnodes {options.nnodes or 1}; needed: 0 to {max_nodes - 1}")
    settings = parse_settings(options.rdzv_conf)
    return Cluster(min_nodes, max_nodes, host, port, options.rdzv_id or "none", rank, settings)


def parse_nodes(text: str) -> tuple[int, int]:
    """The least and the greatest number of nodes: of "2" or "1:4".

    Raises:
        UsageError: it is neither.
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"got --nnodes {text}; needed: a number, such as 2, or two, such as 1:4")
    low, high = int(parts[0]), int(parts[-1])
    if not 1 <= low <= high:
        raise UsageError(f"got --nnodes {text}; needed: 1 or more, and the first no greater than the second")
    return low, high


def parse_endpoint(text: str, what: str = "--rdzv-endpoint") -> tuple[str, int]:
    """Host and port of "host:29400", "host" or "[::1]:29400".

    Raises:
        UsageError: it is none of these.
    """
    host, port = text.strip(), str(DEFAULT_PORT)
    if host.startswith("["):
        host, _, rest = host[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif host.count(":") == 1:
        host, port = host.split(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= MAX_PORT:
        raise UsageError(f"got {what} {text}; needed: host:port, such as node1:29400, with a port of 1 to {MAX_PORT}")
    return host, int(port)


def parse_settings(text: str | None) -> dict[str, int]:
    """The settings of the meeting, with what "join_timeout=60,last_call_timeout=5" changes.

    Raises:
        UsageError: a name that there is not, or a value that is no number above 0.
    """
    settings = dict(SETTINGS)
    for part in (text or "").split(","):
        name, _, value = part.partition("=")
        name = {"timeout": "join_timeout"}.get(name.strip(), name.strip())
        if not name:
            continue
        if name not in SETTINGS:
            raise UsageError(f"got --rdzv-conf {part}; there are {', '.join(SETTINGS)}")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (number >= 1 and math.isfinite(number)):
            raise UsageError(f"got --rdzv-conf {part}; needed: a number, 1 or more, as in {name}={SETTINGS[name]}")
        settings[name] = int(number)
    return settings


def _meeting_place(options: ClusterOptions) -> tuple[str, int]:
    """Where the nodes meet."""
    if options.rdzv_endpoint:
        return parse_endpoint(options.rdzv_endpoint)
    if options.master_addr:
        port = DEFAULT_PORT if options.master_port is None else options.master_port
        host = f"[{options.master_addr}]" if ":" in options.master_addr else options.master_addr
        return parse_endpoint(f"{host}:{port}", "--master-addr and --master-port")
    raise UsageError(
        f"got --nnodes {options.nnodes} but no place to meet; give all nodes the same --rdzv-endpoint HOST:PORT, where "
        "HOST is one of them"
    )
