"""IDX files: values are read as written, and a damaged file is an error that names it."""

import gzip
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.readers import DTYPES, find_pairs, read_idx, read_image_label_pair
from samestep.errors import DataError


def idx_bytes(array, code=0x08):
    array = np.asarray(array)
    header = struct.pack(f">2x2B{array.ndim}I", code, array.ndim, *array.shape)
    return header + array.astype(DTYPES[code]).tobytes()


@pytest.fixture
def write(tmp_path):
    def write(content, name="file"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("packed", [False, True])
@given(code=st.sampled_from(sorted(DTYPES)), shape=st.lists(st.integers(0, 4), min_size=1, max_size=4), data=st.data())
def test_every_dtype_and_shape_is_read_as_it_was_written(tmp_path_factory, packed, code, shape, data):
    values = data.draw(st.lists(st.integers(0, 100), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    array = np.array(values, dtype=DTYPES[code].newbyteorder("=")).reshape(shape)
    path = tmp_path_factory.getbasetemp() / "any.idx"
    content = idx_bytes(array, code)
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    got = read_idx(path)
    assert got.dtype == torch.from_numpy(array).dtype
    assert got.shape == tuple(shape)
    assert torch.equal(got, torch.from_numpy(array))


def test_negative_and_fractional_values_keep_their_bytes_in_order(write):
    assert read_idx(write(idx_bytes([-2, 258, -30000], 0x0B))).tolist() == [-2, 258, -30000]
    assert read_idx(write(idx_bytes([1.5, -2.25], 0x0D))).tolist() == [1.5, -2.25]


def test_gzip_is_recognised_by_content_whatever_the_name(write):
    content = idx_bytes([1, 2, 3])
    assert read_idx(write(gzip.compress(content, mtime=0), "packed")).tolist() == [1, 2, 3]
    assert read_idx(write(content, "plain.gz")).tolist() == [1, 2, 3]


GOOD = idx_bytes([[1, 2, 3], [4, 5, 6]])
PACKED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\0\0\x08", "starts with 00 00 08, not with 00 00"),
        (b"PNG!" + GOOD, "starts with 50 4e 47 21"),
        (b"\0\0\x0a\x01" + GOOD[4:], "starts with 00 00 0a 01"),
        (b"\0\0\x08\0", "starts with 00 00 08 00"),
        (GOOD[:9], "damaged or truncated"),
        (GOOD[:-1], "5 bytes follow a header that says 6"),
        (GOOD + b"\n", "7 bytes follow a header that says 6"),
        (b"\0\0\x0e\x02\xff\xff\xff\xff\xff\xff\xff\xff" + b"12345678", "damaged or truncated"),
        (b"\0\0\x08\x04" + b"\0" * 4 + b"\xff" * 12, "damaged or truncated"),
        (PACKED[:-9], "Compressed file ended"),
        (gzip.compress(b"", mtime=0), "starts with nothing"),
        (b"\x1f\x8b nothing of the kind", "Unknown compression method"),
        (PACKED[:-6] + b"\0\0" + PACKED[-4:], "CRC check failed"),
        (PACKED[:10] + b"\xff" * 20, "invalid block type"),
    ],
)
def test_a_damaged_file_is_named_with_what_was_got(write, content, message):
    path = write(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match="nowhere: there is no such file"):
        read_idx(tmp_path / "nowhere")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_idx(tmp_path)


def pair(write, images, labels, code=0x08):
    return write(idx_bytes(images), "images"), write(idx_bytes(labels, code), "labels")


def test_a_pair_becomes_images_with_a_channel_and_int64_labels(write):
    data = read_image_label_pair(*pair(write, np.arange(3 * 4 * 5).reshape(3, 4, 5), [9, 0, 4]))
    x, y = data.gather(torch.tensor([2, 0]))
    assert (x.shape, x.dtype) == ((2, 1, 4, 5), torch.uint8)
    assert (y.tolist(), y.dtype) == ([4, 9], torch.int64)
    assert x[1].flatten().tolist() == list(range(20))


@pytest.mark.parametrize(
    ("images", "labels", "code", "message"),
    [
        (np.zeros((3, 2, 2)), [1, 2], 0x08, r"labels: holds uint8 \[2\]; needed: integers \[3\]"),
        (np.zeros((4, 2, 2)), [1, 2, 10, 11], 0x08, "labels: label 10 at index 2 is out of range; needed: 0 to 9"),
        (np.zeros((2, 2, 2)), [1, -1], 0x0C, "labels: label -1 at index 1 is out of range"),
        (np.zeros((2, 2)), [1, 1], 0x08, r"images: holds uint8 \[2, 2\]; needed: bytes \[number, height, width\]"),
        (np.zeros((2, 2, 2)), [[1], [1]], 0x08, r"labels: holds uint8 \[2, 1\]; needed: integers \[2\]"),
        (np.zeros((2, 2, 2)), [1.0, 1.0], 0x0D, r"labels: holds float32 \[2\]"),
        (np.zeros((0, 2, 2)), [], 0x08, r"images: holds uint8 \[0, 2, 2\]; needed: .*, at least one"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(write, images, labels, code, message):
    with pytest.raises(DataError, match=message):
        read_image_label_pair(*pair(write, images, labels, code))


@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_pairs_are_found_by_all_their_usual_names(write, tmp_path, mark, ending):
    names = [f"{part}-{kind}{mark}idx{dims}-ubyte{ending}" for part in ("train", "t10k") for kind, dims in KINDS]
    paths = [write(b"", name) for name in names]
    assert find_pairs(tmp_path) == {"train": (paths[0], paths[1]), "t10k": (paths[2], paths[3])}


KINDS = (("images", 3), ("labels", 1))


def test_a_folder_with_one_pair_has_that_pair_and_half_a_pair_is_an_error_also_beside_a_whole_one(write, tmp_path):
    images = write(b"", "t10k-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match="holds half of the pair t10k-…; needed: "):
        find_pairs(tmp_path)
    labels = write(b"", "t10k-labels.idx1-ubyte")
    assert find_pairs(tmp_path) == {"t10k": (images, labels)}
    write(b"", "train-labels-idx1-ubyte")
    with pytest.raises(DataError, match="holds half of the pair train-…; needed: "):
        find_pairs(tmp_path)


def test_a_folder_without_pairs_or_no_folder_at_all_says_what_is_needed(tmp_path):
    with pytest.raises(DataError, match=r"holds no pair of IDX files; needed: train-images-idx3-ubyte"):
        find_pairs(tmp_path)
    with pytest.raises(DataError, match="there is no such folder; needed: one with IDX files, by --data"):
        find_pairs(tmp_path / "nowhere")
