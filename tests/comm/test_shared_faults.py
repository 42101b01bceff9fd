"""Shared memory when ranks die, leave, are late or cannot take part: nobody waits for ever, and nothing is left."""

import os
import signal

import pytest
from shared_programs import puppets

from samestep.comm import segment
from samestep.comm.segment import NoSegmentError

LOST = "waits for rank {}, which has died, has ended, or is late"


@pytest.fixture(autouse=True)
def _pooled(worlds):
    """Processes come from the server that the pools of processes use too, so they start at once."""
    try:
        segment.check_machine()
    except NoSegmentError as error:
        pytest.skip(f"no shared memory between ranks: {error}")


def together(ranks, name, *args):
    """All do the same; what came of it."""
    for rank in ranks:
        rank.tell(name, *args)
    return [rank.answer() for rank in ranks]


def check_lost(answer, *missing):
    """An answer is the error that names these ranks."""
    kind, message, ranks = answer
    assert (kind, ranks) == ("PeerLostError", missing)
    assert LOST.format(", ".join(str(rank) for rank in missing)) in message


def connected(ranks):
    """Connects ranks, and has them exchange something."""
    assert together(ranks, "connect") == ["SharedTransport"] * len(ranks)
    assert together(ranks, "exchange") == [list(range(len(ranks)))] * len(ranks)


def kill(puppet, signum=signal.SIGKILL):
    """Kills it, and waits until it is gone."""
    os.kill(puppet.process.pid, signum)
    puppet.process.join()


def test_a_rank_that_is_killed_while_it_posts_is_named_by_those_who_wait(tmp_path):
    with puppets(tmp_path, 3, {1: "die_before_it_is_known"}) as ranks:
        connected(ranks)
        for rank in ranks:
            rank.tell("exchange")
        check_lost(ranks[0].answer(), 1)
        check_lost(ranks[2].answer(), 1)


def test_what_a_rank_posted_before_it_was_killed_arrives(tmp_path):
    with puppets(tmp_path, 3) as ranks:
        connected(ranks)
        ranks[1].ask("post")
        kill(ranks[1])
        for rank in (ranks[0], ranks[2]):
            rank.tell("exchange")
        assert [rank.answer() for rank in (ranks[0], ranks[2])] == [[100, 101, 102]] * 2
        check_lost(ranks[0].ask("exchange"), 1)


def test_a_rank_that_is_stopped_is_waited_for_until_it_goes_on_or_is_killed(tmp_path):
    with puppets(tmp_path, 2) as ranks:
        connected(ranks)
        for goes_on in (True, False):
            os.kill(ranks[1].process.pid, signal.SIGSTOP)
            ranks[1].tell("exchange")
            ranks[0].tell("exchange")
            assert ranks[0].is_quiet(0.3)
            if goes_on:
                os.kill(ranks[1].process.pid, signal.SIGCONT)
                assert ranks[0].answer() == ranks[1].answer() == [100, 101]
        kill(ranks[1])
        check_lost(ranks[0].answer(), 1)


def test_a_rank_that_leaves_is_named_but_what_it_posted_arrives(tmp_path):
    with puppets(tmp_path, 3) as ranks:
        connected(ranks)
        ranks[0].tell("exchange")
        ranks[2].ask("post")
        ranks[2].ask("leave")
        assert ranks[1].ask("exchange") == ranks[0].answer() == [100, 101, 102]
        ranks[0].tell("exchange")
        ranks[1].tell("exchange")
        check_lost(ranks[0].answer(), 2)
        check_lost(ranks[1].answer(), 2)


def test_a_source_of_broadcasts_notices_that_nobody_reads_them(tmp_path):
    with puppets(tmp_path, 2) as ranks:
        connected(ranks)
        ranks[0].tell("broadcast", 1000, 0)
        assert ranks[0].is_quiet(0.3), "it does not run ahead without end"
        kill(ranks[1])
        check_lost(ranks[0].answer(), 1)


def test_broadcasts_arrive_while_an_earlier_exchange_is_still_awaited(tmp_path):
    with puppets(tmp_path, 2) as ranks:
        connected(ranks)
        together(ranks, "post")
        assert together(ranks, "broadcast", 200, 1) == [None, None]
        assert together(ranks, "wait") == [[100, 101]] * 2


def test_a_child_that_closes_its_copy_leaves_the_rank_connected(tmp_path):
    with puppets(tmp_path, 2) as ranks:
        connected(ranks)
        ranks[0].ask("close_in_a_child")
        assert together(ranks, "exchange") == [[100, 101]] * 2


def test_nothing_is_left_open_after_leaving(tmp_path):
    before_all = set(os.listdir("/dev/shm"))
    with puppets(tmp_path, 3) as ranks:
        before = together(ranks, "open_files")
        for _ in range(3):
            connected(ranks)
            together(ranks, "leave")
        assert together(ranks, "open_files") == before
    assert not [name for name in set(os.listdir("/dev/shm")) - before_all if "samestep" in name]


def test_more_ranks_than_cores_get_on_and_use_little_while_they_wait(tmp_path):
    with puppets(tmp_path, 6) as ranks:
        connected(ranks)
        assert together(ranks, "exchange_many", 30) == [[]] * 6
        ranks[0].tell("seconds_used_by", "exchange")
        assert ranks[0].is_quiet(1.0)
        for rank in ranks[1:]:
            rank.tell("exchange")
        assert ranks[0].answer() < 0.3  # of a second or more: it sleeps
        assert len({str(rank.answer()) for rank in ranks[1:]}) == 1


@pytest.mark.parametrize("setup", ["refuse", "look_elsewhere", "little_space"])
def test_where_one_rank_cannot_share_memory_all_use_gloo(tmp_path, setup):
    with puppets(tmp_path, 3, {2: setup}) as ranks:
        assert together(ranks, "connect") == ["GroupTransport"] * 3
        assert together(ranks, "exchange") == [[0, 1, 2]] * 3
        assert not any("memfd" in name for files in together(ranks, "open_files") for name in files)


def test_a_rank_that_does_not_connect_is_named_and_who_comes_late_does_not_wait_for_those_who_gave_up(tmp_path):
    with puppets(tmp_path, 3, seconds=1) as ranks:
        for kind, message, missing in together(ranks[:2], "connect"):
            assert (kind, missing) == ("PeerLostError", (2,))
            assert "but rank 2 did not connect to them" in message
        assert ranks[2].ask("connect")[0] == "PeerLostError"


def test_where_it_was_asked_for_the_reason_is_given(tmp_path):
    with puppets(tmp_path, 2, {1: "look_elsewhere"}, choice="shared") as ranks:
        for kind, message, _ in together(ranks, "connect"):
            assert kind == "UsageError"
            assert "SAMESTEP_TRANSPORT=shared cannot be had: rank 1 says: rank 0's memory is not found" in message
            assert "set it to gloo" in message


def test_rank_zero_makes_less_where_it_may_map_less(tmp_path):
    with puppets(tmp_path, 2, {0: "little_space"}) as ranks:
        connected(ranks)


def test_twin_an_operation_that_is_known_before_its_bytes_are_there_is_noticed(tmp_path):
    with puppets(tmp_path, 2, {0: "announce_too_early"}, seconds=10) as ranks:
        together(ranks, "connect")
        assert together(ranks, "exchange_many", 3)[1] != []


def test_twin_a_place_that_is_used_again_before_all_have_read_it_is_noticed(tmp_path):
    with puppets(tmp_path, 2, {0: "reuse_too_early"}) as ranks:
        together(ranks, "connect")
        ranks[0].ask("post")
        ranks[0].ask("post")
        assert ranks[1].ask("exchange") != [0, 1]
