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


class Faulty:
    """A transport with a fault on one rank; all else is the real one's.

    "broken" changes an element of what an exchange brings, "hanging" never ends a broadcast, "dying" ends the process
    in one. "silent" is a broadcast from which no rank comes back, as NCCL's, whose wait raises nothing.
    """

    def __init__(self, inner, fault):
        self._inner = inner
        self._fault = fault if inner.rank == BROKEN_RANK or fault == "silent" else None

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def exchange(self, parts, sizes, receive_sizes):
        pending = self._inner.exchange(parts, sizes, receive_sizes)
        return Flipped(pending) if self._fault == "broken" else pending

    def broadcast(self, tensor, source):
        if self._fault in ("hanging", "silent"):
            time.sleep(1000)
        if self._fault == "dying":
            os.kill(os.getpid(), signal.SIGKILL)
        self._inner.broadcast(tensor, source)


run_broken, run_hanging, run_silent, run_dying = (
    partial(run_worker, wrap=partial(Faulty, fault=fault)) for fault in ("broken", "hanging", "silent", "dying")
)
