"""Positions in the data: how much of an epoch is consumed, whatever the number of devices."""

from dataclasses import dataclass

from samestep.errors import UsageError


@dataclass(frozen=True)
class Cursor:
    """A position in the data: the epoch, counted from 0, and the samples of it that are consumed."""

    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.position < 0:
            raise UsageError(f"got cursor epoch={self.epoch}, position={self.position}; neither can be negative")

    def advance(self, num_samples: int) -> "Cursor":
        """The cursor after `num_samples` more samples of this epoch."""
        return Cursor(self.epoch, self.position + num_samples)

    def next_epoch(self) -> "Cursor":
        """The cursor at the start of the next epoch."""
        return Cursor(self.epoch + 1, 0)


def batch_length(position: int, num_samples: int, global_batch_size: int, drop_last: bool = False) -> int:
    """Samples of the global batch that starts at `position`: fewer at the end of an epoch, 0 when it is over."""
    left = max(0, num_samples - position)
    return 0 if drop_last and left < global_batch_size else min(left, global_batch_size)


def num_batches(num_samples: int, global_batch_size: int, drop_last: bool = False) -> int:
    """Global batches of an epoch."""
    return num_samples // global_batch_size if drop_last else -(-num_samples // global_batch_size)
