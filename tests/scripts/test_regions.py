"""Values that enter and leave a wrapped forward: the derivatives of plain autograd, on any number of ranks.

Most inputs are small whole numbers, of which sums and products are exact: so the results of plain PyTorch, on the whole
batch at once, are to be met to the bit.
"""

import pytest
from core_programs import OUTPUT_DTYPES, moody, on_ranks, plainly

WORLDS = (1, 2, 3)
# rows and microbatches: divided evenly and not; fewer chunks than microbatches; fewer chunks than ranks; one chunk
CUTS = [(12, 4), (13, 7), (5, 8), (2, 8), (1, 4)]


def shared_out(worlds, n, program, num_microbatches, *args, breaker=None):
    """The result of a program on n ranks, which all have the same."""
    results = worlds(n).run(on_ranks, program, num_microbatches, args, breaker)
    assert all(result == results[0][0] for result, _ in results)
    return results[0][0]


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize(("num_rows", "num_microbatches"), CUTS)
def test_first_and_second_derivatives_are_those_of_plain_autograd_to_the_bit(worlds, n, num_rows, num_microbatches):
    plain = plainly("cubic_derivatives", "whole", num_rows)
    assert any(entry is not None and any(entry[2]) for entry in plain[-4:]), "the second derivatives are not all zero"
    assert shared_out(worlds, n, "cubic_derivatives", num_microbatches, "whole", num_rows) == plain


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("breaker", ["own sum", "own join"])
def test_the_comparison_notices_ranks_that_keep_to_themselves(worlds, n, breaker):
    plain = plainly("cubic_derivatives", "whole", 12)
    for result, _ in worlds(n).run(on_ranks, "cubic_derivatives", 4, ("whole", 12), breaker):
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
    assert shared_out(worlds, n, "cubic_derivatives", 7, "normal", 13, breaker="left sum") != alone


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize(("num_rows", "num_microbatches"), CUTS)
def test_every_chunk_runs_once_and_on_the_rank_it_was_dealt_to(worlds, n, num_rows, num_microbatches):
    by_rank = [ran for _, ran in worlds(n).run(on_ranks, "blend_gradients", num_microbatches, ("whole", num_rows))]
    num_chunks = {(12, 4): 4, (13, 7): 7, (5, 8): 5, (2, 8): 2, (1, 4): 1}[num_rows, num_microbatches]
    assert [chunk for ran in by_rank for chunk in ran] == [(0, chunk) for chunk in range(num_chunks)]
    assert sum(bool(ran) for ran in by_rank) == min(n, num_chunks)


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("breaker", [None, "small buckets"])
@pytest.mark.parametrize(("num_rows", "num_microbatches"), [(12, 4), (2, 8)])
def test_parameters_of_several_dtypes_get_the_gradients_of_plain_autograd(
    worlds, n, num_rows, num_microbatches, breaker
):
    plain = plainly("blend_gradients", "whole", num_rows)
    result = shared_out(worlds, n, "blend_gradients", num_microbatches, "whole", num_rows, breaker=breaker)
    assert result[:3] == plain[:3]
    assert [entry[0] for entry in result[:4]] == [
        *("torch.float32", "torch.float64", "torch.bfloat16", "torch.bfloat16")
    ]


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize(("num_rows", "num_microbatches"), [(12, 4), (2, 8)])
def test_a_gradient_is_absent_only_where_no_chunk_of_any_rank_has_one(worlds, n, num_rows, num_microbatches):
    rare, spare = shared_out(worlds, n, "blend_gradients", num_microbatches, "whole", num_rows)[3:]
    assert spare is None
    rows_of_the_first_chunk = -(-num_rows // num_microbatches)
    ones = plainly("blend_gradients", "whole", rows_of_the_first_chunk)[3]
    assert rare == ones, "the first chunk alone used it"


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize(
    ("num_rows", "num_microbatches", "width"),
    [
        pytest.param(6, 6, 100, id="small"),
        pytest.param(6, 6, 5000, id="weights of 100 KB"),
        pytest.param(4, 2, 5001, id="results of 80 KB on some ranks"),
        pytest.param(600, 3, 64, id="results of 50 KB a chunk"),
        pytest.param(7, 7, 700, id="results about as large as a message"),
    ],
)
def test_large_tensors_come_through_as_small_ones_do(worlds, n, num_rows, num_microbatches, width):
    plain = plainly("wide_gradients", "whole", num_rows, width)
    assert shared_out(worlds, n, "wide_gradients", num_microbatches, "whole", num_rows, width) == plain


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("breaker", ["own sum", "own join"])
def test_the_comparison_notices_large_tensors_that_are_a_part_only(worlds, n, breaker):
    plain = plainly("wide_gradients", "whole", 6, 5000)
    assert all(
        result != plain for result, _ in worlds(n).run(on_ranks, "wide_gradients", 6, ("whole", 6, 5000), breaker)
    )


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize(("num_rows", "num_microbatches"), [(6, 4), (2, 4)])
def test_results_of_any_dtype_are_joined_bit_by_bit(worlds, n, num_rows, num_microbatches):
    plain = plainly("converted", num_rows)
    result = shared_out(worlds, n, "converted", num_microbatches, num_rows)
    rows = [name for name in result if not name.endswith("number")]
    assert {name: result[name] for name in rows} == {name: plain[name] for name in rows}
    for name in OUTPUT_DTYPES:
        dtype, shape, data = result[f"{name} number"]
        firsts = result[name][2][::1]
        size = len(data) // shape[0]
        assert (dtype, shape) == (f"torch.{name}", (len(range(0, num_rows, -(-num_rows // num_microbatches))),))
        assert data[:size] == firsts[:size], "the first chunk's number is that of the first row"
        assert data[-size:] != data[:size]


@pytest.mark.parametrize("n", WORLDS)
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
def test_chunks_that_return_different_things_are_an_error_on_all_ranks_which_stay_in_step(worlds, n, case, text):
    for (error, message), in_step in worlds(n).run(moody, case, 4, 4):
        assert error == "UsageError"
        assert text in message
        assert in_step


def test_ranks_without_a_chunk_return_what_the_others_do(worlds):
    for (name, entries), in_step in worlds(3).run(moody, "named", 2, 2):
        assert (name, entries) == ("Pair", ["Tensor", "list"])
        assert in_step


def test_ranks_without_a_chunk_cannot_return_what_does_not_pickle(worlds):
    for (error, message), in_step in worlds(3).run(moody, "unpicklable", 2, 2):
        assert error == "UsageError"
        assert "does not pickle" in message
        assert in_step
    for (name, entries), _ in worlds(2).run(moody, "unpicklable", 2, 2):
        assert (name, entries) == ("local", ["Tensor"])
