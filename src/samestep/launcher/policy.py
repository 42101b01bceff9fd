"""The policy: what the supervisor does about failed workers, and how many restarts are left."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from samestep.comm.heartbeat_page import MAX_SLOTS
from samestep.errors import UsageError

if TYPE_CHECKING:
    from samestep.launcher.failures import AttemptFailure

HANG_SECONDS = 600.0


def _option(help: str, default: Any, **more: Any) -> Any:
    """A field that is an option of the command line too."""
    return field(default=default, metadata={"help": help, "panel": "Failed workers", **more})


@dataclass(frozen=True)
class Policy:
    """What is done about failed workers, by the options of `samestep train` and `run`; checked when it is made."""

    heal: bool = _option("Go on with the devices that are left when a worker fails: the same bits.", True, negated=True)
    min_devices: int = _option("With fewer devices left the run ends.", 1, metavar="N")
    max_restarts: int = _option(
        "How often all workers may be restarted, from the newest checkpoint, when none can go on.",
        0,
        metavar="N",
    )
    hang_seconds: float = _option(
        "A worker without a heartbeat for so long is ended, its stack in its log. 0 for never.",
        HANG_SECONDS,
        metavar="SECONDS",
    )
    replace: bool = _option("Start a new worker on the device of a failed one; counts as a restart.", False)

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.min_devices < 1:
            raise UsageError(
                f"got {self.min_devices} as the least number of devices; needed: 1 or more (--min-devices)"
            )
        if self.max_restarts < 0:
            raise UsageError(f"got {self.max_restarts} restarts; needed: 0 or more (--max-restarts)")
        if not (self.hang_seconds >= 0 and math.isfinite(self.hang_seconds)):
            raise UsageError(
                f"got a hang timeout of {self.hang_seconds} s; needed: seconds, or 0 for never (--hang-seconds)"
            )
        if self.replace and self.max_restarts == 0:
            raise UsageError("got --replace, which starts workers again, but no --max-restarts; give it 1 or more")

    def check_devices(self, count: int) -> None:
        """Checks a number of devices against the policy."""
        if count < self.min_devices:
            raise UsageError(
                f"got {count} devices and --min-devices {self.min_devices}; needed: no more than there are"
            )
        if count > MAX_SLOTS:
            raise UsageError(f"got {count} devices; one machine runs {MAX_SLOTS} workers at most (--devices)")


@dataclass
class Restarts:
    """How many restarts are used up; one allowance for all workers together and for single ones."""

    limit: int
    used: int = 0
    last: "AttemptFailure | None" = None
    why_not: str = ""  # why none is taken although some are left

    def take(self) -> bool:
        """Uses one up; False if none is left."""
        if self.used >= self.limit:
            return False
        self.used += 1
        return True

    def take_after(self, ended_by: "AttemptFailure | None") -> bool:
        """Uses one up for another attempt; False if none is left, or two attempts in turn failed alike."""
        before, self.last = self.last, ended_by
        if before is None or ended_by is None or not ended_by.is_like(before) or self.used >= self.limit:
            return self.take()
        left = self.limit - self.used
        self.why_not = (
            f"two attempts in turn have ended in step {ended_by.failure.step} by {ended_by.failure.cause}: that is no "
            f"accident, and is not tried again, although {left} of {self.limit} restarts are left"
        )
        return False
