"""The mesh: the ranks as a grid, one axis for each way in which work is divided among them."""

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import UsageError

AXES = ("data", "pipe", "tensor")
"""From the outermost to the innermost: ranks that are neighbours along an inner axis have neighbouring numbers."""
REST = -1


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid.

    The axis "data" divides the microbatches of a batch, "pipe" the layers of the model, "tensor" what is within a
    layer. What talks most is innermost, so that it lies on one node where ranks are numbered node by node.

    Attributes:
        sizes: ranks along each axis; of those that are not named 1.

    Raises:
        UsageError: an axis that there is not, or a size that cannot be.
    """

    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if axis not in AXES:
                raise UsageError(f"got mesh axis {axis!r}; the axes are {', '.join(map(repr, AXES))}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"got {size!r} ranks along mesh axis {axis!r}; it must be 1 or more, or -1 once")
        object.__setattr__(self, "sizes", {axis: self.sizes.get(axis, 1) for axis in AXES})

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.sizes["data"] * self.num_inner

    @property
    def num_inner(self) -> int:
        """The ranks that execute the same microbatches: those along all axes but "data"."""
        return self.sizes["pipe"] * self.sizes["tensor"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank lies along each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.sizes[axis])
        return {axis: place[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a place; coordinates that are not named are 0."""
        number = 0
        for axis in AXES:
            number = number * self.sizes[axis] + coordinates.get(axis, 0)
        return number

    def along(self, axis: str, rank: int) -> range:
        """The ranks along an axis through a rank, itself among them."""
        place = self.coordinates(rank)
        first = self.rank({**place, axis: 0})
        step = self.rank({axis: 1}) if self.sizes[axis] > 1 else 1
        return range(first, first + step * self.sizes[axis], step)

    def lines(self, axis: str) -> list[range]:
        """The ranks along an axis, through every rank: each rank is in one of them."""
        return list(dict.fromkeys(self.along(axis, rank) for rank in range(self.world_size)))


def make_mesh(sizes: Mapping[str, int] | None, world_size: int) -> Mesh:
    """The mesh over so many ranks.

    A rank that is alone needs none: whatever was asked for, it does everything, and the bits are the same.
    """
    if sizes is None:
        return Mesh({"data": world_size})
    if not isinstance(sizes, Mapping):
        raise UsageError(f'got mesh={sizes!r}; it is a dict, for example {{"data": 2, "pipe": 2}}')
    open_axes = [axis for axis, size in sizes.items() if size == REST and not isinstance(size, bool)]
    if len(open_axes) > 1:
        raise UsageError(f"got mesh={dict(sizes)}; one size may be -1 (what is left), not {len(open_axes)}")
    known = Mesh({axis: size for axis, size in sizes.items() if axis not in open_axes} | dict.fromkeys(open_axes, 1))
    if world_size == 1:
        return Mesh({})
    rest, left = divmod(world_size, known.world_size)
    if left or (rest != 1 and not open_axes):
        raise UsageError(
            f"got mesh={dict(sizes)} for {world_size} devices; its sizes multiply to {known.world_size}: "
            f"{_advice(known, world_size)}"
        )
    return Mesh({axis: rest if axis in open_axes else size for axis, size in sizes.items()})


def _advice(known: Mesh, world_size: int) -> str:
    """What would work."""
    inner = known.num_inner
    if world_size % inner == 0:
        return f'use "data": {world_size // inner}, or --devices for {known.world_size}'
    return f"use a multiple of {inner} devices (--devices), or other sizes"
