"""The transport through shared memory: between ranks of one host, without sockets and without a process group.

A rank copies the parts of an operation to its outbox, writes the place to its ring, and only then counts the operation
as posted and wakes the ranks that wait for it. A rank that has read its part marks it as read; the place is reused once
all have. A waiting rank first polls the other's count, then sleeps on it (a futex), and at intervals looks whether the
other is alive. Operations posted before a rank left or died can still be read.
"""

import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed import Store

from samestep.comm.outbox import (
    Outbox,
    OutboxBlock,
    RingOffsets,
    deliver_offsets,
    exchange_offsets,
    gather_offsets,
    header,
    receive_offsets,
    with_pieces,
)
from samestep.comm.segment import RING, WORD, Lane, Peers, Segment, copy
from samestep.comm.transport import Connection, Pending, unexpected_sizes
from samestep.devices.inventory import usable_cores
from samestep.errors import PeerLostError, UsageError

SPIN_SECONDS = 0.0002
"""How long a rank polls before it sleeps, given a core for each rank: about ten times the cost of a wake-up."""
SLEEP_SECONDS = (0.001, 0.02)
"""The first and the longest sleep between looks at whether the other is alive."""
LONGEST_COUNTED_SECONDS = 1.0
"""The most that one sleep adds to the time waited: while this process was stopped, it did not wait."""
PIECE_BYTES = 4 << 20
"""Of a broadcast, at a time."""
LATENCY_BYTES = 128 << 10
"""The cost of a message in bytes: measured (benchmarks/transport.py --forms)."""
MAX_BROADCASTS, MAX_BROADCAST_BYTES = 64, 4 * PIECE_BYTES
"""The most unread broadcasts of a source."""


class SharedTransport(Connection):
    """Moves tensors through memory that all ranks map. Tensors of an accelerator are copied to it and from it.

    Tier `bitwise`: tensors travel as bytes. `add` sums by rank, from left to right, the same on every rank.
    Every rank has written its process id to the segment. `store` is from the rendezvous, for a process group that is
    made later.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        timeout: timedelta,
        store: Store | None = None,
        healing_store: Store | None = None,
    ) -> None:
        world_size = segment.world_size
        super().__init__(rank, world_size, timeout, healing_store)
        self.latency_bytes = LATENCY_BYTES
        self.store = store
        self._segment: Segment | None = segment
        # From the next rank on: with all ranks starting at rank 0, its lane would be read by all at once.
        self.others = [(rank + step) % world_size for step in range(1, world_size)]
        self._peers = Peers({other: segment.words[segment.lanes[other].pid] for other in self.others})
        self._number = 0  # of the next operation: the same on all ranks, which make the same calls in the same order
        self._dropped: deque[tuple[int, int]] = deque()
        self._broadcasts: deque[OutboxBlock] = deque()
        self._lane = segment.lanes[rank]
        # Also when the run is dropped: nothing refers to it then.
        self._leave = finalize(self, _leave, segment, self._lane, self._peers, os.getpid())
        self._outbox = Outbox(segment.outbox_size, RING, self._is_read)
        self._header = header(world_size)
        self._marks = WORD * (1 + 2 * world_size)
        self._all_read = struct.pack(f"={world_size}Q", *[1] * world_size)
        # With more ranks than cores, polling would keep the awaited rank from running.
        self.spins = world_size <= usable_cores()

    def exchange(self, parts: Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]) -> "SharedParts":
        parts = parts.contiguous()
        offsets = exchange_offsets(tuple(sizes), parts.element_size(), self.rank)
        number = self._post(offsets, [parts] * len(offsets.copies)).number
        return SharedParts(self, number, parts, offsets.own_start, receive_sizes)

    def deliver(self, pieces: Sequence[Tensor], sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        if any(sizes):
            number = self._post(with_pieces(deliver_offsets(tuple(sizes)), pieces), pieces).number
        else:
            number = self._pass()
        senders = [peer for peer in self.others[::-1] if receive_sizes[peer]]
        return SharedParts(self, number, torch.empty(0, dtype=torch.uint8), 0, receive_sizes, senders)

    def gather(self, part: Tensor, sizes: Sequence[int] = (), into: Tensor | None = None) -> "SharedParts":
        """Starts an all-gather: one copy in shared memory, which all read."""
        part = part.contiguous()
        numel = part.numel()
        offsets = gather_offsets(self.world_size, self.rank, 0, numel * part.element_size())
        return SharedParts(self, self._post(offsets, [part]).number, part, 0, sizes or (numel,) * self.world_size)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcasts in pieces, so that a large tensor needs little shared memory."""
        # Bytes of a strided tensor are copied to and from a contiguous one; a Parameter is written to without autograd.
        ours = tensor.detach()
        moved = ours.contiguous()
        size = moved.numel() * moved.element_size()
        for start in range(0, size, PIECE_BYTES):
            piece = min(PIECE_BYTES, size - start)
            if self.rank == source:
                self._hold_back(piece)
                offsets = gather_offsets(self.world_size, self.rank, start, piece)
                self._broadcasts.append(self._post(offsets, [moved]))
            else:
                number = self._pass()
                self.wait_for(source, number)
                self.read_part(source, number, moved, start, piece)
        if moved is not ours and self.rank != source:
            ours.copy_(moved)

    def broadcast_all(self, tensors: Sequence[Tensor], source: int) -> None:
        for group in _by_bytes(tensors):
            size = sum(tensor.nbytes for tensor in group)
            if len(group) == 1:
                self.broadcast(group[0], source)
            elif self.rank == source:
                self._hold_back(size)
                offsets = with_pieces(gather_offsets(self.world_size, self.rank, 0, size), group)
                self._broadcasts.append(self._post(offsets, group))
            else:
                number = self._pass()
                self.wait_for(source, number)
                at, mark = self._find(source, number, size)
                for tensor in group:
                    self._mapped().read(at, tensor, 0, tensor.nbytes)
                    at += tensor.nbytes
                self.mark_read(mark)

    def close(self) -> None:
        """Leaves: the others may still read what was posted; a wait for more raises on them."""
        self.abandon()
        self.store = self.healing_store = None

    def abandon(self) -> None:
        """Leaves after a failure; keeps the store for healing."""
        self._segment = None
        self._leave()  # runs once

    def _mapped(self) -> Segment:
        """The segment, unless this rank has left."""
        if self._segment is None:
            raise PeerLostError("the exchange failed: this rank has dropped its connections")
        return self._segment

    def _post(self, offsets: RingOffsets, tensors: Sequence[Tensor]) -> OutboxBlock:
        """Posts an operation with parts of contiguous tensors, one a copy."""
        segment = self._mapped()
        if self._dropped:  # here, since in `__del__` the parts may not be posted yet, and waiting there would block
            self._mark_dropped()
        block = self._place(self._header.size + offsets.size)
        at = self._lane.outbox + block.start
        self._header.pack_into(segment.memory, at, block.number | self.call << 48, *offsets.rows, self.note)
        for tensor, (to, start, size) in zip(tensors, offsets.copies, strict=True):
            segment.write(at + self._header.size + to, tensor, start, size)
        self._announce(segment, block)
        if unused := self._outbox.unused(block.number):
            with suppress(OSError):  # a kernel that cannot release it
                segment.memory.madvise(mmap.MADV_REMOVE, self._lane.outbox + unused.start, len(unused))
        return block

    def _announce(self, segment: Segment, block: OutboxBlock) -> None:
        """Counts an operation as posted, whose bytes are in their place."""
        words, lane = segment.words, self._lane
        words[lane.ring + block.number % RING] = block.start
        # The store that publishes: a rank that loads this count sees all stores before it (`segment`: memory ordering).
        words[lane.posted] = self._number = block.number + 1
        segment.wake(lane.posted)

    def _pass(self) -> int:
        """Counts an operation to which this rank contributes nothing; no rank waits for it, so none is woken."""
        segment, number = self._mapped(), self._number
        segment.words[self._lane.posted] = self._number = number + 1
        return number

    def _place(self, size: int) -> OutboxBlock:
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
        # The source of broadcasts waits for no rank by itself, and could fill all memory while the others compute.
        sent = self._broadcasts
        while sent and (len(sent) >= MAX_BROADCASTS or sum(b.end - b.start for b in sent) + size > MAX_BROADCAST_BYTES):
            self._wait_until_read(sent.popleft())

    def read_part(self, peer: int, number: int, into: Tensor, start: int, size: int) -> None:
        """Copies a rank's part of an operation that it has posted to a place in a contiguous tensor, and marks it."""
        at, mark = self._find(peer, number, size)
        segment = self._mapped()
        segment.read(at, into, start, size)
        # After the copy: once all marks are set, the peer may overwrite these bytes.
        segment.words[mark] = 1

    def view_part(self, peer: int, number: int, size: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """A rank's part of an operation that it has posted, where it lies, and the word to `mark` after reading it."""
        at, mark = self._find(peer, number, size)
        return self._mapped().view(at, size, dtype), mark

    def mark_read(self, word: int) -> None:
        self._mapped().words[word] = 1

    def _find(self, peer: int, number: int, size: int) -> tuple[int, int]:
        """The first byte of a rank's part of an operation that it has posted, and the word of our mark."""
        segment = self._mapped()
        words, ranks, lane = segment.words, self.world_size, segment.lanes[peer]
        at = lane.outbox + words[lane.ring + number % RING]
        word = at // WORD
        mine = word + 1 + self.rank
        # A place that was reused too early, or a rank that posts other operations, must not be read as this one.
        if words[word] != number | self.call << 48:
            raise unexpected_sizes(self.rank, f"another operation of rank {peer}", "the one that it has posted")
        sent = words[mine + ranks]
        if sent != size:
            raise unexpected_sizes(self.rank, f"{sent} bytes of rank {peer}", f"{size}")
        if (note := words[word + 1 + 3 * ranks]) != self.note:
            self.other_notes[peer] = note
        return at + self._header.size + words[mine], mine + 2 * ranks

    def wait_for(self, peer: int, number: int) -> None:
        """Waits until a rank has posted an operation."""
        segment = self._mapped()
        words, at = segment.words, segment.lanes[peer].posted
        if words[at] > number:
            return
        # A wake-up costs some 20 μs and a system call on each side; most waits between equal ranks are shorter.
        if self.spins:
            end = time.perf_counter() + SPIN_SECONDS
            while time.perf_counter() < end:
                if words[at] > number:
                    return
        waited, pause = 0.0, SLEEP_SECONDS[0]
        while (posted := words[at]) <= number:
            if waited >= self._timeout or self._has_left(peer):
                if words[at] > number:  # it may have posted this between the two looks, as its last operation
                    return
                raise self._lost([p for p in self.others if words[segment.lanes[p].posted] <= number])
            before = time.monotonic()
            # With a limit: a process that is killed wakes no rank.
            segment.wait(at, posted, pause)
            waited += min(time.monotonic() - before, LONGEST_COUNTED_SECONDS)
            pause = min(2 * pause, SLEEP_SECONDS[1])

    def _wait_until_read(self, block: OutboxBlock) -> None:
        """Waits until all have read an operation of ours."""
        segment = self._mapped()
        marks = (self._lane.outbox + block.start + self._marks) // WORD
        waited, pause = 0.0, SPIN_SECONDS
        # A block that the outbox no longer has was read: in its place are another operation's marks, or payload.
        while block in self._outbox.blocks and not self._is_read(block):
            # The operations of a rank that has left stay readable, but it will read none of ours: no need to time out.
            late = [peer for peer in self.others if not segment.words[marks + peer]]
            if waited >= self._timeout or any(self._has_left(peer) for peer in late):
                if self._is_read(block):
                    return
                raise self._lost(late)
            before = time.monotonic()
            time.sleep(pause)  # not a futex: a reader would have to make a system call for each mark
            waited += min(time.monotonic() - before, LONGEST_COUNTED_SECONDS)
            pause = min(2 * pause, SLEEP_SECONDS[1])

    def _is_read(self, block: OutboxBlock) -> bool:
        """Whether all ranks have read an operation of ours, which the outbox has."""
        marks = self._lane.outbox + block.start + self._marks
        return self._mapped().memory[marks : marks + len(self._all_read)] == self._all_read

    def drop_parts(self, number: int, peers: Sequence[int]) -> None:
        """Notes that this rank will not read the parts of some ranks in an operation."""
        self._dropped.extend((number, peer) for peer in peers)

    def _mark_dropped(self) -> None:
        """Marks parts that this rank will not read as read, once they are posted: else their places stay taken."""
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

    def has_lost(self) -> bool:
        return any(self._has_left(peer) for peer in self.others)

    def _has_left(self, peer: int) -> bool:
        """Whether a rank has closed its transport, or its process has ended."""
        segment = self._mapped()
        return segment.words[segment.lanes[peer].gone] != 0 or self._peers.has_ended(peer)

    def _lost(self, late: Sequence[int]) -> PeerLostError:
        return self.lost(sorted([peer for peer in late if self._has_left(peer)] or late))


def _by_bytes(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of at most `PIECE_BYTES`, or of one tensor."""
    group, size = list[Tensor](), 0
    for tensor in tensors:
        if group and size + tensor.nbytes > PIECE_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group


def _leave(segment: Segment, lane: Lane, peers: Peers, pid: int) -> None:
    """Ends the waits of the other ranks for this one, and closes the descriptors."""
    peers.close()
    if os.getpid() == pid:  # a forked child (a data worker) has a copy of us, and is not the rank
        segment.words[lane.gone] = 1
        segment.wake(lane.posted)


class SharedParts:
    """An exchange or a gather under way; keeps `sent` alive, whose part for this rank is copied from `own_start` on."""

    def __init__(
        self,
        transport: SharedTransport,
        number: int,
        sent: Tensor,
        own_start: int,
        receive_sizes: Sequence[int],
        senders: list[int] | None = None,
    ) -> None:
        self._transport = transport
        self._number = number
        self._sent = sent
        self._own_start = own_start
        self._sizes = tuple(receive_sizes)
        self._unread = transport.others[::-1] if senders is None else senders
        self._received: Tensor | None = None

    def wait(self) -> Tensor:
        """The parts from rank 0, 1, …, concatenated, in memory of their own."""
        if self._received is not None:
            return self._received
        transport, sent, unread = self._transport, self._sent, self._unread
        numel, starts, sizes = receive_offsets(self._sizes, sent.element_size())
        received = sent.new_empty(numel)
        rank = transport.rank
        # First the own part: it is in this process's memory already, and the others have time to post theirs.
        copy(received, starts[rank], sent, self._own_start, sizes[rank])
        while unread:
            peer = unread[-1]
            transport.wait_for(peer, self._number)
            transport.read_part(peer, self._number, received, starts[peer], sizes[peer])
            unread.pop()  # only now: if the wait raised, `__del__` must mark the rest
        self._received = received
        return received

    @contextmanager
    def views(self) -> Iterator[list[Tensor]]:
        """The parts from rank 0, 1, … where they lie: the others' in shared memory, for the time of a block."""
        transport, sent = self._transport, self._sent
        width, rank = sent.element_size(), transport.rank
        own = self._own_start // width
        parts = [sent[own : own + self._sizes[rank]]] * len(self._sizes)
        marks = []
        for peer in reversed(self._unread):
            transport.wait_for(peer, self._number)
            parts[peer], mark = transport.view_part(peer, self._number, self._sizes[peer] * width, sent.dtype)
            marks.append(mark)
        yield parts
        for mark in marks:
            transport.mark_read(mark)
        self._unread = []

    def __del__(self) -> None:
        if self._unread:  # given up, by an exception: its places in the outboxes of the others must become free
            self._transport.drop_parts(self._number, self._unread)
