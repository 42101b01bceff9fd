"""The display: one progress bar on the terminal, rank 0's lines, and messages about the run."""

import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TextIO

from samestep.comm.channel import Event
from samestep.text import show, showing

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REFRESH_SECONDS = 0.1
LINE_SECONDS = 30.0


class Display:
    """Shows a run by a bar on stderr, removed at the end; without a terminal by a line every half minute."""

    def __init__(self, quiet: bool, lines_to: Literal["stdout", "stderr"]) -> None:
        self._quiet = quiet
        self._lines: TextIO = sys.stdout if lines_to == "stdout" else sys.stderr
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._begun = self._shown = time.monotonic()

    def progress(self, event: Event) -> None:
        """Moves the bar, at most ten times a second."""
        now = time.monotonic()
        last = event.get("step") == event.get("steps")
        if self._quiet:
            return
        if not sys.stderr.isatty():
            if now - self._shown >= LINE_SECONDS:  # so that a long epoch does not look hung
                self._shown = now
                steps = f"step {event.get('step')} of {event.get('steps') or '?'}"
                self._print(f"epoch {event.get('epoch')}, {steps}, {_figures(event)}", sys.stderr)
            return
        if now - self._shown < REFRESH_SECONDS and not last:
            return
        self._shown = now
        if self._bar is None or self._task is None:
            self._bar = _new_bar()
            self._task = self._bar.add_task("", total=None, figures="", clock="")
        self._bar.update(
            self._task,
            description="epoch "
            + "/".join(str(event[name]) for name in ("epoch", "epochs") if event.get(name) is not None),
            completed=event.get("step") or 0,
            total=event.get("steps"),
            figures=_figures(event),
            clock=str(timedelta(seconds=int(now - self._begun))),
        )
        with showing(sys.stderr):
            self._bar.start()  # does nothing the second time
            self._bar.refresh()

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._quiet:
            return
        self._print(text, self._lines)

    def notify(self, text: str) -> None:
        """Prints a message about the run on stderr, above the bar if there is one; even if the display is quiet."""
        self._print(f"samestep: {text}", sys.stderr)

    def _print(self, text: str, stream: TextIO) -> None:
        # If bar and text share the terminal the bar's console must print it.
        if self._bar is not None and stream.isatty():
            with showing(stream):
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            show(text, stream)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            with showing(sys.stderr):
                self._bar.stop()


def _new_bar() -> "Progress":
    """A bar that is refreshed by calls, so that the supervisor needs no thread."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TextColumn("{task.fields[clock]}"),  # rich's own stops when an epoch is complete
        console=Console(file=sys.stderr),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _figures(event: Event) -> str:
    """Loss and speed, if they are known."""
    loss, speed = event.get("loss"), event.get("samples_per_second")
    figures = [f"loss {loss:.4g}"] if isinstance(loss, int | float) else []
    figures += [f"{speed:,.0f} samples/s"] if isinstance(speed, int | float) else []
    return ", ".join(figures)
