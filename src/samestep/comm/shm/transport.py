"""The transport through shared memory: between ranks of one host, without sockets and without a process group.

A rank copies what it hands over into its outbox, notes the place in its ring, and only then counts the operation as
posted and wakes who waits for it. Whoever has read its part marks it as read; the place is used again when all have. A
rank that waits looks at the other's count for a moment, then sleeps on it (a futex), and now and then looks whether the
other is still there. What a rank posted before it left or died counts.
"""

import os
import struct
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor
from torch.distributed import Store

from samestep.comm.shm.ring import Block, Layout, Outbox, exchange_layout, gather_layout, header, receive_layout
from samestep.comm.shm.segment import RING, WORD, Peers, Segment, copy, futex_wait, futex_wake, read, write
from samestep.comm.transport import Pending, peers_lost, unexpected_sizes
from samestep.devices.inventory import usable_cores
from samestep.errors import PeerLostError, UsageError

SPIN_SECONDS = 0.0002
"""How long a rank looks before it sleeps, where there is a core for each: about ten times what waking one costs."""
SLEEP_SECONDS = (0.001, 0.02)
"""The first and the longest sleep between looks at whether the other is still there."""
LONGEST_COUNTED_SECONDS = 1.0
"""What one sleep adds to the time waited at most: a process that was stopped did not wait."""
PIECE_BYTES = 4 << 20
"""Of a broadcast, at a time."""
LATENCY_BYTES = 128 << 10
"""What a message costs, in bytes: measured (benchmarks/transport.py --forms)."""
MAX_BROADCASTS, MAX_BROADCAST_BYTES = 64, 4 * PIECE_BYTES
"""How far the source of broadcasts runs ahead of those who read them."""


class SharedTransport:
    """Moves tensors through memory that all ranks map. Tensors of an accelerator are copied to it and from it.

    Tier `bitwise`: tensors travel as bytes. `add` sums by rank, from left to right, the same on every rank.

    Args:
        segment: the memory; every rank has left its process id there.
        rank: our own.
        timeout: after this long without an answer a transfer fails.
        store: the store that the ranks met at, kept while we may need it.
        meeting: where its ranks can meet anew after a loss; None if they cannot.
    """

    nodes = None
    stream = None

    def __init__(
        self,
        segment: Segment,
        rank: int,
        timeout: timedelta,
        store: Store | None = None,
        meeting: Store | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size = segment.world_size
        self.latency_bytes = LATENCY_BYTES
        self.meeting = meeting
        self.store = store
        self._timeout = timeout.total_seconds()
        self._segment: Segment | None = segment
        self._pid = os.getpid()
        self.others = [(rank + step) % world_size for step in range(1, world_size)]
        self._peers = Peers({other: segment.words[segment.lanes[other].pid] for other in self.others})
        self._number = 0
        self._dropped: deque[tuple[int, int]] = deque()
        self._broadcasts: deque[Block] = deque()
        self._lane = segment.lanes[rank]
        self._outbox = Outbox(segment.outbox_size, RING, self._is_read)
        self._header = header(world_size)
        self._marks = WORD * (1 + 2 * world_size)
        self._all_read = struct.pack(f"={world_size}Q", *[1] * world_size)
        self._spin_seconds = SPIN_SECONDS if world_size <= usable_cores() else 0.0

    def exchange(self, parts: Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        """All-to-all of the parts."""
        parts = parts.contiguous()
        layout = exchange_layout(tuple(sizes), parts.element_size(), self.rank)
        return SharedParts(self, self._post(layout, parts).number, parts, layout.own_start, receive_sizes)

    def gather(self, part: Tensor) -> Pending:
        """All-gather: one copy in shared memory, which all read."""
        part = part.contiguous()
        numel = part.numel()
        layout = gather_layout(self.world_size, self.rank, 0, numel * part.element_size())
        return SharedParts(self, self._post(layout, part).number, part, 0, (numel,) * self.world_size)

    def add(self, tensor: Tensor) -> Pending:
        """Sums by rank, from left to right: tier `allclose`."""
        return SharedTotal(self.gather(tensor), self.world_size)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcast in pieces, so that a large tensor needs little shared memory."""
        ours = tensor.detach()
        moved = ours.contiguous()
        size = moved.numel() * moved.element_size()
        for start in range(0, size, PIECE_BYTES):
            piece = min(PIECE_BYTES, size - start)
            if self.rank == source:
                self._hold_back(piece)
                layout = gather_layout(self.world_size, self.rank, start, piece)
                self._broadcasts.append(self._post(layout, moved))
            else:
                number = self._pass()
                self.wait_for(source, number)
                self.take(source, number, moved, start, piece)
        if moved is not ours and self.rank != source:
            ours.copy_(moved)

    def close(self) -> None:
        """Leaves: the others may still read what was posted; whoever waits for more learns that we are gone."""
        self.abandon()
        self.store = self.meeting = None

    def abandon(self) -> None:
        """Leaves after a transfer failed; the same as `close`, but for where the ranks can meet anew."""
        segment, self._segment = self._segment, None
        if segment is None:
            return
        self._peers.close()
        if os.getpid() == self._pid:  # a child that was forked has a copy of us, and is not the rank
            segment.words[self._lane.gone] = 1
            futex_wake(segment.address_of(self._lane.posted))

    def _mapped(self) -> Segment:
        """The segment, if it is still ours."""
        if self._segment is None:
            raise PeerLostError("the exchange failed: this rank has dropped its connections")
        return self._segment

    def _post(self, layout: Layout, tensor: Tensor) -> Block:
        """Posts an operation that hands over parts of a contiguous tensor."""
        segment = self._mapped()
        if self._dropped:
            self._mark_dropped()
        block = self._place(self._header.size + layout.size)
        at = self._lane.outbox + block.start
        self._header.pack_into(segment.memory, at, block.number, *layout.rows)
        for to, start, size in layout.pieces:
            write(segment, at + self._header.size + to, tensor, start, size)
        self._announce(segment, block)
        return block

    def _announce(self, segment: Segment, block: Block) -> None:
        """Makes an operation, whose bytes are in their place, known to the others."""
        words, lane = segment.words, self._lane
        words[lane.ring + block.number % RING] = block.start
        words[lane.posted] = self._number = block.number + 1
        futex_wake(segment.address + lane.posted * WORD)

    def _pass(self) -> int:
        """Takes part in an operation to which this rank has nothing to give, and which nobody waits for."""
        segment, number = self._mapped(), self._number
        segment.words[self._lane.posted] = self._number = number + 1
        return number

    def _place(self, size: int) -> Block:
        """A free place in our outbox for the next operation; waits for one if need be."""
        outbox = self._outbox
        if size > outbox.size:
            raise UsageError(
                f"{size:,} bytes at once do not fit the {outbox.size:,} bytes of address space that a rank may share: "
                "raise the limit (ulimit -v), or set SAMESTEP_TRANSPORT=gloo"
            )
        while (block := outbox.place(size, self._number)) is None:
            self._wait_until_read(outbox.oldest())
        return block

    def _hold_back(self, size: int) -> None:
        """Waits until few enough bytes of our broadcasts are unread that `size` more may be sent."""
        sent = self._broadcasts
        while sent and (len(sent) >= MAX_BROADCASTS or sum(b.end - b.start for b in sent) + size > MAX_BROADCAST_BYTES):
            self._wait_until_read(sent.popleft())

    def take(self, peer: int, number: int, into: Tensor, start: int, size: int) -> None:
        """Copies a rank's part of an operation that it has posted to a place in a contiguous tensor, and marks it."""
        segment = self._mapped()
        words, ranks, lane = segment.words, self.world_size, segment.lanes[peer]
        at = lane.outbox + words[lane.ring + number % RING]
        word = at // WORD
        mine = word + 1 + self.rank
        assert words[word] == number, f"rank {peer} wrote operation {words[word]} where {number} was to be"
        sent = words[mine + ranks]
        if sent != size:
            raise unexpected_sizes(self.rank, f"{sent} bytes of rank {peer}", f"{size}")
        read(segment, at + self._header.size + words[mine], into, start, size)
        words[mine + 2 * ranks] = 1

    def wait_for(self, peer: int, number: int) -> None:
        """Waits until a rank has posted an operation."""
        segment = self._mapped()
        words, at = segment.words, segment.lanes[peer].posted
        if words[at] > number:
            return
        if self._spin_seconds:
            end = time.perf_counter() + self._spin_seconds
            while time.perf_counter() < end:
                if words[at] > number:
                    return
        waited, pause = 0.0, SLEEP_SECONDS[0]
        while (posted := words[at]) <= number:
            if waited >= self._timeout or self._has_left(peer):
                if words[at] > number:  # what it did last counts
                    return
                raise self._peers_lost([p for p in self.others if words[segment.lanes[p].posted] <= number])
            before = time.monotonic()
            futex_wait(segment.address_of(at), posted, pause)
            waited += min(time.monotonic() - before, LONGEST_COUNTED_SECONDS)
            pause = min(2 * pause, SLEEP_SECONDS[1])

    def _wait_until_read(self, block: Block) -> None:
        """Waits until all have read an operation of ours."""
        segment = self._mapped()
        marks = (self._lane.outbox + block.start + self._marks) // WORD
        waited, pause = 0.0, SPIN_SECONDS
        while not self._is_read(block):
            late = [peer for peer in self.others if not segment.words[marks + peer]]
            if waited >= self._timeout or any(self._has_left(peer) for peer in late):
                if self._is_read(block):
                    return
                raise self._peers_lost(late)
            before = time.monotonic()
            time.sleep(pause)
            waited += min(time.monotonic() - before, LONGEST_COUNTED_SECONDS)
            pause = min(2 * pause, SLEEP_SECONDS[1])

    def _is_read(self, block: Block) -> bool:
        """Whether all ranks have read an operation of ours."""
        segment = self._mapped()
        at = self._lane.outbox + block.start
        marks = at + self._marks
        # Where another operation is by now, this one was read.
        return (
            segment.memory[marks : marks + len(self._all_read)] == self._all_read
            or segment.words[at // WORD] != block.number
        )

    def drop(self, number: int, peers: Sequence[int]) -> None:
        """Notes that nobody here will read what some ranks have for us in an operation."""
        self._dropped.extend((number, peer) for peer in peers)

    def _mark_dropped(self) -> None:
        """Marks as read what nobody here will read, as far as it has come."""
        segment = self._mapped()
        words = segment.words
        for _ in range(len(self._dropped)):
            number, peer = self._dropped.popleft()
            lane = segment.lanes[peer]
            if words[lane.posted] > number:
                at = lane.outbox + words[lane.ring + number % RING]
                words[(at + self._marks) // WORD + self.rank] = 1
            else:
                self._dropped.append((number, peer))

    def _has_left(self, peer: int) -> bool:
        """Whether a rank has said so, or its process has ended."""
        segment = self._mapped()
        return segment.words[segment.lanes[peer].gone] != 0 or self._peers.has_ended(peer)

    def _peers_lost(self, late: Sequence[int]) -> PeerLostError:
        """An error that names those who have left; if nobody has, those who are late."""
        missing = tuple(sorted([peer for peer in late if self._has_left(peer)] or late))
        return peers_lost(self.rank, self.world_size, missing, self._timeout)


class SharedParts:
    """An exchange or a gather under way; keeps what it sends alive, since the part for this rank is in it.

    Args:
        transport: which posted it.
        number: of the operation.
        sent: this rank's parts.
        own_start: where the one for itself begins in it, in bytes.
        receive_sizes: elements of the part from each rank.
    """

    def __init__(
        self, transport: SharedTransport, number: int, sent: Tensor, own_start: int, receive_sizes: Sequence[int]
    ) -> None:
        self._transport = transport
        self._number = number
        self._sent = sent
        self._own_start = own_start
        self._sizes = tuple(receive_sizes)
        self._unread = transport.others[::-1]
        self._received: Tensor | None = None

    def wait(self) -> Tensor:
        """The parts from rank 0, 1, … one after another, in memory of their own."""
        if self._received is not None:
            return self._received
        transport, sent, unread = self._transport, self._sent, self._unread
        numel, starts, sizes = receive_layout(self._sizes, sent.element_size())
        received = sent.new_empty(numel)
        rank = transport.rank
        copy(received, starts[rank], sent, self._own_start, sizes[rank])
        while unread:
            peer = unread[-1]
            transport.wait_for(peer, self._number)
            transport.take(peer, self._number, received, starts[peer], sizes[peer])
            unread.pop()
        self._received = received
        return received

    def __del__(self) -> None:
        if self._unread:  # an exchange that was given up: its place must not stay taken
            self._transport.drop(self._number, self._unread)


class SharedTotal:
    """A sum under way.

    Args:
        parts: what is to be summed, of every rank.
        world_size: the number of ranks.
    """

    def __init__(self, parts: Pending, world_size: int) -> None:
        self._parts = parts
        self._world_size = world_size

    def wait(self) -> Tensor:
        """The sum, from left to right."""
        first, *others = self._parts.wait().chunk(self._world_size)
        for other in others:
            first.add_(other)
        return first
