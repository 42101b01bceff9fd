"""Exceptions that travel arrive as what they were; where they cannot be rebuilt, as a plain one with their text."""

import errno
import pickle
import sys
import threading
from pathlib import Path

import pytest
from torch._utils import KeyErrorMessage
from worlds import in_turns

from samestep.comm.exceptions import on_main, packed, unpacked
from samestep.errors import ContractError, PeerLostError, RunFolderError, UsageError


class TwoArguments(Exception):
    """Pickle cannot make it again: it is made of two arguments and keeps one."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.first = first


class OwnText(Exception):
    """Made of a number, of which it makes its text."""

    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


class Guarded(LookupError):
    """It holds what cannot be sent."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class Mute(KeyError):
    """It can neither be sent nor read."""

    def __init__(self):
        super().__init__(threading.Lock())

    def __str__(self):
        raise ArithmeticError


class StrictUsageError(UsageError):
    """One of our own kind, with a lock."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def sent(error):
    return unpacked(packed(error))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a", 1),
        KeyError("x"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "data.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        SystemExit(3),
        PeerLostError("rank 1 is gone", (1,)),
        TwoArguments("this", "that"),
        OwnText(3),
        KeyError(KeyErrorMessage("of a data worker,\nin two lines")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_with_its_type_text_arguments_and_attributes(error):
    copy = sent(error)
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert repr(copy.args) == repr(error.args)
    assert copy.__dict__ == error.__dict__


def test_notes_and_causes_arrive_too():
    root, middle, error = OSError(5, "Input/output error"), TwoArguments(1, 2), ValueError("no")
    error.__cause__, middle.__cause__ = middle, root
    error.add_note("while reading")
    root.add_note("on the disk")
    copy = sent(error)
    assert copy.__notes__ == ["while reading"]
    assert (type(copy.__cause__), str(copy.__cause__)) == (TwoArguments, "1 and 2")
    assert copy.__cause__.__cause__.errno == 5
    assert copy.__cause__.__cause__.__notes__ == ["on the disk"]
    assert copy.__cause__.__cause__.__cause__ is None


def test_an_exception_that_causes_itself_arrives():
    error = ValueError("round")
    error.__cause__ = TypeError("and round")
    error.__cause__.__cause__ = error
    copy = sent(error)
    assert str(copy.__cause__) == "and round"
    assert copy.__cause__.__cause__ is None


def local_class():
    class Local(OSError):
        pass

    return Local


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Guarded("locked"), LookupError, "Guarded: locked"),
        (local_class()("full"), OSError, "Local: full"),
        (StrictUsageError("give --devices"), UsageError, "StrictUsageError: give --devices"),
        (type("Odd", (Exception,), {})("one"), RuntimeError, "Odd: one"),
        (type("Abrupt", (BaseException,), {})("end"), RuntimeError, "Abrupt: end"),
        (Mute(), LookupError, "Mute"),
        (ExceptionGroup("two", [ValueError("a")]), RuntimeError, "two (1 sub-exception)"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str) else type(value).__name__),
)
def test_what_cannot_be_rebuilt_arrives_as_the_nearest_plain_exception_with_its_text_and_notes(error, kind, text):
    error.add_note("a note")
    plain = sent(error)
    assert type(plain) is kind
    assert str(plain) == text
    assert plain.__notes__ == ["a note"]


class Loaded(KeyError):
    """Of a module that a rank may not have loaded."""


def test_a_class_that_is_not_loaded_here_is_the_plain_exception_with_its_text(monkeypatch):
    data = packed(Loaded("x"))
    monkeypatch.delitem(sys.modules, __name__)
    assert repr(unpacked(data)) == """LookupError("Loaded: 'x'")"""


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_that_another_process_sends_runs(tmp_path):
    """A pickle does; a form is of an exception, with arguments and attributes that are literals."""
    path = tmp_path / "ran"
    call = repr([(("pathlib", "Path.touch", (str(path),), {}),) * 2 + ([],)]).encode()
    for data in (pickle.dumps(Runs(path)), call, f"[((Path({str(path)!r}).touch()), ())]".encode()):
        with pytest.raises((ValueError, SyntaxError, TypeError)):
            unpacked(data)
    assert not path.exists()
    pickle.loads(pickle.dumps(Runs(path)))
    assert path.exists()


def test_a_builtin_whose_arguments_cannot_be_sent_keeps_its_type_and_text():
    error = ValueError("held by", threading.Lock())
    copy = sent(error)
    assert type(copy) is ValueError
    assert str(copy) == str(error)


def fail_on_main(communicator, error):
    def action():
        if error is not None:
            raise error
        return "done"

    try:
        return on_main(communicator, action)
    except (UsageError, RunFolderError, ContractError) as met:
        return type(met), str(met), type(met.__cause__)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_the_first_rank_raises_is_raised_on_all_with_its_cause(world_size):
    error = RunFolderError("runs/a cannot be written (--run-dir)")
    error.__cause__ = PermissionError(errno.EACCES, "Permission denied")
    told = (RunFolderError, "runs/a cannot be written (--run-dir)", PermissionError)
    assert in_turns(world_size, fail_on_main, error) == [told] * world_size
    assert in_turns(world_size, fail_on_main, None) == ["done"] + [None] * (world_size - 1)
