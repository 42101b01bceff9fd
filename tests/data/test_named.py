"""Image data by name and by folder: sizes, splits, ranges, and what is said where there is none."""

import gzip
import hashlib
import struct

import numpy as np
import pytest
import torch

from samestep.data.embedded import digits
from samestep.data.named import DOWNLOADS, bytes_to_unit, image_data
from samestep.data.tensors import TensorData
from samestep.errors import DataError, UsageError


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
    train, test, description = image_data("mnist", tmp_path)
    assert (len(train), len(test)) == (12, 5)
    assert description == "mnist: 17 handwritten digits, 28×28 (12 train, 5 test)"


@pytest.mark.parametrize("part", ["train", "t10k"])
def test_a_folder_with_one_pair_is_split_80_to_20_in_file_order(tmp_path, part):
    folder = tmp_path / "mine"
    folder.mkdir()
    write_pair(folder, part, 20, side=4)
    train, test, description = image_data(data_dir=folder)
    assert (len(train), len(test)) == (16, 4)
    assert test.tensors[1].tolist() == [6, 7, 8, 9]
    assert description == "mine: 20 images, 4×4 (16 train, 4 test)"


def test_a_data_set_by_name_is_read_from_the_cache_once_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "samestep" / "fashion-mnist"
    folder.mkdir(parents=True)
    write_pair(folder, "train", 12)
    write_pair(folder, "t10k", 5)
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert sums.keys() == DOWNLOADS["fashion-mnist"].md5.keys()
    for name, md5 in sums.items():
        monkeypatch.setitem(DOWNLOADS["fashion-mnist"].md5, name, md5)
    assert len(image_data("fashion-mnist")[0]) == 12


def test_every_download_has_its_four_files_with_an_md5():
    for download in DOWNLOADS.values():
        assert len(download.md5) == 4
        assert all(len(md5) == 32 and int(md5, 16) for md5 in download.md5.values())
        assert all(mirror.endswith("/") for mirror in download.mirrors)


def test_an_unknown_name_and_a_folder_for_the_digits_are_refused(tmp_path):
    with pytest.raises(UsageError, match="unknown image data 'cifar'; known by --data: digits, mnist, fashion-mnist"):
        image_data("cifar")
    with pytest.raises(UsageError, match="the digits are embedded and read no folder"):
        image_data("digits", tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere: there is no such folder"):
        image_data("mnist", tmp_path / "nowhere")


def test_the_real_folders_are_split_as_documented(shared_data):
    train, test, _ = image_data(data_dir=shared_data / "mnist")
    assert (len(train), len(test)) == (8000, 2000)
    assert train.tensors[1][:3].tolist() == [7, 2, 1]
    train, test, _ = image_data("fashion-mnist", shared_data / "fashion-mnist")
    assert (len(train), len(test)) == (750, 150)
