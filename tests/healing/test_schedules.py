"""Runs of the simulator's supervisor and ranks that once ended otherwise, and defects that its invariants find."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from worlds import cpu_only

from samestep.comm import membership, quorums
from samestep.comm.membership import Membership
from samestep.comm.requests import Requests
from samestep.comm.shared_memory import SharedTransport
from samestep.core import microbatches
from samestep.core.microbatches import ranges_of_slots
from samestep.launcher.healing import Healing
from samestep.launcher.worker_states import Workers

sys.path.append(str(Path(__file__).resolve().parents[1] / "simulation"))
from run import Search
from simulated_membership import Fault, Schedule, check_schedule

pytestmark = cpu_only("the ranks of the simulator are threads with CPUs")

ENDED_OTHERWISE = {
    "a rank that connects is not taken for hung if the others have left for another quorum": Schedule(
        3, (Fault("killed", 0), Fault("killed", 1, 0, 15)), steps=1, microbatches=3
    ),
    "a checkpoint is agreed by a rank that repeats the step without the one that asked": Schedule(
        2, (Fault("breaks", 1, 4, 9),), order=717130, steps=4, microbatches=2, checkpoints=(3,)
    ),
    "a rank that waits for one that hangs is not taken for hung": Schedule(
        4, (Fault("hangs", 0, 1), Fault("breaks", 3, 1)), order=1, steps=1
    ),
    "the end of a fit is agreed as it was by the ranks that have gone on": Schedule(
        2, (Fault("breaks", 1, 3), Fault("ends", 1, 4, 3)), order=1, steps=4, microbatches=2
    ),
    "a replacement that failed before it joined, and does not end, is ended": Schedule(
        2, (Fault("given up", 2), Fault("killed", 0)), order=418335, steps=1, replacements=1
    ),
    "a rank that waits for a quorum is not taken for hung": Schedule(
        4, (Fault("given up", 1, 4, 11), Fault("breaks", 2, 4, 15)), order=538563
    ),
}


@pytest.mark.parametrize("name", ENDED_OTHERWISE)
def test_a_run_ends_well_whatever_happens(name):
    check_schedule(ENDED_OTHERWISE[name])


def test_a_late_worker_that_was_not_counted_in_begins_another_quorum_with_its_first_round(monkeypatch):
    def pause(reports, real=membership.all_admit):
        admits = real(reports)
        if not admits and sys._getframe(1).f_code.co_name == "join":
            quorums.time.sleep(0.5)  # in which another rank is lost
        return admits

    monkeypatch.setattr(membership, "all_admit", pause)
    monkeypatch.setattr(Healing, "_gather_strays", lambda *_: None)  # after a while it ends the wait for each other
    faults = Fault("killed", 0, 2), Fault("killed", 2, 3, 11)
    check_schedule(Schedule(3, faults, order=2, steps=3, microbatches=3, replacements=1))


class LaterRequests(Requests):
    """Requests to stop are read a step later."""

    stop = property(
        lambda self: vars(self).get("stops", (0, 0))[0],
        lambda self, stop: vars(self).update(stops=(vars(self).get("stops", (0, 0))[1], stop)),
    )


class RequestsOfRanks:
    """`Membership.requests`, those of rank 1 `LaterRequests`."""

    def __get__(self, member, _):
        return vars(member)["requests"]

    def __set__(self, member, requests):
        vars(member)["requests"] = LaterRequests() if member.rank == 1 else requests


def heal_uncounted(self, attempt, failure, real=Membership._heal):
    """An operation that was repeated among the ranks behind is not counted."""
    before, values = self.num_operations, real(self, attempt, failure)
    self.num_operations = before
    return values


def spares_first(num_microbatches, slots, num_active, shares):
    return ranges_of_slots(num_microbatches, slots, num_active, shares)[::-1]


KILLED = Schedule(3, (Fault("killed", 1, 2, 5),))
TWINS = {
    "a quorum counts a lost rank": (Workers, "living", property(lambda self: self.members), KILLED),
    "a repeated operation is carried out twice": (
        *(Membership, "_heal", heal_uncounted),
        ENDED_OTHERWISE["a checkpoint is agreed by a rank that repeats the step without the one that asked"],
    ),
    "one rank stops a step later": (
        Membership,
        "requests",
        RequestsOfRanks(),
        Schedule(3, (Fault("ends", 0, 1),), steps=9),
    ),
    "a spare is in the wrong place": (microbatches, "ranges_of_slots", spares_first, replace(KILLED, spares=1)),
    "a place is used again before it is read": (SharedTransport, "_is_read", lambda *_: True, Schedule(3)),
}


@pytest.mark.parametrize("name", TWINS)
def test_twin_a_run_shows_the_defect(monkeypatch, name):
    *broken, schedule = TWINS[name]
    check_schedule(schedule)
    monkeypatch.setattr(*broken, raising=False)
    with pytest.raises(AssertionError):
        check_schedule(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_twin_what_seeds_draw_shows_the_defect(monkeypatch, name):
    *broken, _ = TWINS[name]
    monkeypatch.setattr(*broken, raising=False)
    search = Search(shrinking_seconds=0)
    assert any(search.smallest("membership", seed, examples=40) for seed in range(1, 16))
