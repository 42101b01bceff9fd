"""What the driver keeps of the modules that it shares out, and of their calls.

A module is kept weakly, and known to the workers by the number of its image; a call lives as long as its node of the
script's graph. Both end by finalizers, so the workers hear of it with the next message: none is sent for that alone.
"""

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from samestep.errors import DeterminismError, PeerLostError
from samestep.scripts.split_forward.calls import Call, Split
from samestep.scripts.workers.flags import flags_now
from samestep.scripts.workers.image import Image
from samestep.scripts.workers.link import Link, encode

LACKING = (
    "the forward depends on something that the worker does not have (a clock, a process id, an object's id, a "
    "generator, a file, a variable of a library, something registered there), or a device is broken. Pass the value to "
    "the forward, or give --devices cpu:1"
)
Answers = Sequence[tuple[Any, list[Tensor]]]
"""What the workers have answered, by rank from 1 on."""


@dataclass
class Driver:
    """The driver's state."""

    link: Link
    calls: dict[int, Call] = field(default_factory=dict)
    again: dict[int, dict[int, Call]] = field(default_factory=dict)  # chunks of workers that were computed here too
    modules: weakref.WeakKeyDictionary[nn.Module, "Shared"] = field(default_factory=weakref.WeakKeyDictionary)
    num_calls: int = 0
    num_images: int = 0
    flags: Any = None  # those that the workers have
    released: list[int] = field(default_factory=list)  # calls that the workers may drop
    dropped: list[int] = field(default_factory=list)  # images that they may drop
    process: int = field(default_factory=os.getpid)
    variables: dict[bytes, bytes] = field(default_factory=lambda: dict(os.environb))  # before the script runs
    has_failed: bool = False  # whether workers on other machines are to end as the script does

    def new_number(self) -> int:
        """The number of a new call."""
        self.num_calls += 1
        return self.num_calls

    def new_flags(self) -> Any:
        """The flags of this process, if they are others than the workers'."""
        before, self.flags = self.flags, flags_now(self.variables)
        return None if self.flags == before else self.flags

    def forget(self, module: nn.Module, image: Image) -> None:
        """Has a module be sent anew, and the flags."""
        # A new image takes its place, by another number: this one has noted as sent what may not have arrived.
        self.flags = None
        self.modules.pop(module, None)
        self.dropped.append(image.number)

    def release(self, number: int) -> None:
        """Drops a call."""
        # Called by a finalizer, at any moment and perhaps amid a message: the workers hear of it with the next one.
        self.calls.pop(number, None)
        self.again.pop(number, None)
        self.released.append(number)

    def unneeded(self) -> tuple[list[int], list[int]]:
        """The calls and images that the workers may drop, once."""
        lists = list(self.released), list(self.dropped)
        # Not `clear`: a finalizer may have added to them meanwhile.
        del self.released[: len(lists[0])], self.dropped[: len(lists[1])]
        return lists


@dataclass
class Shared:
    """A module that is shared out."""

    split: Split
    image: Image
    num_forwards: int = 0
    num_checks: int = 0
    plan: Any = None  # the last forward's, which the workers have, and its pickled template


def end(driver: Driver) -> None:
    """Lets the workers end, unless one has ended, or this is a process that the script has forked."""
    # Without this message a worker on another machine finds the link broken, and ends by an error too: the launcher
    # there must not take a script that has failed for one that is done.
    if os.getpid() == driver.process and not driver.has_failed:
        with suppress(PeerLostError, DeterminismError):  # of workers that are out of step
            driver.link.send(encode(("end",)))


def changes_what_it_reads(when: str, what: str) -> DeterminismError:
    """The error of a forward or backward that writes what other chunks read."""
    return DeterminismError(
        f"the wrapped {when} changes {what}: chunks on other devices would not see it, and "
        "what is read of it afterwards would depend on the number of devices. Return the value from the forward, or "
        "register a buffer"
    )


def other_bits(what: str) -> DeterminismError:
    """The error of a worker that lacks something."""
    return DeterminismError(
        f"{what}, which a worker has computed, has other bits when this process computes it again: {LACKING}"
    )
