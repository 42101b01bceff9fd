"""Image data by folder, and embedded: sizes, splits, ranges, messages."""

import gzip
import struct

import numpy as np
import pytest
import torch

from samestep.data.named import bytes_to_unit, digits, image_data
from samestep.data.tensors import TensorData
from samestep.errors import UsageError


def write_pair(folder, part, count, side=28):
    labels = np.arange(count) % 10
    images = np.broadcast_to(labels[:, None, None], (count, side, side))
    for kind, array in (("images", images), ("labels", labels)):
        header = struct.pack(f">2x2B{array.ndim}I", 8, array.ndim, *array.shape)
        path = folder / f"{part}-{kind}-idx{array.ndim}-ubyte.gz"
        path.write_bytes(gzip.compress(header + array.astype("u1").tobytes()))


def test_the_embedded_digits_are_split_80_to_20_in_file_order():
    train, test, description = image_data()
    assert description == "digits: 1,797 scans, 28×28 (1,437 train, 360 test)"
    assert (len(train), len(test)) == (1437, 360)
    images, labels = digits()
    assert torch.equal(train.tensors[0], images[:1437])
    assert torch.equal(test.tensors[1], labels[1437:])
    assert train.tensors[1][:10].tolist() == list(range(10))


def test_a_batch_is_turned_into_floats_from_0_to_1():
    data = TensorData(digits(), bytes_to_unit)
    x, y = bytes_to_unit(data.gather(torch.tensor([0, 1])))
    assert x.dtype == torch.float32
    assert 0 <= x.min() < x.max() <= 1
    assert torch.equal(data[1][0], x[1])
    assert y.tolist() == [0, 1]


def test_a_folder_with_two_pairs_is_train_and_test(tmp_path):
    write_pair(tmp_path, "train", 12)
    write_pair(tmp_path, "t10k", 5)
    train, test, description = image_data(str(tmp_path))
    assert (len(train), len(test)) == (12, 5)
    assert description == f"{tmp_path.name}: 17 images, 28×28 (12 train, 5 test)"


@pytest.mark.parametrize("part", ["train", "t10k"])
def test_a_folder_with_one_pair_is_split_80_to_20_in_file_order(tmp_path, part):
    folder = tmp_path / "mine"
    folder.mkdir()
    write_pair(folder, part, 20, side=4)
    train, test, description = image_data(str(folder))
    assert (len(train), len(test)) == (16, 4)
    assert test.tensors[1].tolist() == [6, 7, 8, 9]
    assert description == "mine: 20 images, 4×4 (16 train, 4 test)"


def test_what_is_neither_a_name_nor_a_folder_is_refused(tmp_path):
    for name in ("cifar", str(tmp_path / "nowhere")):
        with pytest.raises(UsageError, match=f"got --data {name}; needed: digits, or a folder of IDX files"):
            image_data(name)


def test_the_real_folders_are_split_as_documented(shared_data):
    train, test, _ = image_data(str(shared_data / "mnist"))
    assert (len(train), len(test)) == (8000, 2000)
    assert train.tensors[1][:3].tolist() == [7, 2, 1]
    train, test, _ = image_data(str(shared_data / "fashion-mnist"))
    assert (len(train), len(test)) == (750, 150)
