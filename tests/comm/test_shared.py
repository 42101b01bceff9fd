"""Shared memory between ranks: the bytes that arrive, in any order of waiting, and the memory that it takes."""

import mmap
import os
import random

import pytest
import torch
from comm_programs import DTYPES, talk
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_programs import (
    after_a_large_operation,
    broadcasts_over_payload,
    deliver_many,
    exchange_many,
    kind_of,
    large_broadcast,
    numbers,
    patterns,
)
from worlds import DEVICE, SHARED

from samestep.comm import segment
from samestep.comm.outbox import PATIENCE, Outbox
from samestep.comm.segment import NoSegmentError
from samestep.comm.shared_memory import MAX_BROADCAST_BYTES

MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def _where_memory_can_be_shared():
    try:
        segment.check_machine()
    except NoSegmentError as error:
        pytest.skip(f"no shared memory between ranks: {error}")


def test_ranks_of_one_host_share_memory_and_form_no_process_group(worlds):
    expected = ("SharedTransport", False) if DEVICE == "cpu" else ("GroupTransport", True)
    assert worlds(2).run(kind_of) == [expected] * 2
    assert worlds(2, SHARED).run(kind_of) == [("SharedTransport", False)] * 2
    assert worlds(2, "gloo").run(kind_of) == [("GroupTransport", True)] * 2


@st.composite
def plans(draw):
    """A number of ranks, and exchanges of any sizes and dtypes, with an order to wait in."""
    ranks = draw(st.integers(2, 4))
    size = st.integers(0, 300) | st.sampled_from([0, 1, 64, 4096, 40_000])
    sizes = st.lists(st.lists(size, min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks)
    operations = draw(st.lists(st.tuples(st.sampled_from(DTYPES), sizes), min_size=1, max_size=6))
    return ranks, operations, draw(st.permutations(range(len(operations))))


@given(plan=plans())
@settings(max_examples=40)
def test_what_arrives_is_what_was_sent_in_whatever_order_it_is_awaited(worlds, plan):
    ranks, operations, order = plan
    for rank, received in enumerate(worlds(ranks, SHARED).run(exchange_many, operations, order)):
        for number, (dtype, sizes) in enumerate(operations):
            sent = [numbers(source, rank, sizes[source][rank], dtype, number) for source in range(ranks)]
            assert torch.equal(received[number], torch.cat(sent).view(torch.uint8))


def test_all_that_ranks_say_to_each_other_is_the_same_over_gloo(worlds):
    over_memory, over_gloo = (worlds(3, transport).run(talk, (2, 0, 3), 2) for transport in (SHARED, "gloo"))
    for ours, theirs in zip(over_memory, over_gloo, strict=True):
        assert str(ours) == str(theirs)


@pytest.mark.parametrize("transport", [SHARED, "gloo"])
def test_pieces_arrive_at_some_ranks_as_one_message_and_tensors_that_are_broadcast_together_one_by_one(
    worlds, transport
):
    sizes = [[[0, 20, 0], [3, 0, 100], [0, 0, 0]], [[0] * 3] * 3, [[0, 1, 1], [9, 0, 0], [40_000, 0, 0]]]
    lengths = [3, 0, 5 << 20, 1, 3 << 20, 2 << 20, 64]
    for rank, (arrived, tensors) in enumerate(worlds(3, transport).run(deliver_many, sizes, lengths)):
        for number, (matrix, received) in enumerate(zip(sizes, arrived, strict=True)):
            sent = [numbers(source, rank, matrix[source][rank], torch.uint8, number) for source in range(3)]
            assert torch.equal(received, torch.cat(sent))
        assert [len(each) for each in tensors] == lengths
        assert all((each == 1).all() for each in tensors)


def test_memory_does_not_grow_with_a_thousand_operations_under_way_or_given_up(worlds):
    for first, *later in worlds(2, SHARED).run(patterns, 3):
        assert first < 64 * MEGABYTE
        assert max(later) - first <= MEGABYTE


def test_a_large_broadcast_takes_little_shared_memory(worlds):
    before = [used for _, used in worlds(3, SHARED).run(large_broadcast, 1)]
    for earlier, (arrived, used) in zip(before, worlds(3, SHARED).run(large_broadcast, 12 * MEGABYTE), strict=True):
        assert arrived
        assert used - earlier <= 2 * MAX_BROADCAST_BYTES


def test_memory_that_a_large_operation_took_is_released_and_can_be_taken_again(worlds):
    both = 2 * 4 * MEGABYTE * 8
    for used in worlds(2, SHARED).run(after_a_large_operation, 4 * MEGABYTE, PATIENCE):
        assert min(used[0], used[2]) >= both
        assert max(used[1], used[3]) <= both // 2
    for used in worlds(2, SHARED).run(after_a_large_operation, 4 * MEGABYTE, PATIENCE // 4):
        assert used[1] >= both, "a step has some hundred operations, of which one may be large"


def test_payload_that_looks_like_an_earlier_broadcast_is_not_waited_for(worlds):
    assert worlds(2, SHARED).run(broadcasts_over_payload) == [True, False]


@given(operations=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 5)), max_size=60), places=st.integers(1, 8))
def test_places_never_overlap_and_the_lowest_is_taken(operations, places):
    read, live = set(), []
    outbox = Outbox(2000, places, lambda block: block.number in read)
    for number, (length, age) in enumerate(operations):
        block = outbox.place(length, number)
        live = [other for other in live if other.number not in read]
        borders = sorted([0, *(other.end for other in live)])
        fits = [
            at for at in borders if all(at + length <= o.start or at >= o.end for o in live) and at + length <= 1984
        ]
        if block is None:
            assert not fits or number - min(other.number for other in live) >= places
            read.add(outbox.oldest().number)
            continue
        assert block.start % 64 == 0
        assert block.end - block.start >= length
        assert all(block.end <= other.start or block.start >= other.end for other in live)
        assert block.start == min(fits, default=block.start)
        live.append(block)
        read.add(number - age)


def test_only_pages_behind_all_that_is_in_use_or_was_taken_of_late_are_released(monkeypatch):
    monkeypatch.setattr("samestep.comm.outbox.PATIENCE", 5)
    read, blocks, released, choose = set(), [], 0, random.Random(0).choice
    outbox = Outbox(MEGABYTE, 64, lambda block: block.number in read)
    for number in range(2000):
        blocks.append(outbox.place(choose([100] * 9 + [50_000]), number))
        if unused := outbox.unused(number):
            assert unused.start % mmap.PAGESIZE == 0
            assert all(block.end <= unused.start for block in blocks if block.number not in read)
            assert all(block.end < unused.stop for block in blocks[-5:])
            released += len(unused)
        read.update(range(number - choose([0, 3, 20])))
    assert released > MEGABYTE


def test_a_segment_that_is_not_rank_zeros_is_refused(tmp_path):
    made, fd, told = segment.create(2)
    try:
        pid, number, nonce = told.split()
        assert segment.join(told, 2).outbox_size == made.outbox_size
        with pytest.raises(NoSegmentError, match="another run's"):
            segment.join(f"{pid} {number} {int(nonce) ^ 2}", 2)
        with pytest.raises(NoSegmentError, match="another run's"):
            segment.join(told, 3)
        with (
            open(tmp_path / "file", "wb") as other,
            pytest.raises(NoSegmentError, match="another host or in another container"),
        ):
            segment.join(f"{pid} {other.fileno()} {nonce}", 2)
        with pytest.raises(NoSegmentError, match="cannot be opened"):
            segment.join(f"{pid} 100000 {nonce}", 2)
    finally:
        os.close(fd)


def test_other_machines_are_told_why_they_share_no_memory(monkeypatch):
    monkeypatch.setattr(segment.platform, "machine", lambda: "aarch64")
    with pytest.raises(NoSegmentError, match="it needs Linux on x86-64, this is Linux on aarch64"):
        segment.create(2)
