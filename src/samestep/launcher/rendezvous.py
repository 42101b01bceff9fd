"""The rendezvous: where the agents of all nodes meet, by torchrun's elastic rendezvous, and make sure that they agree.

One node hosts the store, at the endpoint that all were given: the one with --node-rank 0, or else the one whose
address it is. Who takes part in a round, with how many nodes it begins, and that a node has gone, is the business of
`torch.distributed.elastic.rendezvous`; so a node that comes back waits there for the next round.
"""

import contextlib
import errno
import json
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousState,
)

from samestep.comm.listening import is_loopback, listen
from samestep.errors import PeerLostError, UsageError
from samestep.launcher.cluster import Cluster
from samestep.version import __version__

STORE_SECONDS = 30.0
POLL_SECONDS = 0.1
SPARES_SECONDS = 3.0
"""How long the host stays for nodes that wait to see that the run is over; torch's handler looks every two seconds."""

T = TypeVar("T")


class ForeignError(RuntimeError):
    """What the store holds is not what a node of the run writes."""


@dataclass(frozen=True)
class Introduction:
    """What a node says of itself; all but its name and number must be the same on all nodes.

    Attributes:
        name: of the machine.
        node_rank: its number, where it was told.
        nnodes: as given.
        devices: number and kind of its devices.
        threads: CPU threads a worker.
        program: what it runs, in words.
        content: a checksum of that.
        torch: version.
        samestep: version.
    """

    name: str
    node_rank: int | None
    nnodes: str
    devices: str
    threads: int
    program: str
    content: str
    torch: str
    samestep: str

    @classmethod
    def of(cls, cluster: Cluster, devices: str, threads: int, program: str, content: str) -> "Introduction":
        """That of this node."""
        versions = (str(torch.__version__), __version__)
        name, rank = socket.gethostname(), cluster.node_rank
        return cls(name, rank, cluster.nodes_in_words, devices, threads, program, content, *versions)


class Backend(C10dRendezvousBackend):
    """torch's backend, with its state as JSON in the store.

    torch's handler unpickles what its backend gives it. Anybody who reaches the port may write to the store, so what
    is pickled is only what this process has read and made itself.
    """

    def get_state(self) -> tuple[bytes, Any] | None:
        """See base class."""
        found = super().get_state()
        return found and (_pickled(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """See base class."""
        found = super().set_state(_as_json(pickle.loads(state)), token)
        return found and (_pickled(found[0]), *found[1:])


class Handler(DynamicRendezvousHandler):
    """torch's handler, without a store of its own for the workers: torch's listens at all addresses."""

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> dist.TCPStore:
        """The rendezvous' own store; nothing asks it for that purpose."""
        return cast("dist.TCPStore", self._store)


@dataclass(frozen=True)
class Round:
    """The nodes that run together until one is lost, or comes.

    Attributes:
        number: counted from 0, alike on all.
        nodes: their introductions, by their numbers in this round.
        rank: this node's number.
        store: for this round alone.
        address: of the store of its workers.
        port: of that.
        workers: that store, on the node that hosts it, for as long as the round is kept.
    """

    number: int
    nodes: tuple[Introduction, ...]
    rank: int
    store: dist.Store
    address: str
    port: int
    workers: dist.Store | None

    def name(self, rank: int) -> str:
        """A node, in words."""
        return f"node {rank} ({self.nodes[rank].name})"


@dataclass(frozen=True)
class Rendezvous:
    """This node at the meeting place.

    Attributes:
        cluster: what the user asked for.
        ours: what this node says of itself.
        store: of the run; lasts as long as the node that hosts it.
        handler: torchrun's.
        hosts: whether this node hosts the store.
        own_address: this node's address, as seen on the way to the meeting place.
    """

    cluster: Cluster
    ours: Introduction
    store: dist.Store
    handler: DynamicRendezvousHandler
    hosts: bool
    own_address: str

    def meet(self) -> Round:
        """Waits for the other nodes, and begins a round with them.

        Raises:
            UsageError: too few came in time, two nodes were given one number, or the run is over.
            PeerLostError: the host of the meeting is gone.
            RendezvousGracefulExitError: the run had as many nodes as it may have until its end.
        """
        try:
            info = self.handler.next_rendezvous()
            if info.rank == 0:
                _repeat_address(info)
                info.store.set("samestep/number", str(self.store.add("rounds", 1) - 1))
            number = told(int, info.store.get("samestep/number"))
            store = dist.PrefixStore(f"round {number}", self.store)
            store.set(f"node/{info.rank}", json.dumps(vars(self.ours)))
            nodes = [told(Introduction, store.get(f"node/{rank}")) for rank in range(info.world_size)]
        except RendezvousTimeoutError as error:
            raise UsageError(self._too_few()) from error
        except RendezvousClosedError as error:
            raise self._closed() from error
        except RendezvousGracefulExitError:
            raise
        except (RendezvousError, RuntimeError) as error:
            raise self.host_lost(error) from error
        order = order_of([node.node_rank for node in nodes])
        rank = order.index(info.rank)
        try:
            workers = self._serve(store) if rank == 0 else None
            address, port = told(lambda host, port: (str(host), int(port)), store.get("workers"))
        except RuntimeError as error:
            raise self.host_lost(error) from error
        return Round(number, tuple(nodes[place] for place in order), rank, store, address, port, workers)

    def _serve(self, store: dist.Store) -> dist.Store:
        """Hosts the store of a round's workers, and says where it is.

        It is a new one each time, on a free port: torch's own `init_process_group` would find the addresses of the dead
        in it, since it counts on that (`torch/distributed/rendezvous.py`, TORCHELASTIC_USE_AGENT_STORE).
        """
        # A host's own name often leads to its loopback address: on that machine the endpoint is the better name.
        host = self.cluster.host if self.hosts else self.own_address
        listener = listen(host, 0)
        port = listener.getsockname()[1]
        workers = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        store.set("workers", json.dumps([host, port]))
        return workers

    def num_waiting(self) -> int:
        """How many nodes wait to take part.

        Raises:
            RuntimeError: the host of the meeting is gone, or what it stores is not the run's.
        """
        try:
            return int(self.handler.num_nodes_waiting())
        except RendezvousStateError as error:
            raise ForeignError from error
        except RendezvousError as error:
            raise RuntimeError(str(error)) from error

    def check(self) -> None:
        """Compares this node with the first that came.

        Raises:
            UsageError: they differ in what must be the same, or the run is full for good.
            PeerLostError: the host of the meeting is gone.
        """
        count = self.cluster.max_nodes
        try:
            first = told(Introduction, self.store.compare_set("first", "", json.dumps(vars(self.ours))))
            sentence, has_begun = difference(self.ours, first), self.store.check(["rounds"])
            if not sentence and has_begun and self.cluster.min_nodes == count:
                sentence = (
                    f"the run at {self.cluster.endpoint} is full: {count} of {count} nodes take part, and it goes on "
                    "without this one; give another run another port"
                )
            if not sentence:
                return
            if not has_begun:  # nobody can begin: those who wait are told
                self.store.set("refusal", sentence)
                self.handler.set_closed()
        except (RendezvousError, RuntimeError) as error:
            raise self.host_lost(error) from error
        raise UsageError(sentence)

    def host_lost(self, error: Exception | None) -> PeerLostError:
        """The error that ends a node which has lost the meeting place, or cannot believe what is there."""
        if isinstance(error, (RendezvousStateError, ForeignError)):
            return PeerLostError(
                f"something that is no node of this run has written to the rendezvous at {self.cluster.endpoint}; let "
                "only the nodes reach that port"
            )
        return PeerLostError(
            f"the node that hosts the rendezvous at {self.cluster.endpoint} does not answer any more: it, or the way "
            "to it, is lost"
        )

    def close(self, over: bool) -> None:
        """Takes leave.

        Args:
            over: whether the run is, for all nodes; else the others may go on.
        """
        with contextlib.suppress(Exception):  # whatever is wrong with the meeting place, we are leaving it
            if over:
                self.handler.shutdown()
                state = self.handler._state_holder.state
                if self.hosts and (state.wait_list or state.redundancy_list):
                    time.sleep(SPARES_SECONDS)
            else:
                self.handler._stop_heartbeats()

    def _too_few(self) -> str:
        seconds, needed = self.cluster.settings["join_timeout"], self.cluster.min_nodes
        return (
            f"fewer than {needed} nodes came to {self.cluster.endpoint} within {seconds} s; start the same command on "
            f"all nodes with the same --rdzv-endpoint and --rdzv-id ({self.cluster.run_id}), or allow more time by "
            "--rdzv-conf join_timeout=SECONDS"
        )

    def _closed(self) -> UsageError:
        with contextlib.suppress(RuntimeError):
            if self.store.check(["refusal"]):
                return UsageError(self.store.get("refusal").decode(errors="replace"))
        return UsageError(
            f"the run at {self.cluster.endpoint} is over, without this node; start all nodes anew, or give another run "
            "another port"
        )


def open_rendezvous(cluster: Cluster, ours: Introduction) -> Rendezvous:
    """Hosts the meeting place, or reaches it.

    Args:
        cluster: what the user asked for.
        ours: what this node says of itself.

    Raises:
        UsageError: it cannot be, or nobody answers in time.
    """
    listener = open_listener(cluster)
    if listener is None:
        _wait_for_host(cluster)
    timeout = timedelta(seconds=STORE_SECONDS)
    fd = None if listener is None else listener.detach()
    try:
        store = dist.TCPStore(
            cluster.host,
            cluster.port,
            is_master=fd is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=fd,
        )
        owner = store.compare_set("samestep/owner", "", cluster.run_id).decode(errors="replace")
        backend = Backend(store, cluster.run_id)
    except (RendezvousError, RuntimeError) as error:
        raise UsageError(
            f"what answers at {cluster.endpoint} is no rendezvous: {_first_line(error)}; give --rdzv-endpoint a port "
            "that nothing else uses"
        ) from error
    if owner != cluster.run_id:
        raise UsageError(
            f"got --rdzv-id {cluster.run_id}, and the run at {cluster.endpoint} is {owner}; give the same on all "
            "nodes, and each run a port of its own"
        )
    address = own_address(cluster)
    settings = cluster.settings
    waits = RendezvousTimeout(
        join=timedelta(seconds=settings["join_timeout"]), last_call=timedelta(seconds=settings["last_call_timeout"])
    )
    handler = Handler.from_backend(
        cluster.run_id,
        store,
        backend,
        cluster.min_nodes,
        cluster.max_nodes,
        address,
        waits,
        settings["keep_alive_interval"],
        settings["keep_alive_max_attempt"],
    )
    ours_only = dist.PrefixStore(f"samestep/{cluster.run_id}", store)
    return Rendezvous(cluster, ours, ours_only, handler, fd is not None, address)


def open_listener(cluster: Cluster) -> socket.socket | None:
    """The socket at which this node hosts the meeting; None if another does.

    Raises:
        UsageError: this node is to be the host, and cannot.
    """
    if cluster.node_rank is not None and cluster.node_rank > 0:
        return None
    if cluster.node_rank is None and not _is_ours(cluster.host):
        return None
    try:
        return listen(cluster.host, cluster.port)
    except OSError as error:
        if cluster.node_rank is None and error.errno == errno.EADDRINUSE:
            return None  # another agent on this machine
        raise UsageError(
            f"node 0 cannot host the rendezvous at port {cluster.port}: {error.strerror}; choose another port in "
            "--rdzv-endpoint, the same on all nodes"
        ) from error


def own_address(cluster: Cluster) -> str:
    """This machine's address on the way to the meeting place."""
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(cluster.host, cluster.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only chooses the way
            return str(probe.getsockname()[0])
    return socket.gethostname()


def interface_to(cluster: Cluster, address: str) -> str | None:
    """The network interface that has an address; None if it is not known.

    A host's own name often leads to its loopback address, by which no other node can reach it: that is believed only
    where the endpoint says so itself.
    """
    import psutil

    if is_loopback(address) and not is_loopback(cluster.host):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None


def difference(ours: Introduction, first: Introduction) -> str:
    """The sentence about what differs between two nodes though it must not; empty if nothing does."""
    asked: Mapping[str, tuple[Any, Any, str]] = {
        "--nnodes": (ours.nnodes, first.nnodes, "give all nodes the same"),
        "devices": (ours.devices, first.devices, "give all nodes equally many (--nproc-per-node, --devices)"),
        "--threads": (ours.threads, first.threads, "give all nodes the same"),
        "PyTorch": (ours.torch, first.torch, "install the same version on all nodes"),
        "samestep": (ours.samestep, first.samestep, "install the same version on all nodes"),
        "the command": (ours.program, first.program, "start the same script with the same options on all nodes"),
        "the content of the script": (ours.content, first.content, "copy the same script to all nodes"),
    }
    for what, (here, there, mend) in asked.items():
        if here != there:
            return f"the nodes differ in {what}: {here} on {ours.name}, {there} on {first.name}; {mend}"
    return ""


def order_of(node_ranks: Sequence[int | None]) -> list[int]:
    """The nodes in the order of their numbers: those that they were told, if all were; else as they came.

    Raises:
        UsageError: two were told the same.
    """
    places = list(range(len(node_ranks)))
    given = [rank for rank in node_ranks if rank is not None]
    twice = next((rank for rank in given if given.count(rank) > 1), None)
    if twice is not None:
        raise UsageError(f"two nodes were given --node-rank {twice}; give each another one, 0 to {len(places) - 1}")
    return sorted(places, key=lambda place: given[place]) if len(given) == len(places) else places


def told(kind: Callable[..., T], text: bytes) -> T:
    """A value that a node has written to the store, as JSON: the arguments of a kind.

    Raises:
        ForeignError: it is no such value, so no node of the run has written it.
    """
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            return kind(**value)
        return kind(*value) if isinstance(value, list) else kind(value)
    except (ValueError, TypeError) as error:
        raise ForeignError from error


def _as_json(state: _RendezvousState) -> bytes:
    """The state of torch's rendezvous as it is stored."""
    stored = {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": state.deadline and state.deadline.isoformat(),
        "participants": [(*_node(node), rank) for node, rank in state.participants.items()],
        "last_heartbeats": [(*_node(node), beat.isoformat()) for node, beat in state.last_heartbeats.items()],
        "wait_list": [_node(node) for node in state.wait_list],
        "redundancy_list": [_node(node) for node in state.redundancy_list],
    }
    return json.dumps(stored).encode()


def _pickled(text: bytes) -> bytes:
    """A stored state as torch's handler takes it.

    Raises:
        RendezvousStateError: it is none.
    """

    def node(parts: Sequence[Any]) -> _NodeDesc:
        return _NodeDesc(str(parts[0]), int(parts[1]), int(parts[2]))

    def moment(text: str) -> datetime:
        return datetime.fromisoformat(text).astimezone(UTC)

    state = _RendezvousState()
    try:
        stored = json.loads(text)
        state.round, state.complete, state.closed = (
            int(stored["round"]),
            bool(stored["complete"]),
            bool(stored["closed"]),
        )
        state.deadline = moment(stored["deadline"]) if stored["deadline"] else None
        state.participants = {node(parts): int(parts[3]) for parts in stored["participants"]}
        state.last_heartbeats = {node(parts): moment(parts[3]) for parts in stored["last_heartbeats"]}
        state.wait_list, state.redundancy_list = (
            set(map(node, stored[key])) for key in ("wait_list", "redundancy_list")
        )
    except Exception as error:  # whatever a stranger wrote there
        raise RendezvousStateError("no state of a rendezvous") from error
    return pickle.dumps(state)


def _node(node: _NodeDesc) -> tuple[str, int, int]:
    return node.addr, node.pid, node.local_id


def _repeat_address(info: RendezvousInfo) -> None:
    """Says where torch's own store is, which its rank 0 does in its first round only; a newcomer waits for it."""
    place = info.bootstrap_store_info
    if place is not None:
        info.store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, place.master_addr)
        info.store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(place.master_port))


def _is_ours(host: str) -> bool:
    """Whether a host is this machine: only then has it an address that a socket here can be bound to."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind((address[0], 0, *address[2:]))
                return True
    return False


def _wait_for_host(cluster: Cluster) -> None:
    """Waits until somebody listens at the meeting place."""
    seconds = cluster.settings["join_timeout"]
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((cluster.host, cluster.port), timeout=max(0.1, min(5.0, left))).close()
            return
        except OSError as error:
            if left <= 0:
                reason = error.strerror or str(error)
                raise UsageError(
                    f"nobody answers at {cluster.endpoint} within {seconds} s ({reason}); --rdzv-endpoint must name a "
                    "node of the run, reachable from here: give --node-rank 0 there if it goes by another name, or "
                    "allow more time by --rdzv-conf join_timeout=SECONDS"
                ) from error
        time.sleep(POLL_SECONDS)


def _first_line(error: BaseException) -> str:
    """The first line of an exception's text; torch's go on with a C++ stack."""
    return (str(error).splitlines() or [type(error).__name__])[0]
