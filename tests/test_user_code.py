"""Whose file a line of code is in, and which line of the user's is being executed."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from samestep import callsite
from samestep.callsite import is_script_file, script_frames, script_line


def run_as(filename, source, **names):
    """The variables of a piece of code that says it is that file."""
    exec(compile(source, str(filename), "exec"), names)
    return names


@pytest.mark.parametrize(
    "filename",
    [
        os.__file__,
        torch.nn.functional.__file__,
        pytest.__file__,
        callsite.__file__,
        "<string>",
        "<frozen importlib._bootstrap>",
        "<__array_function__ internals>",
    ],
)
def test_files_of_libraries_are_not_the_users(filename):
    assert not is_script_file(str(filename))


def test_files_elsewhere_are_the_users(tmp_path):
    own = Path(callsite.__file__).parent  # a folder whose name begins like that of a library
    for name in (str(tmp_path / "train.py"), __file__, "<stdin>", f"{own}_experiments{os.sep}train.py"):
        assert is_script_file(name)


def test_the_line_is_named_from_the_folder_that_the_script_runs_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = run_as(tmp_path / "nets" / "train.py", "\n\nline = script_line()", script_line=script_line)
    assert inside["line"] == os.path.join("nets", "train.py") + ", line 3"
    outside = run_as("/elsewhere/train.py", "line = script_line()", script_line=script_line)
    assert outside["line"] == "/elsewhere/train.py, line 1"


def test_the_innermost_line_of_the_users_counts_also_from_inside_a_library(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    library = Path(os.__file__).parent / "invented.py"
    ask = run_as(library, "def ask():\n    return script_line()", script_line=script_line)["ask"]
    script = "def helper():\n    return ask()\n\nline = helper()"
    assert run_as(tmp_path / "train.py", script, ask=ask)["line"] == "train.py, line 2"


def test_the_frame_is_that_of_the_caller():
    frame = next(script_frames(sys._getframe()))
    assert frame is not None
    assert frame.f_code.co_name == "test_the_frame_is_that_of_the_caller"


def test_a_thread_that_runs_nothing_of_the_users_has_no_line():
    found = []
    names = run_as(os.__file__, "def run():\n    found.append(script_line())", found=found, script_line=script_line)
    thread = threading.Thread()
    thread.run = names["run"]
    thread.start()
    thread.join()
    assert found == [""]
