"""The title: what `ps` and `top` call a process of a run; on Linux, elsewhere it keeps its command line."""

import contextlib
import os
from pathlib import Path

ROOM = " " * 128
"""The last argument of a program that is to have a title: the title takes the place of its command line."""

_START = 45  # of the command line in memory: the 48th field of /proc/self/stat, whose third is the first after the name


def set_title(title: str, short: str) -> None:
    """Shows this process under a title, as far as the system lets it and its command line was long.

    It goes through /proc, so whatever is not where it is expected is left alone.

    Args:
        title: in place of the command line.
        short: in place of the program's name; 15 bytes at most.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        Path("/proc/self/comm").write_text(short)
        line = Path("/proc/self/cmdline").read_bytes()
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_START])
        memory = os.open("/proc/self/mem", os.O_RDWR)
        try:
            if line.endswith(b"\0") and os.pread(memory, len(line), start) == line:
                # The last byte stays 0: by it the kernel tells that the line has not grown into the environment.
                os.pwrite(memory, os.fsencode(title)[: len(line) - 1].ljust(len(line), b"\0"), start)
        finally:
            os.close(memory)
