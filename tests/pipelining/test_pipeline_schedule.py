"""The schedules: orders in which every microbatch gets through, forwards and backwards in order, for any number."""

import pytest

from samestep.engine.pipelining.p2p import BACKWARD, FORWARD, INPUT, WEIGHT, make_schedule

KINDS = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
    ("zbv", 2),
)


def waits_for(action, num_stages):
    """What must be done before an action."""
    kind, stage, place = action
    if kind == FORWARD:
        return {(FORWARD, stage - 1, place)} if stage else set()
    if kind == WEIGHT:
        return {(INPUT, stage, place)}
    after = {(INPUT, stage + 1, place)} if stage + 1 < num_stages else set()
    return {(FORWARD, stage, place)} | after


def run(schedule):
    """Carries out a schedule on ranks that send without waiting; the most microbatches that each held at once."""
    done, at, held = set(), [0] * len(schedule.actions), [0] * len(schedule.actions)
    most = list(held)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while at[rank] < len(actions) and waits_for(actions[at[rank]], len(schedule.owners)) <= done:
                kind, stage, place = actions[at[rank]]
                done.add((INPUT if kind == BACKWARD else kind, stage, place))
                held[rank] += {FORWARD: 1, INPUT: 0}.get(kind, -1)
                most[rank] = max(most[rank], held[rank])
                at[rank] += 1
                moved = True
    assert at == [len(actions) for actions in schedule.actions], "ranks wait for each other"
    return most


@pytest.mark.parametrize(("name", "stages_per_rank"), KINDS)
def test_no_rank_waits_in_vain_whatever_the_number_of_microbatches(name, stages_per_rank):
    for num_ranks in (2, 3, 4):
        for num_microbatches in (0, 1, 2, 3, 7, 8, 13):
            run(make_schedule(name, num_ranks, stages_per_rank, num_microbatches))


def test_1f1b_holds_no_more_microbatches_than_there_are_stages_and_gpipe_all():
    assert run(make_schedule("1f1b", 4, 1, 16)) == [4, 3, 2, 1]
    assert run(make_schedule("gpipe", 4, 1, 16)) == [16] * 4


@pytest.mark.parametrize(("name", "stages_per_rank"), KINDS)
def test_what_one_rank_sends_another_awaits(name, stages_per_rank):
    schedule = make_schedule(name, 3, stages_per_rank, 7)
    sent = [m for a in range(3) for b in range(3) for m in schedule.messages(a, b)]
    assert sorted(sent) == sorted(m for rank in range(3) for m in schedule.awaited(rank))
    stages = len(schedule.owners)
    wanted = {(FORWARD, stage, place) for stage in range(1, stages) for place in range(7)}
    wanted |= {(BACKWARD, stage, place) for stage in range(stages - 1) for place in range(7)}
    assert len(sent) == len(set(sent)) == len(wanted)
    assert set(sent) == wanted


def test_stages_go_round_the_ranks_and_with_zbv_there_and_back():
    assert make_schedule("interleaved", 3, 2, 4).owners == (0, 1, 2, 0, 1, 2)
    assert make_schedule("zbv", 3, 2, 4).owners == (0, 1, 2, 2, 1, 0)
