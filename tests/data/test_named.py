"""Image data by name and by folder: sizes, splits, ranges, messages; downloads from a real server."""

import gzip
import hashlib
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from samestep.data.named import DOWNLOADS, bytes_to_unit, cache_folder, digits, fetch, image_data
from samestep.data.tensors import TensorData
from samestep.errors import DataError, UsageError

CONTENT = bytes(range(256)) * 4096
MD5 = hashlib.md5(CONTENT).hexdigest()
WRONG = CONTENT[:-1] + b"?"
HALF = len(CONTENT) // 2


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


def test_what_is_neither_a_name_nor_a_folder_is_refused(tmp_path):
    for name in ("cifar", str(tmp_path / "nowhere")):
        with pytest.raises(UsageError, match=f"got --data {name}; needed: digits, mnist, fashion-mnist or a folder"):
            image_data(name)


def test_the_real_folders_are_split_as_documented(shared_data):
    train, test, _ = image_data(str(shared_data / "mnist"))
    assert (len(train), len(test)) == (8000, 2000)
    assert train.tensors[1][:3].tolist() == [7, 2, 1]
    train, test, _ = image_data(str(shared_data / "fashion-mnist"))
    assert (len(train), len(test)) == (750, 150)


class Handler(BaseHTTPRequestHandler):
    """The path decides the server's behaviour; the server logs the requests."""

    def do_GET(self):
        behaviour = self.path.strip("/")
        self.server.asked.append(behaviour)
        if behaviour == "missing":
            self.send_error(404)
            return
        content = WRONG if "corrupt" in behaviour else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: HALF if "breaks" in behaviour else None])

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def server(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_is_fetched_into_a_new_folder_and_then_left_alone(server, tmp_path):
    path = tmp_path / "a" / "b" / "file"
    for _ in range(2):
        fetch([f"{server.url}/whole"], path, MD5)
        assert path.read_bytes() == CONTENT
    assert server.asked == ["whole"]
    assert files(tmp_path) == ["file"]


def test_a_damaged_file_in_the_cache_is_fetched_anew(server, tmp_path):
    (tmp_path / "file").write_bytes(WRONG)
    fetch([f"{server.url}/whole"], tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("bad", ["missing", "corrupt", "breaks"])
def test_a_bad_address_is_passed_over_for_the_next(server, tmp_path, bad):
    fetch([f"{server.url}/{bad}", f"{server.url}/whole"], tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert files(tmp_path) == ["file"]


def test_a_corrupt_file_is_never_put_in_place_and_leaves_nothing(server, tmp_path):
    wrong = hashlib.md5(WRONG).hexdigest()
    with pytest.raises(DataError, match=f"corrupt: the file there has the md5 {wrong}, needed: {MD5}"):
        fetch([f"{server.url}/corrupt"], tmp_path / "file", MD5)
    assert files(tmp_path) == []


def test_every_address_and_the_way_without_a_network_are_named(server, tmp_path):
    addresses = [f"{server.url}/missing", "http://127.0.0.1:1/nobody", "no address"]
    with pytest.raises(DataError) as caught:
        fetch(addresses, tmp_path / "file", MD5)
    first, *others = str(caught.value).splitlines()
    assert first.startswith("file could not be downloaded; without a network, put the files into a folder and give it")
    assert [line.strip().split(": ")[0] for line in others] == addresses
    assert "HTTP Error 404" in others[0]
    assert "refused" in others[1].lower()
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(DataError, match=r"taken.*: cannot be written: .*; set XDG_CACHE_HOME"):
        fetch(["http://127.0.0.1:1/"], tmp_path / "taken" / "file", MD5)


def test_of_several_that_want_a_file_one_downloads_it(server, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: fetch([f"{server.url}/whole"], tmp_path / "file", MD5), range(8)))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == ["whole"]
    assert files(tmp_path) == ["file"]


def test_the_cache_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "samestep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().is_relative_to(Path.home())
    assert files(tmp_path) == []
