"""The peers: whether the other ranks of this host are still there, told by the kernel (pidfd_open(2))."""

import os
import select
from collections.abc import Mapping


class Peers:
    """The processes of other ranks.

    Args:
        pids: their process ids, by rank.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._fds: dict[int, int | None] = {}
        for rank, pid in pids.items():
            try:
                self._fds[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._fds[rank] = None

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended, however it did. One that is stopped has not."""
        fd = self._fds.get(rank)
        if fd is None:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Gives back the descriptors."""
        for fd in self._fds.values():
            if fd is not None:
                os.close(fd)
        self._fds = {}
