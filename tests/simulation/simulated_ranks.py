"""Ranks that take turns in an order drawn from a seed, of which one may be lost, a disk that may fail, and the checks.

A check takes the functions of the program that it runs, what an undisturbed rank returns, a folder, and drawn numbers.
What is used of its text is the head of each script that the simulator prints.
"""

import errno
import io
import os
import random
import shutil
import sys
from contextlib import contextmanager, redirect_stderr, suppress
from unittest.mock import patch

import numpy as np
import torch

from samestep import files
from samestep.comm.communicator import Communicator
from samestep.comm.sequential import SequentialWorld
from samestep.data import streams
from samestep.errors import PeerLostError, RunFolderError
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
        return train(Communicator(torch.device("cpu"), transport, transport), *args, **options)

    try:
        # A picture takes as long as all else of a short run.
        with patch.object(RunLog, "draw"), patch.object(streams, "BATCHES_A_STATE", 2):
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


def check_same(found, expected, after=0, but=()):
    """Fails and names the entries that are not the same; losses count after a step."""
    wrong = {}
    for name in expected.keys() - {*but}:
        ours, theirs = found[name], expected[name]
        if name == "losses":
            theirs = {step: values for step, values in theirs.items() if step in ours or int(step) > after}
        if ours != theirs:
            wrong[name] = f"{ours}, not {theirs}" if name not in ("weights", "digest") else "another one"
    assert not wrong, wrong


def checkpoints_in(folder):
    """The checkpoints below a folder, from the first step on."""
    return sorted((folder / "checkpoints").glob("step-*"))


def check_ranks(train, one, folder, n):
    for found in in_turns(n.ranks, train, order=n.order):
        check_same(found, one)


def check_resumed(train, one, folder, n):
    for found in in_turns(n.ranks, train, folder / "run", order=n.order):
        check_same(found, one)
    places = checkpoints_in(folder / "run")
    assert places
    stride = -(-len(places) // 5)
    for place in {*places[n.place % stride :: stride], places[-1]}:
        done = int(place.name[5:])
        for found in in_turns((done + n.ranks) % n.most + 1, train, None, place, order=n.order):
            check_same(found, one, done, ("draws",) if place == places[-1] else ())


def check_seldom(train, one, folder, n):
    check_same(in_turns(1, train, folder / "seldom", every=3)[0], one)


def check_watched(train, one, folder, n):
    check_same(in_turns(n.ranks, train, looks=True)[0], one)


def check_workers(train, one, folder, n):
    check_same(in_turns(1, train, num_workers=2)[0], one)


def check_resumed_workers(train, one, folder, n):
    whole = in_turns(1, train, folder / "workers", num_workers=1)[0]
    places = checkpoints_in(folder / "workers")[:-1]
    for place in places[n.place % max(1, len(places)) :][:1]:
        check_same(in_turns(1, train, None, place, num_workers=2)[0], whole, int(place.name[5:]))


def check_plain(plain, one, folder, n):
    check_same(plain(), {name: one[name] for name in ("digest", "weights")})


def check_nearly_plain(plain, one, folder, n):
    # Another order of the sums, in float32, over some steps: what a small change of the first weights comes to is the
    # measure, since normalisation of nearly constant values magnifies each rounding.
    expected, nudged = plain()["weights"], plain(nudge=2.0**-20)["weights"]
    magnified = 4 * max(abs(a - b) for a, b in zip(nudged, expected, strict=True))
    for a, b in zip(one["weights"], expected, strict=True):
        assert abs(a - b) <= 1e-4 * (1 + abs(b)) + magnified, (a, b, magnified)


def check_loops(train_by_hand, one, folder, n):
    check_same(in_turns(1, train_by_hand)[0], one, but=("history", "best", "averaged"))


def check_lost(train, one, folder, n):
    world = Turns(n.ranks)
    world.run(lambda t: train(Communicator(torch.device("cpu"), t, t), folder / "whole"))
    lost = n.order % n.ranks, n.place % world.exchanges
    assert in_turns(n.ranks, train, folder / "run", lost=lost) == "lost"
    for found in in_turns(n.others, train, None, folder / "run" if checkpoints_in(folder / "run") else None):
        check_same(found, one, 1 << 30, ("draws",))


def check_stopped(train, one, folder, n):
    first = n.place % len(one["losses"])
    in_turns(n.ranks, train, folder / "run", stops=(n.order % n.ranks, first))
    in_turns(n.others, train, folder / "run", resume="auto", stops=(0, first + n.count))
    for found in in_turns(n.ranks, train, folder / "run", resume="auto"):
        check_same(found, one, 1 << 30, ("draws",))


def check_named(train, one, folder, n):
    with redirect_stderr(io.StringIO()) as said:
        in_turns(1, train, folder / "named")
    assert n.named in said.getvalue(), said.getvalue()


def num_writes(train, folder):
    """How often a run changes files."""
    with failing(folder / "run", 1 << 30, 0, "full") as disk:
        in_turns(1, train, folder / "run")
    shutil.rmtree(folder / "run")
    return disk.seen


def check_full_disk(train, one, folder, n):
    files.CHECKPOINT_RETRIES = 0  # the first failure ends the run
    place = 1 + n.place % num_writes(train, folder)
    try:
        with failing(folder / "run", place, n.count, "full"):
            found = in_turns(n.ranks, train, folder / "run")
    except RunFolderError:
        found = in_turns(n.others, train, folder / "run", resume="auto")
    for each in found:
        check_same(each, one, 1 << 30, ("draws",))


def check_crash(train, one, folder, n):
    place = 1 + n.place % num_writes(train, folder)
    with failing(folder / "run", place, 1, "crash"), suppress(BaseException):
        in_turns(1, train, folder / "run")
    if (folder / "run").exists():
        shutil.copytree(folder / "run", folder / "left")  # without the lock, which ends with a process
    for found in in_turns(n.others, train, folder / "left", resume="auto"):
        check_same(found, one, 1 << 30, ("draws",))


def check_damaged(train, one, folder, n):
    in_turns(n.ranks, train, folder / "run")
    places = checkpoints_in(folder / "run")
    files = sorted(places[-1].iterdir())
    file = files[n.place % len(files)]
    data = bytearray(file.read_bytes())
    data[n.order * len(data) // 100] ^= 1
    file.write_bytes(data)
    if len(places) > 1:
        for found in in_turns(n.others, train, None, folder / "run"):
            check_same(found, one, 1 << 30, ("draws",))
