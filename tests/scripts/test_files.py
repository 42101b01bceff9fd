"""Only rank 0 writes, readers wait for it, and questions get its answers."""

import gzip
import http.server
import json
import os
import pickle
import threading
import zipfile
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import io_programs as programs
import numpy as np
import pytest
import torch
from simulated_programs import alone
from worlds import World

from samestep.scripts.files import patches as file_patches


def script(worlds, n, name, folder, *args):
    """The results of a function of the programs on all ranks, as `samestep run` does."""
    return worlds(n).run(programs.in_script, name, str(folder), *args)


def equal(results):
    """The result that all ranks have."""
    assert all(result == results[0] for result in results), results
    return results[0]


@pytest.mark.parametrize("n", [1, 3])
def test_only_rank_0_writes_whatever_the_way(worlds, tmp_path, n):
    position, size = equal(script(worlds, n, "writes", tmp_path))
    assert position == len("rank 0\n")
    assert size > 100, "saving to a buffer goes on everywhere"
    assert (tmp_path / "plain.txt").read_text() == "rank 0\nrank 0\n"
    assert (tmp_path / "binary").read_bytes() == (tmp_path / "low").read_bytes() == b"rank 0"
    assert (tmp_path / "path.txt").read_text() == (tmp_path / "d" / "copy.txt").read_text() == "rank 0"
    assert json.loads((tmp_path / "data.json").read_text()) == "rank 0"
    assert pickle.loads((tmp_path / "data.pickle").read_bytes()) == "rank 0"
    assert (tmp_path / "data.csv").read_text() == "rank 0\n"
    assert gzip.decompress((tmp_path / "text.gz").read_bytes()) == b"rank 0"
    assert zipfile.ZipFile(tmp_path / "archive.zip").read("member") == b"rank 0"
    for name in ("array.npy", "arrays.npz"):
        loaded = np.load(tmp_path / name)
        assert (loaded if name == "array.npy" else loaded["a"]).tolist() == [0, 0]
    assert np.loadtxt(tmp_path / "array.txt").tolist() == [0, 0]
    assert np.fromfile(tmp_path / "array.raw", int).tolist() == [0, 0]
    assert torch.load(tmp_path / "model.pt") == torch.load(tmp_path / "old.pt") == {"rank": 0}
    assert not (tmp_path / "touched").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["d"]


def test_without_patches_every_rank_would_write(worlds, tmp_path):
    with pytest.raises(AssertionError, match="FileExistsError"):
        worlds(2).run(programs.bare, "writes", str(tmp_path))


@pytest.mark.parametrize("n", [1, 2])
def test_what_goes_wrong_goes_wrong_on_every_rank_alike(worlds, tmp_path, n):
    fails, works = equal(script(worlds, n, "outcomes", tmp_path))
    assert all(fails), fails
    assert not any(works), works
    names = [name for name, _ in fails]
    assert names[:3] == ["FileExistsError"] * 3
    assert names[3:9] == [
        *("FileNotFoundError", "IsADirectoryError", "FileNotFoundError", "FileNotFoundError", "OSError"),
        "FileNotFoundError",
    ]
    assert names[-2:] == ["CalledProcessError", "FileNotFoundError"]


FOUND = {  # by a program of so many ranks, on each of them
    "late_writer": (3, ["written", "by a library", 2.0, 2.0, 2.0, "noted"]),
    "overwritten": (3, ["before", "0", "1", "2"]),
    "threads_of_its_own": (2, True),
    "by_library": (2, ("rank 0", False, "rank 0")),
    "listed_by_library": (2, ((True, []), "rank 0")),
    "changed_by_library": (2, (False, True, True, ["file"], ["file"], 1, False, 4)),
    "in_a_folder_moved_by_library": (2, ("text", "text")),
    "appended_and_read": (2, ["0", "01", "012"]),
    "saved_again_by_library": (2, [0, 0, 1, 1]),
    "saved_on_a_thread": (2, (True, 2.0)),
    "asked": (2, "yes"),
}


@pytest.mark.parametrize("program", FOUND)
def test_every_rank_finds_what_rank_0_has_written_made_or_been_told(worlds, tmp_path, program):
    n, expected = FOUND[program]
    (tmp_path / "state").write_text("before")
    assert equal(script(worlds, n, program, tmp_path)) == expected
    if program == "late_writer":
        assert all("0" in path.name for path in tmp_path.iterdir() if path.name != "state"), list(tmp_path.iterdir())


def test_without_patches_names_with_a_clock_differ(worlds, tmp_path):
    worlds(3).run(programs.bare, "late_writer", str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("at-*")) == ["at-0.txt", "at-1.txt", "at-2.txt"]


@pytest.mark.parametrize("n", [1, 2])
def test_files_for_reading_and_writing_read_back_on_every_rank(worlds, tmp_path, n):
    found, is_mapped = equal(script(worlds, n, "both_ways", tmp_path))
    assert found == ["", "w+ ", "w+ ", "w+ r+ ", "", "w+ r+ a+ "]
    assert is_mapped
    assert (tmp_path / "both").read_text() == "w+ r+ a+ "
    assert np.fromfile(tmp_path / "mapped", np.float32).tolist() == [1.0, 1.0, 1.0]


def test_questions_are_answered_as_on_rank_0(worlds, tmp_path):
    (tmp_path / "0").write_text("abc")
    about, more, listed, paths, (walked, scanned) = equal(script(worlds, 3, "questions", tmp_path))
    assert about == (True, True, True, True, False, 3)
    assert more[0] == 3
    assert sorted(listed[0]) == ["0", "sub"]
    assert sorted(listed[1]) == sorted(listed[2]) == [str(tmp_path / "0"), str(tmp_path / "sub")]
    assert sorted(paths[0]) == sorted(paths[1]) == [tmp_path / "0", tmp_path / "sub"]
    assert tmp_path / "sub" / "skipped" in paths[2]
    assert walked == [(tmp_path.name, ["0"]), ("sub", ["file"])]
    assert sorted(scanned) == [("0", False), ("sub", True)]


def test_a_line_that_asks_very_often_is_answered_on_each_rank_after_a_while(worlds, tmp_path):
    (tmp_path / "0").touch()
    first, second = script(worlds, 2, "many_questions", tmp_path)
    assert first == 1000
    assert second == 256


def test_temporary_files_are_rank_0s_but_a_librarys_own_are_each_ranks(worlds, tmp_path):
    results = script(worlds, 3, "temporary", tmp_path)
    made, inner, read, named, path, low, nameless = equal([result[0] for result in results])
    assert (read, named, low, nameless) == ("b", "named", "low", b"nameless")
    assert sorted(map(str, tmp_path.iterdir())) == sorted([made, path])
    assert not Path(inner).exists()
    own = [result[1] for result in results]
    assert len({folder for folder, _, _ in own}) == 3
    assert all(text == "own" and not exists for _, text, exists in own)


@pytest.mark.parametrize("n", [1, 2])
def test_programs_run_once_and_everybody_gets_the_result(worlds, tmp_path, n):
    found = equal(script(worlds, n, "commands", tmp_path))
    assert found[:3] == (0, "said\n", 3)
    assert (tmp_path / "log").read_text() == "once\nonce\n"


def test_the_output_of_a_program_that_is_read_as_a_stream_is_that_of_rank_0(worlds, tmp_path):
    lines, listed, text, status = equal(script(worlds, 2, "piped", tmp_path))
    assert lines[:2] == ["one\n", "two\n"]
    assert (listed, text, os.waitstatus_to_exitcode(status)) == (["a\n", "b\n"], "read\n", 3)
    assert (tmp_path / "log").read_text() == "once\n"


def test_files_of_h5py_are_written_by_rank_0_and_others_have_a_copy(worlds, tmp_path):
    h5py = pytest.importorskip("h5py")
    results = script(worlds, 3, "hdf5", tmp_path)
    for rank, (found, missing, existing) in enumerate(results):
        assert found[:3] == [[rank] * 3, [0, 0, 0], [2, 0, 0]]
        assert found[3] == [[3, 0, 0], ["a", "mode a", "mode r+"]]
        assert (missing[0], existing[0]) == ("FileNotFoundError", "FileExistsError")
    with h5py.File(tmp_path / "data.h5") as file:
        assert file["a"][:].tolist() == [3, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["data.h5"]


def test_threads_workers_and_libraries_write_on_rank_0_only_and_nobody_waits(worlds, tmp_path):
    assert equal(script(worlds, 2, "elsewhere", tmp_path)) == 0
    for name in ("thread", "worker", "library", "script", "logging"):
        assert (tmp_path / name).read_text() == "rank 0\n", name
    assert (tmp_path / "thread-folder").is_dir()
    assert (tmp_path / "library-folder").is_dir()


def test_chunks_write_on_rank_0_only_and_nobody_waits(worlds, tmp_path):
    worlds(3).run(programs.in_a_chunk, str(tmp_path))
    assert (tmp_path / "log").read_text() == "rank 0\n"


FAKE_TORCHVISION = """
import os

class Digits:
    def __init__(self, root, download=False):
        path = os.path.join(root, "digits")
        if download and not os.path.exists(path):
            os.makedirs(root, exist_ok=True)
            with open(path, "w") as file:
                for _ in range(200):
                    file.write("fetched by one\\n")
                    file.flush()
        with open(path) as file:
            self.text = file.read()
"""


@pytest.mark.usefixtures("worlds")
def test_libraries_that_are_imported_late_are_patched_and_put_back(tmp_path):
    package = tmp_path / "torchvision" / "datasets"
    package.mkdir(parents=True)
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    (package / "__init__.py").write_text(FAKE_TORCHVISION)
    world = World(3)  # of its own: which libraries are imported already must not depend on other tests
    try:
        results = world.run(programs.saves_and_loads, str(tmp_path))
    finally:
        world.close()
    loaded, by_script, by_library, is_undone, is_left, is_restored = equal(results)
    assert loaded == [0, 0]
    assert by_script == by_library == "fetched by one\n" * 200
    assert is_undone
    assert not is_left
    assert is_restored
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["0.safetensors"]


@contextmanager
def serving():
    """A server on this machine; its address, and the paths requested so far."""
    asked, saved = [], BytesIO()
    torch.save({"w": torch.ones(2)}, saved)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            body = saved.getvalue() if self.path == "/model.pt" else f"served {self.path}".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Kind", "test")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_download_happens_once_also_for_libraries(worlds, tmp_path):
    with serving() as (url, asked):
        kind, library, late, weights = equal(script(worlds, 3, "downloads", tmp_path, url))
    assert (kind, library, late, weights) == ("test", "served /library", "served /late", [1.0, 1.0])
    assert sorted(asked) == ["/hub", "/late", "/library", "/model.pt", "/script"]


def test_without_patches_every_rank_would_download(worlds, tmp_path):
    with serving() as (url, asked):
        worlds(2).run(programs.bare, "downloads", str(tmp_path), url)
    assert asked.count("/script") == 2


def test_a_rank_that_finds_a_file_complete_and_never_asks_for_it_is_not_waited_for(worlds, tmp_path):
    with serving() as (url, asked):
        assert equal(script(worlds, 2, "skips_a_fetch", tmp_path, url)) == "served /only"
    assert asked == ["/only"]


def test_one_rank_alone_needs_no_patch():
    assert file_patches.patches(alone()) == []
