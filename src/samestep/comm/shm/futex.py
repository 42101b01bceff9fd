"""The futex: sleeping until another process changes a word of shared memory, by Linux's `futex` system call.

Source: futex(2), FUTEX_WAIT and FUTEX_WAKE without FUTEX_PRIVATE_FLAG, since the word is shared between processes. The
calls let go of the interpreter's lock.
"""

import ctypes
import functools
from collections.abc import Callable

_SYSCALL_X86_64 = 202
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def sleep(address: int, value: int, seconds: float) -> None:
    """Sleeps while the 32-bit word at an address holds a value, until somebody wakes us; perhaps for less.

    Args:
        address: of the word, a multiple of 4, in memory that the processes share.
        value: what we saw there; if it is something else by now, the call returns at once.
        seconds: how long at most.
    """
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    _syscall()(_SYSCALL_X86_64, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wakes everybody who sleeps at an address."""
    _syscall()(_SYSCALL_X86_64, address, _WAKE, _EVERYONE, None, None, 0)


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
