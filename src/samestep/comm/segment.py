"""The segment: memory that the ranks of one host share, without a name that could be left behind.

Rank 0 makes a file without a name (memfd_create) and publishes its process id, descriptor and a nonce; the others open
it through /proc and map it. It is gone with the last process that maps it, however that ends. It is sparse: memory is
used only where something was written, until that is released (madvise(2), MADV_REMOVE).

Memory ordering: x86-64 makes plain stores visible to other cores in program order, and reorders no load with a later
load or store (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3A, "Memory Ordering"; string
instructions and non-temporal stores are ordered before the word that follows, as the C library fences the latter). So a
rank that sees a new count of posted operations also sees their bytes, and one that sees a mark may overwrite what was
read, without fences, which Python does not have. Other processors promise less, so there is no segment on them.

Layout, in words of 8 bytes, native:

    0      the nonce; number of ranks; bytes of an outbox
    then, a multiple of 4,096 bytes a rank: process id, number of operations posted, whether it has gone; at 512 words,
           the ring of `RING` places: operation n's place in its outbox is at n % `RING`
    then, an outbox a rank

A waiting rank sleeps on a word of the segment by Linux's `futex` system call: futex(2), FUTEX_WAIT and FUTEX_WAKE
without FUTEX_PRIVATE_FLAG, since the word is shared between processes. ctypes releases the interpreter's lock for the
call. The kernel reports whether another rank's process has ended: pidfd_open(2).
"""

import ctypes
import functools
import mmap
import os
import platform
import secrets
import select
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.environment import Environment
from samestep.comm.rendezvous import Rendezvous
from samestep.errors import PeerLostError

RING = 16_384
"""Operations that may be under way between two ranks."""
OUTBOX_SIZES = tuple(gigabytes << 30 for gigabytes in (64, 16, 4, 1))
"""Bytes of address space a rank: the first of them that can be mapped."""

SEGMENT, NO_SEGMENT = "segment", "none"

PAGE = 4096
WORD = 8
_RANK_SIZE = PAGE + RING * WORD
_SYSCALL_X86_64 = 202
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1


class NoSegmentError(Exception):
    """This process cannot share memory with the others; the message has the reason."""


class Lane(NamedTuple):
    """The places of one rank in the segment."""

    pid: int  # the word with its process id; 0 until it has connected
    posted: int  # the word with the number of operations it has posted
    gone: int  # the word that is 1 once it has left
    ring: int  # the first word of its ring
    outbox: int  # the first byte of its outbox


@dataclass(frozen=True)
class Segment:
    """A mapped segment."""

    world_size: int  # the number of ranks
    outbox_size: int  # bytes of each rank's outbox
    lanes: tuple[Lane, ...]  # the places of each rank
    memory: mmap.mmap  # all of it
    words: memoryview  # the same, by words of 8 bytes
    address: int  # of its first byte

    def enter(self, rank: int) -> None:
        """Writes the id of this process, which is a rank's: by it the others see whether the rank lives."""
        self.words[self.lanes[rank].pid] = os.getpid()

    def wait(self, word: int, value: int, seconds: float) -> None:
        """Sleeps while a word's lower half is `value`, until `wake`; at most so many seconds, perhaps less."""
        whole = int(seconds)
        limit = _Timespec(whole, int((seconds - whole) * 1e9))
        # The kernel compares and sleeps in one step: a rank that posts just before the call is not missed.
        address = self.address + word * WORD
        _syscall()(_SYSCALL_X86_64, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)

    def wake(self, word: int) -> None:
        """Wakes all ranks that sleep on a word."""
        _syscall()(_SYSCALL_X86_64, self.address + word * WORD, _WAKE, _ALL, None, None, 0)

    def write(self, at: int, tensor: Tensor, start: int, size: int) -> None:
        """Copies bytes of a contiguous tensor to byte `at` of the segment."""
        if size and tensor.is_cpu:
            ctypes.memmove(self.address + at, tensor.data_ptr() + start, size)
        elif size:
            self._bytes(at, size).copy_(_bytes_of(tensor, start, size))

    def read(self, at: int, tensor: Tensor, start: int, size: int) -> None:
        """Copies bytes at byte `at` of the segment to a place in a contiguous tensor."""
        if size and tensor.is_cpu:
            ctypes.memmove(tensor.data_ptr() + start, self.address + at, size)
        elif size:
            _bytes_of(tensor, start, size).copy_(self._bytes(at, size))

    def view(self, at: int, size: int, dtype: torch.dtype) -> Tensor:
        """The bytes at byte `at` as a tensor."""
        if not size:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=size // dtype.itemsize, offset=at)

    def _bytes(self, at: int, size: int) -> Tensor:
        return self.view(at, size, torch.uint8)


def copy(target: Tensor, at: int, tensor: Tensor, start: int, size: int) -> None:
    """Copies bytes of a contiguous tensor to a place in another of the same device."""
    # By memmove, like all copies here: views and copies of torch cost several microseconds a piece.
    if size and tensor.is_cpu:
        ctypes.memmove(target.data_ptr() + at, tensor.data_ptr() + start, size)
    elif size:
        _bytes_of(target, at, size).copy_(_bytes_of(tensor, start, size))


def _bytes_of(tensor: Tensor, start: int, size: int) -> Tensor:
    return tensor.view(-1).view(torch.uint8)[start : start + size]


def create(world_size: int) -> tuple[Segment, int, str]:
    """Makes a segment; returns it, its descriptor and its address for `join`."""
    check_machine()
    nonce = secrets.randbits(63) | 1  # not 0, which new memory holds
    try:
        fd = os.memfd_create("samestep-transport", os.MFD_CLOEXEC)
    except OSError as error:
        raise NoSegmentError(f"memory without a name cannot be had: {error}") from error
    reason = ""
    for outbox_size in OUTBOX_SIZES:
        try:
            os.ftruncate(fd, _total_size(world_size, outbox_size))
            segment = _mapped(fd, world_size, outbox_size)
        except (OSError, ValueError, OverflowError) as error:  # a limit on address space (ulimit -v), for one
            reason = str(error)
            continue
        # Before the address is published: a rank that joins compares these words.
        segment.words[:3] = memoryview(_words(nonce, world_size, outbox_size)).cast("Q")
        return segment, fd, f"{os.getpid()} {fd} {nonce}"
    os.close(fd)
    raise NoSegmentError(f"{OUTBOX_SIZES[-1] >> 30} GiB of address space a rank cannot be had: {reason}")


def join(address: str, world_size: int) -> Segment:
    """Opens the segment that rank 0 has made."""
    check_machine()
    pid, number, nonce = (int(word) for word in address.split())
    path = f"/proc/{pid}/fd/{number}"
    try:
        # In another container the process id is another process's, so the descriptor may be anything.
        if not os.readlink(path).startswith("/memfd:samestep-transport"):
            raise NoSegmentError("rank 0's memory is not found: it runs on another host or in another container")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NoSegmentError(f"rank 0's memory cannot be opened: {error}") from error
    try:
        head = os.pread(fd, 3 * WORD, 0)
        outbox_size = int.from_bytes(head[2 * WORD :], sys.byteorder)
        size = _total_size(world_size, outbox_size)
        if head != _words(nonce, world_size, outbox_size) or os.fstat(fd).st_size != size:
            raise NoSegmentError("rank 0's memory is not found: what is in its place is another run's")
        return _mapped(fd, world_size, outbox_size)
    except (OSError, ValueError, OverflowError) as error:
        raise NoSegmentError(f"rank 0's memory cannot be mapped: {error}") from error
    finally:
        os.close(fd)


def map_segment(met: Rendezvous) -> Segment:
    """Maps memory that all ranks share; raises `NoSegmentError` on all of them if one cannot."""
    place, rank, world_size = met.place, met.place.rank, met.place.world_size
    segment, fd, answer, address = None, -1, _refusal(place) or "yes", ""
    try:
        try:
            if rank > 0:
                address = met.wait_for(SEGMENT)
                if answer == "yes" and address != NO_SEGMENT:
                    segment = join(address, world_size)
            elif answer == "yes":
                segment, fd, address = create(world_size)
        except NoSegmentError as error:
            answer = str(error)
        if rank == 0:
            met.store.set(SEGMENT, address or NO_SEGMENT)
        if segment is not None:
            segment.enter(rank)
        # Also the barrier after which rank 0 may close the descriptor by which the others open the segment.
        answers = met.gather_words(answer)
    except (RuntimeError, PeerLostError) as error:
        if segment is not None:  # ranks that go on would wait for this one until the timeout
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
    assert segment is not None, "no rank refused"
    return segment


def _refusal(place: Environment) -> str:
    """The reason for which this rank does not share memory; empty if there is none."""
    if place.transport == "gloo":
        return "SAMESTEP_TRANSPORT is gloo"
    if place.local_world_size < place.world_size:
        return f"only {place.local_world_size} of {place.world_size} ranks are on its host"
    return ""


def check_machine() -> None:
    """Checks that this is Linux on x86-64, and that the kernel can report the end of a process."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise NoSegmentError(f"it needs Linux on x86-64, this is {platform.system()} on {machine}")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise NoSegmentError(f"the kernel does not tell when another rank ends (pidfd_open): {error}") from error


def _words(*values: int) -> bytes:
    return b"".join(value.to_bytes(WORD, sys.byteorder) for value in values)


def _total_size(world_size: int, outbox_size: int) -> int:
    return PAGE + world_size * (_RANK_SIZE + outbox_size)


def _mapped(fd: int, world_size: int, outbox_size: int) -> Segment:
    """Maps a segment; it is unmapped once no object refers to it."""
    memory = mmap.mmap(fd, _total_size(world_size, outbox_size))
    memory.madvise(mmap.MADV_DONTDUMP)  # a core file would be as long as the address space
    # Mapped from a file, so that ranks which do not descend from rank 0 can map it as well; sparse, so that 64 GiB of
    # address space a rank cost nothing until they are written to.
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    lanes = tuple(_lane(rank, world_size, outbox_size) for rank in range(world_size))
    return Segment(world_size, outbox_size, lanes, memory, memoryview(memory).cast("Q"), address)


def _lane(rank: int, world_size: int, outbox_size: int) -> Lane:
    # A page a rank: no two ranks write to the same cache line.
    word = (PAGE + rank * _RANK_SIZE) // WORD
    outbox = PAGE + world_size * _RANK_SIZE + rank * outbox_size
    return Lane(word, word + 1, word + 2, word + PAGE // WORD, outbox)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


@functools.cache
def _syscall() -> Callable[..., int]:
    """The C library's `syscall`, for the arguments of `futex`."""
    function = ctypes.CDLL(None).syscall
    function.restype = ctypes.c_long
    function.argtypes = (
        *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
    )
    return function


class Peers:
    """The processes of other ranks, by rank their process ids."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._fds: dict[int, int | None] = {}
        for rank, pid in pids.items():
            try:
                # A descriptor stays with its process, while the kernel may give the id of an ended one to another.
                self._fds[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._fds[rank] = None

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended, for any reason; one that is stopped has not."""
        fd = self._fds.get(rank)
        if fd is None:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        for fd in self._fds.values():
            if fd is not None:
                os.close(fd)
        self._fds = {}
