"""The active adoption: that of the script that runs now, or one of its own for a process that nobody adopted."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cache

import torch

from samestep.comm.communicator import make_communicator
from samestep.comm.environment import read_environment
from samestep.scripts.adoption import Adoption
from samestep.train.process import make_deterministic, own_device

TIMEOUT_SECONDS = 1800.0

_ACTIVE: ContextVar[Adoption | None] = ContextVar("adoption", default=None)


def active() -> Adoption:
    """The adoption of the running script; outside of one, that of this process: alone, or one of torchrun's ranks."""
    return _ACTIVE.get() or _of_this_process()


@contextmanager
def activated(adoption: Adoption) -> Iterator[None]:
    """The time in which `active()` is this adoption."""
    token = _ACTIVE.set(adoption)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def connect_adoption(num_microbatches: int | None = None) -> Adoption:
    """Connects this process to the other ranks that the environment names, and sets what equal bits rest on."""
    environment = read_environment()
    device = own_device(None, environment)
    make_deterministic(device, environment.num_threads or 1, "ordered")
    communicator = make_communicator(environment, device, timedelta(seconds=TIMEOUT_SECONDS))
    if environment.world_size > 1:
        atexit.register(communicator.close)
    alone = environment.world_size == 1 and device.type != "cpu"
    num_devices = torch.accelerator.device_count() if alone else environment.world_size
    return Adoption(communicator, num_microbatches, num_devices=num_devices)


@cache
def _of_this_process() -> Adoption:
    return connect_adoption()
