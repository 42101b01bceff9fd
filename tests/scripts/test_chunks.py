"""How the arguments of a wrapped forward are cut, and which rank runs which chunk."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import UsageError
from samestep.scripts.wrapped.chunks import Chunks, already_cut, chunk_sizes, cut, deal


def cut_all(*args, num_microbatches=4, dim=0, scatter="tensors", **kwargs):
    return cut(args, kwargs, num_microbatches, dim, scatter)


def sizes_of(chunks: Chunks):
    return [leaf.sizes for leaf in chunks.leaves]


@settings(deadline=None)
@given(length=st.integers(0, 300), num_chunks=st.integers(1, 40))
def test_the_sizes_of_chunks_are_those_of_torch(length, num_chunks):
    expected = tuple(len(chunk) for chunk in torch.empty(length).chunk(num_chunks))
    assert chunk_sizes(length, num_chunks) == expected


@pytest.mark.parametrize(
    ("length", "num_chunks", "sizes"),
    [(30, 4, (8, 8, 8, 6)), (10, 8, (2, 2, 2, 2, 2)), (1, 4, (1,)), (0, 3, (0, 0, 0)), (9, 1, (9,))],
)
def test_the_sizes_of_chunks_are_these(length, num_chunks, sizes):
    assert chunk_sizes(length, num_chunks) == sizes


@settings(deadline=None)
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
        {"x": torch.arange(6.0)}, [torch.arange(12).view(6, 2)], text, num_microbatches=3, table=table, none=None
    )
    assert chunks.num_chunks == 3
    assert sizes_of(chunks) == [(2, 2, 2)] * 2
    args, kwargs = chunks.arguments(["first", "second"])
    assert args == ({"x": "first"}, ["second"], text)
    assert kwargs == {"table": table, "none": None}


@pytest.mark.parametrize("dim", [1, -2])
def test_tensors_are_cut_along_the_dim_counted_from_either_end(dim):
    chunks = cut_all(torch.empty(2, 7, 3), dim=dim)
    assert sizes_of(chunks) == [(2, 2, 2, 1)]
    assert chunks.leaves[0].dim == 1
    assert [chunks.num_rows(chunk) for chunk in range(4)] == [2, 2, 2, 1]


def test_a_0d_tensor_is_given_whole_to_every_chunk():
    chunks = cut_all(torch.tensor(0.5), torch.empty(6), num_microbatches=2)
    assert sizes_of(chunks) == [(), (3, 3)]
    assert chunks.num_chunks == 2
    assert chunks.num_rows(1) == 3, "the first tensor with rows counts"


def test_without_tensors_there_are_as_many_chunks_as_microbatches_and_without_inputs_there_is_one():
    assert cut_all(3, "mode").num_chunks == 4
    assert cut_all(torch.tensor(1.0)).num_chunks == 4
    assert cut_all(flag=True).num_chunks == 4
    assert cut_all().num_chunks == 1
    assert cut_all().num_rows(0) == 1


def test_fewer_rows_than_microbatches_make_fewer_chunks():
    assert cut_all(torch.empty(10, 2), num_microbatches=8).num_chunks == 5
    assert cut_all(torch.empty(1, 2), num_microbatches=8).num_chunks == 1


def test_an_empty_batch_is_cut_in_empty_chunks_as_torch_does():
    chunks = cut_all(torch.empty(0, 5), num_microbatches=3)
    assert chunks.num_chunks == 3
    assert sizes_of(chunks) == [(0, 0, 0)]


def test_lists_are_cut_by_element_where_that_is_asked_for():
    images = [torch.empty(3, size, size) for size in (4, 5, 6, 7, 8)]
    chunks = cut_all(images, torch.empty(5, 2), num_microbatches=2, scatter="elements", targets=[{}, {}, {}, {}, {}])
    assert sizes_of(chunks) == [(3, 2)] * 3
    assert chunks.leaves[0].value is images
    by_tensor = cut_all([torch.empty(5, 1), torch.empty(5, 1)], num_microbatches=2)
    assert len(by_tensor.leaves) == 2, "the tensors in a list are cut along the dim otherwise"


def test_elements_are_cut_along_the_list_whatever_the_dim():
    chunks = cut_all(["a", "b", "c"], torch.empty(2, 3), num_microbatches=3, dim=1, scatter="elements")
    assert sizes_of(chunks) == [(1, 1, 1)] * 2
    assert [leaf.dim for leaf in chunks.leaves] == [0, 1]


def test_inputs_that_do_not_split_alike_are_an_error_that_shows_each_of_them():
    with pytest.raises(UsageError) as caught:
        cut_all(torch.empty(12, 3), torch.empty(2, 12, 4), torch.tensor(1.0))
    message = str(caught.value)
    for part in ("dim=0", "4 microbatches", "[12, 3] gives 4 (of 3, 3, 3, 3)", "[2, 12, 4] gives 2 (of 1, 1)"):
        assert part in message


def test_lists_that_do_not_split_alike_are_counted_in_the_error():
    with pytest.raises(UsageError, match=r"3 elements gives 3 \(of 1, 1, 1\)"):
        cut_all([1, 2, 3], torch.empty(8, 1), scatter="elements")


def test_different_lengths_that_give_equally_many_chunks_are_left_to_the_script_as_in_torch():
    assert sizes_of(cut_all(torch.empty(8, 1), torch.empty(16, 1))) == [(2, 2, 2, 2), (4, 4, 4, 4)]


@pytest.mark.parametrize("dim", [1, -2])
def test_a_dim_that_a_tensor_does_not_have_is_an_error_that_names_shape_and_dim(dim):
    with pytest.raises(UsageError, match=rf"\[6\] to cut along dim={dim}"):
        cut_all(torch.empty(6), dim=dim)


def test_chunks_that_the_script_cut_keep_their_sizes_and_their_objects():
    thing, first, second = object(), torch.zeros(2, 3), torch.zeros(5, 1)
    chunks = already_cut([((thing, first), {}), ((), {"x": [second, torch.tensor(1.0)]}), ((thing,), {})])
    assert [leaf.sizes for leaf in chunks.leaves] == [(2, 0, 0), (0, 5, 0), ()]
    assert [chunks.num_rows(chunk) for chunk in range(3)] == [2, 5, 1], "what has no rows weighs one"
    assert chunks.arguments(["a", "b", "c"], 0) == ((thing, "a"), {})
    assert chunks.arguments(["a", "b", "c"], 1) == ((), {"x": ["b", "c"]})
    assert chunks.arguments(["a", "b", "c"], 2) == ((thing,), {})


@pytest.mark.parametrize("sparse", [torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()], ids=["coo", "csr"])
def test_a_sparse_input_is_refused_in_a_sentence(sparse):
    with pytest.raises(UsageError, match=r"layout torch\.sparse_\w+ .* cannot be cut into chunks"):
        cut((torch.ones(4, 2), [sparse]), {}, 2, 0, "tensors")
    with pytest.raises(UsageError, match="pass it dense, or keep it in an attribute of the module"):
        already_cut([((sparse,), {})])
