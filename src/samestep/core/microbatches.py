"""Microbatches: how a global batch is cut, and which rank executes which microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from samestep.checks import check_counts
from samestep.errors import UsageError

DEFAULT_NUM_MICROBATCHES = 8


@dataclass(frozen=True)
class WorkPlan:
    """Who computes what: the microbatches of each rank.

    Args:
        num_microbatches: V.
        slots: of the workers, by rank.
        num_active: so many workers execute microbatches, the first ones; the others are spares.
        shares: relative work of each slot from 0 on; equal if None.
        is_dealt: whether microbatches are dealt to the ranks in turn.
    """

    num_microbatches: int
    slots: tuple[int, ...]
    num_active: int
    shares: tuple[float, ...] | None = None
    is_dealt: bool = False

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The microbatches of each rank: all on the first ranks, none on the spares after them."""
        if self.is_dealt:
            return dealt_ranges(self.num_microbatches, len(self.slots))
        return ranges_of_slots(self.num_microbatches, self.slots, self.num_active, self.shares)

    def num_rounds(self, num_samples: int) -> int:
        """How often each rank runs the model for a batch, if all of them must do so equally often; else 0."""
        return -(-min(num_samples, self.num_microbatches) // len(self.slots)) if self.is_dealt else 0

    def to_fetch(self, rank: int, num_leaves: int) -> range:
        """The microbatches whose samples a rank needs, of so many that hold samples.

        They are its own; if it has none and they are dealt in turn, the first: FSDP2 needs every rank in every round.
        """
        mine = self.ranges[rank]
        if self.is_dealt and mine.start >= num_leaves:
            return range(1)
        return range(mine.start, min(mine.stop, num_leaves), mine.step)


def check_num_microbatches(num_microbatches: int | None, global_batch_size: int | None) -> int:
    """The number of microbatches: as given, else 8, or the global batch size if that is smaller."""
    check_counts(global_batch_size=global_batch_size, num_microbatches=num_microbatches)
    if num_microbatches is not None:
        return num_microbatches
    return DEFAULT_NUM_MICROBATCHES if global_batch_size is None else min(DEFAULT_NUM_MICROBATCHES, global_batch_size)


def microbatch_bounds(length: int, num_microbatches: int) -> list[int]:
    """The bounds of the microbatches of a batch, larger ones first; a batch smaller than V leaves the last ones empty.

    Sizes differ by at most one, and depend on (length, num_microbatches) alone, never on the ranks.
    """
    size, larger = divmod(length, num_microbatches)
    return [s * size + min(s, larger) for s in range(num_microbatches + 1)]


def microbatch_ranges(
    num_microbatches: int, world_size: int, shares: Sequence[float] | None = None
) -> tuple[range, ...]:
    """The contiguous microbatches that each rank executes, in proportion to the shares if given."""
    check_num_microbatches(num_microbatches, None)
    if world_size > num_microbatches:
        raise UsageError(
            f"got {world_size} devices for {num_microbatches} microbatches; a device needs at least one microbatch: "
            f"use num_microbatches={world_size} or more (--num-microbatches; it is part of the contract), or at most "
            f"{num_microbatches} devices (--devices)"
        )
    if shares is None:
        cuts = [rank * num_microbatches // world_size for rank in range(world_size + 1)]
        return tuple(range(a, b) for a, b in pairwise(cuts))
    active_shares(shares, world_size, 0)
    if not all(0 < share < float("inf") for share in shares):
        raise UsageError(f"got shares={list(shares)}; they must be above 0")
    return _weighted_ranges(num_microbatches, shares)


def ranges_of_slots(
    num_microbatches: int, slots: Sequence[int], num_active: int, shares: Sequence[float] | None
) -> tuple[range, ...]:
    """The microbatches of the workers in some slots: all on the first `num_active`, none on the spares after them."""
    num_active = min(num_active, len(slots))
    if shares is not None:  # by slot, which stays; a late worker does as much as the average
        average = sum(shares) / len(shares)
        shares = [shares[slot] if slot < len(shares) else average for slot in slots[:num_active]]
    # Empty, but in its place: ranges by rank stay in the order of the microbatches.
    rest = range(num_microbatches, num_microbatches)
    return microbatch_ranges(num_microbatches, num_active, shares) + (rest,) * (len(slots) - num_active)


def dealt_ranges(num_microbatches: int, world_size: int) -> tuple[range, ...]:
    """The microbatches of each rank if they are dealt in turn: rank r has r, r + D, r + 2D, …"""
    # In round k the ranks execute the adjacent microbatches kD … kD + D - 1, so the rank that receives the gradients of
    # all of them can push these on the tree at once.
    return tuple(range(rank, num_microbatches, world_size) for rank in range(world_size))


def in_microbatch_order(ranges: Sequence[range]) -> list[int] | None:
    """The permutation that puts entries gathered by rank in the order of the microbatches; None if they are in it."""
    if all(before.stop == after.start and before.step == 1 for before, after in pairwise(ranges)):
        return None
    microbatches = [microbatch for microbatches in ranges for microbatch in microbatches]
    return sorted(range(len(microbatches)), key=microbatches.__getitem__)


def active_shares(shares: Sequence[float] | None, world_size: int, spares: int) -> list[float] | None:
    """The shares of the ranks that are not spares."""
    if shares is not None and len(shares) != world_size:
        raise UsageError(f"got {len(shares)} shares for {world_size} devices; needed: one number a device")
    return None if shares is None else list(shares[: world_size - spares])


def _weighted_ranges(num_microbatches: int, shares: Sequence[float]) -> tuple[range, ...]:
    """One microbatch for each rank, the rest by largest remainder; ties go to the lower rank, alike on all ranks."""
    spare = num_microbatches - len(shares)
    exact = [max(0.0, num_microbatches * share / sum(shares) - 1) for share in shares]
    scale = spare / sum(exact) if sum(exact) else 0.0
    extra = [int(value * scale) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (extra[rank] - exact[rank] * scale, rank))
    for rank in by_remainder[: spare - sum(extra)]:
        extra[rank] += 1
    ranges, start = [], 0
    for count in extra:
        ranges.append(range(start, start + 1 + count))
        start += 1 + count
    return tuple(ranges)
