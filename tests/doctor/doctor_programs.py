"""Checks over faulty transports, run by workers: the checks must find and name the fault."""

import os
import signal
import time
from functools import partial

import torch

from samestep.doctor.rank_checks import run_worker

BROKEN_RANK = 1


class Flipped:
    """What arrives, with the last element of it changed."""

    def __init__(self, pending):
        self._pending = pending

    def wait(self):
        received = self._pending.wait().clone()
        if received.numel():
            received.view(torch.uint8)[-1] ^= 1
        return received


class Broken:
    """A transport whose exchange changes an element on one rank; all else is the real one's."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def exchange(self, parts, sizes, receive_sizes):
        pending = self._inner.exchange(parts, sizes, receive_sizes)
        return Flipped(pending) if self._inner.rank == BROKEN_RANK else pending


class Hanging(Broken):
    """A transport whose broadcast never ends on one rank."""

    def exchange(self, parts, sizes, receive_sizes):
        return self._inner.exchange(parts, sizes, receive_sizes)

    def broadcast(self, tensor, source):
        if self._inner.rank == BROKEN_RANK:
            time.sleep(1000)
        self._inner.broadcast(tensor, source)


class Silent(Hanging):
    """A transport whose wait raises nothing, as NCCL's: no rank comes back from a broadcast."""

    def broadcast(self, tensor, source):
        time.sleep(1000)


class Dying(Hanging):
    """A transport that ends one rank's process in its broadcast."""

    def broadcast(self, tensor, source):
        if self._inner.rank == BROKEN_RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        self._inner.broadcast(tensor, source)


run_broken, run_hanging, run_silent, run_dying = (
    partial(run_worker, wrap=wrap) for wrap in (Broken, Hanging, Silent, Dying)
)
