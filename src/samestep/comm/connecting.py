"""Connecting: which transports the ranks of a run talk through, chosen by all of them together.

Ranks of one host share memory where they can; else they form a process group: NCCL where each has a GPU of its own,
gloo for everything else. `SAMESTEP_TRANSPORT` overrides the choice. Ranks of several nodes also get transports within
their node (shared memory where that can be) and between nodes, unless `SAMESTEP_NODES` is "flat".
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from samestep.comm.environment import Environment, chosen_transport
from samestep.comm.group import FIRST_POLL_SECONDS, POLL_SECONDS, GroupTransport, meet, roll_call, store_host
from samestep.comm.nodes import Nodes, Part, node_size
from samestep.comm.shm import segment as segments
from samestep.comm.shm.segment import NoSegmentError, Segment
from samestep.comm.shm.transport import SharedTransport
from samestep.errors import PeerLostError, UsageError

CONNECT_SECONDS = 10.0
SEGMENT, NO_SEGMENT = "segment", "none"

Connection = GroupTransport | SharedTransport


def connect(environment: Environment, device: torch.device, timeout: timedelta) -> tuple[Connection, Connection]:
    """Joins the ranks that the environment describes."""
    if dist.is_initialized():
        return _adopt_group(environment, device, timeout)
    return connect_at(meet(environment, timeout), environment, device, timeout, timeout)


def reconnect(
    meeting: dist.Store, rank: int, world_size: int, device: torch.device, timeout: timedelta
) -> tuple[Connection, Connection]:
    """Joins the ranks that are left, which have met in a store already."""
    connect_timeout = timedelta(seconds=min(CONNECT_SECONDS, timeout.total_seconds()))
    transport = chosen_transport()
    place = Environment(rank, world_size, rank, world_size, store_is_kept=True, transport=transport)
    return connect_at(meeting, place, device, connect_timeout, timeout, by_nodes=False)


def connect_at(
    store: dist.Store,
    place: Environment,
    device: torch.device,
    connect_timeout: timedelta,
    timeout: timedelta,
    by_nodes: bool = True,
) -> tuple[Connection, Connection]:
    """Connects ranks that have met in a store."""
    has_own_gpu = device.type == "cuda" and place.local_world_size <= torch.cuda.device_count()
    backend = "nccl" if has_own_gpu and place.transport == "auto" else "gloo"
    host = store_host(place)
    # One supervisor must see all ranks to say who is left: over several nodes nobody heals.
    meeting = store if host is None and place.local_world_size == place.world_size else None
    shared = None
    try:
        segment = _share(dist.PrefixStore("shared", store), place, connect_timeout)
        shared = SharedTransport(segment, place.rank, timeout, store, meeting)
    except NoSegmentError as error:
        if place.transport == "shared":
            raise UsageError(
                f"SAMESTEP_TRANSPORT=shared cannot be had: {error}; leave the variable out, or set it to gloo"
            ) from error
    if shared is not None and backend == "gloo":
        return shared, shared
    try:
        _join_group(store, place, backend, device, connect_timeout, timeout)
        control = dist.new_group(backend="gloo", timeout=timeout) if backend == "nccl" and shared is None else None
    except RuntimeError as error:
        if shared is not None:
            shared.close()
        raise PeerLostError(f"rank {place.rank} met all others, but could not connect to them: {error}") from error
    calls = dist.PrefixStore("calls", store)
    transport = GroupTransport(None, calls, timeout, host, meeting)
    if backend == "nccl":
        transport.stream = torch.cuda.Stream(device)
    if shared is not None:
        return transport, shared
    small = transport if control is None else GroupTransport(control, calls, timeout, host)
    try:
        if by_nodes:
            transport.nodes = _connect_nodes(small, store, place, backend, connect_timeout, timeout)
    except PeerLostError:
        transport.abandon()
        raise
    return transport, small


def _connect_nodes(
    control: GroupTransport,
    store: dist.Store,
    place: Environment,
    backend: str,
    connect_timeout: timedelta,
    timeout: timedelta,
) -> Nodes | None:
    """Connects ranks that have a process group by their nodes; None where sums are not to go by nodes."""
    rank, num_ranks = control.rank, control.world_size
    words = [place.local_rank, place.local_world_size, int(place.nodes == "auto")]
    told = control.gather(torch.tensor(words)).wait().view(num_ranks, 3).tolist()
    size = node_size([(local, count) for local, count, _ in told])
    if size is None or not all(wants for _, _, wants in told):
        return None
    nodes = [range(first, first + size) for first in range(0, num_ranks, size)]
    rails = [range(first, num_ranks, size) for first in range(size)]
    ours, rail = nodes[rank // size], rails[rank % size]
    within: GroupTransport | SharedTransport | None = None
    try:
        if backend == "gloo":
            memory = dist.PrefixStore(f"node {ours.start}", store)
            within = _share_in_node(control, memory, place, connect_timeout, timeout)
        if within is None:
            within = subgroup(nodes, rank, backend, store, timeout)
        between = subgroup(rails, rank, backend, store, timeout)
    except (RuntimeError, PeerLostError) as error:
        if within is not None:
            within.abandon()
        raise PeerLostError(f"rank {rank} met all others, but could not connect to them by nodes: {error}") from error
    return Nodes(Part(within, ours, num_ranks, timeout), Part(between, rail, num_ranks, timeout))


def _share_in_node(
    control: GroupTransport, store: dist.Store, place: Environment, connect_timeout: timedelta, timeout: timedelta
) -> SharedTransport | None:
    """The transport through memory that the ranks of this node share; None, on all ranks, where one node has none."""
    size = place.local_world_size
    alone = Environment(place.local_rank, size, place.local_rank, size, store_is_kept=True, transport=place.transport)
    transport = None
    with contextlib.suppress(NoSegmentError):
        transport = SharedTransport(_share(store, alone, connect_timeout), place.local_rank, timeout, store)
    have = bool(control.gather(torch.tensor([transport is not None])).wait().all())
    if transport is not None and not have:
        transport.close()
    return transport if have else None


def subgroup(groups: Sequence[range], rank: int, backend: str, store: dist.Store, timeout: timedelta) -> GroupTransport:
    """The transport of the group that this rank is in; all ranks make all groups, in the same order."""
    made = [dist.new_group(list(ranks), timeout=timeout, backend=backend) for ranks in groups]
    number = next(number for number, ranks in enumerate(groups) if rank in ranks)
    calls = dist.PrefixStore(f"calls {groups[number]}", store)
    return GroupTransport(made[number], calls, timeout)


def _share(store: dist.Store, place: Environment, timeout: timedelta) -> Segment:
    """Maps memory that all ranks share."""
    rank, world_size = place.rank, place.world_size
    segment, fd, answer = None, -1, _refusal(place) or "yes"
    try:
        try:
            if rank == 0:
                told = ""
                if answer == "yes":
                    segment, fd, told = segments.create(world_size)
            else:
                told = _told(store, timeout)
                if answer == "yes" and told:
                    segment = segments.join(told, world_size)
        except NoSegmentError as error:
            answer = str(error)
        if rank == 0:
            store.set(SEGMENT, told or NO_SEGMENT)
        if segment is not None:
            segment.words[segment.lanes[rank].pid] = os.getpid()
        answers = _answers(store, place, timeout, answer)
    except (RuntimeError, PeerLostError) as error:
        if segment is not None:  # those who go on must not wait for us
            segment.words[segment.lanes[rank].gone] = 1
        if isinstance(error, PeerLostError):
            raise
        raise PeerLostError(f"rank {rank} met all others, but could not connect to them: {error}") from error
    finally:
        if fd >= 0:
            os.close(fd)
    for other, word in enumerate(answers):
        if word != "yes":
            raise NoSegmentError(f"rank {other} says: {word}")
    assert segment is not None, "nobody refused"
    return segment


def _refusal(place: Environment) -> str:
    """Why this rank will not share memory; empty if it will."""
    if place.transport == "gloo":
        return "SAMESTEP_TRANSPORT is gloo"
    if place.local_world_size < place.world_size:
        return f"only {place.local_world_size} of {place.world_size} ranks are on its host"
    return ""


def _told(store: dist.Store, timeout: timedelta) -> str:
    """What rank 0 says about its segment; empty if it has none."""
    deadline, pause = time.monotonic() + timeout.total_seconds(), FIRST_POLL_SECONDS
    while not store.check([SEGMENT]):
        if time.monotonic() > deadline:
            raise PeerLostError("rank 0 met all others, but did not connect to them", (0,))
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)
    told = store.get(SEGMENT).decode()
    return "" if told == NO_SEGMENT else told


def _answers(store: dist.Store, place: Environment, timeout: timedelta, answer: str) -> list[str]:
    """Whether each rank shares memory: "yes", or why not."""
    seconds = timeout.total_seconds()
    missing = roll_call(store, place.rank, place.world_size, seconds, store_host(place), answer)
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        raise PeerLostError(f"rank {place.rank} met all others, but rank {names} did not connect to them", missing)
    return [store.get(str(rank)).decode() for rank in range(place.world_size)]


def _join_group(
    store: dist.Store,
    place: Environment,
    backend: str,
    device: torch.device,
    connect_timeout: timedelta,
    timeout: timedelta,
) -> None:
    """Makes the process group of ranks that have met."""
    # Its functions take the default group of the moment of their import as the default of an argument. Building an
    # optimizer imports it, and the group's connections would stay open for good, however they are dropped.
    import torch.distributed.nn.functional  # noqa: F401 - for when it is imported

    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=connect_timeout,
        device_id=device if backend == "nccl" else None,
    )
    if connect_timeout != timeout:
        dist.distributed_c10d._set_pg_timeout(timeout)


def _adopt_group(environment: Environment, device: torch.device, timeout: timedelta) -> tuple[Connection, Connection]:
    """Uses the ranks of a process group that the user's script has set up, through a group of our own."""
    if dist.get_world_size() != environment.world_size:
        raise UsageError(
            f"the process group has {dist.get_world_size()} ranks, the environment says {environment.world_size}"
        )
    calls: dist.Store = dist.HashStore()
    with contextlib.suppress(AttributeError):
        calls = dist.PrefixStore("samestep-calls", dist.distributed_c10d._get_default_store())
    transport = host = GroupTransport(dist.new_group(backend="gloo", timeout=timeout), calls, timeout)
    backend = "nccl" if device.type == "cuda" and dist.get_backend() == "nccl" else "gloo"
    if backend == "nccl":
        transport = GroupTransport(dist.new_group(backend=backend, timeout=timeout), calls, timeout)
        transport.stream = torch.cuda.Stream(device)
    # Memory is not shared here: the script's group may have no store that all ranks see.
    unshared = replace(environment, transport="gloo")
    transport.nodes = _connect_nodes(host, calls, unshared, backend, timeout, timeout)
    return transport, host
