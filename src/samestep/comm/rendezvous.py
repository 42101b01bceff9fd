"""The rendezvous: the ranks of a run connect to one store, and find out which of them are missing.

A store is a table of keys in one process: in rank 0 under a plain starter, in a process of its own under `samestep run`
and torchrun. Rank 0 cannot know at what moment the others start, whether a rank that comes belongs to this attempt or
to one that has failed, and whether one will come at all. So the ranks

    1. connect to the store, which does not wait for any of them (`rendezvous`);
    2. learn from rank 0 the number of this round, under a key that no process has used before (`meet`);
    3. write their names under keys of the round, and wait for the others' names (`roll_call`): a rank that does not
       come in time is named, with its machine;
    4. agree, by words in the store, on how they connect (`Rendezvous`, used by `comm.connecting`).
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from samestep.comm.environment import Environment
from samestep.comm.wire import listen
from samestep.errors import PeerLostError, UsageError

FIRST_POLL_SECONDS, POLL_SECONDS = 0.0005, 0.02
ARRIVALS = "samestep/arrivals"


class RankReport(NamedTuple):
    """A rank's report when a quorum is taken up; in the store its numbers as text."""

    operations: int  # carried out so far; -1 for a rank that joins, which has no state yet
    admits: int = 0  # whether a rank may join before the next operation
    stop: int = 0  # as `Requests.stop`
    checkpoint: int = 0  # as `Requests.checkpoint`


class AbsentError(PeerLostError):
    """Ranks did not come to the rendezvous in time."""


@dataclass(frozen=True)
class Rendezvous:
    """Ranks that have all reached one store, in which they agree on how to connect.

    Attributes:
        store: where ranks write for others, under agreed keys.
        place: the place of this rank among them.
        timeout: the time in which every rank must answer. A lost rank must be noticed soon, so it may be shorter than
            the timeout of later exchanges.
        check: called while this rank waits for another one; raises if that one will not come.
    """

    store: dist.Store
    place: Environment
    timeout: timedelta
    check: Callable[[], None] = lambda: None

    def part(self, name: str) -> "Rendezvous":
        """The same ranks, with keys of their own."""
        return replace(self, store=dist.PrefixStore(name, self.store))

    def gather_words(self, word: str) -> list[str]:
        """The words of all ranks, by rank."""
        place, seconds = self.place, self.timeout.total_seconds()
        missing = roll_call(self.store, place.rank, place.world_size, seconds, store_host(place), word, self.check)
        if missing:
            raise not_connected(place.rank, missing)
        return [self.store.get(str(rank)).decode() for rank in range(place.world_size)]

    def wait_for(self, key: str) -> str:
        """The word that rank 0 writes under a key."""
        deadline, pause = time.monotonic() + self.timeout.total_seconds(), FIRST_POLL_SECONDS
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                raise PeerLostError("rank 0 met all others, but did not connect to them", (0,))
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        return self.store.get(key).decode()


def not_connected(rank: int, missing: tuple[int, ...]) -> PeerLostError:
    """The error of a rank that has met all others, while some did not connect."""
    names = ", ".join(map(str, missing))
    return PeerLostError(f"rank {rank} met all others, but rank {names} did not connect to them", missing)


def all_admit(reports: Mapping[int, RankReport]) -> bool:
    """Whether all ranks that have a state are before the same operation, and a rank may join there."""
    present = [report for report in reports.values() if report.operations >= 0]
    return len({report.operations for report in present}) == 1 and all(report.admits for report in present)


def rendezvous(environment: Environment, timeout: timedelta) -> dist.Store:
    """Connects to the store and waits until every rank has."""
    rank, host, port = environment.rank, environment.master_addr, environment.master_port
    hosting, listener = store_host(environment), None
    if rank == hosting:
        # If another socket of this process listens at the port, torch shares that one (multi_tenant) below.
        with contextlib.suppress(OSError):
            listener = listen(host, port).detach()
    try:
        # Not dist.rendezvous: its store waits for all ranks by itself, and an error cannot name the missing ones.
        store = dist.TCPStore(
            host,
            port,
            is_master=rank == hosting,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener,
        )
    except (RuntimeError, ValueError, OSError) as error:
        verb = "open" if rank == hosting else "reach"
        raise UsageError(
            f"rank {rank} cannot {verb} the store at {host}:{port}, as MASTER_ADDR and MASTER_PORT say: {error}"
        ) from error
    seconds, ranks = timeout.total_seconds(), range(environment.world_size)
    try:
        ours, missing = meet(store, rank, len(ranks), seconds, hosting)
    except RuntimeError as error:
        raise PeerLostError(f"the store at {host}:{port} went while rank {rank} waited for the others") from error
    if missing:
        names, each = ", ".join(str(rank) for rank in missing), environment.local_world_size
        gone = ", ".join(str(machine) for machine in sorted({other // each for other in missing}))
        raise AbsentError(
            f"rank {rank} met {len(ranks) - len(missing)} of {len(ranks)} ranks within {seconds:g} s; missing: {names}"
            + (f", of machine {gone}" if each < len(ranks) else ""),
            missing,
        )
    return ours


def meet(
    store: dist.Store, rank: int, world_size: int, seconds: float, hosting: int | None = None
) -> tuple[dist.Store, tuple[int, ...]]:
    """A part of the store that no ranks have used before, for ranks that all reach it; and those that do not come.

    The store may outlive processes and groups, and torchrun's agents count restarts each for themselves: so rank 0
    numbers the rounds, and tells each rank that arrives the number, under a key that no process has known before.
    """
    call = dist.PrefixStore(f"{ARRIVALS}/{rank}.{store.add(f'{ARRIVALS}/{rank}', 1)}", store)
    if rank == 0:
        call.set("0", f"samestep/{store.add('samestep/rounds', 1)}")
    if missing := roll_call(call, 1, 2, seconds, hosting):
        return store, missing
    prefix = call.get("0").decode()

    def admit() -> None:
        # At each poll: a rank that its agent has restarted arrives once more, under the next number. `add` of 0 reads
        # it.
        for other in range(world_size) if rank == 0 else ():
            store.set(f"{ARRIVALS}/{other}.{store.add(f'{ARRIVALS}/{other}', 0)}/0", prefix)

    ours = dist.PrefixStore(prefix, store)
    return ours, roll_call(dist.PrefixStore("meeting", ours), rank, world_size, seconds, hosting, check=admit)


def join_store(environment: Environment, timeout: timedelta) -> dist.Store:
    """The store of a run under way, for a worker that joins it late: the store of the first rendezvous."""
    host, port = environment.master_addr, environment.master_port
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise PeerLostError(f"the run to join is over: no answer at {host}:{port}") from error
    return dist.PrefixStore("samestep/1", store)


def store_host(environment: Environment) -> int | None:
    """The rank that hosts the store; None if no rank does."""
    return None if environment.store_is_kept else 0


def roll_call(
    store: dist.Store,
    rank: int,
    world_size: int,
    seconds: float,
    store_host: int | None,
    word: str = "here",
    check: Callable[[], None] = lambda: None,
) -> tuple[int, ...]:
    """Writes a word under this rank's key, and waits for the others' words; returns the ranks without one.

    `check` is called at every poll; it may raise to end the wait.
    """
    missing: tuple[int, ...] = ()
    deadline, pause = time.monotonic() + seconds, FIRST_POLL_SECONDS
    try:
        store.set(str(rank), word)
        # Polling, since `Store.wait` prints warnings when it times out, and cannot tell which keys are there; with
        # growing pauses, since hundreds of ranks may ask one store: for all at once, and then for those not yet seen.
        left = tuple(range(world_size))
        while left and not store.check([str(other) for other in left]):
            left = missing = tuple(other for other in left if not store.check([str(other)]))
            if time.monotonic() >= deadline:
                break
            check()
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        else:
            missing = ()
    except RuntimeError:
        if store_host is None:
            raise
        # The host may have left after its own roll call: then the ranks missing at the last poll are the cause.
        return missing or (store_host,)
    return missing
