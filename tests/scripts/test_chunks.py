"""The cut of a wrapped forward's arguments, the templates of nested values, and which rank runs which chunk."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from samestep.errors import UsageError
from samestep.scripts.split_forward.chunks import (
    already_cut,
    chunk_sizes,
    cut,
    deal,
    is_tensor,
    put_together,
    take_apart,
)


def cut_all(*args, num_microbatches=4, dim=0, scatter="tensors", **kwargs):
    return cut(args, kwargs, num_microbatches, dim, scatter)


def sizes_of(chunks):
    return [leaf.sizes for leaf in chunks.leaves]


@given(length=st.integers(0, 300), num_chunks=st.integers(1, 40))
def test_the_sizes_of_chunks_are_those_of_torch(length, num_chunks):
    expected = tuple(len(chunk) for chunk in torch.empty(length).chunk(num_chunks))
    assert chunk_sizes(length, num_chunks) == expected
    assert chunk_sizes(10, 8) == (2, 2, 2, 2, 2)


@given(num_chunks=st.integers(1, 60), world_size=st.integers(1, 20))
def test_every_chunk_is_dealt_once_in_order_and_ranks_without_one_come_last(num_chunks, world_size):
    ranges = deal(num_chunks, world_size)
    assert len(ranges) == world_size
    assert [chunk for chunks in ranges for chunk in chunks] == list(range(num_chunks))
    assert all(left.stop == right.start for left, right in pairwise(ranges))
    busy = [bool(chunks) for chunks in ranges]
    assert busy == sorted(busy, reverse=True)
    assert sum(busy) == min(num_chunks, world_size)
    lengths = [len(chunks) for chunks in ranges if chunks]
    assert max(lengths) - min(lengths) <= 1


def test_tensors_are_cut_wherever_they_are_and_all_else_is_given_to_every_chunk():
    text, table = "mode", {"scale": 3}
    chunks = cut_all(
        {"x": torch.arange(6.0)},
        [torch.arange(12).view(6, 2)],
        text,
        num_microbatches=3,
        table=table,
        none=None,
        number=torch.tensor(0.5),
    )
    assert chunks.num_chunks == 3
    assert sizes_of(chunks) == [(2, 2, 2), (2, 2, 2), ()]
    args, kwargs = chunks.arguments(["first", "second", "whole"])
    assert args == ({"x": "first"}, ["second"], text)
    assert kwargs == {"table": table, "none": None, "number": "whole"}


@pytest.mark.parametrize("dim", [1, -2])
def test_tensors_are_cut_along_the_dim_counted_from_either_end(dim):
    chunks = cut_all(torch.tensor(1.0), torch.empty(2, 7, 3), dim=dim)
    assert sizes_of(chunks) == [(), (2, 2, 2, 1)]
    assert [chunks.num_rows(chunk) for chunk in range(4)] == [2, 2, 2, 1], "the first tensor with rows counts"
    with pytest.raises(UsageError, match=rf"\[6\] to cut along dim={dim}"):
        cut_all(torch.empty(6), dim=dim)


def test_without_tensors_there_are_as_many_chunks_as_microbatches_and_without_inputs_there_is_one():
    assert cut_all(3, "mode").num_chunks == cut_all(torch.tensor(1.0)).num_chunks == cut_all(flag=True).num_chunks == 4
    assert (cut_all().num_chunks, cut_all().num_rows(0)) == (1, 1)
    assert sizes_of(cut_all(torch.empty(0, 5), num_microbatches=3)) == [(0, 0, 0)], "as of torch.chunk"


def test_lists_are_cut_by_element_if_that_is_asked_for_whatever_the_dim():
    images = [torch.empty(3, size, size) for size in (4, 5, 6, 7, 8)]
    chunks = cut_all(images, torch.empty(2, 5), num_microbatches=2, dim=1, scatter="elements", targets=[{}] * 5)
    assert sizes_of(chunks) == [(3, 2)] * 3
    assert [leaf.dim for leaf in chunks.leaves] == [0, 1, 0]
    assert len(cut_all([torch.empty(5, 1), torch.empty(5, 1)], num_microbatches=2).leaves) == 2


def test_inputs_that_do_not_split_alike_are_an_error_that_shows_each_of_them():
    with pytest.raises(UsageError) as caught:
        cut_all(torch.empty(12, 3), torch.empty(2, 12, 4), torch.tensor(1.0))
    for part in ("dim=0", "4 microbatches", "[12, 3] gives 4 (of 3, 3, 3, 3)", "[2, 12, 4] gives 2 (of 1, 1)"):
        assert part in str(caught.value)
    with pytest.raises(UsageError, match=r"3 elements gives 3 \(of 1, 1, 1\)"):
        cut_all([1, 2, 3], torch.empty(8, 1), scatter="elements")
    # Different lengths that give equally many chunks are left to the script, as in torch.
    assert sizes_of(cut_all(torch.empty(8, 1), torch.empty(16, 1))) == [(2, 2, 2, 2), (4, 4, 4, 4)]


def test_chunks_that_the_script_cut_keep_their_sizes_and_their_objects():
    thing, first, second = object(), torch.zeros(2, 3), torch.zeros(5, 1)
    chunks = already_cut([((thing, first), {}), ((), {"x": [second, torch.tensor(1.0)]}), ((thing,), {})])
    assert [leaf.sizes for leaf in chunks.leaves] == [(2, 0, 0), (0, 5, 0), ()]
    assert [chunks.num_rows(chunk) for chunk in range(3)] == [2, 5, 1], "a chunk without rows weighs one"
    found = [chunks.arguments(["a", "b", "c"], chunk) for chunk in range(3)]
    assert found == [((thing, "a"), {}), ((), {"x": ["b", "c"]}), ((thing,), {})]


@pytest.mark.parametrize("sparse", [torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()], ids=["coo", "csr"])
def test_a_sparse_input_is_refused_in_a_sentence(sparse):
    with pytest.raises(UsageError, match=r"layout torch\.sparse_\w+ .* cannot be cut into chunks"):
        cut((torch.ones(4, 2), [sparse]), {}, 2, 0, "tensors")
    with pytest.raises(UsageError, match="pass it dense, or keep it in an attribute of the module"):
        already_cut([((sparse,), {})])


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


@dataclasses.dataclass
class Doubled:
    logits: Any

    def __post_init__(self):
        self.logits = self.logits * 2


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


TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.builds(torch.ones, st.just(1))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(Row),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(), inner, max_size=3).map(Readable),
        st.builds(Pair, inner, inner),
        st.builds(namedtuple("Old", "a b"), inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(value=TREES)
def test_any_nesting_comes_back_with_its_own_tensors_and_types(value):
    leaves, template = take_apart(value, is_tensor)
    assert same(put_together(template, leaves), value)
    assert not same(put_together(template, [leaf.clone() for leaf in leaves]), value) or not leaves


def test_leaves_are_in_reading_order_and_a_tensor_in_two_places_is_two():
    x, y = torch.zeros(1), torch.ones(1)
    leaves, template = take_apart({"b": [x, torch.Size([2])], "a": (y, {"k": x})}, is_tensor)
    assert [id(leaf) for leaf in leaves] == [id(x), id(y), id(x)]
    assert put_together(template, "xyz") == {"b": ["x", torch.Size([2])], "a": ("y", {"k": "z"})}


def test_containers_keep_what_they_are():
    table = defaultdict(list, x=torch.ones(1))
    again = put_together(take_apart(table, is_tensor)[1], ["x"])
    assert (type(again), again["absent"], "absent" in table) == (defaultdict, [], False)
    largest = torch.rand(3, 2).max(dim=1)  # of a type of torch's own
    assert type(put_together(take_apart(largest, is_tensor)[1], [1, 2])) is type(largest)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_packed_sequences_are_cut_by_rows_and_come_back_as_torch_packs_them(is_sorted):
    lengths = [5, 4, 4, 2, 1] if is_sorted else [2, 5, 1, 4, 4]
    rows = [torch.rand(length, 3) for length in lengths]
    whole = pack_sequence(rows, enforce_sorted=is_sorted)
    leaves, template = take_apart({"packed": [whole]}, is_tensor)
    again = put_together(template, leaves)["packed"][0]
    assert [None if part is None else part.tolist() for part in again] == [
        None if part is None else part.tolist() for part in whole
    ]
    for scatter in ("tensors", "batch"):
        chunks = cut_all(whole, torch.empty(5, 2), num_microbatches=3, scatter=scatter)
        assert sizes_of(chunks) == [(2, 2, 1), (sum(lengths[:2]), sum(lengths[2:4]), lengths[4]), (2, 2, 1)]
        pieces = [leaf.value.split(leaf.sizes)[1] for leaf in chunks.leaves]
        ((part, _), _) = chunks.arguments(pieces, 1)
        assert [row.tolist() for row in unpack_sequence(part)] == [row.tolist() for row in rows[2:4]]
    whole_for_all = cut_all(torch.empty(4, 2), whole, num_microbatches=2, scatter="batch")
    assert sizes_of(whole_for_all) == [(2, 2), (), ()], "another number of rows"


def test_dataclasses_are_looked_into_if_that_is_asked_for_and_classes_are_not():
    value = Scores(logits=[torch.ones(2)], loss=torch.ones(()))
    assert take_apart(value, is_tensor) == ([], value)
    leaves, template = take_apart((value, 1, Scores), is_tensor, dataclasses=True)
    assert len(leaves) == 2
    again, one, kind = put_together(template, ["a", "b"])
    assert again == Scores(logits=["a"], loss="b")
    assert (again.seen, one, kind) == (7, 1, Scores)
    leaves, template = take_apart(Doubled(torch.ones(2)), is_tensor, dataclasses=True)
    assert put_together(template, leaves).logits.tolist() == [2.0, 2.0]
