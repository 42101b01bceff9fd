"""Text for people: what others wrote (names, values, files) cut to a readable length, and kept from the terminal."""

import re
from typing import Any, Final

MAX_WORD: Final = 300
MAX_LINE: Final = 1000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")


def one_line(text: Any) -> str:
    """Text without line breaks, control characters, which could write elsewhere on a terminal, and lone surrogates."""
    return _CONTROL.sub("�", str(text))


def readable(text: str) -> str:
    """A message, each of its lines as `one_line`, of which long words and long lines lose their middle."""
    return "\n".join(map(_short, text.split("\n")))


def _short(line: str) -> str:
    line = _LONG_WORD.sub(lambda word: _without_middle(word[0], MAX_WORD), one_line(line.expandtabs()))
    return _without_middle(line, MAX_LINE)


def _without_middle(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size * 2 // 3]}…{text[-size // 3 + 1 :]}"
