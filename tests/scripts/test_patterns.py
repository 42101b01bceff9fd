"""Scripts as people write them, unchanged: the same bits and prints on any number of processes, and a reference.

The reference cuts alike and adds gradients up by the same tree, so it is compared to the bit as well.
"""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from adopting import Bits, run, run_reference

FOLDER = Path(__file__).parent / "patterns"

# Only the order of a few sums differs: a dozen roundings of 2**-24 a step over at most four steps, on numbers of order
# 1 that may cancel to hundredths.
ROUNDING = {"rtol": 1e-4, "atol": 1e-6}


@dataclass(frozen=True)
class Pattern:
    """How a script is run.

    Attributes:
        num_microbatches: V; None leaves it to the script.
        worlds: numbers of processes beside one.
        num_devices: how many devices the script sees, if it is not the number of processes.
        argv: arguments.
        in_reference: whether the reference can run it: not where chunks draw from generators of their own, or where
            the script names samestep's own classes.
        counted: whether every chunk runs exactly once; not where some fail, as the chunks after them may run or not.
        needs: a package that may not be installed.
    """

    num_microbatches: int | None = 4
    worlds: tuple[int, ...] = (2, 3)
    num_devices: int | None = None
    argv: tuple[str, ...] = ()
    in_reference: bool = True
    counted: bool = True
    needs: str = ""


USUAL = """
accumulation adversarial_input anomaly_detected asks_for_process_groups attributes_written backwards_apart
buffers_made_inside buffers_replaced buffers_updated buffers_used_after_update channels_last checkpointed_batch_norm
checkpointed_layer_norm checkpointed_nested_wrap checkpointing complex_inputs contrastive criterion_wrapped
criterion_wrapped_twice custom_function dataclass_outputs default_device device_count_guard devices_inside dim_one
ema_deepcopy
embedding empty_batch forward_called_directly frozen_backbone functional_call functional_none gan grad_scaler
hessian_vector hooks inplace_relu inputs_of_all_kinds is_parameter l2_outside large_buffer_written lbfgs
list_of_tensors loader_with_workers logging_lines loss_inside models_dropped module_access nested_outputs nested_wrap
next_parameters no_grad_evaluation no_inputs none_and_keywords output_device outputs_changed packed_sequence
parameter_list part_wrap partly_detached parts_replaced prints_inside recurrent resume saved_bytes scatter_overridden
replicated_by_hand scattered_and_gathered shared_encoder
single_normals sparse_embedding spectral_norm three_forwards tied_outside transformer two_forwards
two_heads_two_backwards
unused_parameter weight_norm weights_set_by_hand whole_model_saved
"""
PATTERNS = dict.fromkeys(USUAL.split(), Pattern()) | {
    "arguments": Pattern(argv=("--lr", "0.05", "--steps=3")),
    "batch_norm": Pattern(worlds=(2, 3, 4)),
    "buffer_made_in_inference": Pattern(in_reference=False),
    "catches_and_goes_on": Pattern(counted=False),
    "checkpoint_outside": Pattern(in_reference=False),
    "checkpoint_outside_few_rows": Pattern(worlds=(2, 3, 4), in_reference=False),
    "checkpointed_dropout": Pattern(in_reference=False),
    "conjugate_outputs": Pattern(worlds=(2, 3, 4)),
    "dropout": Pattern(worlds=(2, 3, 4), in_reference=False),
    "edited_import": Pattern(in_reference=False),
    "exceptions_of_its_own": Pattern(counted=False),
    "functional_ids": Pattern(num_microbatches=None, num_devices=4),
    "gradient_penalty": Pattern(worlds=(2, 3, 4)),
    "gradient_penalty_few_rows": Pattern(worlds=(2, 3, 4)),
    "last_batch_of_one": Pattern(worlds=(2, 3, 4)),
    "own_generators": Pattern(in_reference=False),
    "progress_bar": Pattern(needs="tqdm"),
    "scatters_lists": Pattern(worlds=(2, 3, 4), in_reference=False),
    "seeds_inside": Pattern(worlds=(2, 3, 4), in_reference=False),
    "summary_writer": Pattern(worlds=(2,)),
    "ten_rows_over_eight": Pattern(num_microbatches=8, worlds=(2, 3, 4)),
    "visible_devices": Pattern(num_microbatches=None),
    "whole_wrap": Pattern(worlds=(2, 3, 4)),
    "zero_dim_input": Pattern(in_reference=False),
}
OTHERS = """
array_changed backward_on_a_thread checkpointing_reentrant data_written draws_by_process exit_in_forward forward_mode
hidden_on_the_wrong_dim hook_collects keyboard_interrupt leaf_in_a_closure modules_in_a_list momentum_encoder
named_by_the_clock noise_in_a_backward noise_in_a_hook parameter_in_a_list process_id prompt_computed_outside
raises_in_a_chunk raises_on_one_rank replicas_used replicate_overridden scripted_module state_beside_buffers sys_exit
unseeded
"""


def script(name):
    return FOLDER / f"{name}.py"


def line_of(name, text):
    """The number of the line of a script that holds a text."""
    lines = script(name).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return number


def run_pattern(worlds, n, name, cwd):
    """The outcomes of a script on n processes."""
    pattern = PATTERNS[name]
    return run(
        worlds, n, script(name), pattern.num_microbatches, pattern.argv, cwd=cwd, num_devices=pattern.num_devices
    )


@pytest.fixture(scope="module")
def alone(worlds, tmp_path_factory):
    """`alone(name)`: what came of a script in one process, run once for all tests."""
    outcomes = {}

    def get(name):
        if name not in outcomes:
            outcomes[name] = run_pattern(worlds, 1, name, tmp_path_factory.mktemp(name))[0]
        return outcomes[name]

    return get


def check_same(outcomes, expected):
    """Fails unless all ranks have the result of one process to the bit, and rank 0 printed the same."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.message}\n{outcome.frames}"
        differing = [path for path in expected.result if outcome.result.get(path) != expected.result[path]]
        assert outcome.result.keys() == expected.result.keys()
        assert not differing, f"rank {rank} has other bits in {differing}"
    assert outcomes[0].stdout == expected.stdout


def check_chunks(outcomes, expected):
    """Fails unless every chunk ran exactly once in all, and no rank had all where there were enough to share."""
    chunks = sorted(chunk for outcome in outcomes for chunk in outcome.chunks)
    assert chunks == sorted(expected.chunks)
    assert len(set(chunks)) == len(chunks)
    busy = sum(bool(outcome.chunks) for outcome in outcomes)
    assert busy == min(len(outcomes), 1 + max(chunk for _, chunk in chunks))


def check_close(result, expected):
    """Fails unless floats are within rounding, and everything else is equal."""
    assert result.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, Bits):
            torch.testing.assert_close(
                result[path].tensor(), value.tensor(), msg=f"{path} is not within rounding", **ROUNDING
            )
        else:
            assert result[path] == value, path


def wanted(name):
    """The pattern; the test is skipped where what it needs is not installed."""
    pattern = PATTERNS[name]
    if pattern.needs and importlib.util.find_spec(pattern.needs) is None:
        pytest.skip(f"{pattern.needs} is not installed")
    return pattern


def test_every_script_in_the_folder_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == PATTERNS.keys() | set(OTHERS.split())


@pytest.mark.parametrize(("name", "n"), [(name, n) for name in PATTERNS for n in PATTERNS[name].worlds])
def test_processes_do_not_change_the_bits_or_the_prints(worlds, tmp_path, alone, name, n):
    pattern = wanted(name)
    assert alone(name).result, alone(name).message
    assert alone(name).chunks
    outcomes = run_pattern(worlds, n, name, tmp_path)
    check_same(outcomes, alone(name))
    if pattern.counted:
        check_chunks(outcomes, alone(name))


@pytest.mark.parametrize("name", [name for name in PATTERNS if PATTERNS[name].in_reference])
def test_one_process_computes_to_the_bit_what_the_reference_does(worlds, tmp_path, alone, name):
    pattern = wanted(name)
    expected = run_reference(worlds, script(name), pattern.num_microbatches, pattern.argv, cwd=tmp_path)
    ours = alone(name)
    assert (ours.error, ours.exit_code) == (expected.error, expected.exit_code), ours.message + expected.message
    differing = [path for path, value in expected.result.items() if ours.result.get(path) != value]
    assert not differing
    assert ours.result.keys() == expected.result.keys()
    assert any(isinstance(value, Bits) and any(value.data) for value in expected.result.values())
    if pattern.counted:
        assert sorted(ours.chunks) == sorted(expected.chunks)


@pytest.mark.parametrize("num_microbatches", [3, 6])
def test_the_comparison_notices_another_chunking(worlds, tmp_path, alone, num_microbatches):
    expected = run_reference(worlds, script("batch_norm"), num_microbatches, cwd=tmp_path)
    with pytest.raises(AssertionError):
        check_close(alone("batch_norm").result, expected.result)
    with pytest.raises(AssertionError):
        check_chunks([alone("batch_norm")], expected)


def test_the_comparison_notices_another_order_of_the_sum(worlds, tmp_path, alone):
    expected = run_reference(worlds, script("whole_wrap"), cwd=tmp_path, fold="left")
    check_close(alone("whole_wrap").result, expected.result)
    assert alone("whole_wrap").result != expected.result


def test_the_comparison_notices_a_result_that_depends_on_the_rank(worlds, tmp_path):
    outcomes = run(worlds, 2, script("process_id"), cwd=tmp_path)
    with pytest.raises(AssertionError, match="other bits in"):
        check_same(outcomes, outcomes[0])


def test_the_comparison_notices_a_chunk_that_ran_twice_or_never(alone):
    outcome = alone("whole_wrap")
    for chunks in (outcome.chunks + outcome.chunks[:1], outcome.chunks[1:]):
        with pytest.raises(AssertionError):
            check_chunks([replace(outcome, chunks=chunks)], outcome)


def test_scripts_that_seed_nothing_draw_the_same_everywhere_and_say_so(worlds, tmp_path):
    outcomes = run(worlds, 3, script("unseeded"), cwd=tmp_path)
    assert outcomes[0].result == outcomes[1].result == outcomes[2].result
    assert "--seed" in outcomes[0].stderr
    seeded = [run(worlds, n, script("unseeded"), cwd=tmp_path, seed=7)[0] for n in (1, 2)]
    assert seeded[0].result == seeded[1].result
    assert seeded[0].result != outcomes[0].result


def test_the_tutorial_prints_its_chunks_in_order(alone):
    inside = [f"\tIn Model: input size torch.Size([{k}, 5]) output size torch.Size([{k}, 2])" for k in (8, 8, 8, 6)]
    lines = alone("device_count_guard").stdout.splitlines()
    assert lines[:5] == ["Let's use 4 GPUs!", *inside]
    assert lines[5] == "Outside: input size torch.Size([30, 5]) output_size torch.Size([30, 2])"


def test_ten_rows_over_eight_devices_are_five_chunks(alone):
    sizes = [int(line.split()[-1]) for line in alone("ten_rows_over_eight").stdout.splitlines() if "chunk" in line]
    assert sizes == [2] * 5 + [1] * 3 + [3] * 5 + [2]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_prints_inside_the_forward_come_once_and_in_the_order_of_the_chunks(worlds, tmp_path, n):
    outcomes = run(worlds, n, script("prints_inside"), cwd=tmp_path)
    firsts = [line.split(" on")[0] for line in outcomes[0].stdout.splitlines() if line.startswith("rows")]
    assert firsts[:4] == [f"rows {[4.0 * row for row in rows]}" for rows in ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9,))]
    assert outcomes[0].stdout.count("done with") == 8
    assert outcomes[0].stderr.count("to the other stream\n") == 8


def test_only_the_first_process_writes_files(worlds, tmp_path):
    run(worlds, 2, script("summary_writer"), cwd=tmp_path)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert len([path for path in found if path.startswith("curves/")]) == 1
    assert [path for path in found if not path.startswith("curves/")] == ["loss.png", "tables/losses.json"]


def test_lines_of_the_logging_module_are_in_the_file_once(worlds, tmp_path, alone):
    run(worlds, 2, script("logging_lines"), cwd=tmp_path)
    assert (tmp_path / "train.log").read_text() == alone("logging_lines").stdout


def test_outputs_are_on_the_output_device_and_gradients_on_the_first(alone):
    assert alone("output_device").stdout == "cuda:1\ncuda:0\n" * 2


def test_checkpointed_dropout_lets_through_in_the_backward_what_it_let_through_in_the_forward(alone):
    assert alone("checkpointed_dropout").stdout == "the same draws: True\n"


def test_a_callers_tensor_stays_as_it_was_where_the_forward_writes_to_its_input(alone):
    assert alone("inplace_relu").stdout == "negative entries left: True\n"


def test_parameters_that_no_chunk_used_have_no_gradient(alone):
    assert alone("unused_parameter").stdout == "['module.spare.weight', 'module.spare.bias']\n"


@pytest.mark.parametrize("n", [1, 2])
def test_attributes_written_in_the_forward_are_named(worlds, tmp_path, n):
    stderr = run(worlds, n, script("attributes_written"), cwd=tmp_path)[0].stderr
    assert "num_calls" in stderr
    assert "last_mean" in stderr


@pytest.mark.parametrize("n", [1, 2, 3])
def test_what_one_chunk_raises_every_process_raises_from_the_scripts_line(worlds, tmp_path, n):
    outcomes = run(worlds, n, script("raises_in_a_chunk"), cwd=tmp_path)
    call = ("raises_in_a_chunk.py", line_of("raises_in_a_chunk", "# fails"))
    for outcome in outcomes:
        assert (outcome.error, outcome.message) == ("ValueError", "a pixel of 100 in these 1 rows")
        assert call in outcome.frames
    raised = ("raises_in_a_chunk.py", line_of("raises_in_a_chunk", "raise ValueError"))
    assert [outcome.frames[-1] == raised for outcome in outcomes] == [rank == n - 1 for rank in range(n)]
    assert outcomes[0].stdout == "so far so good\n"


def test_what_one_process_alone_raises_ends_the_others_and_is_what_the_user_sees(tmp_path):
    command = [sys.executable, "-m", "samestep", "run", "--devices", "cpu:2", "--num-microbatches", "4"]
    ended = subprocess.run(
        [*command, script("raises_on_one_rank")], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert ended.stdout == "so far so good\n"
    line = line_of("raises_on_one_rank", "fcntl.flock(")
    assert f'raises_on_one_rank.py", line {line}' in ended.stderr
    assert "BlockingIOError" in ended.stderr


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_script_may_end_itself(worlds, tmp_path, n):
    outcomes = run(worlds, n, script("sys_exit"), cwd=tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [3] * n
    assert "which is good enough" in outcomes[0].stdout


@pytest.mark.parametrize("n", [1, 2])
def test_a_script_may_catch_an_interruption_and_be_ended_by_the_next(worlds, tmp_path, n):
    outcomes = run(worlds, n, script("keyboard_interrupt"), cwd=tmp_path)
    assert [outcome.error for outcome in outcomes] == ["KeyboardInterrupt"] * n
    assert outcomes[0].stdout == "Exiting from training early\n"
    assert len(outcomes[0].result) == 3
    assert all(outcome.result == outcomes[0].result for outcome in outcomes)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("name", "error", "texts"),
    [
        ("hidden_on_the_wrong_dim", "UsageError", ("hidden state", "[2, 12, 4]")),
        ("parameter_in_a_list", "DeterminismError", ("gain", "plain list")),
        ("replicas_used", "UsageError", ("a replica of Linear itself", "parallel_apply as it is")),
        ("replicate_overridden", "UsageError", ("by a function of its own", "torch.nn.parallel.replicate")),
        ("checkpointing_reentrant", "DeterminismError", ("use_reentrant=False",)),
        ("state_beside_buffers", "DeterminismError", ("level",)),
        ("scripted_module", "UsageError", ("jit",)),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(worlds, tmp_path, name, error, texts, n):
    for outcome in run(worlds, n, script(name), cwd=tmp_path):
        assert outcome.error == error, outcome.message
        assert all(text in outcome.message for text in texts), outcome.message
        assert "not reached" not in outcome.stdout


LONE_ROW = """
import torch
from torch import nn
model = nn.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda())
model(torch.ones(8, 3))
model(torch.ones(5, 3))
"""


@pytest.mark.parametrize("n", [1, 2])
def test_a_chunk_that_leaves_batchnorm_one_row_is_named(worlds, tmp_path, n):
    (tmp_path / "lone.py").write_text(LONE_ROW)
    for outcome in run(worlds, n, tmp_path / "lone.py", cwd=tmp_path):
        assert outcome.error == "UsageError", outcome.message
        assert "module 1 (BatchNorm1d) needs two samples" in outcome.message
        assert "of the 5 rows of wrapped forward 1 chunk 2 (of 3) has one" in outcome.message
        assert "drop_last=True" in outcome.message


@pytest.mark.parametrize("n", [2, 3])
def test_a_loss_that_differs_between_processes_is_an_error(worlds, tmp_path, n):
    for outcome in run(worlds, n, script("hook_collects"), cwd=tmp_path):
        assert outcome.error == "DeterminismError"


@pytest.mark.parametrize("n", [2, 3])
def test_names_and_seeds_from_the_clock_are_those_of_the_first_process(worlds, tmp_path, n):
    outcomes = run(worlds, n, script("named_by_the_clock"), cwd=tmp_path)
    assert all(outcome.result == outcomes[0].result and not outcome.error for outcome in outcomes)
    assert len(outcomes[0].result) == 3
    assert outcomes[0].stdout == "best so far 2\n"
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_what_a_script_saved_loads_in_plain_pytorch(worlds, tmp_path):
    run(worlds, 2, script("resume"), cwd=tmp_path)
    saved = torch.load(tmp_path / "checkpoints" / "last.pth.tar", weights_only=True)
    assert list(saved["state_dict"]) == ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]
    assert {type(value) for value in saved["state_dict"].values()} == {torch.Tensor}
    assert {value.device.type for value in saved["state_dict"].values()} == {"cpu"}


@pytest.mark.parametrize("n", [2, 3])
def test_inputs_that_differ_between_processes_are_an_error_that_names_the_line(worlds, tmp_path, n):
    place = f"draws_by_process.py, line {line_of('draws_by_process', 'the line to be named')}"
    for outcome in run(worlds, n, script("draws_by_process"), cwd=tmp_path):
        assert outcome.error == "DeterminismError"
        assert place in outcome.message
