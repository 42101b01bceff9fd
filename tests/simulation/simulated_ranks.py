"""Ranks that take turns in an order drawn from a seed, of which one may be lost, and a disk that may fail.

Its text is the head of each script that the simulator prints.
"""

import errno
import os
import random
import sys
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from samestep.comm.communicator import Communicator
from samestep.comm.sequential import SequentialWorld
from samestep.errors import PeerLostError
from samestep.runs.run_log import RunLog


def generator_states():
    """The states of the global generators; of NumPy's also which object it is, since the engine replaces it."""
    numpy = np.random.get_bit_generator(), np.random.get_state(legacy=False)
    return torch.get_rng_state(), random.getstate(), *numpy


def set_generators(states):
    """Sets the global generators."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_bit_generator(states[2])
    np.random.set_state(states[3])


class LostRank(BaseException):
    """The end of a rank: no handler of an `Exception` sees it, as none sees a SIGKILL."""


class Turns(SequentialWorld):
    """Ranks that take turns; `order` draws whose turn is next, `lost` is a rank and the exchange that it does not make.

    Without an order they take turns by their numbers.
    """

    def __init__(self, world_size, order=0, lost=None):
        super().__init__(world_size)
        self._draw, self._lost = random.Random(order) if order else None, lost
        self._states = dict.fromkeys(range(world_size), generator_states())
        self.exchanges = 0

    def post(self, call, rank, parts):
        if self._lost == (rank, call):
            raise LostRank(f"rank {rank} is lost in exchange {call}")
        self.exchanges = max(self.exchanges, call + 1)
        super().post(call, rank, parts)

    def _await_turn(self, rank):
        super()._await_turn(rank)
        set_generators(self._states[rank])  # the global ones, of which each process has its own

    def _pass_turn(self, rank):
        self._states[rank] = generator_states()
        left = sorted({*range(self.world_size)} - self._over)
        if self._draw is None or not left:
            super()._pass_turn(rank)
            return
        self._turn = self._draw.choice(left)
        self._changed.notify_all()


def in_turns(world_size, train, *args, order=0, lost=None, **options):
    """What `train(communicator, …)` returns on each rank; "lost" if one was lost."""

    def rank_main(transport):
        return train(Communicator(torch.device("cpu"), transport, transport, "ordered"), *args, **options)

    try:
        with patch.object(RunLog, "draw"):  # a picture takes as long as all else of a short run
            return Turns(world_size, order, lost).run(rank_main)
    except (LostRank, PeerLostError):
        if lost is None:
            raise
        return "lost"


class Disk:
    """Counts what changes files below a folder, and lets the `first`-th change and `count` - 1 after it fail."""

    folder, first, count, seen, kind = None, 0, 0, 0, "full"

    @classmethod
    def audit(cls, event, arguments):
        """The interpreter calls this before each operation; an error here is the operation's."""
        if cls.folder is None or event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"):
            return
        if not str(arguments[0]).startswith(cls.folder):
            return
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if event == "open" and not (set(arguments[1] or "") & set("wax+") or (arguments[2] or 0) & writes):
            return
        if cls.kind == "full" and event in ("os.remove", "os.rmdir"):
            return  # what frees space is not refused for the lack of it
        cls.seen += 1
        if cls.first <= cls.seen < cls.first + cls.count:
            if cls.kind == "crash":
                raise LostRank(f"{event} of {arguments[0]} was the last operation")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))


@contextmanager
def failing(folder, first, count, kind):
    """The disk fails within the block: it is "full" for `count` changes, or after a "crash" nothing is written."""
    if not hasattr(sys, "_simulated_disk"):  # an audit hook is for good
        sys._simulated_disk = Disk
        sys.addaudithook(Disk.audit)
    disk = sys._simulated_disk
    disk.folder, disk.first, disk.seen, disk.kind = str(folder), first, 0, kind
    disk.count = count if kind == "full" else 1 << 30
    try:
        yield disk
    finally:
        disk.folder = None


def check_same(found, expected, since=-1, but=()):
    """Fails and names the entries that are not the same; losses count from a step on."""
    wrong = {}
    for name in expected.keys() - {*but}:
        ours, theirs = found[name], expected[name]
        if name == "losses":
            theirs = {step: values for step, values in theirs.items() if step in ours or int(step) >= since}
        if ours != theirs:
            wrong[name] = f"{ours}, not {theirs}" if name not in ("weights", "digest") else "another one"
    assert not wrong, wrong
