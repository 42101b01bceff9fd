"""Hard scripts: what they show beyond equal bits, which test_patterns.py holds them to, and those that are refused."""

import random
from pathlib import Path

import pytest
import torch
from adopting import run

FOLDER = Path(__file__).parent / "patterns"
OWN_RANDOMNESS = "random numbers were drawn in the backward"


def run_pattern(worlds, n, name, cwd):
    """The outcomes of a script on n processes."""
    return run(worlds, n, FOLDER / f"{name}.py", cwd=cwd)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("name", "error", "texts"),
    [
        ("momentum_encoder", "DeterminismError", ("parameter key.weight was written", "after optimizer.step()")),
        ("data_written", "DeterminismError", ("parameter fc.weight was written",)),
        ("noise_in_a_hook", "DeterminismError", (OWN_RANDOMNESS, "by a hook")),
        ("noise_in_a_backward", "DeterminismError", (OWN_RANDOMNESS, "by a custom Function")),
        ("leaf_in_a_closure", "DeterminismError", ("a tensor of shape [4]", "pass it to the forward as an input")),
        ("prompt_computed_outside", "DeterminismError", ("computed outside", "Pass it to the forward as an input")),
        ("array_changed", "DeterminismError", ("an array, list or number among the arguments was changed",)),
        ("forward_mode", "UsageError", ("forward-mode differentiation",)),
        ("modules_in_a_list", "DeterminismError", ("a parameter of shape [4, 4]", "use nn.ModuleList")),
    ],
)
def test_what_would_give_other_numbers_unnoticed_is_refused_on_any_number_of_processes(
    worlds, tmp_path, name, error, texts, n
):
    for outcome in run_pattern(worlds, n, name, tmp_path):
        assert outcome.error == error, outcome.message
        assert all(text in outcome.message for text in texts), outcome.message
        assert f"{name}.py" in [file for file, _ in outcome.frames]
        assert "not reached" not in outcome.stdout


@pytest.mark.parametrize("n", [1, 2])
def test_a_backward_on_another_thread_is_refused_by_the_threads_name(worlds, tmp_path, n):
    for outcome in run_pattern(worlds, n, "backward_on_a_thread", tmp_path):
        assert not outcome.error, outcome.message
        (failure,) = [value for path, value in outcome.result.items() if path.startswith("/failures")]
        assert failure.startswith("DeterminismError: backward was called on the thread second")


@pytest.mark.parametrize("n", [1, 2])
def test_after_a_refused_backward_on_another_thread_the_next_forward_runs_in_chunks(worlds, tmp_path, n):
    outcomes = run_pattern(worlds, n, "backward_on_a_thread", tmp_path)
    assert outcomes[0].stdout == "rows 2\n" * 8
    assert len({forward for outcome in outcomes for forward, _ in outcome.chunks}) == 2


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_exit_in_one_chunk_ends_every_process_with_its_code(worlds, tmp_path, n):
    outcomes = run_pattern(worlds, n, "exit_in_forward", tmp_path)
    assert [(outcome.error, outcome.exit_code) for outcome in outcomes] == [("", 7)] * n
    assert outcomes[0].stdout == "step 0\nbad input, stopping\n"


@pytest.mark.parametrize("n", [1, 3])
def test_exceptions_keep_their_class_and_text_whatever_their_constructors_take(worlds, tmp_path, n):
    expected = [("row 0 is too bright",) * 2, ("row 2 is too bright",) * 2, ("code 3", 3), ("code 3", 3)]
    for outcome in run_pattern(worlds, n, "exceptions_of_its_own", tmp_path):
        assert not outcome.error, outcome.message
        assert [(outcome.result[f"/skipped/{k}/0"], outcome.result[f"/skipped/{k}/1"]) for k in range(4)] == expected
        assert {path for path in outcome.result if path.startswith("/losses")} == {"/losses/0", "/losses/1"}


def test_a_backward_that_fails_in_the_first_or_the_last_chunk_is_skipped_everywhere(worlds, tmp_path):
    for outcome in run_pattern(worlds, 2, "anomaly_detected", tmp_path):
        assert not outcome.error, outcome.message
        assert {path for path in outcome.result if path.startswith("/losses")} == {"/losses/0", "/losses/1"}


@pytest.mark.parametrize("n", [1, 3])
def test_a_modules_own_generators_draw_anew_in_each_chunk_and_step_and_are_put_back(worlds, tmp_path, n):
    result = run_pattern(worlds, n, "own_generators", tmp_path)[0].result
    steps = [result[f"/drawn/{step}"].tensor() for step in range(3)]
    chunks = [chunk for step in steps for chunk in step.chunk(4)]
    assert not any(torch.equal(a, b) for i, a in enumerate(chunks) for b in chunks[:i])
    untouched = random.Random(1)
    assert [result[f"/outside/{step}"].tensor().item() for step in range(3)] == [untouched.random() for _ in range(3)]


@pytest.mark.parametrize("n", [1, 2])
def test_models_that_the_script_drops_are_freed(worlds, tmp_path, n):
    assert run_pattern(worlds, n, "models_dropped", tmp_path)[0].stdout == "0 alive\n"


@pytest.mark.parametrize("n", [1, 3])
def test_an_empty_batch_leaves_the_running_statistics_alone(worlds, tmp_path, n):
    assert run_pattern(worlds, n, "empty_batch", tmp_path)[0].stdout == "[0, 4, 4, 4] True True\n"


@pytest.mark.parametrize("n", [1, 2])
def test_a_written_zero_dim_input_stays_as_the_caller_had_it(worlds, tmp_path, n):
    assert run_pattern(worlds, n, "zero_dim_input", tmp_path)[0].result["/temperature"].tensor().item() == 0.5


def test_gradients_hold_no_memory_but_their_own(worlds, tmp_path):
    result = run_pattern(worlds, 2, "saved_bytes", tmp_path)[0].result
    sizes = [len(result[f"/grads/{k}"].data) for k in range(6)]
    assert [result[f"/bytes/{k}"] for k in range(6)] == sizes


def test_some_chunks_of_the_script_that_detaches_do_and_some_do_not(worlds, tmp_path):
    (outcome,) = run_pattern(worlds, 1, "partly_detached", tmp_path)
    assert outcome.stdout in [f"detached chunks: {count} of 4\n" for count in (1, 2, 3)]
