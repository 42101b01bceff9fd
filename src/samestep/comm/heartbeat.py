"""Heartbeats: a page of memory that the supervisor shares with its workers, read and written without a system call.

Workers post their phase and the time; the supervisor posts the quorum of workers that make up the run, and the request
to stop. No process waits for another or wakes one: reading the page costs less than a microsecond, so it is read many
times a step.

Layout, little-endian:

    0     u64  number of the quorum that is in force; it moves after the quorum itself is written
    8     u64  the signal by which the run is requested to stop; 0 for none
    16    u64  number of lines that the supervisor has shown
    24    u32  length and u32 CRC-32 of the quorum's JSON, which follows at 32:
               {"number": 3, "slots": [0, 2, 5], "lost": [{"slot": 1, "cause": "SIGKILL", …}]}
    16384 64 bytes a slot: u64 time of the last beat (monotonic, ns), u64 step, u32 phase, u32 flags, u64 quorum joined
"""

import json
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from samestep.comm.environment import read_settings
from samestep.errors import PeerLostError

T = TypeVar("T")

WORK = {"forward": "compute", "backward": "compute", "files": "checkpoint"}
"""What seconds in a phase count as; in others, the phase itself."""
PHASES = (
    *("start", "script", "data", "forward", "backward", "exchange", "update", "checkpoint", "evaluate"),
    *("files", "regroup", "end"),
)
STOPS_ON_REQUEST = 1  # flags: finishes its step and exits when the page has a request to stop
HEALS = 2  # goes on with the others after the loss of one
READY_TO_JOIN = 4  # started late, and waits for a quorum that includes it
LEAVES_EARLY = 8  # exits with success on a request to stop, before all is done
SHOWS_LIFE = 16  # does not heal, but its beats show whether it hangs
IS_LATER = 32  # in a run that its program made after another one, which no worker that is started late reaches

MAX_SLOTS = 1024
MAX_LOST = 20
WRITING_LOOKS = 10_000  # at a quorum that is being written, with a millisecond between them
_QUORUM_SIZE = 16_384
_SLOT_SIZE = 64
_NUMBER, _STOP, _SHOWN, _LENGTH = struct.Struct("<Q"), struct.Struct("<Q"), struct.Struct("<Q"), struct.Struct("<II")
_SLOT = struct.Struct("<QQIIQ")
_HEADER_SIZE = 32
_CODES = {name: code for code, name in enumerate(PHASES)}


@dataclass(frozen=True)
class Quorum:
    """The workers that make up a run from some moment on.

    Attributes:
        number: counted from 0, the workers that the run began with.
        slots: the workers in the order of their ranks; a worker keeps its slot, but not its rank.
        lost: the workers lost so far, the newest last, `MAX_LOST` at most: each with "slot", "rank" (in its last
            quorum), "device", "cause" ("SIGKILL", "exit code 3", "hang", an exception's type), "phase" and "step".
        joined: the slots that joined when it was taken up; noted by workers, not on the page.
    """

    number: int
    slots: tuple[int, ...]
    lost: tuple[Mapping[str, Any], ...] = ()
    joined: tuple[int, ...] = ()


@dataclass(frozen=True)
class Beat:
    """A worker's last post."""

    seconds: float  # its time, on the clock of `time.monotonic`; 0 before the first
    step: int  # that the worker is in
    phase: str  # one of `PHASES`
    flags: int  # `STOPS_ON_REQUEST`, `HEALS`, `READY_TO_JOIN`, `LEAVES_EARLY`, `SHOWS_LIFE` and `IS_LATER`, or-ed
    quorum: int  # the number of the quorum that it works in


class HeartbeatPage:
    """The page, in the file of a descriptor that the supervisor makes and its workers inherit."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, 0)

    @classmethod
    def create(cls, slots: int) -> "HeartbeatPage":
        """A new page whose first quorum holds the slots 0 … slots - 1."""
        # A file, since forked and spawned workers inherit a descriptor alike; without a name, so none is left behind.
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("samestep-page", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _QUORUM_SIZE + MAX_SLOTS * _SLOT_SIZE)
        page = cls(fd)
        page.announce(tuple(range(slots)), 0)
        return page

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> "tuple[HeartbeatPage, int] | None":
        """The page of the supervisor that started this process, and this worker's slot; None without one."""
        settings = read_settings(variables)
        try:
            fd = settings.fds["page"]
            return (cls(fd), settings.slot) if os.fstat(fd).st_size >= _QUORUM_SIZE else None
        except (KeyError, OSError, ValueError):
            return None

    @property
    def number(self) -> int:
        """The number of the quorum in force."""
        number: int = _NUMBER.unpack_from(self._memory, 0)[0]
        return number

    @property
    def stop(self) -> int:
        """The signal by which the run is requested to stop; 0 for none."""
        signum: int = _STOP.unpack_from(self._memory, 8)[0]
        return signum

    def ask_to_stop(self, signum: int) -> None:
        """Posts the request to stop after the step under way."""
        self._write(8, _STOP.pack(signum))

    @property
    def shown(self) -> int:
        """The number of lines that the supervisor has shown."""
        number: int = _SHOWN.unpack_from(self._memory, 16)[0]
        return number

    def count_shown(self, number: int | None = None) -> None:
        """Counts one more line that was shown, or posts their number."""
        self._write(16, _SHOWN.pack(self.shown + 1 if number is None else number))

    def announce(
        self, slots: tuple[int, ...], number: int | None = None, lost: Sequence[Mapping[str, Any]] = ()
    ) -> Quorum:
        """Posts a new quorum."""
        quorum = Quorum(self.number + 1 if number is None else number, slots, tuple(lost[-MAX_LOST:]))
        text = json.dumps({"number": quorum.number, "slots": slots, "lost": quorum.lost}).encode()
        assert len(text) <= _QUORUM_SIZE - _HEADER_SIZE, "MAX_SLOTS fits on the page"
        # The number moves last, and the checksum covers the rest: a reader in between finds one wrong, and retries.
        self._memory[_HEADER_SIZE : _HEADER_SIZE + len(text)] = text
        self._write(24, _LENGTH.pack(len(text), zlib.crc32(text)))
        self._write(0, _NUMBER.pack(quorum.number))
        return quorum

    def quorum(self) -> Quorum:
        # A lock could be held by a process that was killed; a checksum cannot.
        for _ in range(WRITING_LOOKS):
            length, checksum = _LENGTH.unpack_from(self._memory, 24)
            text = self._memory[_HEADER_SIZE : _HEADER_SIZE + length]
            if length > 0 and zlib.crc32(text) == checksum:
                value = json.loads(text)
                if value["number"] == self.number:
                    return Quorum(value["number"], tuple(value["slots"]), tuple(value["lost"]))
            time.sleep(0.001)  # it is being written
        raise PeerLostError("the supervisor of the run has ended in the middle of an announcement")

    def post(self, slot: int, phase: str, step: int, flags: int, quorum: int) -> None:
        """Posts a worker's beat."""
        beat = (time.monotonic_ns(), step, _CODES[phase], flags, quorum)
        self._write(_QUORUM_SIZE + slot * _SLOT_SIZE, _SLOT.pack(*beat))

    def beat(self, slot: int) -> Beat:
        """A worker's last post."""
        when, step, phase, flags, quorum = _SLOT.unpack_from(self._memory, _QUORUM_SIZE + slot * _SLOT_SIZE)
        return Beat(when / 1e9, step, PHASES[min(phase, len(PHASES) - 1)], flags, quorum)

    def read_slot(self, slot: int) -> bytes:
        """A worker's last post as it lies on the page, for the page of another machine."""
        start = _QUORUM_SIZE + slot * _SLOT_SIZE
        return self._memory[start : start + _SLOT.size]

    def write_slot(self, slot: int, post: bytes) -> None:
        """Lays the post of a worker of another machine on the page, whose time is by the clock of that machine."""
        self._write(_QUORUM_SIZE + slot * _SLOT_SIZE, post[: _SLOT.size])

    def _write(self, start: int, data: bytes) -> None:
        # Not `struct.pack_into`, which first fills the place with zeros that other processes could see.
        self._memory[start : start + len(data)] = data

    def close(self) -> None:
        """Unmaps the memory and closes the descriptor."""
        self._memory.close()
        os.close(self.fd)


class Heartbeat:
    """Posts this worker's phase, if there is a page, and adds up the seconds of the phases."""

    def __init__(self, page: HeartbeatPage | None = None, slot: int = 0) -> None:
        self.page = page
        self.slot = slot
        had = HEALS | SHOWS_LIFE | IS_LATER  # the flags of any run before this one
        self.flags = 0 if page is None or not page.beat(slot).flags & had else IS_LATER
        self.quorum = 0
        self.step = 0
        self.phase = "start"
        self._stop = 0
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self.enter("start")

    @property
    def stop_asked(self) -> int:
        """The signal by which the run is to stop, as far as this worker has received it; 0 for none."""
        return self._stop or (0 if self.page is None else self.page.stop)

    def ask_to_stop(self, signum: int) -> None:
        """Requests that the run stops after the step under way; may be called from a signal handler."""
        self._stop = signum

    def enter(self, phase: str) -> str:
        """Begins a phase, one of `PHASES`, and returns the one before; in the same phase it only posts a beat."""
        now = time.perf_counter()
        before = self.phase
        kind = WORK.get(before, before)
        self._seconds[kind] = self._seconds.get(kind, 0.0) + now - self._since
        self.phase, self._since = phase, now
        # At every phase, not on a timer thread: a beat shows that the training goes on, not only the process.
        if self.page is not None:
            self.page.post(self.slot, phase, self.step, self.flags, self.quorum)
        return before

    def call(self, phase: str, action: Callable[[], T]) -> T:
        """Calls a function in a phase, and returns to the one before; not if it fails: messages name the phase."""
        before = self.enter(phase)
        value = action()
        self.enter(before)
        return value

    def set_flags(self, flags: int) -> None:
        """Posts flags of this worker, such as `HEALS`."""
        self.flags = flags
        self.enter(self.phase)

    def take_seconds(self) -> dict[str, float]:
        """Host seconds in "data", "compute", "exchange", "update", "checkpoint" … since the last call."""
        self.enter(self.phase)
        seconds, self._seconds = self._seconds, {}
        return seconds
