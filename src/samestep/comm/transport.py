"""The transport: the seam between the ordered reduction and the code that moves bytes.

Transports exchange, and never add. There are four: `LocalTransport` here (one rank),
`SharedTransport` (memory that the ranks of a host share), `GroupTransport` (torch.distributed: gloo, NCCL) and
`SequentialTransport` (ranks that take turns in one process).
"""

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakMethod, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.core.tree import Block
from samestep.errors import DeterminismError, PeerLostError

WORD_BYTES = 4096  # of a word that ranks gather: a longer one, of NCCL's, is cut
ARRIVAL_POLL_SECONDS = 20e-6  # much less than a step, and the host has nothing else to do
ABORT_SECONDS = 30.0
STUCK = f"NCCL has not given up its connections within {ABORT_SECONDS:g} s"
ADVICE = (
    "do all ranks take the same number of steps? A rank that needs more time than {:g} s for its microbatches needs a "
    "larger timeout_seconds"
)


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> Tensor:
        """Returns the received tensor; blocks the host, or the device's stream, until it has arrived.

        Raises:
            PeerLostError: a rank died or did not answer in time.
        """


Blocks = Sequence[Sequence[Block]]
"""The blocks of every rank, by rank."""
Stages = Generator[Pending, Tensor, Tensor]
"""A form of the reduction: yields the transfer under way, is sent what arrived, and returns the sum."""


class NodeReduction(Protocol):
    """The reduction of ranks on several machines, by machines; `comm.hierarchical_reduction` has it."""

    def reduce(self, blocks_by_rank: Blocks, sums: Sequence[Tensor], like: Tensor, total: Tensor | None) -> Stages:
        """The sum over all microbatches; arguments as in `reduction.ordered`."""

    def close(self) -> None:
        """Closes the connections within and between nodes."""

    def abandon(self) -> None:
        """Drops these connections after a failure."""

    def watch(self, check_lost: Callable[[], None] | None, names_missing: bool) -> None:
        """As `Connection.watch`, for these connections."""


class Transport(Protocol):
    """Moves flat (1-d, contiguous) tensors between ranks. Every rank calls the same methods in the same order."""

    rank: int  # 0 … world_size - 1
    world_size: int
    # The cost of one message in bytes: receiving fewer more is cheaper than another message. The same on all ranks,
    # which must choose the same form of the reduction.
    latency_bytes: int
    through_host: bool  # whether tensors of an accelerator go through host memory

    @property
    def nodes(self) -> "NodeReduction | None":
        """The reduction by nodes; None for a flat one."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the exchange, if waiting blocks a stream and not the host; else None."""
        # NCCL's `wait` lets the current stream wait for the transfer and returns at once. On a stream of its own an
        # exchange, with the folds between its messages, runs beside the backward that the caller's stream computes.
        # Whatever crosses from one stream to the other needs `wait_stream`, and is held until then (`Reduction`).

    def exchange(self, parts: Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        """Starts an all-to-all of the parts for rank 0, 1, …, concatenated; the result may alias `parts`.

        Both sizes are in elements: of the part for each rank, and of the part from each rank.
        """

    def gather(self, part: Tensor, sizes: Sequence[int] = (), into: Tensor | None = None) -> Pending:
        """Starts an all-gather of parts, whose numbers of elements are `sizes` if they differ.

        The result may alias `part`, and take the memory of `into`; `part` may be this rank's place in `into`.
        """

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrites `tensor` on all ranks with rank `source`'s tensor."""

    def close(self) -> None:
        """Closes connections and frees threads."""


class Connection(Transport):
    """A transport between processes, which may fail.

    `healing_store` is the store at which the ranks connect again after a failure; None if they cannot.
    """

    nodes: "NodeReduction | None" = None
    stream: torch.cuda.Stream | None = None
    through_host = True

    def __init__(self, rank: int, world_size: int, timeout: timedelta, healing_store: dist.Store | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.ranks: Sequence[int] = range(world_size)  # the numbers of the ranks in the whole run, which users know
        self.run_size = world_size
        self.healing_store = healing_store
        self.names_missing = True  # whether an error names the ranks that did not answer; false if a supervisor does
        # Raises if a rank is lost; set in a run that heals, where a wait would not end by itself then.
        self.check_lost: Callable[[], None] | None = None
        self.call = 0  # up to 15 bits: of what a process group calls, which ranks that call something else notice
        self.note = 0  # a word that goes along with what this rank sends
        self.other_notes: dict[int, int] = {}  # of the ranks that sent another note, if the transport carries notes
        self.advice = ADVICE  # in the error of a transfer for which a rank is missing
        self._timeout = timeout.total_seconds()

    def watch(self, check_lost: Callable[[], None] | None, names_missing: bool) -> None:
        """Sets `check_lost` and `names_missing` for later waits."""
        self.check_lost, self.names_missing = check_lost, names_missing
        if self.nodes is not None:
            self.nodes.watch(check_lost, names_missing)

    def limit_waits(self, timeout: timedelta | None) -> None:
        """Sets the timeout of later waits; None for waits as long as the others live."""
        self._timeout = math.inf if timeout is None else timeout.total_seconds()

    def deliver(self, pieces: Sequence[Tensor], sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        """As `exchange` of contiguous pieces, [n] uint8; none is for this rank itself."""
        data = torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)
        return self.exchange(data, sizes, receive_sizes)

    def broadcast_all(self, tensors: Sequence[Tensor], source: int) -> None:
        """Broadcasts contiguous tensors."""
        for tensor in tensors:
            self.broadcast(tensor, source)

    def meet(self) -> None:
        """Returns when every rank has called it; waits for a rank as long as its process lives."""
        limit, self._timeout = self._timeout, math.inf
        try:
            self.gather(torch.zeros(1, dtype=torch.uint8)).wait()
        finally:
            self._timeout = limit

    def gather_words(self, word: str) -> list[str]:
        """The words of all ranks, by rank."""
        said = word.encode()[:WORD_BYTES]
        part = torch.tensor([*said, *bytes(WORD_BYTES - len(said))], dtype=torch.uint8)
        rows = self.gather(part).wait().view(self.world_size, WORD_BYTES).numpy()
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]

    def abandon(self) -> None:
        """Drops the connections after a failure, without waiting for transfers under way; peers' transfers fail."""
        raise NotImplementedError

    def has_lost(self) -> bool:
        """Whether a rank has closed its transport or ended, if that can be told without an exchange; else false."""
        return False

    def lost(self, missing: Sequence[int]) -> PeerLostError:
        """The error of a transfer that these ranks did not take part in."""
        names = ", ".join(str(self.ranks[rank]) for rank in missing)
        how = f"has died, has ended, or is late: {self.advice.format(self._timeout)}"
        if self._timeout == math.inf:
            how = "has died or has ended"
        return PeerLostError(
            f"rank {self.ranks[self.rank]} of {self.run_size} waits for rank {names}, which {how}",
            tuple(self.ranks[rank] for rank in missing),
        )


def close_at_exit(close: Callable[[], None]) -> "finalize[..., Any]":
    """Calls a method when the process ends, unless its object is gone by then: what it connects closes with it."""
    owner: Any = close.__self__  # type: ignore[attr-defined]  # only methods have one
    return finalize(owner, lambda method: (method() or int)(), WeakMethod(close))


def wait_until(has_arrived: Callable[[], bool], check_lost: Callable[[], None], seconds: float) -> None:
    """Blocks the host until a device has come so far, unless a rank is lost meanwhile."""
    deadline = time.monotonic() + seconds
    while not has_arrived():
        check_lost()
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"an exchange has not arrived within {seconds:g} s, though no rank is known to be lost; if a rank "
                "needs more time for its microbatches, raise timeout_seconds"
            )
        time.sleep(ARRIVAL_POLL_SECONDS)


def returns(call: Callable[[], object]) -> bool:
    """Makes a call in a thread; whether it has ended within `ABORT_SECONDS`, by whatever error of torch's."""

    def run() -> None:
        with suppress(RuntimeError):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)
    return not thread.is_alive()


def gather_parts(transport: Transport, part: Tensor, sizes: Sequence[int]) -> Pending:
    """Starts an all-gather of flat parts with the given numbers of elements, which may differ."""
    return transport.gather(part, () if len(set(sizes)) == 1 else sizes)


def repeat_to_all(transport: Transport, part: Tensor, sizes: Sequence[int]) -> Pending:
    """Starts an all-gather as an all-to-all of copies."""
    ranks = transport.world_size
    return transport.exchange(part.repeat(ranks), [part.numel()] * ranks, sizes)


class Arrived:
    """A transfer that has arrived."""

    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self) -> Tensor:
        return self._received


class LocalTransport:
    """The transport of a single rank: every exchange is with itself."""

    rank = 0
    world_size = 1
    latency_bytes = 0
    through_host = False
    nodes = None
    stream = None

    def exchange(self, parts: Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        return Arrived(parts)

    def gather(self, part: Tensor, sizes: Sequence[int] = (), into: Tensor | None = None) -> Pending:
        return Arrived(part)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def unexpected_sizes(rank: int, got: str, expected: str) -> DeterminismError:
    """The error of a rank that receives parts of unexpected sizes."""
    return DeterminismError(
        f"rank {rank} got {got} in one exchange, and expected {expected}: the ranks take different steps; hand every "
        "rank the same batches, and let all call the same functions in the same order"
    )
