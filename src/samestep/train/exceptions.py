"""Exceptions that travel: what one process of a run raised, as bytes from which another raises the like.

Only processes of one run send them to each other; none is ever read from a file.
"""

import pickle
from contextlib import suppress
from itertools import pairwise
from typing import Any

from samestep import errors
from samestep.errors import PeerLostError


def packed(error: BaseException) -> bytes:
    """An exception as bytes, with its notes and the exceptions that it was raised from.

    Those that cannot be rebuilt elsewhere go as plain ones; see `portable`.
    """
    links, seen = [], set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        links.append((_form(current) or pickle.dumps(_plain(current)), _notes(current)))
        current = current.__cause__
    return pickle.dumps(links)


def unpacked(data: bytes) -> BaseException:
    """The exception that was packed: of the same type, text, notes and cause. It has no traceback."""
    links = [_rebuilt(form, notes) for form, notes in pickle.loads(data)]
    for error, cause in pairwise(links):
        error.__cause__ = cause
    return links[0]


def portable(error: BaseException) -> BaseException:
    """The exception itself if it can be rebuilt elsewhere, else a plain one with its text, raised from it.

    The plain one is of the nearest type among Python's and ours that is made of a text alone, and of RuntimeError
    where that would be Exception.
    """
    if _form(error) is not None:
        return error
    plain = _plain(error)
    _annotate(plain, _notes(error))
    plain.__cause__ = error
    return plain


def blamed(error: BaseException, rank: int, where: str) -> BaseException:
    """An exception of another rank, to be raised here from a `PeerLostError`, so that this rank is not blamed."""
    peer = PeerLostError(where, (rank,))
    peer.__cause__ = error.__cause__
    error.__cause__ = peer
    return error


def _form(error: BaseException) -> bytes | None:
    """An exception pickled, or its class and what it holds; None where neither brings back the like."""
    for content in (error, (type(error), error.args, error.__dict__)):
        with suppress(Exception):  # whatever pickling raises, there is another way
            data = pickle.dumps(content)
            copy = _rebuilt(data, [])
            if type(copy) is type(error) and str(copy) == str(error):
                return data
    return None


def _rebuilt(form: bytes, notes: list[str]) -> BaseException:
    value: Any = pickle.loads(form)
    if isinstance(value, BaseException):
        error = value
    else:
        cls, args, attributes = value
        error = cls.__new__(cls, *args)
        error.args = args
        error.__dict__.update(attributes)
    _annotate(error, notes)
    return error


def _plain(error: BaseException) -> BaseException:
    """An exception like it that is made of its text alone."""
    text = type(error).__name__
    with suppress(Exception):
        text = str(error) if type(error).__module__ == "builtins" else f"{text}: {error}"
    for kind in type(error).__mro__:
        if kind.__module__ in ("builtins", errors.__name__) and kind not in (Exception, BaseException, object):
            with suppress(Exception):
                plain: BaseException = kind(text)
                if str(plain) == text:
                    return plain
    return RuntimeError(text)


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _annotate(error: BaseException, notes: list[str]) -> None:
    if notes:
        error.__notes__ = list(notes)
