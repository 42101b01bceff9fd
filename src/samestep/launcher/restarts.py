"""The restarts: how many of those that are allowed are used up; one allowance for whole crews and single workers."""

from dataclasses import dataclass


@dataclass
class Restarts:
    """An allowance.

    Attributes:
        limit: how many restarts there may be.
        used: how many there were.
    """

    limit: int
    used: int = 0

    def take(self) -> bool:
        """Uses one up; False if none is left."""
        if self.used >= self.limit:
            return False
        self.used += 1
        return True
