"""The transport over torch.distributed: gloo between CPU workers, NCCL between GPUs."""

import math
import os
import socket
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.nccl_errors import nccl_failure
from samestep.comm.rendezvous import roll_call
from samestep.comm.transport import Connection, Pending, Transport, repeat_to_all, returns, wait_until
from samestep.errors import PeerLostError, SamestepError

ROLL_CALL_SECONDS = 5.0
FAILURE_SECONDS = 10.0  # in which the ranks hear of NCCL's error on one, unless NCCL holds them back
MOST_QUEUED = 32  # transfers on whose results a stream waits: some ten launches each, and a GPU takes about 1,000
NO_LIMIT = timedelta(days=365)
LOOK_SECONDS = timedelta(seconds=0.2)  # while gloo waits, between looks whether a rank is lost
LATENCY_BYTES = {"gloo": 256 << 10, "nccl": 1 << 20}
"""The cost of a message in bytes: gloo's is measured (benchmarks/transport.py --forms). NCCL's is an estimate,
20 μs at 50 GB/s."""


class GroupTransport(Connection):
    """Moves tensors by a torch.distributed process group, or by a backend itself, for which torch has no group.

    Tensors travel as bytes, since gloo lacks some dtypes (bfloat16, unsigned integers) in some collectives. With gloo
    the tensors of an accelerator go through host memory.
    By the store, which rank `store_host` hosts, the ranks find the missing ones after a failure.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        store: dist.Store,
        timeout: timedelta,
        store_host: int | None = None,
        healing_store: dist.Store | None = None,
        backend: Any = None,
    ) -> None:
        name: str
        if backend is None:
            rank, world_size, name = dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)
        else:
            rank, world_size, name = backend.rank(), backend.size(), backend.name()
        super().__init__(rank, world_size, timeout, healing_store)
        self.group = group
        self._backend = backend
        self._store = store
        self._store_host = store_host
        self.through_host = name == "gloo"
        self._has_failed = False
        self.sockets: frozenset[int] = frozenset()  # gloo's, by inode, if a lost machine's may stay open
        self._queued: deque[torch.cuda.Event] = deque()  # at which the stream has what a transfer brings
        self.latency_bytes = LATENCY_BYTES.get(name, 0)

    def exchange(self, parts: Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        device = parts.device
        if self.through_host:
            parts = parts.cpu()  # waits for the kernels that compute them; gloo reads host memory at once
        received = torch.empty(sum(receive_sizes), dtype=parts.dtype, device=parts.device)
        width = parts.element_size()
        with self.failures_named():
            work = self._all_to_all(
                received.view(torch.uint8),
                parts.contiguous().view(torch.uint8),
                [size * width for size in receive_sizes],
                [size * width for size in sizes],
            )
        return GroupPending(self, work, received, parts, device)

    def gather(self, part: Tensor, sizes: Sequence[int] = (), into: Tensor | None = None) -> Pending:
        if self.through_host or sizes or self._backend is not None:
            # gloo's all-gather passes the parts around a ring, one rank after another; its all-to-all sends them all at
            # once, and was faster at every measured size.
            return repeat_to_all(self, part, sizes or [part.numel()] * self.world_size)
        received = part.new_empty(part.numel() * self.world_size) if into is None else into
        # The second is the name until torch 2.12, and deprecated since.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self.failures_named():
            work = all_gather(
                received.view(torch.uint8), part.contiguous().view(torch.uint8), group=self.group, async_op=True
            )
        return GroupPending(self, work, received, part, part.device)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcasts, through host memory with gloo."""
        ours = tensor.detach()
        moved = (ours.cpu() if self.through_host else ours).contiguous()
        sent = moved.view(-1).view(torch.uint8)
        with self.failures_named():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = source, 0, self._limit
            group: Any = self._backend or self.group or dist.group.WORLD
            self.wait_for(group.broadcast([sent], options))
        if moved is not ours:  # strided, or on an accelerator
            ours.copy_(moved)

    def wait_for(self, work: dist.Work) -> None:
        """Waits for a transfer; if the run heals, and a rank is lost meanwhile, it raises."""
        stream, check = self.stream, self.check_lost
        if check is None:
            work.wait()
        elif stream is None:
            # The kernel closes the connections of a process that has ended, but not those to a machine that is gone.
            while not _has_arrived(work):
                check()
        elif torch.cuda.current_stream(stream.device) != stream:
            wait_until(work.is_completed, check, self._timeout)
            work.wait()
        else:
            # Only sums are computed on the stream of the exchange: `Membership.await_exchange` waits for it. But what
            # is queued behind transfers that never arrive must not fill the GPU's queue: a launch would never return.
            work.wait()
            self._queued.append(stream.record_event())
            if len(self._queued) > MOST_QUEUED:
                wait_until(self._queued.popleft().query, check, self._timeout)

    def close(self) -> None:
        """Destroys the process group and the nodes' groups; after an error without waiting for the other ranks."""
        # The interpreter sets `last_value` for an exception that ends the program: this rank may have begun an exchange
        # that the others never will.
        if self._has_failed or getattr(sys, "last_value", None) is not None:
            self.abandon()
            return
        if self.nodes is not None:
            self.nodes.close()
            self.nodes = None
        if self._backend is not None:
            if not self.through_host:  # gloo closes with the last object that refers to it
                self._backend.shutdown()
            self._backend = None
        elif dist.is_initialized():
            dist.destroy_process_group(self.group)

    def abandon(self) -> None:
        """Drops all process groups, or the backend; if NCCL's abort does not return, torch still has the groups."""
        _shut(self.sockets)
        if self.nodes is not None:
            self.nodes.abandon()
            self.nodes = None
        # NCCL's destroy waits for kernels under way, which wait for the lost rank for ever. torch's own limit of an
        # abort blocks until it ends all the same, in the destructor of its future.
        if self._backend is not None:
            backend, self._backend = self._backend, None
            if not self.through_host:
                returns(backend.abort)
        elif dist.is_initialized():
            # The group of all ranks, since this may be a group for host memory beside it.
            if "nccl" in dist.get_backend():
                returns(dist.distributed_c10d._abort_process_group)
            else:
                dist.destroy_process_group()

    @property
    def _limit(self) -> timedelta:
        """The timeout of an operation; without one gloo fails all the same once the other process has ended."""
        return NO_LIMIT if self._timeout == math.inf else timedelta(seconds=self._timeout)

    def _all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sizes: list[int]
    ) -> dist.Work | None:
        options = dist.AllToAllOptions()
        options.timeout = self._limit
        group: Any = self._backend or self.group or dist.group.WORLD
        # The second is the name until torch 2.13.
        all_to_all = getattr(group, "all_to_all_single", None) or group.alltoall_base
        return cast(dist.Work | None, all_to_all(received, sent, received_sizes, sizes, options))

    @contextmanager
    def failures_named(self) -> Iterator[None]:
        """Turns the failure of a transfer into the error of `failure`."""
        try:
            yield
        except RuntimeError as error:
            raise self.failure(error) from error

    def failure(self, error: RuntimeError) -> SamestepError:
        """The error of a failed transfer: NCCL's own, or one that names missing ranks unless `names_missing` is false.

        torch's own message names the rank whose socket broke, which is often one that failed because of another. So
        every rank whose transfer failed answers a roll call in the store; those that do not are missing.
        """
        self._has_failed = True
        if own := nccl_failure(str(error), self.ranks[self.rank]):
            return own
        if not self.names_missing:
            return PeerLostError(f"the exchange failed: {error}")
        seconds = min(ROLL_CALL_SECONDS, self._timeout)
        try:
            missing = roll_call(self._store, self.rank, self.world_size, seconds, self._store_host)
        except RuntimeError:
            return PeerLostError(f"the exchange failed and the store of the ranks is gone: {error}")
        if not missing:
            return PeerLostError(f"the exchange failed although all ranks are alive: {error}")
        return self.lost(missing)


def open_sockets() -> frozenset[int]:
    """The sockets of this process, by inode; empty on a system without /proc."""
    found = set()
    with suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                status = os.fstat(int(fd))
                if stat.S_ISSOCK(status.st_mode):
                    found.add(status.st_ino)
    return frozenset(found)


def _shut(inodes: frozenset[int]) -> None:
    """Shuts down the sockets that are connected: gloo's transfers fail at once, which else wait for long."""
    # gloo has no call for it: its abort leaves a transfer under way, and its destructor waits for that.
    for fd in os.listdir("/proc/self/fd") if inodes else ():
        with suppress(OSError):
            if os.fstat(int(fd)).st_ino in inodes:
                with socket.socket(fileno=os.dup(int(fd))) as ours:
                    ours.getpeername()  # raises for one that listens, whose end gloo does not survive
                    ours.shutdown(socket.SHUT_RDWR)


def _has_arrived(work: dist.Work) -> bool:
    """Waits for a transfer of gloo for a moment; raises its error if it has failed."""
    try:
        return work.wait(LOOK_SECONDS)
    except RuntimeError:
        return work.is_completed() and work.wait()


class GroupPending:
    """A torch.distributed operation under way; keeps the sent memory alive, which gloo reads in the background."""

    def __init__(
        self, transport: GroupTransport, work: dist.Work | None, received: Tensor, sent: Tensor, device: torch.device
    ) -> None:
        self._transport = transport
        self._work = work
        self._received = received
        self._sent = sent
        self._device = device

    def wait(self) -> Tensor:
        """Waits, and copies what arrived in host memory to the device."""
        with self._transport.failures_named():
            if self._work is not None:
                self._transport.wait_for(self._work)
        return self._received.to(self._device)


@contextmanager
def nccl_tried(
    control: Connection,
    device: torch.device,
    timeout: timedelta,
    abandon: Callable[[], None],
    check: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Connects ranks by NCCL in its block; NCCL's error on one rank is raised on all ranks of `control`.

    NCCL makes its buffers at the first message of a kind (`exchange_a_byte`): now, before the model takes the memory,
    and not in the first backward. `abandon` drops the connections after an error; waits call `check`.
    """
    try:
        with _failures_shared(control, timeout):
            yield
        wait_until(torch.cuda.current_stream(device).record_event().query, check, timeout.total_seconds())
    except Exception:
        abandon()  # what NCCL has queued never ends
        raise


@contextmanager
def _failures_shared(control: Connection, timeout: timedelta) -> Iterator[None]:
    """Raises NCCL's error on one rank on all ranks of `control`."""
    said, own = "", None
    try:
        yield
    except PeerLostError:
        raise
    except (SamestepError, RuntimeError) as error:
        said, own = str(error.__cause__ or error), error
        control.limit_waits(min(timeout, timedelta(seconds=FAILURE_SECONDS)))
    # All hear of it before they wait for the device: what NCCL has queued on the others never ends.
    words = {control.rank: said}
    with suppress(PeerLostError) if said else nullcontext():
        words = dict(enumerate(control.gather_words(said)))
    for rank, text in words.items():
        if text:
            lost = PeerLostError(f"rank {control.ranks[rank]} could not connect: {text}")
            raise nccl_failure(text, control.ranks[rank]) or (own if rank == control.rank else None) or lost


def exchange_a_byte(transport: Transport, device: torch.device) -> None:
    """An exchange and a gather by NCCL, for which the device's current stream waits."""
    part, ones = torch.zeros(transport.world_size, dtype=torch.uint8, device=device), [1] * transport.world_size
    transport.exchange(part, ones, ones).wait()
    transport.gather(part).wait()


def subgroup(
    groups: Sequence[Sequence[int]], rank: int, backend: str, store: dist.Store, timeout: timedelta
) -> GroupTransport:
    """The transport of the group that this rank is in; all ranks call it."""
    number = next(number for number, ranks in enumerate(groups) if rank in ranks)
    # Not `new_subgroups`, which cuts by adjacent ranks alone. Ranks make other groups than their own only for NCCL,
    # where all ranks together split a communicator off the world's. With gloo under a default group of NCCL those
    # outside a group would take part in a split, and those in it not (pytorch/pytorch#197568). torch then names a group
    # by its ranks and by how many groups this rank is in, so every rank must be in as many, or they never meet.
    if backend == "gloo":
        ours = dist.new_group(list(groups[number]), timeout=timeout, backend=backend, use_local_synchronization=True)
    else:
        ours = [dist.new_group(list(ranks), timeout=timeout, backend=backend) for ranks in groups][number]
    transport = GroupTransport(ours, dist.PrefixStore(f"calls {groups[number]}", store), timeout)
    transport.ranks, transport.run_size = groups[number], sum(map(len, groups))
    return transport
