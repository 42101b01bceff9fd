"""Output of chunks is captured, and replayed in their order."""

import io
import logging
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from script_runs import run

from samestep.scripts import output
from samestep.scripts.output import STDERR, STDOUT, ScriptStream


@contextmanager
def wrapped_streams():
    """Wraps the streams for a block; yields those behind them."""
    before, behind = (sys.stdout, sys.stderr), (io.StringIO(), io.StringIO())
    sys.stdout, sys.stderr = ScriptStream(behind[0], STDOUT), ScriptStream(behind[1], STDERR)
    try:
        yield behind
    finally:
        sys.stdout, sys.stderr = before


def test_an_inner_capture_tells_the_outer_one_when_it_is_replayed():
    with wrapped_streams() as (stdout, _):
        with output.captured() as outer:
            with output.captured() as inner:
                sys.stdout.write("inside")
            assert outer == []
            output.replay(inner)
            sys.stdout.write("outside")
        assert outer == [(STDOUT, "inside"), (STDOUT, "outside")]
        assert stdout.getvalue() == ""


def test_other_threads_write_straight_through():
    with wrapped_streams() as (stdout, _):
        with output.captured() as said:
            thread = threading.Thread(target=lambda: print("aside"))
            thread.start()
            thread.join()
        assert said == []
        assert stdout.getvalue() == "aside\n"


def test_a_wrapped_stream_is_like_the_one_behind(tmp_path):
    with open(tmp_path / "log", "w+", encoding="latin-1", newline="\n") as behind:
        stream = ScriptStream(behind, STDOUT)
        for name in ("encoding", "errors", "newlines", "name", "mode", "line_buffering", "closed", "buffer"):
            assert getattr(stream, name) == getattr(behind, name), name
        for name in ("fileno", "isatty", "readable", "writable", "seekable", "tell"):
            assert getattr(stream, name)() == getattr(behind, name)(), name
        stream.reconfigure(errors="replace", line_buffering=True)
        assert behind.errors == "replace"
        assert stream.write("größe → x\n") == 10
        stream.flush()
        subprocess.run(["echo", "from a program"], stdout=stream, check=True)
        with pytest.raises(TypeError):
            stream.write(b"bytes")
        with output.captured(), pytest.raises(TypeError):
            stream.write(b"bytes")
        with pytest.raises(AttributeError):
            stream.no_such_thing  # noqa: B018
        del stream
        assert not behind.closed, "a wrapper that goes leaves the stream open"
    assert (tmp_path / "log").read_bytes() == "größe ? x\nfrom a program\n".encode("latin-1")


def test_a_wrapped_stream_can_be_read_and_closed(tmp_path):
    path = tmp_path / "log"
    path.write_text("a\nb\n")
    with ScriptStream(open(path), STDOUT) as stream:
        assert next(stream) == "a\n"
        assert list(stream) == ["b\n"]
    assert stream.closed


def test_handlers_bound_at_set_up_are_kept_too_and_replayed():
    behind, before = (io.StringIO(), io.StringIO()), (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = behind
    try:
        with output.script_streams():
            handler = logging.StreamHandler()
            print("before")
            with output.captured() as said:
                print("inside")
                handler.emit(logging.makeLogRecord({"msg": "logged"}))
            assert behind[0].getvalue() == "before\n"
            assert "".join(text for _, text in said) == "inside\nlogged\n"
            output.replay(said)
        assert (sys.stdout, sys.stderr) == behind
    finally:
        sys.stdout, sys.stderr = before
    assert [stream.getvalue() for stream in behind] == ["before\ninside\n", "logged\n"]


def test_a_process_without_a_console_says_nothing(capsys):
    before, sys.stdout = sys.stdout, None
    try:
        output.replay([(STDOUT, "nowhere"), (STDERR, "somewhere")])
    finally:
        sys.stdout = before
    assert capsys.readouterr() == ("", "somewhere")


WARNING = """
import os, warnings
import torch
import torch.nn.functional as F

a, b = torch.ones(4, 1).cuda(), torch.ones(4).cuda()
for _ in range(2):
    F.mse_loss(a, b)
F.mse_loss(a, b)
torch.nn.MSELoss()(a, b)
torch.tensor(a)
torch.save({}, "saved")
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
torch.load("saved")
with warnings.catch_warnings(record=True) as kept:
    warnings.simplefilter("always")
    F.mse_loss(a, b), F.mse_loss(a, b)
RESULT = [(warning.filename == __file__, warning.lineno) for warning in kept]
"""


@pytest.mark.parametrize("n", [1, 2])
def test_warnings_name_the_lines_that_they_name_under_python_and_each_once(worlds, tmp_path, n):
    script = tmp_path / "warns.py"
    script.write_text(WARNING)
    for outcome in run(worlds, n, script, cwd=tmp_path):
        assert not outcome.error, outcome.message
        places = [line.split(": UserWarning:")[0] for line in outcome.stderr.splitlines() if "UserWarning" in line]
        names = [place.replace(str(script), "warns.py").rsplit("/", 1)[-1] for place in places]
        assert [name for name in names if not name.startswith("loss.py")] == [
            *("warns.py:8", "warns.py:9", "warns.py:11", "warns.py:14")
        ]
        assert sum(name.startswith("loss.py") for name in names) == 1
        assert list(outcome.result.values()) == [True, 17, True, 17]
