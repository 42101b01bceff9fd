"""The verdict: what all nodes conclude from how each of them ended."""

import pytest

from samestep.launcher.verdict import End, Rules, judge

NAMES = ["node 0 (a)", "node 1 (b)", "node 2 (c)"]
FIXED = Rules(3, 3, 0, "resume it")
ELASTIC = Rules(1, 3, 2, "resume it")
DONE, PEER, LEFT, AGAIN = End("done"), End("peer", 1, "rank 2 is gone"), End("left", 143), End("again", 143)
STOPPED = End("stopped", 143)
CRASH = End("failed", 3, "it crashed")
SILENCE = {1: "no sign of life for 10 s"}


def after(*ends, lost=(), rules=FIXED):
    return judge({rank: end for rank, end in enumerate(ends) if end is not None}, dict(lost), NAMES, rules)


def test_when_all_are_done_the_run_is_done():
    assert after(DONE, DONE, DONE) == judge({0: DONE, 1: DONE, 2: DONE}, {}, NAMES, ELASTIC)
    assert (after(DONE, DONE, DONE).again, after(DONE, DONE, DONE).exit_code) == (False, 0)


def test_a_lost_node_ends_a_run_of_fixed_size_and_is_named_with_how_to_resume():
    verdict = after(PEER, None, PEER, lost=SILENCE)
    assert (verdict.again, verdict.exit_code) == (False, 1)
    assert "node 1 (b) is lost: no sign of life" in verdict.text
    assert "2 nodes are left" in verdict.text
    assert "resume it" in verdict.text


def test_a_lost_node_uses_a_restart_of_a_run_that_can_go_on_with_fewer():
    verdict = after(PEER, None, PEER, lost=SILENCE, rules=ELASTIC)
    assert (verdict.again, verdict.uses_restart) == (True, True)
    assert not after(PEER, None, PEER, lost=SILENCE, rules=Rules(1, 3, 0, "resume it")).again


@pytest.mark.parametrize("ends", [(CRASH, PEER, PEER), (PEER, CRASH, PEER), (LEFT, CRASH, PEER)])
def test_the_node_that_failed_by_itself_is_named_not_those_that_saw_it_vanish(ends):
    verdict = after(*ends)
    assert verdict.exit_code == 3
    assert "it crashed" in verdict.text
    assert "rank 2 is gone" not in verdict.text
    assert after(*ends, rules=ELASTIC).again


def test_a_mistake_of_the_user_is_not_tried_again():
    mistake = End("failed", 2, "no such dataset", is_fault=True)
    verdict = after(mistake, PEER, PEER, rules=ELASTIC)
    assert (verdict.again, verdict.exit_code) == (False, 2)
    assert "no such dataset" in verdict.text


@pytest.mark.parametrize("ends", [(AGAIN, LEFT, LEFT), (AGAIN, AGAIN, PEER)])
def test_nodes_that_make_room_for_another_go_on_without_using_a_restart(ends):
    verdict = after(*ends, rules=ELASTIC)
    assert (verdict.again, verdict.uses_restart) == (True, False)


def test_a_signal_to_one_node_stops_a_run_of_fixed_size():
    verdict = after(LEFT, STOPPED, LEFT)
    assert (verdict.again, verdict.exit_code) == (False, 143)
    assert "node 1 (b) was asked to stop (SIGTERM)" in verdict.text


def test_a_signal_to_one_node_lets_a_run_go_on_that_can_with_fewer():
    verdict = after(LEFT, STOPPED, LEFT, rules=ELASTIC)
    assert (verdict.again, verdict.uses_restart) == (True, False)
    assert not after(STOPPED, STOPPED, STOPPED, rules=ELASTIC).again


def test_connections_that_broke_without_a_loss_are_a_failure():
    verdict = after(PEER, PEER, PEER)
    assert (verdict.again, verdict.exit_code) == (False, 1)
    assert "rank 2 is gone" in verdict.text


def test_workers_that_ended_by_a_signal_nobody_here_sent_are_a_failure():
    assert after(End("left", 143, "rank 1 exited with code 143"), PEER, PEER).exit_code == 143
