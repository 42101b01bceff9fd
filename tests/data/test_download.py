"""Downloads from a real server: whole or not there, one at a time."""

import hashlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from samestep.data.download import cache_folder, fetch
from samestep.errors import DataError

CONTENT = bytes(range(256)) * 4096
MD5 = hashlib.md5(CONTENT).hexdigest()
WRONG = CONTENT[:-1] + b"?"
HALF = len(CONTENT) // 2


class Handler(BaseHTTPRequestHandler):
    """The path says how the server behaves; the server remembers what it was asked for."""

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
        assert fetch([f"{server.url}/whole"], path, MD5) == path
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


@pytest.mark.skipif(sys.platform == "win32", reason="each process downloads on its own there")
def test_of_several_that_want_a_file_one_downloads_it(server, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: fetch([f"{server.url}/whole"], tmp_path / "file", MD5), range(8)))
    assert {path.read_bytes() == CONTENT for path in paths} == {True}
    assert server.asked == ["whole"]
    assert files(tmp_path) == ["file"]


def test_the_cache_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "samestep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().is_relative_to(Path.home())
    assert files(tmp_path) == []
