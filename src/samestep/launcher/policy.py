"""The policy: what the supervisor does about workers that are lost."""

import math
from dataclasses import dataclass

from samestep.comm.heartbeat_page import MAX_SLOTS
from samestep.errors import UsageError

HANG_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Policy:
    """What is done about workers that are lost; checked when it is made.

    Attributes:
        heal: go on with the workers that are left, where these can.
        min_devices: with fewer left the run ends, or starts again.
        max_restarts: how often all workers may be started again, or a lost one replaced, in all.
        hang_timeout_seconds: a worker that shows no sign of life for so long, while it should, counts as lost; 0 for
            never.
        replace: start a new worker on the device of a lost one; the others count it in when it is ready.
    """

    heal: bool = True
    min_devices: int = 1
    max_restarts: int = 0
    hang_timeout_seconds: float = HANG_TIMEOUT_SECONDS
    replace: bool = False

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            UsageError: one of them, or two together, cannot be.
        """
        if self.min_devices < 1:
            raise UsageError(
                f"got {self.min_devices} as the least number of devices; needed: 1 or more (--min-devices)"
            )
        if self.max_restarts < 0:
            raise UsageError(f"got {self.max_restarts} restarts; needed: 0 or more (--max-restarts)")
        if not (self.hang_timeout_seconds >= 0 and math.isfinite(self.hang_timeout_seconds)):
            raise UsageError(
                f"got a hang timeout of {self.hang_timeout_seconds} s; needed: seconds, or 0 for never (--hang-timeout)"
            )
        if self.replace and self.max_restarts == 0:
            raise UsageError("got --replace, which starts workers again, but no --max-restarts; give it 1 or more")

    def check_devices(self, count: int) -> None:
        """Checks a number of devices against the policy.

        Raises:
            UsageError: they are fewer than the run may go on with, or more than one supervisor watches.
        """
        if count < self.min_devices:
            raise UsageError(
                f"got {count} devices and --min-devices {self.min_devices}; needed: no more than there are"
            )
        if count > MAX_SLOTS:
            raise UsageError(f"got {count} devices; one machine runs {MAX_SLOTS} workers at most (--devices)")
