"""The cursor: epochs, positions, batch lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.core.order import Cursor, batch_length, num_batches
from samestep.errors import UsageError


@given(st.integers(1, 5000), st.integers(1, 700), st.booleans())
def test_an_epoch_consumes_every_sample_once_unless_told_to_drop_the_rest(num_samples, batch_size, drop_last):
    cursor, batches = Cursor(), 0
    while length := batch_length(cursor.position, num_samples, batch_size, drop_last):
        cursor = Cursor(cursor.epoch, cursor.position + length)
        batches += 1
    assert batches == num_batches(num_samples, batch_size, drop_last)
    assert cursor.position == (num_samples // batch_size * batch_size if drop_last else num_samples)
    assert cursor.next_epoch() == Cursor(1, 0)


def test_a_cursor_is_never_negative():
    with pytest.raises(UsageError, match="negative"):
        Cursor(0, -1)
