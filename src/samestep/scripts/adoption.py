"""The adoption: what a process that runs somebody's script knows, and how its ranks keep step.

Every rank runs the whole script, so every rank makes the same calls in the same order. Where they have to talk they
*meet*: a header of fixed size says what is to happen at which line of the script, and ranks that have drifted apart
stop with an error that names both lines.
"""

import os
import pickle
import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.comm.communicator import Communicator
from samestep.data.randomness import Generators
from samestep.engine.site import script_line
from samestep.errors import DeterminismError

HEADER_WORDS = 24
EXTRA_WORDS = HEADER_WORDS - 3
KEPT_CHUNKS = 65_536
INLINE_BYTES = 16 * 1024
MESSAGE_BYTES = HEADER_WORDS * 8 + INLINE_BYTES
TEXT_BYTES = 512


@dataclass
class Adoption:
    """One adopted process.

    Attributes:
        communicator: this rank's communicator.
        num_microbatches: chunks a wrapped forward is cut into; None leaves it to the script: `len(device_ids)`, else
            `num_devices`.
        num_devices: how many devices the script sees.
        mark: tells the script on which virtual device a tensor is: `mark(tensor, index)`; does nothing where devices
            are real. An index of -1 is the host.
        on_device: makes a virtual device the current one for a while; does nothing where devices are real.
        in_chunk: whether a chunk of a wrapped forward runs now; what is nested in it is not shared out again.
        chunks_run: (forward number, chunk) of the last chunks that this rank ran.
        num_forwards: wrapped forwards so far.
        num_since_reseed: of those, since the script last seeded or restored a generator.
        seeding: what `adopt.seeding` keeps about the script's seeds.
        visible_at_start: CUDA_VISIBLE_DEVICES before the script ran: another value is the script's.
        backward: what `adopt.backward` keeps while gradients pass through chunks.
        own_failure: what this rank raised, and all others a copy of: it has the script's own lines.
        scratch: what `adopt.scratch` keeps about the script's own lists of parameters.
        templates: structures of results that the ranks have told each other, pickled.
        wrapped: what `adopt.forward` remembers about each wrapped module.
    """

    communicator: Communicator
    num_microbatches: int | None = None
    num_devices: int = 1
    mark: Callable[[Tensor, int], Tensor] = lambda tensor, index: tensor
    on_device: Callable[[int], AbstractContextManager[Any]] = lambda index: nullcontext()
    in_chunk: bool = False
    chunks_run: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=KEPT_CHUNKS))
    num_forwards: int = 0
    num_since_reseed: int = 0
    seeding: Any = None
    scratch: Any = None
    backward: Any = None
    own_failure: BaseException | None = None
    visible_at_start: str | None = field(default_factory=lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
    templates: dict[int, bytes] = field(default_factory=dict)
    wrapped: weakref.WeakKeyDictionary[nn.Module, Any] = field(default_factory=weakref.WeakKeyDictionary)
    _process: int = field(default_factory=os.getpid)
    _thread: int = field(default_factory=threading.get_ident)
    _noticed: set[str] = field(default_factory=set)

    @property
    def rank(self) -> int:
        """This rank, 0 … world_size - 1."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.communicator.world_size

    @cached_property
    def generators(self) -> Generators:
        """The global generators of this process."""
        return Generators(self.communicator.device)

    def may_meet(self) -> bool:
        """Whether the caller stands where all ranks pass: on the script's own thread, in no chunk, in no child."""
        return not self.in_chunk and self.is_own_thread() and os.getpid() == self._process

    def is_own_thread(self) -> bool:
        """Whether the caller runs on the script's main thread."""
        return threading.get_ident() == self._thread

    def meet(self, what: str, words: Sequence[int] = ()) -> list[list[int]]:
        """Meets all ranks at the same point of the script.

        Args:
            what: what is to happen, in words, such as "a wrapped forward"; the same on all ranks.
            words: up to `EXTRA_WORDS` 64-bit integers of this rank.

        Returns:
            The words of each rank, padded with zeros.

        Raises:
            DeterminismError: the ranks are at different points; it names each one's line.
        """
        return self.hand_out(what, words, None)[0]

    def hand_out(self, what: str, words: Sequence[int], data: Tensor | None) -> tuple[list[list[int]], list[Tensor]]:
        """Meets all ranks, and gives every one the bytes that each brought along.

        All meetings are messages of one size, so that ranks which have drifted apart still understand each other. A
        few bytes fit into it; more follow in a second one.

        Args:
            what: as for `meet`.
            words: as for `meet`.
            data: [n] uint8 on this rank's device; None for nothing.

        Returns:
            The words of each rank, and the bytes of each.

        Raises:
            DeterminismError: the ranks are at different points; it names each one's line.
        """
        with torch._C.DisableTorchFunction():
            own = torch.empty(0, dtype=torch.uint8, device=self.communicator.device) if data is None else data
        padded = [*words, *[0] * (EXTRA_WORDS - len(words))]
        if self.world_size == 1:
            return [padded], [own]
        with torch._C.DisableTorchFunction():  # neither virtual devices nor the script's default device
            return self._exchange(what, own, padded)

    def _exchange(self, what: str, own: Tensor, padded: list[int]) -> tuple[list[list[int]], list[Tensor]]:
        """The message of a meeting, and the second one for what does not fit into it."""
        line = script_line()
        head = [zlib.crc32(what.encode()), zlib.crc32(line.encode())]
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        message[: HEADER_WORDS * 8] = torch.tensor([*head, own.numel(), *padded]).view(torch.uint8)
        inline = own.device.type == "cpu" and own.numel() <= INLINE_BYTES
        if inline:
            message[HEADER_WORDS * 8 : HEADER_WORDS * 8 + own.numel()] = own
        transport, sizes = self.communicator.control, [MESSAGE_BYTES] * self.world_size
        received = transport.exchange(message.repeat(self.world_size), sizes, sizes).wait().view(self.world_size, -1)
        rows: list[list[int]] = received[:, : HEADER_WORDS * 8].contiguous().view(torch.int64).tolist()
        if any(row[:2] != head for row in rows):
            self.drifted("the ranks are at different points of the script", f"{what} at {line or 'an unknown line'}")
        lengths = [row[2] for row in rows]
        if inline and max(lengths) <= INLINE_BYTES:
            parts = [part[HEADER_WORDS * 8 :][:length] for part, length in zip(received, lengths, strict=True)]
        elif any(lengths):
            parts = list(self.communicator.gather_rows(own.view(-1, 1), lengths).view(-1).split(lengths))
        else:
            parts = [own] * self.world_size
        return [row[3:] for row in rows], parts

    def drifted(self, why: str, state: str) -> None:
        """Raises the error about ranks that no longer agree; every rank calls it at the same point.

        Args:
            why: what differs.
            state: what this rank has or does.
        """
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

    def agree(self, what: str, value: Any) -> Any:
        """Gives every rank the value of rank 0: what a clock, a folder or a person answered there."""
        return self.share(what, value, 0)

    def share(self, what: str, value: Any, source: int) -> Any:
        """Gives every rank the value of rank `source`: anything that pickles; that of other ranks is ignored."""
        if self.world_size == 1:
            return value
        ours = pickle.dumps(value) if self.rank == source else b""
        size = self.meet(what, [len(ours)])[source][0]
        data = self.share_bytes(ours, size, source)
        return value if self.rank == source else pickle.loads(data)

    def share_bytes(self, ours: bytes, size: int, source: int) -> bytes:
        """Gives every rank the bytes of rank `source`; all know how many there are."""
        with torch._C.DisableTorchFunction():
            buffer = torch.empty(max(size, 1), dtype=torch.uint8)
            if self.rank == source and size:
                buffer[:] = torch.frombuffer(bytearray(ours), dtype=torch.uint8)
            self.communicator.control.broadcast(buffer, source)
            return np.asarray(buffer[:size]).tobytes()

    def notice(self, text: str) -> None:
        """Says something about the run once, on rank 0, to stderr."""
        if text not in self._noticed:
            self._noticed.add(text)
            if self.rank == 0:
                print(f"samestep: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def chunk(self, number: int) -> Iterator[None]:
        """The time while a chunk of a wrapped forward runs."""
        self.chunks_run.append((self.num_forwards, number))
        self.in_chunk = True
        try:
            yield
        finally:
            self.in_chunk = False
