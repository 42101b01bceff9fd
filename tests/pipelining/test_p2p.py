"""Point-to-point exchange: tensors arrive as they lay in memory, and ranks along an axis reach each other alone."""

import pytest
from p2p_programs import fail, hand_round, send_pickle, sums_along


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_tensors_arrive_in_order_with_their_strides_and_their_place_on_memory_borders(worlds, transport):
    for rank, (left, came) in enumerate(worlds(3, transport).run(hand_round)):
        assert [note for _, note in came] == [f"note {number} of {(rank - 1) % 3}" for number in range(3)]
        assert all(got == left for got, _ in came)


def test_a_rank_that_fails_says_so_to_those_who_wait_for_it(worlds):
    assert worlds(3).run(fail) == ["", "the first is out of order", "the first is out of order"]


def test_a_pickle_that_another_process_sends_does_not_run(worlds, tmp_path):
    assert worlds(2).run(send_pickle, tmp_path / "ran") == ["", "UnicodeDecodeError"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_ranks_along_an_axis_hear_each_other_alone(worlds, transport):
    told = worlds(4, transport).run(sums_along, {"data": 2, "pipe": 2})
    assert [words["data"] for words, _ in told] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [words["pipe"] for words, _ in told] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [words["tensor"] for words, _ in told] == [[0], [1], [2], [3]]
    assert [shared for _, shared in told] == [2, 3, 2, 3]
