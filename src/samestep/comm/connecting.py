"""Connecting: the ranks of a run choose a transport, all of them the same one, and connect.

Ranks of one host share memory if all of them can; otherwise they form a process group: NCCL if each has a GPU of its
own, else gloo. `SAMESTEP_TRANSPORT` overrides the choice. Ranks of several nodes also get transports within their node
and between nodes, unless `SAMESTEP_NODES` is "flat".
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from samestep.comm.environment import Environment, chosen_nodes, chosen_transport, read_settings
from samestep.comm.group import NO_LIMIT, GroupTransport, exchange_a_byte, nccl_tried, open_sockets
from samestep.comm.hierarchical_reduction import connect_nodes
from samestep.comm.nccl_errors import nccl_failure
from samestep.comm.rendezvous import Rendezvous, meet, not_connected, rendezvous, store_host
from samestep.comm.segment import NoSegmentError, map_segment
from samestep.comm.shared_memory import SharedTransport
from samestep.comm.transport import STUCK, Connection
from samestep.devices.inventory import usable_cores
from samestep.errors import DeviceError, PeerLostError, SamestepError, UsageError
from samestep.text import notify

# For ranks that have all met. Shorter than `STRAY_PAUSE_SECONDS` of the supervisor, which announces another quorum only
# when none of them can be connecting any more.
CONNECT_SECONDS = 10.0
NO_NCCL = "no NCCL"
FIRST = -1  # priority of a stream: else each of the small sums waits until the kernels of a backward leave room


def connect(environment: Environment, device: torch.device, timeout: timedelta) -> tuple[Connection, Connection]:
    """Connects the ranks that the environment describes: the transports for the device and for host memory."""
    # A script that has made its process group has no store of ours, and its ranks are the group's.
    if dist.is_initialized():
        return _adopt_group(environment, device, timeout)
    return connect_at(Rendezvous(rendezvous(environment, timeout), environment, timeout), device, timeout)


def reconnect(
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta,
    check: Callable[[], None],
) -> tuple[Connection, Connection]:
    """Connects the ranks that are left after a failure, which have all reached the store; waits call `check`."""
    # No rank hosts the store, which has outlived one of them.
    place = Environment(rank, world_size, rank, world_size, store_is_kept=True, settings=read_settings())
    place = replace(place, transport=chosen_transport(), nodes=chosen_nodes())
    connect_timeout = timedelta(seconds=min(CONNECT_SECONDS, timeout.total_seconds()))
    met = Rendezvous(store, place, connect_timeout, check)
    if place.settings.machine is not None:
        own = str(place.settings.machine)
        machines = met.part("machines").gather_words(own)
        place = replace(place, local_rank=machines[:rank].count(own), local_world_size=machines.count(own))
        met = replace(met, place=place)
    return connect_at(met, device, timeout)


def connect_at(met: Rendezvous, device: torch.device, timeout: timedelta) -> tuple[Connection, Connection]:
    """Connects ranks that have met, as `connect` and `reconnect` do; `timeout` is for later exchanges."""
    store, place = met.store, met.place
    # Where NCCL still holds connections that were to be dropped (`GroupTransport.abandon`), ranks share memory instead.
    is_stuck = dist.is_initialized()
    words, may = met.part("gpus").gather_words, place.transport == "auto" and not is_stuck
    backend = "nccl" if device.type == "cuda" and have_own_gpus(words, place.rank, device, may) else "gloo"
    host = store_host(place)
    can_heal = place.settings.heals and host is None  # and a supervisor announces quorums (`Quorums.can_heal`)
    healing_store = store if can_heal else None
    is_watched = backend == "nccl" and healing_store is not None and "page" in place.settings.fds
    if is_watched:
        # Else NCCL's watchdog would end the ranks that are left, or (by 1 and 2, which users set) abort their transfers
        # before they know of the loss: their updates would run on what has arrived; and torch's monitor ends a process
        # for which the watchdog has reported a timeout. The supervisor finds lost ranks.
        for name in ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING"):
            os.environ[f"TORCH_NCCL_{name}"] = "0"
    shared = None
    # Tried first even with NCCL: then it carries the small values in host memory.
    try:
        segment = map_segment(met.part("shared"))
        shared = SharedTransport(segment, place.rank, timeout, store, healing_store)
    except NoSegmentError as error:
        if is_stuck:
            raise DeviceError(f"{STUCK}; to go on without it they need shared memory, and {error}") from error
        if place.transport == "shared":
            raise _no_shared_memory(error) from error
    if shared is not None and backend == "gloo":
        return shared, shared
    sockets_before = open_sockets()
    try:
        _join_group(met, backend, device, timeout)
        if is_watched:  # by the watchdog no transfer is late: waits here have their own limit
            dist.distributed_c10d._set_pg_timeout(NO_LIMIT)
        # NCCL moves no host memory.
        control = dist.new_group(backend="gloo", timeout=timeout) if backend == "nccl" and shared is None else None
    except RuntimeError as error:
        if shared is not None:
            shared.close()
        lost = PeerLostError(f"rank {place.rank} met all others, but could not connect to them: {error}")
        raise nccl_failure(str(error), place.rank) or lost from error
    calls = dist.PrefixStore("calls", store)
    transport = GroupTransport(None, calls, timeout, host, healing_store)
    if backend == "nccl":
        transport.stream = torch.cuda.Stream(device, priority=FIRST)
    small = transport if control is None else GroupTransport(control, calls, timeout, host)
    if healing_store is not None and place.settings.machine is not None:
        transport.check_lost = small.check_lost = met.check  # while it is made; `Membership` watches it from then on
    try:
        if backend == "nccl":
            with nccl_tried(shared or small, device, timeout, transport.abandon, met.check):
                exchange_a_byte(transport, device)
        if shared is None:
            transport.nodes = connect_nodes(small, met, backend, device, timeout)
        if place.settings.machine is not None:
            transport.sockets = open_sockets() - sockets_before
    except SamestepError:
        transport.sockets = open_sockets() - sockets_before
        transport.abandon()
        if shared is not None:
            shared.close()
        raise
    return transport, shared or small


def connect_process_group(
    store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta
) -> tuple[Connection, Any, dist.Store]:
    """Connects the ranks of a process group of torch: a transport, gloo for what goes from rank to rank, and a store.

    Args:
        store: which all of its ranks reach. The part of it where they meet, which is returned, is this group's alone.
        rank: in the group.
        ranks: the numbers of the group's ranks in the whole run.
        timeout: of every operation.
    """
    size, chosen = len(ranks), chosen_transport()
    place = Environment(rank, size, rank, size, store_is_kept=True, transport=chosen)
    num_processes = max(size, dist.get_world_size() if dist.is_initialized() else 0)
    shared = None
    # A group that was destroyed has left its addresses in the store, and gloo names no ranks that do not come.
    try:
        store, missing = meet(store, rank, size, timeout.total_seconds())
    except RuntimeError as error:
        raise PeerLostError(f"the store went while rank {rank} waited for the others") from error
    if missing:
        raise not_connected(rank, missing)
    try:
        segment = map_segment(Rendezvous(dist.PrefixStore("shared", store), place, timeout))
        shared = SharedTransport(segment, rank, timeout)
        # With more processes than cores a rank that spins takes the core of one that it waits for.
        shared.spins = num_processes <= usable_cores()
    except NoSegmentError as error:
        if chosen == "shared":
            raise _no_shared_memory(error) from error
    try:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    except RuntimeError as error:
        if shared is not None:
            shared.close()
        raise PeerLostError(f"rank {rank} met all others, but could not connect to them: {error}") from error
    transport = shared or GroupTransport(None, dist.PrefixStore("calls", store), timeout, backend=gloo)
    transport.ranks, transport.run_size = ranks, num_processes
    # A rank that ends at once must not close gloo's connections while others still make them.
    transport.gather(torch.zeros(1, dtype=torch.uint8)).wait()
    transport.advice = "do all ranks call the same collectives? The group's timeout is {:g} s"
    return transport, gloo, store


def connect_gpus(
    host: Connection, store: dist.Store, device: torch.device, timeout: timedelta, may: bool
) -> GroupTransport | None:
    """Connects the ranks of a process group over NCCL if each has a GPU to itself; all of them call it.

    Args:
        host: their transport for host memory.
        store: of the group.
        device: this rank's GPU.
        timeout: of every operation.
        may: whether this rank may use NCCL; if one may not, none does.
    """
    if not have_own_gpus(host.gather_words, host.rank, device, may and chosen_transport() == "auto"):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), host.rank, host.world_size, options)
    transport = GroupTransport(None, dist.PrefixStore("nccl calls", store), timeout, backend=nccl)
    transport.ranks, transport.run_size = host.ranks, host.run_size
    with nccl_tried(host, device, timeout, transport.abandon):
        nccl.eager_connect_single_device(device)
        exchange_a_byte(transport, device)
    return transport


def have_own_gpus(gather_words: Callable[[str], list[str]], rank: int, device: torch.device, may: bool) -> bool:
    """Whether each rank has a GPU to itself, as NCCL needs, and may use it; all ranks call it, and get the same.

    By the identifiers of the GPUs: under Slurm each process may see one GPU, another one each, and call it cuda:0.
    """
    words = gather_words(str(torch.cuda.get_device_properties(device).uuid) if may else NO_NCCL)
    sharing = [str(rank) for rank, word in enumerate(words) if words.count(word) > 1]
    if NO_NCCL in words:
        return False
    if sharing and rank == 0:
        notify(
            f"ranks {', '.join(sharing)} have no GPU to themselves, so all ranks exchange through host "
            "memory instead of NCCL: start one rank a GPU, or set SAMESTEP_TRANSPORT=gloo if this is meant"
        )
    return not sharing


def _no_shared_memory(reason: NoSegmentError) -> UsageError:
    return UsageError(f"SAMESTEP_TRANSPORT=shared cannot be had: {reason}; leave the variable out, or set it to gloo")


def _join_group(met: Rendezvous, backend: str, device: torch.device, timeout: timedelta) -> None:
    """Makes the default process group."""
    connect_timeout = met.timeout
    # The functions of this module take the default group at its import as the default of an argument. An optimizer
    # imports it: after the group is made, that would keep the connections open for good. So it is imported before.
    import torch.distributed.nn.functional  # noqa: F401 - for when it is imported

    options = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = connect_timeout  # else torch warns that it differs from the argument
    met.store.set_timeout(connect_timeout)  # by which NCCL's ranks find each other, whatever the group's timeout
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", met.store),
            rank=met.place.rank,
            world_size=met.place.world_size,
            timeout=connect_timeout,
            device_id=device if backend == "nccl" else None,
            pg_options=options,
        )
    finally:
        met.store.set_timeout(timeout)
    if connect_timeout != timeout:  # a lost rank must be noticed soon while connecting, a slow one be waited for later
        dist.distributed_c10d._set_pg_timeout(timeout)


def _adopt_group(environment: Environment, device: torch.device, timeout: timedelta) -> tuple[Connection, Connection]:
    """Connects the ranks of a process group that the user's script has made, by a group of our own."""
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
        transport.stream = torch.cuda.Stream(device, priority=FIRST)
    # No shared memory here: the script's group may have no store that all ranks reach.
    met = Rendezvous(calls, replace(environment, transport="gloo"), timeout)
    if backend == "nccl":
        with nccl_tried(host, device, timeout, transport.abandon):
            exchange_a_byte(transport, device)
    transport.nodes = connect_nodes(host, met, backend, device, timeout)
    return transport, host
