"""State of a process that runs a single-process script, or computes chunks of its modules' forwards."""

import atexit
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, cached_property
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from samestep.comm.communicator import Communicator, make_communicator
from samestep.comm.environment import read_environment
from samestep.comm.transport import LocalTransport
from samestep.data.randomness import Generators
from samestep.devices.portable import asks_for_portable
from samestep.engine.determinism import make_deterministic
from samestep.engine.forward_backward import backward_on_this_thread
from samestep.engine.portable_kernels import make_portable
from samestep.engine.rank_device import own_device
from samestep.patch import Patch
from samestep.text import counted, notify

TIMEOUT_SECONDS = 1800.0
# Of `chunks_run`, by which tests count who has computed what: results alone would be equal if all computed everything.
KEPT_CHUNKS = 65_536
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
BENCHMARK = "cudnn.benchmark stays off: it chooses kernels by their time, and bits with them"
MAX_DEVICES = 64  # a script may name any of these, however many it counts: chunks are dealt to the ranks that exist


@dataclass
class ScriptState:
    """State of the process that runs a single-process script, or of a worker."""

    communicator: Communicator
    num_microbatches: int | None = None  # chunks of a wrapped forward; None: `len(device_ids)`, else `num_devices`
    num_devices: int = 1  # logical devices that the script sees
    # Marks a tensor as lying on a simulated device (-1: the host); the identity on real devices.
    mark: Callable[[Tensor, int], Tensor] = lambda tensor, index: tensor
    # Makes a simulated device current for a block; does nothing on real devices.
    on_device: Callable[[int], AbstractContextManager[Any]] = lambda index: nullcontext()
    wraps_itself: bool = False  # whether the script has wrapped or replicated a module
    driver: Any = None  # `split_forward.driver.Driver`, if the script runs in this process
    rank_in_run: int = 0  # of this process, if so
    in_chunk: bool = False  # a chunk of a wrapped forward runs: nothing nested in it is split over the ranks again
    chunks_run: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=KEPT_CHUNKS))  # (forward, chunk)
    num_forwards: int = 0
    num_since_reseed: int = 0  # wrapped forwards since the script last seeded or restored a generator
    seeding: Any = None  # `seeding.Seeds`
    tutorial: Any = None  # `tutorial.TutorialState`
    at_first_backward: Callable[[FrameType], None] | None = None  # called with the frame that first calls backward
    # A value that differs from this one was assigned by the script.
    visible_at_start: str | None = field(default_factory=lambda: os.environ.get(VISIBLE_DEVICES))
    _process: int = field(default_factory=os.getpid)
    _thread: int = field(default_factory=threading.get_ident)
    _noticed: set[str] = field(default_factory=set)

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    @cached_property
    def generators(self) -> Generators:
        """The global generators of this process."""
        return Generators(self.communicator.device)

    def devices(self) -> str:
        """Who computes forwards that are split, in words; empty if there is no worker."""
        count = 1 if self.driver is None else self.driver.link.world_size
        return f"{count} devices: this process and {counted(count - 1, 'worker')}" if count > 1 else ""

    def may_meet(self) -> bool:
        """Whether a forward may be split here: on the script's main thread, outside of chunks and child processes.

        Not while its operations are recorded (`torch.jit.trace`, TensorBoard's `add_graph`).
        """
        is_here = not self.in_chunk and self.is_own_thread() and os.getpid() == self._process
        return is_here and not torch.jit.is_tracing()

    def is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def notice(self, text: str) -> None:
        """Prints a text once, by one process, to stderr."""
        if text not in self._noticed:
            self._noticed.add(text)
            if self.rank == self.rank_in_run == 0:
                notify(text)

    @contextmanager
    def on_this_rank(self) -> Iterator[None]:
        """Runs code within which no forward is split."""
        was_shared = self.may_meet()  # false on other threads, which must not change the main thread's state
        self.in_chunk = self.in_chunk or was_shared
        try:
            yield
        finally:
            if was_shared:
                self.in_chunk = False

    @contextmanager
    def chunk(self, number: int) -> Iterator[None]:
        """Runs one chunk of a wrapped forward."""
        self.chunks_run.append((self.num_forwards, number))
        with self.on_this_rank():
            yield


_ACTIVE: ContextVar[ScriptState | None] = ContextVar("script", default=None)


def active() -> ScriptState:
    """The running script; outside of one, the state of this process, which may be a rank of torchrun's."""
    return _ACTIVE.get() or _of_this_process()


@contextmanager
def activated(script: ScriptState) -> Iterator[None]:
    """Makes `active()` return this script."""
    token = _ACTIVE.set(script)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def alone(script: ScriptState) -> ScriptState:
    """The state of a process that runs the script by itself, of a run of several."""
    local = LocalTransport()
    communicator = replace(script.communicator, transport=local, control=local)
    return replace(script, communicator=communicator, rank_in_run=script.rank)


def connect_script(num_microbatches: int | None = None) -> ScriptState:
    """Connects this process to the ranks that the environment names, and sets the switches of deterministic kernels."""
    environment = read_environment()
    device = own_device(None, environment)
    if asks_for_portable():
        make_portable(device.type)
    make_deterministic(environment.settings.num_threads or 1)
    communicator = make_communicator(environment, device, timedelta(seconds=TIMEOUT_SECONDS))
    if environment.world_size > 1:
        atexit.register(communicator.close)
    alone = environment.world_size == 1 and device.type != "cpu"
    num_devices = torch.accelerator.device_count() if alone else environment.world_size
    return ScriptState(communicator, num_microbatches, num_devices=num_devices)


@cache
def _of_this_process() -> ScriptState:
    script = connect_script()
    backward_on_this_thread(script.communicator.device)  # not as a context: from now on
    return script


def fixed_benchmark(tell: Callable[[str], object]) -> list[Patch]:
    """Keeps `cudnn.benchmark` off, and says so if the script sets it, as scripts of any number of processes do."""

    def refuse(asked: bool) -> None:
        if asked:
            tell(BENCHMARK)

    flag: Any = vars(type(torch.backends.cudnn))["benchmark"]  # holds the function that `cudnn.flags` looks up
    return [Patch(flag, "setter", refuse), Patch(torch._C, "_set_cudnn_benchmark", refuse)]


def num_visible(script: ScriptState) -> int:
    """The number of logical devices that the script sees; reads the environment each time.

    In this order: the microbatches asked for; the ids in CUDA_VISIBLE_DEVICES, if the script assigned it ("0,4" counts
    two, even on a machine with one); the devices of the run.
    """
    if script.num_microbatches is not None:
        return script.num_microbatches
    ids = os.environ.get(VISIBLE_DEVICES)
    if ids is None or ids == script.visible_at_start:
        return script.num_devices
    return count_ids(ids)


def count_ids(ids: str) -> int:
    """The number of devices that a value of CUDA_VISIBLE_DEVICES names.

    The list ends at the first entry that is no device: "0,4" is two, "0,-1,2" one, "" and "-1" none. A device named
    twice leaves none, as in CUDA (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    named: list[str] = []
    for entry in map(str.strip, ids.split(",")):
        if not re.match(r"\+?\d|GPU-", entry):
            break
        named.append(entry)
    return len(named) if len(set(named)) == len(named) else 0
