"""Exceptions and actions that ranks share: an error of rank 0 is raised on all ranks.

They travel as literals, the name of a class with its arguments: a pickle would run whatever another process has sent.
"""

import sys
from ast import literal_eval
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeVar

from samestep import errors
from samestep.comm.communicator import Communicator
from samestep.errors import (
    CheckpointError,
    ContractError,
    RunFolderError,
    UsageError,
)

T = TypeVar("T")

SHARED_ERRORS = (UsageError, CheckpointError, ContractError, RunFolderError)


def on_main(communicator: Communicator, action: Callable[[], T]) -> T | None:
    """Calls `action` on rank 0 while the others wait for any time; its value, None on others. All raise its error."""
    value, error = None, None
    if communicator.rank == 0:
        try:
            value = action()
        except SHARED_ERRORS as raised:
            error = raised
    raise_together(communicator, error)
    return value


def raise_together(communicator: Communicator, error: Exception | None) -> None:
    """Raises, on all ranks, the error of the first rank that has one; they wait for each other without a limit."""
    communicator.meet()
    failed = [rank for rank, (has,) in enumerate(communicator.gather_words([error is not None])) if has]
    if not failed:
        return
    theirs = communicator.share_value(None if error is None else packed(error), failed[0])
    raise unpacked(theirs) if error is None or failed[0] != communicator.rank else error


def packed(error: BaseException) -> bytes:
    """An exception as bytes, with its notes and causes; of one that cannot be rebuilt elsewhere a plain one."""
    links, seen = [], set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        plain = _form(_plain(current))
        links.append((_form(current) or plain, plain))
        current = current.__cause__
    return repr(links).encode()


def unpacked(data: bytes) -> BaseException:
    """The exception that was packed, with its type, text, notes and cause, and without its traceback."""
    links = [_rebuilt(*link) for link in literal_eval(data.decode())]
    for error, cause in pairwise(links):
        error.__cause__ = cause
    return links[0]


class _Text(str):
    """A text that is shown without quotes where its `repr` is: in a KeyError, as torch's data workers have it."""

    __repr__ = str.__str__


def _form(error: BaseException) -> tuple[Any, ...] | None:
    """An exception as a literal; None if that does not bring back the same type and text."""
    # `__init__` may take other arguments than it keeps; another error than a KeyError has its text as it is.
    for made_by in ("call", "new", *(["text"] if type(error) is KeyError else [])):
        with suppress(Exception):  # a method of the script's may raise anything
            state = [("".join(str(error)),)] if made_by == "text" else list(error.__reduce__())[1:]
            form = (type(error).__module__, type(error).__qualname__, made_by, *state)
            copy = _made(*literal_eval(repr(form)))
            if type(copy) is type(error) and str(copy) == str(error) and literal_eval(repr(form)) == form:
                return form
    return None


def _rebuilt(form: tuple[Any, ...], plain: tuple[Any, ...]) -> BaseException:
    """The exception of a form, or the plain one if its class is not loaded here."""
    try:
        return _made(*form)
    except Exception:  # also of an attribute that cannot be set
        return _made(*plain)


def _made(module: str, name: str, made_by: str, arguments: Any, attributes: Any = ()) -> BaseException:
    cls = attrgetter(name)(sys.modules[module])
    if not issubclass(cls, BaseException):
        raise TypeError(f"{name} is no exception")
    if made_by == "text":
        arguments = tuple(map(_Text, arguments))
    error: BaseException = cls.__new__(cls, *arguments) if made_by == "new" else cls(*arguments)
    if made_by == "new":
        error.args = arguments
    for attribute, value in dict(attributes).items():
        setattr(error, attribute, value)
    return error


def _plain(error: BaseException) -> BaseException:
    """A similar exception that is made of its text and notes alone."""
    text = type(error).__name__
    with suppress(Exception):
        text = "".join(str(error)) if type(error).__module__ == "builtins" else f"{text}: {error}"
    notes = getattr(error, "__notes__", None)
    plain: BaseException = RuntimeError(text)
    for kind in reversed(type(error).__mro__):
        if kind.__module__ in ("builtins", errors.__name__) and kind not in (Exception, BaseException, object):
            with suppress(Exception):
                if str(similar := kind(text)) == text:
                    plain = similar
    if isinstance(notes, list):
        plain.__notes__ = [note for note in notes if isinstance(note, str)]
    return plain
