"""The token of a device: of the ranks that share a device, the one that holds it computes.

A rank hands the token over whenever it waits for others, so that a device holds the activations of one rank at a time
and no more ranks compute than there are devices. Neither bits nor the order of exchanges depend on it.

The token is a record lock on a byte of a file that the supervisor makes: the kernel takes it back from a process that
ends. A rank that waits unannounced, for a file or a store, uses no CPU time, by which a thread notices it and hands
over. A rank that waits by polling uses CPU time, and hands over for a moment every `HOLD_SECONDS`.
"""

import contextlib
import fcntl
import glob
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

TOKEN_VARIABLE = "SAMESTEP_TOKEN"  # the descriptor of the file, and the byte of this rank's device
LOOK_SECONDS = 0.01
IDLE_SHARE = 0.1  # of a core: a process that uses less waits
HOLD_SECONDS = 5.0
NAMED_AFTER = 3  # moments at which another rank took the token, and this one had met no other


class DeviceToken:
    """One rank's hold on the token of its device; all threads of the process hold it together."""

    def __init__(self, fd: int, index: int, rank: int) -> None:
        self._fd, self._index, self._rank = fd, index, rank
        self._process = os.getpid()
        self._num_waits = 0  # of `lent`
        self._is_idle = self._is_lent = False
        self.acquire()
        threading.Thread(target=self._watch, name="samestep device token", daemon=True).start()

    def acquire(self) -> None:
        """Waits until this rank holds the token."""
        if os.getpid() == self._process:  # a data worker computes beside its rank
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, self._index)
            self._is_idle = False

    def release(self) -> None:
        """Hands the token over."""
        if os.getpid() == self._process:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._index)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Hands the token over during a block."""
        self._num_waits += 1
        self._is_lent = True
        self.release()
        try:
            yield
        finally:
            self._is_lent = False
            self.acquire()

    def _watch(self) -> None:
        """Hands over for a rank that waits unannounced, by sleeping or by polling."""
        clock, used, num_waits, held_since, num_taken = time.monotonic(), time.process_time(), -1, 0.0, 0
        while True:
            time.sleep(LOOK_SECONDS)
            if self._is_lent:  # it has no token to hand over, and must not take it
                clock, used = time.monotonic(), time.process_time()
                continue
            now, now_used = time.monotonic(), time.process_time()
            is_idle = now_used - used < IDLE_SHARE * (now - clock) and not _has_runnable_thread()
            clock, used = now, now_used
            if self._num_waits != num_waits:
                num_waits, held_since, num_taken = self._num_waits, now, 0
            if is_idle and not self._is_idle:
                self._is_idle = True
                self.release()
            elif self._is_idle and not is_idle:
                self.acquire()  # the rank computes in the meantime
            elif not is_idle and now - held_since > HOLD_SECONDS:
                held_since = now
                if self._is_taken_at_once():
                    num_taken += 1
                    if num_taken == NAMED_AFTER:
                        self._name_polling()

    def _is_taken_at_once(self) -> bool:
        """Whether another rank takes the token when it is free for a moment."""
        self.release()
        time.sleep(LOOK_SECONDS / 10)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._index)
        except OSError:
            self.acquire()
            return True
        return False

    def _name_polling(self) -> None:
        seconds = NAMED_AFTER * HOLD_SECONDS
        print(
            f"samestep: rank {self._rank} has computed for {seconds:.0f} s without an exchange, and others of its "
            "device wait for the device; if it polls for them, a barrier or a collective lets them compute at once",
            file=sys.stderr,
            flush=True,
        )


def _has_runnable_thread() -> bool:
    """Whether a thread of this process beside the caller waits for a core, or for a disk."""
    own = threading.get_native_id()
    for path in glob.iglob("/proc/self/task/*/stat"):
        with contextlib.suppress(OSError), open(path, "rb") as file:  # it may have ended
            number, _, rest = file.read().partition(b" ")
            if int(number) != own and rest.rpartition(b") ")[2][:1] in b"RD":
                return True
    return False


_held: list[DeviceToken] = []  # this process's, if it shares its device


def hold_token(rank: int) -> None:
    """Waits for the token of this rank's device, and holds it from now on; does nothing if no other shares it."""
    fd, _, index = os.environ.get(TOKEN_VARIABLE, "").partition(":")
    if fd and index and not _held:
        _held.append(DeviceToken(int(fd), int(index), rank))


def shares_device() -> bool:
    """Whether this rank holds a token, which others of its device wait for."""
    return bool(_held)


def lent_token() -> AbstractContextManager[None]:
    """Hands the token over while the block waits for other ranks."""
    return _held[0].lent() if _held else nullcontext()
