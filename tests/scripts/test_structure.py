"""Nested values, taken apart into tensors and a template, and put together again."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.scripts.wrapped.chunks import Slot, is_tensor, put_together, take_apart


class Pair(NamedTuple):
    left: Any
    right: Any = None


class Readable(dict):
    """A dict whose entries are attributes too, as many libraries have one."""

    __getattr__ = dict.__getitem__


class Row(list):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    logits: Any
    loss: Any = None
    seen: int = dataclasses.field(init=False, default=7)


Old = namedtuple("Old", "a b")
SCALED = [
    [torch.ones(1), (torch.ones(2), None, "text", 3)],
    Pair(torch.ones(1), Pair([torch.ones(2)])),
    Old({"x": torch.ones(1)}, b"bytes"),
    OrderedDict(z=torch.ones(1), a=torch.ones(2)),
    Row([torch.ones(1), 5]),
    (),
    None,
    torch.Size([2, 3]),
    {1: torch.ones(1), (2, 3): {}},
]


def renumbered(leaves):
    """Other leaves, by which the places can be told."""
    return [f"leaf {index}" for index in range(len(leaves))]


def same(left, right):
    """Whether two nested values have the same types and entries, tensors being the very same."""
    if isinstance(left, torch.Tensor):
        return left is right
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("value", SCALED, ids=lambda value: type(value).__name__)
def test_what_was_taken_apart_is_put_together_as_it_was(value):
    leaves, template = take_apart(value, is_tensor)
    assert same(put_together(template, leaves), value)
    assert not same(put_together(template, [leaf.clone() for leaf in leaves]), value) or not leaves


TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.builds(torch.ones, st.just(1))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=50)
@given(value=TREES)
def test_any_nesting_comes_back_with_its_own_tensors(value):
    leaves, template = take_apart(value, is_tensor)
    assert same(put_together(template, leaves), value)


def test_leaves_are_in_reading_order_and_the_template_holds_slots():
    x, y, z = (torch.full((1,), float(k)) for k in range(3))
    leaves, template = take_apart({"b": [x], "a": (y, {"k": z})}, is_tensor)
    assert all(found is expected for found, expected in zip(leaves, (x, y, z), strict=True))
    assert template == {"b": [Slot(0)], "a": (Slot(1), {"k": Slot(2)})}
    assert put_together(template, renumbered(leaves)) == {"b": ["leaf 0"], "a": ("leaf 1", {"k": "leaf 2"})}


def test_one_tensor_in_two_places_is_two_leaves():
    x = torch.ones(2)
    leaves, template = take_apart([x, x], is_tensor)
    assert len(leaves) == 2
    assert put_together(template, [1, 2]) == [1, 2]


def test_the_original_is_left_as_it_was():
    value = {"x": [torch.ones(1)]}
    inner = value["x"]
    leaves, template = take_apart(value, is_tensor)
    put_together(template, renumbered(leaves))
    assert value["x"] is inner
    assert is_tensor(inner[0])


def test_a_defaultdict_keeps_its_factory():
    value = defaultdict(list, x=torch.ones(1))
    leaves, template = take_apart(value, is_tensor)
    again = put_together(template, leaves)
    assert type(again) is defaultdict
    assert again["absent"] == []
    assert "absent" not in value


def test_a_dict_subclass_keeps_its_class():
    leaves, template = take_apart(Readable(loss=torch.ones(1)), is_tensor)
    assert put_together(template, leaves).loss is leaves[0]


def test_what_torch_returns_as_named_tuples_comes_back_as_such():
    value = torch.rand(3, 2).max(dim=1)
    leaves, template = take_apart(value, is_tensor)
    again = put_together(template, leaves)
    assert type(again) is type(value)
    assert again.indices is value.indices


def test_dataclasses_are_looked_into_where_that_is_asked_for():
    value = Scores(logits=[torch.ones(2)], loss=torch.ones(()))
    whole, template = take_apart(value, is_tensor)
    assert whole == []
    assert template is value
    leaves, template = take_apart((value, 1), is_tensor, dataclasses=True)
    again, one = put_together(template, renumbered(leaves))
    assert again == Scores(logits=["leaf 0"], loss="leaf 1")
    assert (again.seen, one) == (7, 1)


def test_a_class_is_no_dataclass_to_look_into():
    leaves, template = take_apart([Scores, torch.ones(1)], is_tensor, dataclasses=True)
    assert len(leaves) == 1
    assert template[0] is Scores


def test_lists_may_be_leaves():
    leaves, template = take_apart(([1, 2], {"x": [[3]]}), lambda value: isinstance(value, list))
    assert leaves == [[1, 2], [[3]]]
    assert put_together(template, ["a", "b"]) == ("a", {"x": "b"})
