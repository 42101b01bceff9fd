"""The transport over torch.distributed: gloo between CPU workers, NCCL between GPUs."""

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.environment import Environment
from samestep.comm.listening import listen
from samestep.comm.transport import Pending, peers_lost
from samestep.errors import PeerLostError, UsageError

if TYPE_CHECKING:
    from samestep.comm.nodes import Nodes

ROLL_CALL_SECONDS = 5.0
FIRST_POLL_SECONDS, POLL_SECONDS = 0.0005, 0.02
LATENCY_BYTES = {"gloo": 256 << 10, "nccl": 1 << 20}
"""What a message costs, in bytes: gloo's is measured (benchmarks/transport.py --forms). NCCL's is an estimate,
20 μs at 50 GB/s."""


class GroupTransport:
    """Moves tensors by a torch.distributed process group.

    Tensors travel as bytes, so every dtype does. With gloo, tensors of an accelerator go through host memory.

    Args:
        group: the process group; None for the default one.
        store: the store that the ranks met at; finds out who is missing when a transfer fails.
        timeout: after this long without an answer a transfer fails.
        store_host: the rank that hosts the store; None if no rank does.
        meeting: where its ranks can meet anew after a loss; None if they cannot.

    Attributes:
        group: as given.
        numbers: of its ranks among all, for messages, and how many these are; None if they are all.
        nodes: the same ranks by their nodes, where `connecting` has connected them so; closed with this one.
        stream: of the exchange, which `connecting` makes where the backend is NCCL.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        store: dist.Store,
        timeout: timedelta,
        store_host: int | None = None,
        meeting: dist.Store | None = None,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.group = group
        self._store = store
        self._timeout = timeout
        self._store_host = store_host
        self.meeting = meeting
        self.numbers: tuple[Sequence[int], int] | None = None
        self.names_missing = True
        self._backend = dist.get_backend(group)
        self._through_host = self._backend == "gloo"
        self.latency_bytes = LATENCY_BYTES.get(self._backend, 0)
        self.nodes: Nodes | None = None
        self.stream: torch.cuda.Stream | None = None

    def exchange(self, parts: Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        """All-to-all of the parts."""
        device = parts.device
        if self._through_host:
            parts = parts.cpu()
        received = torch.empty(sum(receive_sizes), dtype=parts.dtype, device=parts.device)
        width = parts.element_size()
        try:
            work = dist.all_to_all_single(
                received.view(torch.uint8),
                parts.contiguous().view(torch.uint8),
                [size * width for size in receive_sizes],
                [size * width for size in sizes],
                group=self.group,
                async_op=True,
            )
        except RuntimeError as error:
            raise self.peers_lost(error) from error
        return GroupPending(self, work, received, parts, device)

    def gather(self, part: Tensor) -> Pending:
        """All-gather; over gloo as an all-to-all, which is measured to be faster there at every size."""
        if self._through_host:
            size = part.numel()
            return self.exchange(part.repeat(self.world_size), [size] * self.world_size, [size] * self.world_size)
        received = part.new_empty(part.numel() * self.world_size)
        try:
            work = dist.all_gather_into_tensor(
                received.view(torch.uint8), part.contiguous().view(torch.uint8), group=self.group, async_op=True
            )
        except RuntimeError as error:
            raise self.peers_lost(error) from error
        return GroupPending(self, work, received, part, part.device)

    def add(self, tensor: Tensor) -> Pending:
        """The backend's own all-reduce."""
        moved = tensor.cpu() if self._through_host else tensor
        try:
            work = dist.all_reduce(moved, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.peers_lost(error) from error
        return GroupPending(self, work, moved, moved, tensor.device)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcast, through host memory where gloo needs it."""
        ours = tensor.detach()
        moved = (ours.cpu() if self._through_host else ours).contiguous()
        try:
            dist.broadcast(moved.view(-1).view(torch.uint8), group=self.group, group_src=source)
        except RuntimeError as error:
            raise self.peers_lost(error) from error
        if moved is not ours:
            ours.copy_(moved)

    def close(self) -> None:
        """Destroys the process group, and what there is by nodes."""
        if self.nodes is not None:
            self.nodes.close()
            self.nodes = None
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

    def abandon(self) -> None:
        """Drops all process groups after a transfer failed, without waiting for what is under way.

        Peers notice: their transfers with us fail. With NCCL this has not been run on two GPUs.
        """
        if self.nodes is not None:
            self.nodes.abandon()
            self.nodes = None
        if dist.is_initialized():
            if self._backend == "nccl":
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()

    def peers_lost(self, error: RuntimeError) -> PeerLostError:
        """Turns a failed transfer into an error that names the ranks which did not answer.

        Every rank whose transfer failed answers a roll call in the store; those that do not are missing. It is left out
        where somebody else says who is (`names_missing` is false).
        """
        if not self.names_missing:
            return PeerLostError(f"the exchange failed: {error}")
        seconds = min(ROLL_CALL_SECONDS, self._timeout.total_seconds())
        try:
            missing = roll_call(self._store, self.rank, self.world_size, seconds, self._store_host)
        except RuntimeError:
            return PeerLostError(f"the exchange failed and the store of the ranks is gone: {error}")
        if not missing:
            return PeerLostError(f"the exchange failed although all ranks are alive: {error}")
        numbers, count = self.numbers or (range(self.world_size), self.world_size)
        named = tuple(numbers[rank] for rank in missing)
        return peers_lost(numbers[self.rank], count, named, self._timeout.total_seconds())


def roll_call(
    store: dist.Store,
    rank: int,
    world_size: int,
    seconds: float,
    store_host: int | None,
    word: str = "here",
    check: Callable[[], None] = lambda: None,
) -> tuple[int, ...]:
    """Says a word, "here", in a store, and waits for the other ranks to do so."""
    missing: tuple[int, ...] = ()
    deadline, pause = time.monotonic() + seconds, FIRST_POLL_SECONDS
    try:
        store.set(str(rank), word)
        # It polls, since a `wait` that times out makes torch print warnings.
        while missing := tuple(other for other in range(world_size) if not store.check([str(other)])):
            if time.monotonic() >= deadline:
                break
            check()
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
    except RuntimeError:
        if store_host is None:
            raise
        return missing or (store_host,)
    return missing


class GroupPending:
    """A torch.distributed operation under way; keeps what it sends alive."""

    def __init__(
        self, transport: GroupTransport, work: dist.Work | None, received: Tensor, sent: Tensor, device: torch.device
    ) -> None:
        self._transport = transport
        self._work = work
        self._received = received
        self._sent = sent
        self._device = device

    def wait(self) -> Tensor:
        """Waits, and brings what arrived in host memory to the device."""
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            raise self._transport.peers_lost(error) from error
        return self._received.to(self._device)


def meeting_of(environment: Environment, timeout: timedelta) -> dist.Store:
    """Where the ranks of a run that is under way meet when one joins."""
    host, port = environment.master_addr, environment.master_port
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise PeerLostError(f"the run to join is over: nobody answers at {host}:{port}") from error
    return dist.PrefixStore(f"samestep/{environment.attempt}.1", store)


def store_host(environment: Environment) -> int | None:
    """The rank that hosts the store; None if no rank does."""
    return None if environment.store_is_kept else 0


def meet(environment: Environment, timeout: timedelta) -> dist.Store:
    """Connects to the store and waits until every rank has."""
    rank, host, port = environment.rank, environment.master_addr, environment.master_port
    hosting, listener = store_host(environment), None
    if rank == hosting:
        # What this process already shares by the port is in the way of another listener, and taken below.
        with contextlib.suppress(OSError):
            listener = listen(host, port).detach()
    try:
        # Not dist.rendezvous: its store waits for all ranks by itself, and cannot say who is missing.
        store = dist.TCPStore(
            host,
            port,
            is_master=rank == hosting,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener,
        )
        # A store may outlive the processes, and a process may connect again: each time with keys of their own.
        number = store.add(f"samestep/{environment.attempt}/{rank}", 1)
        ours = dist.PrefixStore(f"samestep/{environment.attempt}.{number}", store)
    except (RuntimeError, ValueError, OSError) as error:
        verb = "open" if rank == hosting else "reach"
        raise UsageError(
            f"rank {rank} cannot {verb} the store at {host}:{port}, as MASTER_ADDR and MASTER_PORT say: {error}"
        ) from error
    try:
        missing = roll_call(
            dist.PrefixStore("meeting", ours), rank, environment.world_size, timeout.total_seconds(), hosting
        )
    except RuntimeError as error:
        raise PeerLostError(f"the store at {host}:{port} went while rank {rank} waited for the others") from error
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        raise PeerLostError(
            f"rank {rank} met {environment.world_size - len(missing)} of {environment.world_size} ranks "
            f"within {timeout.total_seconds():g} s; missing: {names}",
            missing,
        )
    return ours
