"""The cut of a wrapped forward's arguments, the templates of nested values, and which rank runs which chunk."""

import dataclasses
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

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
from samestep.scripts.split_forward.replicas import uninitialized


def test_lazy_layers_are_uninitialized_until_their_first_input():
    module = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))
    assert uninitialized(module)
    module(torch.ones(1, 3))
    assert not uninitialized(module)


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


@pytest.mark.parametrize("sparse", [torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()], ids=["coo", "csr"])
def test_a_sparse_input_is_refused_in_a_sentence(sparse):
    with pytest.raises(UsageError, match=r"layout torch\.sparse_\w+ .* cannot be cut into chunks"):
        cut((torch.ones(4, 2), [sparse]), {}, 2, 0, "tensors")
    with pytest.raises(UsageError, match="pass it dense, or keep it in an attribute of the module"):
        already_cut([((sparse,), {})])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    logits: Any
    loss: Any = None
    seen: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass
class Doubled:
    logits: Any

    def __post_init__(self):
        self.logits = self.logits * 2


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
