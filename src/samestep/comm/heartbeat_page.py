"""The page: a page of shared memory between the supervisor and its workers, read and written without a system call.

Workers post what they are doing and when they last did something; the supervisor posts which workers make up the run,
and whether it is to stop. Nobody waits for anybody, and nobody is woken: a look at the page costs less than a
microsecond, so it may be taken many times a step.

Layout, little-endian:

    0     u64  number of the quorum that is in force; it moves after the quorum itself is written
    8     u64  the signal by which the run was asked to stop; 0 for none
    16    u32  length and u32 CRC-32 of the quorum's JSON, which follows at 24:
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PAGE_VARIABLE = "SAMESTEP_HEARTBEAT_FD"
SLOT_VARIABLE = "SAMESTEP_SLOT"
PHASES = (
    *("start", "script", "data", "forward", "backward", "exchange", "update", "checkpoint", "evaluate"),
    *("regroup", "end"),
)
STOPS_ON_REQUEST = 1  # flags: finishes its step and leaves when the page asks for it
HEALS = 2  # goes on with the others when one is lost
READY_TO_JOIN = 4  # started late, and waits for a quorum that counts it in
LEAVES_EARLY = 8  # was told that it is time to leave, and so may end well before all is done
SHOWS_LIFE = 16  # does not heal, but its beats tell whether it hangs

MAX_SLOTS = 1024
MAX_LOST = 20
_QUORUM_SIZE = 16_384
_SLOT_SIZE = 64
_NUMBER, _STOP, _LENGTH = struct.Struct("<Q"), struct.Struct("<Q"), struct.Struct("<II")
_SLOT = struct.Struct("<QQIIQ")
_HEADER_SIZE = 24
_CODES = {name: code for code, name in enumerate(PHASES)}


@dataclass(frozen=True)
class Quorum:
    """The workers that make up a run from some moment on.

    Attributes:
        number: counted from 0, the workers that the run began with.
        slots: the workers in the order of their ranks; a slot is a worker's for good, a rank is not.
        lost: what became of those that were lost so far, the newest last, `MAX_LOST` at most: each with "slot", "rank"
            (in its last quorum), "device", "cause" ("SIGKILL", "exit code 3", "hang", an exception's type), "phase" and
            "step".
        joined: those that were counted in when it was taken up; a worker notes them, the page does not tell.
    """

    number: int
    slots: tuple[int, ...]
    lost: tuple[Mapping[str, Any], ...] = ()
    joined: tuple[int, ...] = ()


@dataclass(frozen=True)
class Beat:
    """What a worker posted last.

    Attributes:
        seconds: when, on the clock of `time.monotonic`; 0 before its first beat.
        step: the step that it is in.
        phase: one of `PHASES`.
        flags: `STOPS_ON_REQUEST`, `HEALS`, `READY_TO_JOIN`, `LEAVES_EARLY` and `SHOWS_LIFE`, or-ed.
        quorum: the number of the quorum that it works in.
    """

    seconds: float
    step: int
    phase: str
    flags: int
    quorum: int


class HeartbeatPage:
    """The page; the supervisor makes it, its workers inherit the descriptor.

    Args:
        fd: of the file that is shared.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, 0)

    @classmethod
    def create(cls, slots: int) -> "HeartbeatPage":
        """A new page whose first quorum holds the slots 0 … slots - 1. Its file has no name, so none is left behind."""
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
        """The page of the supervisor that started this process, and this worker's slot; None if nobody watches."""
        env = os.environ if variables is None else variables
        fd, slot = env.get(PAGE_VARIABLE, ""), env.get(SLOT_VARIABLE, "")
        if not fd.isdigit() or not slot.isdigit():
            return None
        try:
            # A program started by the worker inherits the variables, but not the descriptor.
            return (cls(int(fd)), int(slot)) if os.fstat(int(fd)).st_size >= _QUORUM_SIZE else None
        except (OSError, ValueError):
            return None

    @property
    def number(self) -> int:
        """The number of the quorum in force."""
        number: int = _NUMBER.unpack_from(self._memory, 0)[0]
        return number

    @property
    def stop(self) -> int:
        """The signal by which the run was asked to stop; 0 for none."""
        signum: int = _STOP.unpack_from(self._memory, 8)[0]
        return signum

    def ask_to_stop(self, signum: int) -> None:
        """Posts that the run is to stop after the step under way."""
        self._write(8, _STOP.pack(signum))

    def announce(
        self, slots: tuple[int, ...], number: int | None = None, lost: Sequence[Mapping[str, Any]] = ()
    ) -> Quorum:
        """Posts a new quorum."""
        quorum = Quorum(self.number + 1 if number is None else number, slots, tuple(lost[-MAX_LOST:]))
        text = json.dumps({"number": quorum.number, "slots": slots, "lost": quorum.lost}).encode()
        assert len(text) <= _QUORUM_SIZE - _HEADER_SIZE, "MAX_SLOTS fits on the page"
        self._memory[_HEADER_SIZE : _HEADER_SIZE + len(text)] = text
        self._write(16, _LENGTH.pack(len(text), zlib.crc32(text)))
        self._write(0, _NUMBER.pack(quorum.number))
        return quorum

    def quorum(self) -> Quorum:
        """The quorum in force."""
        while True:
            length, checksum = _LENGTH.unpack_from(self._memory, 16)
            text = self._memory[_HEADER_SIZE : _HEADER_SIZE + length]
            if length > 0 and zlib.crc32(text) == checksum:
                value = json.loads(text)
                if value["number"] == self.number:
                    return Quorum(value["number"], tuple(value["slots"]), tuple(value["lost"]))
            time.sleep(0.001)  # it is being written

    def post(self, slot: int, phase: str, step: int, flags: int, quorum: int) -> None:
        """Posts what a worker is doing."""
        beat = (time.monotonic_ns(), step, _CODES[phase], flags, quorum)
        self._write(_QUORUM_SIZE + slot * _SLOT_SIZE, _SLOT.pack(*beat))

    def beat(self, slot: int) -> Beat:
        """What a worker posted last."""
        when, step, phase, flags, quorum = _SLOT.unpack_from(self._memory, _QUORUM_SIZE + slot * _SLOT_SIZE)
        return Beat(when / 1e9, step, PHASES[min(phase, len(PHASES) - 1)], flags, quorum)

    def _write(self, start: int, data: bytes) -> None:
        """Copies bytes to the page; `struct.pack_into` would show zeros to others in between."""
        self._memory[start : start + len(data)] = data

    def close(self) -> None:
        """Gives back the memory and the descriptor."""
        self._memory.close()
        os.close(self.fd)
