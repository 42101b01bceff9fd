"""The restarts: how many of those that are allowed are used up; one allowance for whole crews and single workers."""

from dataclasses import dataclass

from samestep.launcher.losses import Ending


@dataclass
class Restarts:
    """An allowance.

    Attributes:
        limit: how many restarts there may be.
        used: how many there were.
        ending: what ended the last attempt, if a worker did.
        why_not: why nothing is started again although the allowance is not used up; empty if it may be.
    """

    limit: int
    used: int = 0
    ending: Ending | None = None
    why_not: str = ""

    def take(self) -> bool:
        """Uses one up; False if none is left."""
        if self.used >= self.limit:
            return False
        self.used += 1
        return True

    def take_after(self, ending: Ending | None) -> bool:
        """Uses one up for another attempt; False if none is left, or two attempts in turn ended in the same way.

        Args:
            ending: of the attempt; None if no worker ended it.
        """
        before, self.ending = self.ending, ending
        if before is None or ending is None or not ending.is_like(before) or self.used >= self.limit:
            return self.take()
        left = self.limit - self.used
        self.why_not = (
            f"two attempts in turn have ended in step {ending.loss.step} by {ending.loss.cause}: that is no accident, "
            f"and is not tried again, although {left} of {self.limit} restarts are left"
        )
        return False
