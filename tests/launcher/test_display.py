"""What is shown of a run: a bar, lines and messages, and what becomes of lines that cannot be shown."""

import io
import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest

from samestep import text
from samestep.launcher import monitor

PROGRAM = """
from samestep.launcher.monitor import Display
display = Display(quiet={quiet}, lines_to="stdout")
display.progress(dict(epoch=1, epochs=2, step=3, steps=3, loss=0.25, samples_per_second=1234.5))
display.line("a [bold]line[/bold]")
display.close()
"""

EPOCHS = """
bar = monitor.Display(quiet=False, lines_to="stdout")
bar.progress(dict(epoch=1, epochs=2, step=3, steps=3))
bar.progress(dict(epoch=2, epochs=2, step=1, steps=3))
bar.close()
"""


@pytest.fixture
def at(monkeypatch):
    """Sets the times at which a display looks at the clock."""
    return lambda *times: monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=iter(times).__next__))


def show(quiet=False, stdout_on_terminal=False, program=PROGRAM):
    """What the program writes to a terminal on stderr, and to stdout."""
    terminal, side = pty.openpty()
    with open(side, "w") as stderr, io.StringIO() as stdout, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stderr", stderr)
        patched.setattr(sys, "stdout", stderr if stdout_on_terminal else stdout)
        patched.setenv("TERM", "xterm")
        patched.setenv("COLUMNS", "100")
        exec(program.format(quiet=quiet), {"monitor": monitor})
        print("END", end="", file=stderr, flush=True)
        text = b""
        while not text.endswith(b"END"):
            text += os.read(terminal, 65_536)
        os.close(terminal)
        return text.decode().removesuffix("END"), stdout.getvalue()


def test_the_bar_is_on_the_terminal_and_is_removed_while_lines_go_to_stdout():
    terminal, stdout = show()
    for shown in ("epoch 1/2", "3/3", "loss 0.25", "1,234 samples/s"):
        assert shown in terminal
    assert terminal.rstrip().endswith("\x1b[2K")  # the last thing is that the bar's line is erased
    assert stdout == "a [bold]line[/bold]\n"


def test_the_time_that_is_left_is_told_by_the_pace_since_the_first_progress(at, capsys):
    at(100, 110, 145, 170)
    lines = monitor.Display(quiet=False, lines_to="stdout")
    lines.progress({"epoch": 1, "epochs": 2, "step": 10, "steps": 100})
    lines.progress({"epoch": 1, "epochs": 2, "step": 60, "steps": 100, "loss": 0.5})
    lines.progress({"epoch": 3, "epochs": None, "step": 70, "steps": 100})
    assert capsys.readouterr().err == "epoch 1, step 60 of 100, loss 0.5, 0:01:38 left\n"


def test_the_clock_goes_on_after_an_epoch(at):
    at(100, 160, 100 + 3667)
    terminal, _ = show(program=EPOCHS)
    first, second = terminal.split("epoch 2/2")[0], terminal.split("epoch 2/2", 1)[1]
    assert "0:01:00" in first
    assert "1:01:07" in second
    assert "0:01:00" not in second


def test_on_one_terminal_lines_are_above_the_bar():
    terminal, _ = show(stdout_on_terminal=True)
    assert "a [bold]line[/bold]" in terminal
    assert terminal.index("a [bold]line[/bold]") < terminal.rindex("epoch 1/2")


def test_a_quiet_run_shows_nothing():
    assert show(quiet=True) == ("", "")


def test_without_a_terminal_there_is_no_bar(capsys):
    exec(PROGRAM.format(quiet=False))
    assert capsys.readouterr() == ("a [bold]line[/bold]\n", "")


def test_an_end_by_steps_has_no_number_of_epochs():
    terminal, _ = show(program=PROGRAM.replace("epochs=2", "epochs=None"))
    assert "epoch 1 " in terminal
    assert "None" not in terminal


@pytest.mark.parametrize(
    "program", [PROGRAM, "from samestep.text import notify\nnotify('a line')"], ids=["bar", "line"]
)
@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_a_line_that_cannot_be_shown_is_no_error(program, is_terminal):
    """On a terminal that was closed, or a pipe without a reader; Python would end with 120 for what it cannot flush."""
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", f"input()\n{program.format(quiet=False)}"],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=writer,
    )
    os.close(reader)
    os.close(writer)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0


def test_a_bar_whose_terminal_is_closed_is_no_error():
    reader, writer = pty.openpty()
    program = PROGRAM.format(quiet=False).replace(
        "display.line", "input()\ndisplay.progress(dict(step=3, steps=3))\n#", 1
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=writer,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(writer)
    text = b""
    while b"samples/s" not in text:
        text += os.read(reader, 65_536)
    os.close(reader)
    process.communicate(b"\n", timeout=60)
    assert process.returncode == 0


def test_letters_that_a_stream_lacks_are_escaped():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text.show("b\u2026", stream)
    assert stream.buffer.getvalue() == b"b\\u2026\n"
