"""Derived seeds: fixed for ever, and every part of them matters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.core.seeds import GAMMA, derive_seed, splitmix64

WORDS = st.integers(0, 2**64 - 1)


def test_splitmix64_gives_the_published_stream():
    # The first outputs of splitmix64.c from seed 1234567.
    outputs = [splitmix64(1234567 + step * GAMMA) for step in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(0) == 0xE220_A839_7B1D_CDAF


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((0,), 10451216379200822465),
        ((0, 0), 7235116703822611636),
        ((1, 2, 3, 4), 2524909480129631697),
        ((4, 3, 2, 1), 14685315361781705325),
        ((-1, 2**63), 16840790515249537270),
    ],
)
def test_derived_seeds_never_change(parts, seed):
    assert derive_seed(*parts) == seed


@given(st.lists(WORDS, min_size=1, max_size=5), st.data())
def test_changing_one_part_changes_the_seed(parts, data):
    place = data.draw(st.integers(0, len(parts) - 1))
    other = list(parts)
    other[place] = data.draw(WORDS.filter(lambda word: word != parts[place]))
    assert derive_seed(*parts) != derive_seed(*other)


def test_the_order_and_the_number_of_parts_matter():
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert len({derive_seed(*[0] * length) for length in range(6)}) == 6


def test_neighbouring_steps_microbatches_and_streams_share_no_seed():
    seeds = {
        derive_seed(seed, stream, step, microbatch)
        for seed in range(3)
        for stream in range(2)
        for step in range(200)
        for microbatch in range(16)
    }
    assert len(seeds) == 3 * 2 * 200 * 16
    assert len({seed & 0xFFFF_FFFF for seed in seeds}) > len(seeds) - 3  # generators that keep 32 bits of a seed


def test_one_changed_bit_changes_half_of_the_seed():
    flips = [
        (derive_seed(7, part) ^ derive_seed(7, part ^ (1 << bit))).bit_count()
        for part in range(50)
        for bit in range(64)
    ]
    assert abs(sum(flips) / len(flips) - 32) < 0.3  # a mean of 3,200 binomials of deviation 4: 0.07
    assert min(flips) > 8


def test_integers_of_any_kind_and_sign_are_taken_modulo_two_to_the_64():
    assert derive_seed(np.int64(5), np.uint64(6)) == derive_seed(5, 6)
    assert derive_seed(-1) == derive_seed(2**64 - 1)
    assert 0 <= derive_seed(-(2**70), 2**200) < 2**64


def test_a_part_that_is_no_integer_is_an_error():
    with pytest.raises(TypeError):
        derive_seed(1.5)  # type: ignore[arg-type]
