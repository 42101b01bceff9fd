"""The token of a device: of the ranks that share a device, the one that holds it computes.

A rank hands the token over whenever it waits for others, so that a device holds the activations of one rank at a time
and no more ranks compute than there are devices; of a GPU with little memory left it frees what it has cached. Neither
bits nor the order of exchanges depend on it.

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

from samestep.comm.environment import read_settings
from samestep.text import notify

LOOK_SECONDS = 0.01
IDLE_SHARE = 0.1  # of a core: a process that uses less waits
HOLD_SECONDS = 5.0
NAMED_AFTER = 3  # moments at which another rank took the token, and this one had met no other


class DeviceToken:
    """One rank's hold on the token of its device; all threads of the process hold it together."""

    def __init__(self, fd: int, index: int, rank: int) -> None:
        self._fd, self._index, self._rank = fd, index, rank
        self._process = os.getpid()
        # One thread asks the kernel at a time: of two that wait, the one can get the lock while the other still waits
        # behind another process, which is then refused its own request as a deadlock.
        self._asking = threading.Lock()
        self._holds = False
        self._held_since = 0.0
        self._num_waits = 0  # calls of `lent`
        self._waiting: list[None] = []  # an item for each thread inside `lent`
        self.acquire()
        threading.Thread(target=self._watch, name="samestep device token", daemon=True).start()

    def acquire(self) -> None:
        if os.getpid() == self._process:  # a data worker computes beside its rank
            with self._asking:
                if not self._holds:
                    fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, self._index)
                    self._mark_held()

    def _mark_held(self) -> None:
        self._holds, self._held_since = True, time.monotonic()

    def release(self) -> None:
        if os.getpid() == self._process and self._holds:  # else another thread may be waiting for it
            with self._asking:
                self._holds = False
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._index)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Hands the token over during a block."""
        self._num_waits += 1
        self._waiting.append(None)
        _free_cached_memory()
        self.release()
        try:
            yield
        finally:
            self._waiting.pop()
            self.acquire()

    def _watch(self) -> None:
        """Hands over for a rank that waits unannounced, by sleeping or by polling."""
        clock, used, num_waits, num_taken = time.monotonic(), time.process_time(), -1, 0
        while True:
            time.sleep(LOOK_SECONDS if self._holds else 10 * LOOK_SECONDS)  # a rank that sleeps is to cost nothing
            before, clock = clock, time.monotonic()
            before_used, used = used, time.process_time()
            is_idle = used - before_used < IDLE_SHARE * (clock - before) and not _has_runnable_thread()
            if self._num_waits != num_waits:
                num_waits, num_taken = self._num_waits, 0
            if not self._holds:
                if not is_idle and not self._waiting:
                    self.acquire()  # the rank computes in the meantime
                    if self._waiting:
                        self.release()
            elif self._held_since > before:
                continue  # the rank may have waited for the token
            elif is_idle:
                self.release()
            elif clock - self._held_since > HOLD_SECONDS and self._is_taken_at_once():
                num_taken += 1
                if num_taken == NAMED_AFTER:
                    self._name_polling()

    def _is_taken_at_once(self) -> bool:
        """Whether another rank takes the token when it is free for a moment."""
        self.release()
        time.sleep(LOOK_SECONDS / 10)
        with self._asking:
            if not self._holds:
                try:
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._index)
                except OSError:
                    pass
                else:
                    self._mark_held()
        was_taken = not self._holds
        self.acquire()
        return was_taken

    def _name_polling(self) -> None:
        seconds = NAMED_AFTER * HOLD_SECONDS
        notify(
            f"rank {self._rank} has computed for {seconds:.0f} s without an exchange, and others of its "
            "device wait for the device; if it polls for them, a barrier or a collective lets them compute at once"
        )


def _free_cached_memory() -> None:
    """Frees what torch's allocator keeps of a GPU, unless as much is free there: the next rank needs about as much."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        free, _ = torch.cuda.mem_get_info()
        if free < torch.cuda.memory_reserved():
            torch.cuda.empty_cache()


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
    settings = read_settings()
    if "devices" in settings.fds and not _held:
        _held.append(DeviceToken(settings.fds["devices"], settings.device_index, rank))


def shares_device() -> bool:
    """Whether this rank holds a token, which others of its device wait for."""
    return bool(_held)


def lent_token() -> AbstractContextManager[None]:
    """Hands the token over while the block waits for other ranks."""
    return _held[0].lent() if _held else nullcontext()
