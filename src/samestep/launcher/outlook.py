"""The outlook: from one node of a round to the others; who is alive, how they ended, and whether one wants to join."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Literal

from samestep.launcher.rendezvous import Rendezvous, Round, told
from samestep.launcher.verdict import End, Rules, Verdict, judge

BEAT_SECONDS = 1.0
LOST_SECONDS = 10.0
POLL_SECONDS = 0.05


class Outlook:
    """What this node sees of the others in a round. All nodes beat in the store, so a silent one is lost.

    Args:
        rendezvous: where they met.
        here: the round.

    Attributes:
        asked: what the workers of this node were asked for its sake: "stop", "end", or "" for nothing.
        changes: whether that was because a node waits to take part.
        is_gone: the error that showed that the host of the meeting is, and the store with it; None while it is not.
    """

    def __init__(self, rendezvous: Rendezvous, here: Round) -> None:
        self._rendezvous = rendezvous
        self._round = here
        self._others = [rank for rank in range(len(here.nodes)) if rank != here.rank]
        self._store = here.store
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {rank: (0, time.monotonic()) for rank in self._others}
        self._looked = float("-inf")
        self.ends: dict[int, End] = {}
        self.lost: dict[int, str] = {}
        self.asked: Literal["", "stop", "end"] = ""
        self.changes = False
        self.is_gone: RuntimeError | None = None

    def look(self) -> Literal["", "stop", "end"]:
        """Beats, and looks at the others, once a second; says what that means for the workers of this node."""
        if self.is_gone or time.monotonic() - self._looked < BEAT_SECONDS:
            return self.asked
        try:
            self._look()
        except RuntimeError as error:
            self.is_gone = error
        kinds = {end.kind for end in self.ends.values()}
        if self.is_gone or self.lost or kinds & {"failed", "peer"}:
            self.asked = "end"
        elif self.asked == "" and (self.changes or kinds & {"stopped", "left", "again"}):
            self.asked = "stop"
        return self.asked

    def agree(self, ours: End, max_restarts: int, resume_hint: str, check: Callable[[], None]) -> Verdict:
        """Tells how this node ended, waits until all others did or are lost, and agrees on what follows.

        Args:
            ours: how this node ended.
            max_restarts: how many restarts there may be in all.
            resume_hint: says how to go on with a run that is over.
            check: called while it waits; what it raises ends the wait.

        Raises:
            PeerLostError: the host of the meeting is gone.
        """
        cluster, here = self._rendezvous.cluster, self._round
        try:
            self._store.set(f"end/{here.rank}", json.dumps(asdict(ours)))
            while any(rank not in self.ends and rank not in self.lost for rank in self._others):
                check()
                self.look()
                if self.is_gone:
                    raise self._rendezvous.host_lost(self.is_gone)
                self._read_ends()
                time.sleep(POLL_SECONDS)
            used = self._rendezvous.store.add("restarts", 0)
            rules = Rules(cluster.min_nodes, cluster.max_nodes, max_restarts - used, resume_hint)
            ends = dict(sorted({**self.ends, here.rank: ours}.items()))
            names = [here.name(rank) for rank in range(len(here.nodes))]
            found = json.dumps({"by": here.rank, **asdict(judge(ends, self.lost, names, rules))})
            by, verdict = told(
                lambda by, **verdict: (by, Verdict(**verdict)), self._store.compare_set("verdict", "", found)
            )
            if by == here.rank and verdict.uses_restart:
                self._rendezvous.store.add("restarts", 1)
            return verdict
        except RuntimeError as error:
            raise self._rendezvous.host_lost(error) from error

    def part(self) -> None:
        """Says that this node has all it needs; the host of the meeting waits for the others to say so."""
        try:
            self._store.set(f"bye/{self._round.rank}", "")
            deadline = time.monotonic() + LOST_SECONDS
            waited_for = [f"bye/{rank}" for rank in self._others if rank not in self.lost]
            while self._rendezvous.hosts and waited_for and not self._store.check(waited_for):
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            return  # the host has left already, so it does not wait for us

    def _look(self) -> None:
        """One look."""
        now = self._looked = time.monotonic()
        self._beats += 1
        self._store.set(f"beat/{self._round.rank}", str(self._beats))
        self._read_ends()
        for rank in self._others:
            key = f"beat/{rank}"
            count = told(int, self._store.get(key)) if self._store.check([key]) else 0
            if count != self._seen[rank][0]:
                self._seen[rank] = count, now
            elif now - self._seen[rank][1] > LOST_SECONDS and rank not in self.ends:
                self.lost[rank] = f"no sign of life for {LOST_SECONDS:g} s"
        is_full = len(self._round.nodes) >= self._rendezvous.cluster.max_nodes
        self.changes = self.changes or (not is_full and self._rendezvous.num_waiting() > 0)

    def _read_ends(self) -> None:
        """Takes in how other nodes ended."""
        for rank in self._others:
            if rank not in self.ends and self._store.check([f"end/{rank}"]):
                self.ends[rank] = told(End, self._store.get(f"end/{rank}"))
