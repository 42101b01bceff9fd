"""The policy: what the supervisor does about failed workers, and how many restarts are left."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samestep.comm.heartbeat_page import MAX_SLOTS
from samestep.errors import UsageError

if TYPE_CHECKING:
    from samestep.launcher.failures import AttemptFailure

HANG_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Policy:
    """What is done about failed workers; checked when it is made."""

    heal: bool = True  # go on with the workers that are left, if they can
    min_devices: int = 1  # with fewer left the run ends, or restarts
    max_restarts: int = 0  # restarts of all workers and replacements of single ones, in all
    hang_timeout_seconds: float = HANG_TIMEOUT_SECONDS  # a worker without a heartbeat for so long hangs; 0: never
    replace: bool = False  # start a new worker on the device of a failed one

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            UsageError: one is out of range, or two contradict each other.
        """
        if self.min_devices < 1:
            raise UsageError(
                f"got {self.min_devices} as the least number of devices; needed: 1 or more (--min-devices)"
            )
        if self.max_restarts < 0:
            raise UsageError(f"got {self.max_restarts} restarts; needed: 0 or more (--max-restarts)")
        if not (self.hang_timeout_seconds >= 0 and math.isfinite(self.hang_timeout_seconds)):
            raise UsageError(
                f"got a hang timeout of {self.hang_timeout_seconds} s; needed: seconds, or 0 for never "
                "(--hang-timeout-seconds)"
            )
        if self.replace and self.max_restarts == 0:
            raise UsageError("got --replace, which starts workers again, but no --max-restarts; give it 1 or more")

    def check_devices(self, count: int) -> None:
        """Checks a number of devices against the policy.

        Raises:
            UsageError: there are fewer than the run may go on with, or too many for one machine.
        """
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
