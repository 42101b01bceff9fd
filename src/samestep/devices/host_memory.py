"""Host memory: what a step frees stays with the process, so that the next step has it without page faults."""

import contextlib
import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MOST_TRIMMED = 2**31 - 1  # bytes at the end of the heap, an int
_MOST_MAPPED = 32 << 20  # bytes of a block; glibc takes no more (HEAP_MAX_SIZE / 2)


def keep_freed_memory() -> None:
    """Has glibc's malloc keep freed memory; nothing with another C library, or if the environment sets malloc up.

    A training step frees all its activations. By default glibc gives large blocks and the end of the heap back to the
    system, and the next step pays a page fault for each 4 KiB of them: a tenth of a step on CPUs. See mallopt(3).
    """
    chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(n.startswith("MALLOC_") for n in os.environ)
    if chosen or sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError):  # musl has none
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _MOST_TRIMMED)
        mallopt(_M_MMAP_THRESHOLD, _MOST_MAPPED)
