"""The order of an epoch: a bijection, the same for ever, and as random as a shuffled deck."""

from math import factorial, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.core import order
from samestep.core.order import inverse, permute
from samestep.errors import UsageError

WORDS = st.integers(-(2**63), 2**64 - 1)
pytestmark = pytest.mark.filterwarnings("error")  # wrap-around arithmetic must not warn


def excess(observed, expected=None):
    """Chi-square of counts against a uniform expectation, in standard deviations above its mean."""
    observed = np.asarray(observed, dtype=float).ravel()
    expected = observed.sum() / observed.size if expected is None else expected
    freedom = observed.size - 1
    return (((observed - expected) ** 2 / expected).sum() - freedom) / sqrt(2 * freedom)


def orders(n, count, epochs=False):
    """Whole orders `[count, n]` under consecutive seeds, or in consecutive epochs of one seed."""
    positions = np.arange(n)
    return np.stack([permute(positions, n, 7 if epochs else i, i if epochs else 0) for i in range(count)])


def all_permutations_excess(n, per_permutation):
    codes = orders(n, factorial(n) * per_permutation) @ n ** np.arange(n)
    counts = np.unique(codes, return_counts=True)[1]
    return excess(np.pad(counts, (0, factorial(n) - counts.size)))


def position_excess(ids):
    n = ids.shape[1]
    return max(excess(np.bincount(column, minlength=n)) for column in ids.T)


def pair_excess(ids, distance):
    """The worst excess, over positions p, of the table of (id at p, id at p + distance)."""
    n = ids.shape[1]
    off_diagonal = ~np.eye(n, dtype=bool)
    tables = (
        np.bincount(ids[:, p] * n + ids[:, p + distance], minlength=n * n).reshape(n, n) for p in range(n - distance)
    )
    return max(excess(table[off_diagonal]) for table in tables)


@given(n=st.integers(1, 30) | st.integers(1, 700), seed=WORDS, epoch=WORDS)
@settings(max_examples=150)
def test_an_order_holds_every_id_once_and_its_inverse_undoes_it(n, seed, epoch):
    positions = np.arange(n)
    ids = permute(positions, n, seed, epoch)
    assert np.array_equal(np.sort(ids), positions)
    assert np.array_equal(inverse(ids, n, seed, epoch), positions)
    assert np.array_equal(permute(inverse(positions, n, seed, epoch), n, seed, epoch), positions)


@given(data=st.data(), n=st.integers(1, 2**48), seed=WORDS, epoch=WORDS)
@settings(max_examples=80)
def test_a_huge_order_is_asked_position_by_position_and_can_be_undone(data, n, seed, epoch):
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True)))
    ids = permute(positions, n, seed, epoch)
    assert ids.min() >= 0
    assert ids.max() < n
    assert len(set(ids.tolist())) == len(positions)
    assert np.array_equal(inverse(ids, n, seed, epoch), positions)


@pytest.mark.parametrize("n", [1, 2, 3, 2**24, 2**24 + 1, 2**47 + 12345, (2**24 - 1) ** 2, 2**48 - 1, 2**48])
def test_both_ends_of_an_order_can_be_reached(n):
    ends = np.array([0, n - 1])
    assert np.array_equal(inverse(permute(ends, n, 1, 2), n, 1, 2), ends)
    assert np.array_equal(permute(inverse(ends, n, 1, 2), n, 1, 2), ends)


def test_any_part_of_an_order_equals_that_part_of_the_whole():
    n = 3 * order.BLOCK + 7
    whole = permute(np.arange(n), n, 5, 6)
    assert np.array_equal(np.sort(whole), np.arange(n))
    for start, stop in [(0, 1), (17, 400), (order.BLOCK - 1, order.BLOCK + 1), (n - 3, n)]:
        assert np.array_equal(permute(np.arange(start, stop), n, 5, 6), whole[start:stop])
    backwards = np.arange(n)[::-7]
    assert np.array_equal(permute(backwards, n, 5, 6), whole[backwards])


def test_ids_come_as_int64_in_the_shape_of_the_positions_which_stay_as_they_were():
    positions = np.arange(12, dtype=np.int32).reshape(3, 4).T
    ids = permute(positions, 12, 0, 0)
    assert (ids.shape, ids.dtype) == ((4, 3), np.int64)
    assert np.array_equal(ids, permute(np.arange(12), 12, 0, 0).reshape(3, 4).T)
    assert np.array_equal(positions, np.arange(12).reshape(3, 4).T)
    one = permute(5, 12, 0, 0)
    assert (one.shape, one.dtype, int(one)) == ((), np.int64, int(permute(np.array([5]), 12, 0, 0)[0]))
    assert int(inverse(int(one), 12, 0, 0)) == 5
    assert permute(np.array([], dtype=np.int64), 0, 0, 0).shape == (0,)


def test_seed_epoch_and_size_each_give_another_order():
    firsts = {
        tuple(permute(np.arange(20), n, seed, epoch))
        for n in (1000, 1001)
        for seed in range(-3, 10)
        for epoch in range(10)
    }
    assert len(firsts) == 2 * 13 * 10
    assert not np.array_equal(permute(np.arange(20), 1000, 1, 2), permute(np.arange(20), 1000, 2, 1))


@pytest.mark.parametrize(
    ("positions", "n", "seed", "epoch", "ids"),
    [
        (range(1), 1, 0, 0, [0]),
        (range(5), 5, 0, 0, [4, 3, 0, 2, 1]),
        (range(5), 5, 0, 1, [1, 2, 3, 0, 4]),
        (range(12), 12, 1, 0, [8, 4, 2, 7, 11, 9, 1, 10, 6, 5, 0, 3]),
        (range(256), 256, 3, 1, [52, 32, 228, 225, 101, 68, 42, 4, 33, 26, 125, 220]),
        (range(257), 257, 3, 1, [125, 247, 223, 146, 126, 128, 102, 180, 238, 219, 59, 152]),
        (range(8), 60_000, 0, 0, [25479, 55206, 16370, 49330, 17856, 40747, 19984, 32187]),
        (range(59_996, 60_000), 60_000, 42, 7, [53314, 10757, 16831, 29043]),
        ([0, 1, 2**30, 2**40 - 1], 2**40, 0, 0, [46352550801, 207346682835, 939536443998, 1072723091387]),
        (
            [0, 1, 2**30, 2**48 - 1],
            2**48,
            -1,
            2**63,
            [138141507908985, 261893029991471, 53168306489429, 69943863573112],
        ),
    ],
)
def test_orders_never_change(positions, n, seed, epoch, ids):
    assert permute(np.array(positions), n, seed, epoch)[: len(ids)].tolist() == ids


@pytest.mark.parametrize(("n", "per_permutation"), [(3, 150), (5, 20)])
def test_every_permutation_of_a_few_samples_is_equally_frequent(n, per_permutation):
    assert all_permutations_excess(n, per_permutation) < 4


@pytest.mark.parametrize(("n", "epochs"), [(6, False), (7, True), (9, False), (12, True), (40, False)])
def test_every_id_and_every_pair_of_ids_is_equally_frequent_at_each_position(n, epochs):
    ids = orders(n, 1500, epochs)
    # The worst of up to 40 positions each: 4.5 deviations have a probability below 1e-3.
    assert position_excess(ids) < 4.5
    for distance in (1, 2, n // 2, n - 1):
        assert pair_excess(ids, distance) < 4.5


def test_these_tests_notice_a_network_of_too_few_rounds(monkeypatch):
    monkeypatch.setattr(order, "NUM_ROUNDS_SMALL", 3)
    assert all_permutations_excess(4, 50) > 10
    assert max(pair_excess(orders(8, 1500), distance) for distance in range(1, 8)) > 10


def test_odd_permutations_are_as_frequent_as_even_ones():
    # A square of an odd number and a power of two, where networks tend to give even permutations only.
    for n in (9, 16):
        inversions = [sum(int(np.sum(ids[:i] > ids[i])) for i in range(n)) for ids in orders(n, 800)]
        odd = sum(count % 2 for count in inversions)
        assert abs(odd - 400) < 4 * sqrt(200)


@pytest.mark.parametrize(("n", "count"), [(2**16, 2**16), (60_000, 60_000), (2**48, 2**17)])
def test_within_a_large_order_ids_do_not_follow_from_positions_or_neighbours(n, count):
    positions = np.arange(count)
    ids = permute(positions, n, 11, 0)
    place, coarse = positions * 32 // count, (ids / n * 32).astype(np.int64)
    here, there = coarse[:-1], coarse[1:]
    fine = ids % 32
    steps = np.diff(ids) % n
    assert excess(np.bincount(place * 32 + coarse, minlength=1024)) < 4
    assert excess(np.bincount(here * 32 + there, minlength=1024)) < 4
    assert excess(np.bincount(fine[:-1] * 32 + fine[1:], minlength=1024)) < 4
    assert excess(np.bincount((steps / n * 256).astype(np.int64), minlength=256)) < 4
    # How many neighbours differ by one is Poisson with mean 2·count/n, at most 2.
    assert int(np.sum((steps == 1) | (steps == n - 1))) <= 9


@pytest.mark.parametrize(
    ("positions", "n", "message"),
    [
        (np.array([0, 5]), 5, "5 is outside an order of 5 samples, which has 0 to 4"),
        (np.array([[1], [-2]]), 5, "-2 is outside"),
        (-1, 5, "-1 is outside"),
        (0, 0, "0 is outside an order of 0 samples"),
        (np.array([0.0]), 5, "integers as positions or ids, got float64"),
        (np.array([True]), 5, "got bool"),
        (0, -1, "from 0 to 2\\^48, got -1"),
        (0, 2**48 + 1, "from 0 to 2\\^48, got 281474976710657"),
    ],
)
def test_positions_and_sizes_out_of_range_are_an_error_that_says_the_range(positions, n, message):
    for function in (permute, inverse):
        with pytest.raises(UsageError, match=message):
            function(positions, n, 0, 0)
