"""Values that enter and leave a wrapped forward: the derivatives of plain autograd, on any number of ranks.

Most inputs are small whole numbers, of which sums and products are exact: so the results of plain PyTorch, on the whole
batch at once, are to be met to the bit.
"""

import pytest
import torch
from core_programs import moody, nested_gradients, on_ranks, plainly, restless
from torch import nn
from worlds import device_of

from samestep.scripts.split_forward.replicas import uninitialized

WORLDS, ENDS = (1, 2, 3), (1, 3)
# rows and microbatches: divided evenly and not; fewer chunks than microbatches; fewer chunks than ranks; one chunk
CUTS = [(12, 4), (13, 7), (5, 8), (2, 8), (1, 4)]


def shared_out(worlds, n, program, num_microbatches, *args, breaker=None):
    """The result of a program on n processes."""
    return worlds(n).run(on_ranks, program, num_microbatches, args, breaker)[0]


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize(("num_rows", "num_microbatches"), CUTS)
def test_first_and_second_derivatives_are_those_of_plain_autograd_to_the_bit(worlds, n, num_rows, num_microbatches):
    plain = plainly("cubic_derivatives", "whole", num_rows)
    assert any(entry is not None and any(entry[2]) for entry in plain[-4:]), "the second derivatives are not all zero"
    assert shared_out(worlds, n, "cubic_derivatives", num_microbatches, "whole", num_rows) == plain


@pytest.mark.parametrize("n", [2, 3])
def test_the_comparison_notices_processes_that_keep_to_themselves(worlds, n):
    plain = plainly("cubic_derivatives", "whole", 12)
    result = shared_out(worlds, n, "cubic_derivatives", 4, "whole", 12, breaker="own sum")
    assert result != plain
    assert result[:3] == plain[:3], "what went forward is right"


@pytest.mark.parametrize("num_microbatches", [4, 7])
def test_derivatives_that_round_are_the_same_bits_on_any_number_of_ranks(worlds, num_microbatches):
    alone = shared_out(worlds, 1, "cubic_derivatives", num_microbatches, "normal", 13)
    for n in WORLDS[1:]:
        assert shared_out(worlds, n, "cubic_derivatives", num_microbatches, "normal", 13) == alone


@pytest.mark.parametrize("n", WORLDS)
def test_the_comparison_notices_another_order_of_the_sum(worlds, n):
    alone = shared_out(worlds, 1, "cubic_derivatives", 7, "normal", 13)
    assert shared_out(worlds, n, "cubic_derivatives", 7, "normal", 13, breaker="right sum") != alone


@pytest.mark.parametrize("n", ENDS)
def test_gradients_that_are_added_up_on_their_way_are_those_of_the_chunks_one_by_one(worlds, n):
    expected = nested_gradients(None, device_of(0), 13, 2)
    assert shared_out(worlds, n, "nested_gradients", 7, 13, 2) == expected


@pytest.mark.parametrize("n", ENDS)
def test_results_are_free_before_python_looks_for_cycles(worlds, n):
    assert shared_out(worlds, n, "freed", 4) == [True, True]


@pytest.mark.parametrize("n", ENDS)
@pytest.mark.parametrize(
    ("num_rows", "num_microbatches", "width", "breaker"),
    [
        pytest.param(6, 6, 100, None, id="small"),
        pytest.param(6, 6, 100, "small buckets", id="small buckets"),
        pytest.param(6, 6, 5000, None, id="weights of 100 KB"),
        pytest.param(4, 2, 5001, None, id="results of 80 KB on some ranks"),
        pytest.param(600, 3, 64, None, id="results of 50 KB a chunk"),
        pytest.param(7, 7, 700, None, id="results about as large as a message"),
    ],
)
def test_large_tensors_come_through_as_small_ones_do(worlds, n, num_rows, num_microbatches, width, breaker):
    plain = plainly("wide_gradients", "whole", num_rows, width)
    sizes = num_rows, width
    assert shared_out(worlds, n, "wide_gradients", num_microbatches, "whole", *sizes, breaker=breaker) == plain


@pytest.mark.parametrize("n", [2, 3])
def test_the_comparison_notices_large_tensors_that_are_a_part_only(worlds, n):
    plain = plainly("wide_gradients", "whole", 6, 5000)
    assert shared_out(worlds, n, "wide_gradients", 6, "whole", 6, 5000, breaker="own sum") != plain


def test_results_that_did_not_come_through_are_found_when_they_are_computed_again(worlds):
    with pytest.raises(AssertionError, match="has other bits when this process computes it again"):
        shared_out(worlds, 2, "wide_gradients", 6, "whole", 6, 5000, breaker="own join")


@pytest.mark.parametrize("n", ENDS)
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("containers", "other containers"),
        ("keys", "other keys"),
        ("numbers", "numbers and strings that differ"),
        ("counts", "different things"),
        ("widths", "[1, 1] torch.float32, [1, 2] torch.float32"),
        ("dims", "[1, 2] torch.float32, [1] torch.float32"),
        ("dtypes", "[1, 2] torch.float32, [1, 2] torch.float64"),
        ("sparse", "layout torch.sparse_coo"),
    ],
)
def test_chunks_that_return_different_things_are_an_error_and_the_processes_stay_in_step(worlds, n, case, text):
    (error, message), in_step = worlds(n).run(moody, case, 4, 4)[0]
    assert error == "UsageError"
    assert text in message
    assert in_step


@pytest.mark.parametrize("n", ENDS)
@pytest.mark.parametrize(
    ("case", "name", "entries"), [("named", "Pair", ["Tensor", "list"]), ("local", "local", ["Tensor"])]
)
def test_a_result_of_a_class_of_the_script_s_own_is_one_of_that_class(worlds, n, case, name, entries):
    assert worlds(n).run(moody, case, 2, 2)[0] == ((name, entries), True)


@pytest.mark.parametrize("n", ENDS)
def test_every_chunk_of_every_forward_finds_the_module_as_the_first_did_also_after_one_that_failed(worlds, n):
    found = worlds(n).run(restless)[0]
    assert found["the first call, in every chunk"] == [True, True]
    assert found["left"] == (0, ())
    assert found["names"]


def test_lazy_layers_are_uninitialized_until_their_first_input():
    module = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))
    assert uninitialized(module)
    module(torch.ones(1, 3))
    assert not uninitialized(module)
