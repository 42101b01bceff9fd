"""The transport between ranks that take turns in one process.

Each rank is a thread, but only one runs at a time, and the turn passes on only at a wait for other ranks. So global
state (the random generators above all) is safe, and every world size up to 64 can be tried without processes.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from samestep.comm.transport import Pending, repeat_to_all, unexpected_sizes
from samestep.errors import PeerLostError

T = TypeVar("T")

LATENCY_BYTES = 64 << 10  # a message costs nothing here; not 0, so that both forms of the reduction are exercised


class SequentialWorld:
    """A world of `world_size` ranks that take turns."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        """The state before a program: rank 0 has the turn, nothing has been sent."""
        self._turn = 0
        self._over: set[int] = set()
        self._sent: dict[tuple[int, int], list[Tensor]] = {}
        self._collected: Counter[int] = Counter()

    def run(self, program: Callable[["SequentialTransport"], T]) -> list[T]:
        """Runs the program on every rank and returns its results by rank."""
        self._reset()
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}
        num_threads = torch.get_num_threads()

        def rank_main(rank: int) -> None:
            torch.set_num_threads(1)  # a setting of each thread; kernels may round by their number
            self._await_turn(rank)
            try:
                results[rank] = program(SequentialTransport(self, rank))
            except BaseException as error:
                errors[rank] = error
            with self._changed:
                self._over.add(rank)
                self._pass_turn(rank)

        if self.world_size == 1:
            # On the caller's thread, where data workers may be forked: a child of another thread clears what torch
            # keeps for this one, DTensor's cache of process groups too, whose ends wait for threads it does not have.
            rank_main(0)
            torch.set_num_threads(num_threads)
        else:
            threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(self.world_size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:  # the cause before its consequences: ranks that waited for the one that failed
            raise min(errors.items(), key=lambda item: (isinstance(item[1], PeerLostError), item[0]))[1]
        return [results[rank] for rank in range(self.world_size)]

    def post(self, call: int, rank: int, parts: list[Tensor]) -> None:
        """Stores a rank's parts for its call number `call`."""
        with self._changed:
            self._sent[call, rank] = parts

    def collect(self, call: int, rank: int) -> list[Tensor]:
        """The parts of all ranks for `rank`; passes the turn on until they are there."""
        # Never blocks while it has the turn: the ranks it waits for need it to post their parts.
        while True:
            with self._changed:
                missing = [other for other in range(self.world_size) if (call, other) not in self._sent]
                if not missing:
                    return self._pop_parts(call, rank)
                if all(other in self._over for other in missing):
                    raise PeerLostError(f"rank {rank} waits for ranks {missing}, which have ended", tuple(missing))
                self._pass_turn(rank)
            self._await_turn(rank)

    def _pop_parts(self, call: int, rank: int) -> list[Tensor]:
        """This rank's parts of a call, which are freed after the last rank has taken its own."""
        device = self._sent[call, rank][rank].device  # each rank may have one of its own
        parts = [self._sent[call, other][rank].to(device) for other in range(self.world_size)]
        self._collected[call] += 1
        # Else the parts of a long training would pile up.
        if self._collected[call] == self.world_size:
            del self._collected[call]
            for other in range(self.world_size):
                del self._sent[call, other]
        return parts

    def _pass_turn(self, rank: int) -> None:
        """Gives the turn to the next rank that has not ended; the condition is held."""
        # Up to itself: if all others have ended, this rank goes on, and finds what it waits for or raises.
        for step in range(1, self.world_size + 1):
            following = (rank + step) % self.world_size
            if following not in self._over:
                self._turn = following
                break
        self._changed.notify_all()

    def _await_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)


class SequentialTransport:
    """One rank's end of a `SequentialWorld`."""

    through_host = False
    nodes = None
    stream: torch.cuda.Stream | None = None

    def __init__(self, world: SequentialWorld, rank: int) -> None:
        self.rank = rank
        self.world_size = world.world_size
        self.latency_bytes = LATENCY_BYTES
        self._world = world
        self._calls = 0

    def exchange(self, parts: Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]) -> Pending:
        """Posts copies of the parts: the caller may reuse their memory before the others have their turn."""
        call = self._calls
        self._calls += 1
        self._world.post(call, self.rank, list(parts.clone().split(list(sizes))))
        return SequentialParts(self._world, call, self.rank, list(receive_sizes))

    def gather(self, part: Tensor, sizes: Sequence[int] = (), into: Tensor | None = None) -> Pending:
        return repeat_to_all(self, part, sizes or [part.numel()] * self.world_size)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copies the source's tensor."""
        parts = self.gather(tensor.detach().reshape(-1)).wait().view(self.world_size, *tensor.shape)
        tensor.detach().copy_(parts[source])

    def close(self) -> None:
        """Does nothing: the world ends with its program."""


class SequentialParts:
    """Parts that the other ranks may not have posted yet."""

    def __init__(self, world: SequentialWorld, call: int, rank: int, sizes: list[int]) -> None:
        self._world = world
        self._call = call
        self._rank = rank
        self._sizes = sizes

    def wait(self) -> Tensor:
        """The parts from rank 0, 1, …, concatenated."""
        parts = self._world.collect(self._call, self._rank)
        sent = [part.numel() for part in parts]
        if sent != self._sizes:
            raise unexpected_sizes(self._rank, f"{sent} elements of the ranks", f"{self._sizes}")
        return torch.cat(parts)
