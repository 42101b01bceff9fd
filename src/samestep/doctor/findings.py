"""The finding: what one check saw of this machine, whether that is good, and what to do where it is not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["good", "note", "bad"]
AREA = "ranks"
"""The area of what ranks find out between them."""


@dataclass(frozen=True)
class Finding:
    """One line of the examination.

    Attributes:
        name: what was looked at.
        state: "good"; "note", what a user might not expect; "bad", what must be mended before training.
        found: what was seen, a sentence without its full stop.
        advice: what to do about it; never empty where the state is "bad".
        area: the part of the examination, such as "versions"; the table of checks fills it in.
        numbers: what was measured, by name and unit, such as "latency_us".
    """

    name: str
    state: State
    found: str
    advice: str = ""
    area: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks that whoever reads of a fault reads what to do about it."""
        assert self.state != "bad" or self.advice, f"{self.name}: a bad finding needs advice"


def good(name: str, found: str, numbers: Mapping[str, float] | None = None) -> Finding:
    """What is as it should be."""
    return Finding(name, "good", found, numbers=numbers or {})


def note(name: str, found: str, advice: str = "") -> Finding:
    """What works, but not as a user might expect."""
    return Finding(name, "note", found, advice)


def bad(name: str, found: str, advice: str) -> Finding:
    """What must be mended."""
    return Finding(name, "bad", found, advice)
