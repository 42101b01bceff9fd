"""The display of a training loop's progress and lines.

Under samestep's launcher the supervisor process draws; otherwise rank 0 prints; other ranks are silent.
"""

import time
from typing import Protocol

from samestep.comm.channel import Channel

REFRESH_SECONDS = 0.1


class Display(Protocol):
    """Shows how a run gets on."""

    def progress(self, epoch: int, epochs: int, step: int, steps: int | None, loss: float | None, rate: float) -> None:
        """Shows that `step` of `steps` steps of an epoch are done; loss as last known; `rate` in samples a second."""
        ...

    def is_due(self) -> bool:
        """Whether it is time to show progress again."""
        ...

    def line(self, text: str) -> None:
        """Shows a line of text for good."""
        ...

    def ledger(self, quorum: int | None = None, seconds: float | None = None) -> None:
        """Reports that a ledger is kept; or the duration that it has for the healing that ended in a quorum."""
        ...

    def close(self) -> None:
        """Clears what is not for good."""
        ...


class SilentDisplay:
    """Shows nothing."""

    def progress(self, epoch: int, epochs: int, step: int, steps: int | None, loss: float | None, rate: float) -> None:
        """Shows nothing."""

    def is_due(self) -> bool:
        """Never."""
        return False

    def line(self, text: str) -> None:
        """Shows nothing."""

    def ledger(self, quorum: int | None = None, seconds: float | None = None) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Does nothing."""


class SupervisedDisplay:
    """Sends progress and lines to the supervisor, which draws."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._next = 0.0

    def progress(self, epoch: int, epochs: int, step: int, steps: int | None, loss: float | None, rate: float) -> None:
        """Sends a progress event."""
        self._channel.send(
            "progress", epoch=epoch, epochs=epochs, step=step, steps=steps, loss=loss, samples_per_second=rate
        )

    def is_due(self) -> bool:
        """Ten times a second."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + REFRESH_SECONDS
        return True

    def line(self, text: str) -> None:
        """Sends a line."""
        self._channel.send("line", text=text)

    def ledger(self, quorum: int | None = None, seconds: float | None = None) -> None:
        """Sends the event, so that the supervisor shows a healing with the ledger's number."""
        self._channel.send("ledger", quorum=quorum, seconds=seconds)

    def close(self) -> None:
        """Does nothing: the supervisor clears up when we end."""


class PlainDisplay(SilentDisplay):
    """Prints lines, without a bar: for a single process whose terminal is the user's own."""

    def line(self, text: str) -> None:
        """Prints the line."""
        print(text, flush=True)


def make_display(rank: int) -> Display:
    """The display of a rank: only rank 0 shows anything."""
    if rank != 0:
        return SilentDisplay()
    channel = Channel.from_environment()
    return PlainDisplay() if channel is None else SupervisedDisplay(channel)
