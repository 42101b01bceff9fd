"""State of a process that runs a single-process script, and the exchange of small values between its ranks.

Every rank runs the whole script, so every rank makes the same calls in the same order. Each exchange starts with a
header of fixed size that names the operation and the line of the script; ranks that have diverged therefore stop with
an error that names both lines, instead of hanging.
"""

import atexit
import os
import pickle
import re
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.callsite import script_line
from samestep.comm.communicator import Communicator, make_communicator
from samestep.comm.environment import read_environment
from samestep.data.randomness import Generators
from samestep.devices.portable import asks_for_portable
from samestep.engine.determinism import make_deterministic, own_device
from samestep.engine.forward_backward import backward_on_this_thread
from samestep.engine.portable_kernels import make_portable
from samestep.errors import DeterminismError
from samestep.patch import Patch
from samestep.text import notify

TIMEOUT_SECONDS = 1800.0
HEADER_WORDS = 24
EXTRA_WORDS = HEADER_WORDS - 3
INLINE_BYTES = 16 * 1024
MESSAGE_BYTES = HEADER_WORDS * 8 + INLINE_BYTES
TEXT_BYTES = 512
KEPT_CHUNKS = 65_536
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
BENCHMARK = "cudnn.benchmark stays off: it chooses kernels by their time, and bits with them"
MAX_DEVICES = 64  # a script may name any of these, however many it counts: chunks are dealt to the ranks that exist


@dataclass
class SharedScript:
    """State of one rank of a single-process script, all of which run the whole script."""

    communicator: Communicator
    num_microbatches: int | None = None  # chunks of a wrapped forward; None: `len(device_ids)`, else `num_devices`
    num_devices: int = 1  # logical devices that the script sees
    # Marks a tensor as lying on a simulated device (-1: the host); the identity on real devices.
    mark: Callable[[Tensor, int], Tensor] = lambda tensor, index: tensor
    # Makes a simulated device current for a block; does nothing on real devices.
    on_device: Callable[[int], AbstractContextManager[Any]] = lambda index: nullcontext()
    wraps_itself: bool = False  # whether the script has wrapped or replicated a module
    in_chunk: bool = False  # a chunk of a wrapped forward runs: nothing nested in it is split over the ranks again
    chunks_run: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=KEPT_CHUNKS))  # (forward, chunk)
    num_forwards: int = 0
    num_since_reseed: int = 0  # wrapped forwards since the script last seeded or restored a generator
    seeding: Any = None  # `seeding.Seeds`
    tutorial: Any = None  # `tutorial.TutorialState`
    backward: Any = None  # `backward.Backward`, while gradients pass through chunks
    at_first_backward: Callable[[FrameType], None] | None = None  # called with the frame that first calls backward
    own_failure: BaseException | None = None  # raised first on this rank; its traceback has the script's own lines
    # A value that differs from this one was assigned by the script.
    visible_at_start: str | None = field(default_factory=lambda: os.environ.get(VISIBLE_DEVICES))
    templates: dict[int, bytes] = field(default_factory=dict)  # pickled structures of results, by checksum
    wrapped: weakref.WeakKeyDictionary[nn.Module, Any] = field(default_factory=weakref.WeakKeyDictionary)
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

    def may_meet(self) -> bool:
        """Whether all ranks reach this call: on the script's main thread, outside of chunks and child processes."""
        return not self.in_chunk and self.is_own_thread() and os.getpid() == self._process

    def is_thread_beside(self) -> bool:
        """Whether this is another thread of the script's process."""
        return not self.is_own_thread() and os.getpid() == self._process

    def is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def meet(self, what: str, words: Sequence[int] = ()) -> list[list[int]]:
        """Gathers up to `EXTRA_WORDS` integers of each rank, padded with zeros; a barrier named `what`."""
        return self.gather(what, words, None)[0]

    def gather(self, what: str, words: Sequence[int], data: Tensor | None) -> tuple[list[list[int]], list[Tensor]]:
        """Gathers words and bytes of each rank; raises a `DeterminismError` if `what` or the lines differ.

        The bytes, [n] uint8, are in host memory.

        All headers have one size, so that ranks which have diverged still understand each other. A few bytes fit into
        the same message; more follow in a second one.
        """
        with torch._C.DisableTorchFunction():  # neither simulated devices nor the script's default device
            own = torch.empty(0, dtype=torch.uint8) if data is None else data
            padded = [*words, *[0] * (EXTRA_WORDS - len(words))]
            return ([padded], [own]) if self.world_size == 1 else self._exchange(what, own, padded)

    def _exchange(self, what: str, own: Tensor, padded: list[int]) -> tuple[list[list[int]], list[Tensor]]:
        line = script_line()
        head = [zlib.crc32(what.encode()), zlib.crc32(line.encode())]
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        message[: HEADER_WORDS * 8] = torch.tensor([*head, own.numel(), *padded]).view(torch.uint8)
        if own.numel() <= INLINE_BYTES:
            message[HEADER_WORDS * 8 : HEADER_WORDS * 8 + own.numel()] = own
        transport, sizes = self.communicator.control, [MESSAGE_BYTES] * self.world_size
        received = transport.exchange(message.repeat(self.world_size), sizes, sizes).wait().view(self.world_size, -1)
        rows: list[list[int]] = received[:, : HEADER_WORDS * 8].contiguous().view(torch.int64).tolist()
        if any(row[:2] != head for row in rows):
            self.raise_diverged(
                "the ranks are at different points of the script", f"{what} at {line or 'an unknown line'}"
            )
        lengths = [row[2] for row in rows]
        if max(lengths) <= INLINE_BYTES:
            parts = [part[HEADER_WORDS * 8 :][:length] for part, length in zip(received, lengths, strict=True)]
        else:
            parts = list(self.communicator.gather_rows(own.view(-1, 1), lengths).view(-1).split(lengths))
        return [row[3:] for row in rows], parts

    def gather_bytes(self, what: str, words: Sequence[int], data: bytes) -> tuple[list[list[int]], list[bytes]]:
        """Gathers words and bytes of each rank, through host memory."""
        with torch._C.DisableTorchFunction():
            own = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
            rows, parts = self.gather(what, words, own)
            return rows, [np.asarray(part).tobytes() for part in parts]

    def share(self, what: str, value: Any, source: int = 0) -> Any:
        """Broadcasts a value that pickles from rank `source`; those of other ranks are ignored."""
        if self.world_size == 1:
            return value
        ours = pickle.dumps(value) if self.rank == source else b""
        data = self.gather_bytes(what, (), ours)[1][source]
        return value if self.rank == source else pickle.loads(data)

    def raise_diverged(self, why: str, state: str) -> None:
        """Raises a `DeterminismError` with the state of each rank; all ranks call it at the same point."""
        text = state.encode()[:TEXT_BYTES]
        with torch._C.DisableTorchFunction():
            block = torch.zeros(1, TEXT_BYTES, dtype=torch.uint8)
            block[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            rows = self.communicator.gather_rows(block, [1] * self.world_size)
            texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise DeterminismError(
            f"{why}:\n{lines}\nEvery rank runs the whole script and must do the same in it. Look for what differs "
            "between processes: unseeded generators (numpy.random.default_rng()), clocks, process ids, the order of "
            "os.listdir, or branches on an attribute written inside a wrapped forward"
        )

    def notice(self, text: str) -> None:
        """Prints a text once, on rank 0, to stderr."""
        if text not in self._noticed:
            self._noticed.add(text)
            if self.rank == 0:
                notify(text)

    @contextmanager
    def on_this_rank(self) -> Iterator[None]:
        """Runs code that the other ranks do not run, so that nothing in it may wait for them."""
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


_ACTIVE: ContextVar[SharedScript | None] = ContextVar("script", default=None)


def active() -> SharedScript:
    """The running script; outside of one, the state of this process, which may be a rank of torchrun's."""
    return _ACTIVE.get() or _of_this_process()


@contextmanager
def activated(script: SharedScript) -> Iterator[None]:
    """Makes `active()` return this script."""
    token = _ACTIVE.set(script)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def connect_script(num_microbatches: int | None = None) -> SharedScript:
    """Connects this process to the ranks that the environment names, and sets the switches of deterministic kernels."""
    environment = read_environment()
    device = own_device(None, environment)
    if asks_for_portable():
        make_portable(device.type)
    make_deterministic(environment.num_threads or 1, "ordered")
    communicator = make_communicator(environment, device, timedelta(seconds=TIMEOUT_SECONDS))
    if environment.world_size > 1:
        atexit.register(communicator.close)
    alone = environment.world_size == 1 and device.type != "cpu"
    num_devices = torch.accelerator.device_count() if alone else environment.world_size
    return SharedScript(communicator, num_microbatches, num_devices=num_devices)


@cache
def _of_this_process() -> SharedScript:
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


def num_visible(script: SharedScript) -> int:
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
