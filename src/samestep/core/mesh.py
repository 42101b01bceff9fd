"""The mesh: the ranks as a grid, with one axis for each way in which work is divided."""

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import UsageError

# From the outermost to the innermost: neighbours along an inner axis have adjacent numbers, so the axes with the most
# communication stay within a node when ranks are numbered node by node.
AXES = ("data", "pipe", "tensor")
REST = -1


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid: "data" divides the microbatches, "pipe" the layers, "tensor" the tensors within a layer.

    `sizes` holds the ranks along each axis, 1 for axes that are not given; a `UsageError` names one that is wrong.
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
        """The position of a rank along each axis."""
        place = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.sizes[axis])
        return {axis: place[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at some coordinates; those not given are 0."""
        number = 0
        for axis in AXES:
            number = number * self.sizes[axis] + coordinates.get(axis, 0)
        return number

    def along(self, axis: str, rank: int) -> range:
        """The ranks along an axis through a rank, including it."""
        first = self.rank({**self.coordinates(rank), axis: 0})
        step = self.rank({axis: 1}) if self.sizes[axis] > 1 else 1
        return range(first, first + step * self.sizes[axis], step)

    def lines(self, axis: str) -> list[range]:
        """The lines of ranks along an axis; each rank is in one of them."""
        return list(dict.fromkeys(self.along(axis, rank) for rank in range(self.world_size)))


def make_mesh(sizes: Mapping[str, int] | None, world_size: int) -> Mesh:
    """The mesh of a world; raises a `UsageError` if the sizes do not multiply to it."""
    if sizes is None:
        return Mesh({"data": world_size})
    if not isinstance(sizes, Mapping):
        raise UsageError(f'got mesh={sizes!r}; it is a dict, for example {{"data": 2, "pipe": 2}}')
    open_axes = [axis for axis, size in sizes.items() if size == REST and not isinstance(size, bool)]
    if len(open_axes) > 1:
        raise UsageError(f"got mesh={dict(sizes)}; one size may be -1 (what is left), not {len(open_axes)}")
    known = Mesh({axis: size for axis, size in sizes.items() if axis not in open_axes} | dict.fromkeys(open_axes, 1))
    if world_size == 1:
        return Mesh({})  # one rank does everything whatever the sizes, with the same bits: scripts run unchanged
    rest, left = divmod(world_size, known.world_size)
    if left or (rest != 1 and not open_axes):
        inner = known.num_inner
        advice = f"use a multiple of {inner} devices (--devices), or other sizes"
        if world_size % inner == 0:
            advice = f'use "data": {world_size // inner}, or {known.world_size} devices (--devices)'
        raise UsageError(
            f"got mesh={dict(sizes)} for {world_size} devices; its sizes multiply to {known.world_size}: {advice}"
        )
    return Mesh({axis: rest if axis in open_axes else size for axis, size in sizes.items()})
