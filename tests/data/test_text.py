"""Windows over bytes: every byte but the first is predicted once, from the byte before it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.readers import IGNORE_INDEX, ByteWindows, read_bytes, to_bytes
from samestep.errors import DataError, UsageError


@given(st.binary(min_size=2, max_size=60), st.integers(1, 20))
def test_every_byte_but_the_first_is_predicted_exactly_once_from_its_predecessor(content, context):
    windows = ByteWindows(to_bytes(content), context)
    x, y = windows.gather(torch.arange(len(windows)))
    assert x.shape == y.shape == (len(windows), context)
    assert x.dtype == y.dtype == torch.int64
    valid = y != IGNORE_INDEX
    assert list(zip(x[valid].tolist(), y[valid].tolist(), strict=True)) == list(itertools.pairwise(content))
    assert valid[:-1].all()
    assert valid[-1].any()
    assert x[~valid].eq(0).all()


def test_the_ragged_last_window_is_kept_with_fewer_targets():
    windows = ByteWindows(to_bytes(b"abcdefg"), 4)
    assert len(windows) == 2
    x, y = windows[-1]
    assert x.tolist() == [ord("e"), ord("f"), 0, 0]
    assert y.tolist() == [ord("f"), ord("g"), IGNORE_INDEX, IGNORE_INDEX]
    with pytest.raises(IndexError):
        windows[2]


@given(st.lists(st.integers(0, 4), max_size=8))
def test_a_gather_of_windows_equals_the_windows_one_by_one(ids):
    windows = ByteWindows(torch.arange(18, dtype=torch.uint8), 4)
    x, y = windows.gather(torch.tensor(ids, dtype=torch.int64))
    assert x.shape == y.shape == (len(ids), 4)
    for row, i in enumerate(ids):
        assert torch.equal(x[row], windows[i][0])
        assert torch.equal(y[row], windows[i][1])


def test_a_file_is_read_byte_for_byte(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    assert read_bytes(path).tolist() == list(range(256))


def test_files_that_hold_no_text_are_named(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=r"empty: is empty; a text file \(--data\) is needed"):
        read_bytes(tmp_path / "empty")
    with pytest.raises(DataError, match="nowhere: there is no such file"):
        read_bytes(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_bytes(tmp_path)


@pytest.mark.parametrize(
    ("data", "context", "error", "message"),
    [
        (torch.zeros(9, dtype=torch.uint8), 0, UsageError, "got context=0; it must be 1 or more"),
        (torch.zeros(1, dtype=torch.uint8), 4, DataError, "a text of 1 bytes has nothing to predict"),
        (torch.zeros(9), 4, DataError, "1-d uint8 tensor"),
        (torch.zeros(3, 3, dtype=torch.uint8), 4, DataError, "1-d uint8 tensor"),
    ],
)
def test_windows_that_cannot_be_are_refused(data, context, error, message):
    with pytest.raises(error, match=message):
        ByteWindows(data, context)
