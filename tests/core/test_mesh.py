"""The mesh: every rank has one place, and neighbours along inner axes have neighbouring numbers."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.core.mesh import AXES, Mesh, make_mesh
from samestep.errors import UsageError

SIZES = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


@given(SIZES)
def test_ranks_and_places_go_into_each_other(sizes):
    mesh = Mesh(sizes)
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))


@given(SIZES)
def test_each_rank_is_in_one_line_of_each_axis_which_differs_along_that_axis_alone(sizes):
    mesh = Mesh(sizes)
    for axis in AXES:
        lines = mesh.lines(axis)
        assert sorted(rank for line in lines for rank in line) == list(range(mesh.world_size))
        for line in lines:
            places = [mesh.coordinates(rank) for rank in line]
            assert [place[axis] for place in places] == list(range(sizes[axis]))
            assert len({tuple(value for key, value in place.items() if key != axis) for place in places}) == 1


def test_data_is_the_outermost_axis_and_tensor_the_innermost():
    mesh = Mesh({"tensor": 2, "data": 2, "pipe": 2})
    assert list(mesh.along("tensor", 5)) == [4, 5]
    assert list(mesh.along("pipe", 5)) == [5, 7]
    assert list(mesh.along("data", 5)) == [1, 5]


@given(SIZES, st.sampled_from(AXES))
def test_a_size_of_minus_one_is_what_is_left(sizes, axis):
    world_size = math.prod(sizes.values())
    assert world_size == 1 or make_mesh({**sizes, axis: -1}, world_size) == Mesh(sizes)


def test_without_sizes_all_ranks_are_along_data():
    assert make_mesh(None, 6) == Mesh({"data": 6})


def test_a_rank_that_is_alone_needs_no_mesh():
    assert make_mesh({"data": 2, "pipe": 4}, 1).world_size == 1


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"data": 2}, 'use "data": 6, or 2 devices (--devices)'),
        ({"pipe": 4}, "a multiple of 4 devices"),
        ({"pipe": 4, "data": -1}, "a multiple of 4 devices"),
        ({"stage": 2}, "'data', 'pipe', 'tensor'"),
        ({"pipe": 0}, "1 or more"),
        ({"pipe": True}, "1 or more"),
        ({"pipe": "2"}, "1 or more"),
        ({"data": -1, "pipe": -1}, "not 2"),
        ([2, 3], "it is a dict"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        make_mesh(sizes, 6)
