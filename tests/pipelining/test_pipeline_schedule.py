"""The schedules: orders in which every microbatch gets through, forwards and backwards in order, for any number."""

from itertools import product

import pytest

from samestep.engine.pipelining.schedule import BACKWARD, FORWARD, actions_of


def run(name, num_stages, num_microbatches, order=actions_of):
    """Carries out a schedule on ranks that send without waiting; the most microbatches that each held at once."""
    actions = [order(name, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    done, held = set(), [0] * num_stages
    at, most = list(held), list(held)

    def is_ready(stage):
        kind, place = actions[stage][at[stage]]
        if kind == FORWARD:
            return not stage or (FORWARD, stage - 1, place) in done
        return (FORWARD, stage, place) in done and (stage + 1 == num_stages or (BACKWARD, stage + 1, place) in done)

    while ready := [k for k in range(num_stages) if at[k] < len(actions[k]) and is_ready(k)]:
        for stage in ready:
            kind, place = actions[stage][at[stage]]
            done.add((kind, stage, place))
            held[stage] += 1 if kind == FORWARD else -1
            most[stage] = max(most[stage], held[stage])
            at[stage] += 1
    assert at == [len(each) for each in actions], "ranks wait for each other"
    return most


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_no_rank_waits_in_vain_and_each_runs_all_microbatches_in_order(name):
    for num_stages, num_microbatches in product((1, 2, 3, 4, 7), (0, 1, 2, 3, 7, 8, 13)):
        run(name, num_stages, num_microbatches)
        for stage, kind in product(range(num_stages), (FORWARD, BACKWARD)):
            actions = actions_of(name, stage, num_stages, num_microbatches)
            assert [place for each, place in actions if each == kind] == list(range(num_microbatches))


def test_1f1b_holds_no_more_microbatches_than_there_are_stages_and_gpipe_all():
    assert run("1f1b", 4, 16) == [4, 3, 2, 1]
    assert run("gpipe", 4, 16) == [16] * 4


def test_ranks_that_wait_for_each_other_are_found():
    def backwards_first(name, stage, num_stages, num_microbatches):
        actions = actions_of(name, stage, num_stages, num_microbatches)
        return [actions[1], actions[0], *actions[2:]] if stage == 2 else actions

    with pytest.raises(AssertionError, match="wait for each other"):
        run("1f1b", 3, 4, backwards_first)
