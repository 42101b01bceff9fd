"""Text for people: names, values and messages of a readable length, without control characters, and showing them."""

import errno
import json
import math
import os
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from stat import S_ISCHR
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_WORD: Final = 300
MAX_LINE: Final = 1000
_UNSHOWN: Final = ("Cc", "Cf", "Cs", "Zl", "Zp")  # of Unicode's categories
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")


def one_line(value: Any) -> str:
    """Text without line breaks, control and format characters (which move a cursor or turn a line), lone surrogates."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join("�" if unicodedata.category(each) in _UNSHOWN else each for each in text)


def visible(text: str) -> str:
    """Text of several lines, each as by `one_line`."""
    return "\n".join(one_line(line.expandtabs()) for line in text.split("\n"))


def readable(text: str) -> str:
    """A message with each line as by `one_line`, and without the middle of long words and lines."""
    return "\n".join(map(_short, visible(text).split("\n")))


def listed(values: Sequence[Any], most: int = 4) -> str:
    """Some values for a sentence: "3, 5, 5 and 2 more"."""
    shown = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def counted(number: Any, noun: str) -> str:
    """`1 device`, `1,200 devices`, `8 microbatches`."""
    text = f"{number:,}" if isinstance(number, int) else str(number)
    return f"{text} {noun}{'' if number == 1 else 'es' if noun.endswith('tch') else 's'}"


def describe(value: Any) -> str:
    """A few words for a value in messages: `a float32 tensor of shape [3, 2]`, `an int`, `the class EMA`, `None`."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    words, torch = type(value).__name__, sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        words = f"{str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def json_text(value: Any, **options: Any) -> str:
    """A value as JSON, which has finite numbers alone: others are strings, such as "nan"."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, **options)


def finite(value: Any) -> Any:
    """A value of JSON with strings in the place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(finite, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def showing(stream: TextIO) -> Iterator[None]:
    """For a block that prints: that a terminal was closed, or a reader has gone, is no error; a full disk is one."""
    try:
        yield
    except ValueError:  # the stream is closed
        pass
    except OSError as error:
        # What is no terminal, nor a pipe, is a file on a disk that fails.
        if error.errno != errno.EPIPE and not (error.errno == errno.EIO and S_ISCHR(os.fstat(stream.fileno()).st_mode)):
            raise
        discard(stream)  # Python would try once more at its end, and exit with 120


def discard(stream: TextIO) -> None:
    """Sends what a stream still holds, and gets, to nowhere."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def show(text: str, stream: TextIO) -> None:
    """Prints a text at once, as by `showing`; in ASCII if the stream has no other characters."""
    with showing(stream):
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), file=stream, flush=True)


def tell(text: str, stream: TextIO) -> None:
    """Shows a message, if that is possible: it is no result, for whose sake a program would end."""
    with suppress(OSError):
        show(text, stream)


def notify(text: str) -> None:
    """Shows a message of ours on stderr."""
    if sys.stderr is not None:  # its descriptor may have been closed when the program was started
        tell(f"samestep: {visible(text)}", sys.stderr)


def make_console() -> "Console":
    """The console for tables on stdout; in a file or a pipe nothing is folded or cut.

    What it prints may come from a file or be the name of one: of a text only its own characters reach the terminal, and
    a text that is printed is one line.
    """
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class Visible(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            for text in objects:
                if isinstance(text, Text):
                    text.plain = one_line(text.plain)
            super().print(*(one_line(each) if isinstance(each, str) else each for each in objects), **options)

        def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    console = Visible(highlight=False)
    if not console.is_terminal:
        console.width = 200
    return console


def make_table(*titles: str) -> "Table":
    """A table with a line under its titles, whose entries go on in a line below rather than being cut."""
    from rich import box
    from rich.table import Column, Table

    return Table(*(Column(title, overflow="fold") for title in titles), box=box.SIMPLE)


def print_table(console: "Console", table: "Table", spare: Sequence[str], all_by: str) -> None:
    """Prints a table of `make_table`; on a narrow terminal without some columns, the first of `spare` first.

    A line under it names them; `all_by` says how all are shown.
    """
    cells = {str(column.header): list(column.cells) for column in table.columns}
    left_out: list[str] = []
    wide = console.options.update_width(MAX_LINE)
    for title in spare:
        if console.measure(table, options=wide).maximum <= console.width:
            break
        if title in cells:
            del cells[title]
            left_out.append(title)
            table = make_table(*cells)
            for row in zip(*cells.values(), strict=True):
                table.add_row(*row)
    console.print(table)
    if left_out:
        console.print(f"left out, for want of width: {', '.join(left_out)}; {all_by} shows all", markup=False)


def _short(line: str) -> str:
    line = _LONG_WORD.sub(lambda word: _without_middle(word[0], MAX_WORD), line)
    return _without_middle(line, MAX_LINE)


def _without_middle(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size * 2 // 3]}…{text[-size // 3 + 1 :]}"
