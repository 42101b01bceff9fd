"""Scripts as people write them, unchanged: the same bits and prints on one process and on three, and a reference.

The reference cuts alike and adds gradients up by the same tree, so it is compared to the bit as well. Most scripts hold
many cases, whose results are apart by name.
"""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from script_runs import Bits, check_close, run, run_reference
from worlds import DEVICE, cpu_only

FOLDER = Path(__file__).parent / "patterns"

# Only the order of a few sums differs: a dozen roundings of 2**-24 a step over at most four steps, on numbers of order
# 1 that may cancel to hundredths.
ROUNDING = {"rtol": 1e-4, "atol": 1e-6}


@dataclass(frozen=True)
class Pattern:
    """How a script is run."""

    num_microbatches: int | None = 4  # None leaves it to the script
    argv: tuple[str, ...] = ()
    # Not where chunks draw random numbers, or where the script names samestep's own classes.
    in_reference: bool = True
    rounds: tuple[str, ...] = ()  # results whose sums the reference adds up in another order
    counted: bool = True  # whether every chunk runs exactly once; where some fail, the chunks after them may run or not


PATTERNS = {
    "buffers": Pattern(),
    "by_hand": Pattern(),
    "draws": Pattern(in_reference=False),
    "errors": Pattern(counted=False),
    # Each call sums along its own tree, a derivative is a call, and autograd adds up: in another order than a graph
    # of all chunks does.
    "gradients": Pattern(rounds=("gradient_penalty_few_rows/1", "functional_calls/1")),
    "modules": Pattern(),
    "prints_inside": Pattern(),
    "resume": Pattern(),
    "values": Pattern(),
    "visible_devices": Pattern(num_microbatches=None),
}
OTHERS = {"backward_on_a_thread", "collects", "ends", "refused", "unseeded", "usual"}


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
    return run(worlds, n, script(name), pattern.num_microbatches, pattern.argv, cwd=cwd)


@pytest.fixture(scope="module")
def alone(worlds, tmp_path_factory):
    """`alone(name)`: the outcome of a script in one process, run once for all tests."""
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
    # Which GPU a chunk is on, which a forward may print, depends on their number.
    hidden = r"cuda:\d( \d)?" if DEVICE == "cuda" else "$^"
    ours, theirs = (re.sub(hidden, "cuda", text) for text in (outcomes[0].stdout, expected.stdout))
    assert ours == theirs


def check_chunks(outcomes, expected):
    """Fails unless every chunk ran exactly once in all, and no rank had all where there were enough to share."""
    chunks = sorted(chunk for outcome in outcomes for chunk in outcome.chunks)
    assert chunks == sorted(expected.chunks)
    assert len(set(chunks)) == len(chunks)
    busy = sum(bool(outcome.chunks) for outcome in outcomes)
    assert busy == min(len(outcomes), 1 + max(chunk for _, chunk in chunks))


def test_every_script_in_the_folder_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == PATTERNS.keys() | OTHERS


@pytest.mark.parametrize("name", PATTERNS)
def test_processes_do_not_change_the_bits_or_the_prints(worlds, tmp_path, alone, name):
    assert alone(name).result, alone(name).message
    assert alone(name).chunks
    outcomes = run_pattern(worlds, 3, name, tmp_path)  # of four chunks one process has two
    check_same(outcomes, alone(name))
    if PATTERNS[name].counted:
        check_chunks(outcomes, alone(name))


@cpu_only("the reference is on simulated devices, whose random numbers are other ones")
@pytest.mark.parametrize("name", [name for name in PATTERNS if PATTERNS[name].in_reference])
def test_one_process_computes_to_the_bit_what_the_reference_does(worlds, tmp_path, alone, name):
    pattern, ours = PATTERNS[name], alone(name)
    expected = run_reference(worlds, script(name), pattern.num_microbatches, pattern.argv, cwd=tmp_path)
    assert (ours.error, ours.exit_code) == (expected.error, expected.exit_code), ours.message + expected.message
    differing = {path: value for path, value in expected.result.items() if ours.result.get(path) != value}
    assert {path[1:].rpartition("/")[0] for path in differing} == set(pattern.rounds)
    check_close({path: ours.result[path] for path in differing}, differing, **ROUNDING)
    assert ours.result.keys() == expected.result.keys()
    cases = {path.split("/")[1] for path in expected.result}
    nonzero = [path for path, value in expected.result.items() if isinstance(value, Bits) and any(value.data)]
    assert {path.split("/")[1] for path in nonzero} == cases or "usual" not in script(name).read_text()
    assert nonzero
    if pattern.counted:
        assert sorted(ours.chunks) == sorted(expected.chunks)


def test_the_comparison_notices_another_chunking(worlds, tmp_path, alone):
    expected = run_reference(worlds, script("modules"), 3, cwd=tmp_path)
    with pytest.raises(AssertionError):
        check_close(alone("modules").result, expected.result, **ROUNDING)
    with pytest.raises(AssertionError):
        check_chunks([alone("modules")], expected)


def test_the_comparison_notices_another_order_of_the_sum(worlds, tmp_path, alone):
    expected = run_reference(worlds, script("by_hand"), cwd=tmp_path, fold="left")
    check_close(alone("by_hand").result, expected.result, **ROUNDING)
    assert alone("by_hand").result != expected.result


@pytest.mark.parametrize("name", ["by_hand", "gradients"])
def test_messages_of_any_size_bring_the_same_bits(worlds, tmp_path, alone, name):
    outcomes = run(worlds, 3, script(name), cwd=tmp_path, changed="small messages")
    check_same(outcomes, alone(name))


ONE_STEP = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.DataParallel(nn.Linear(4, 2)).cuda()
model(torch.randn(12, 4).cuda()).square().sum().backward()
RESULT = [parameter.grad for parameter in model.parameters()]
"""


def test_twin_gradients_that_processes_keep_and_results_that_did_not_come_through_are_noticed(worlds, tmp_path):
    (tmp_path / "step.py").write_text(ONE_STEP)
    whole, kept, lost = (
        run(worlds, 3, tmp_path / "step.py", cwd=tmp_path, changed=name)[0] for name in (None, "own sums", "zeros")
    )
    assert (whole.error, kept.error) == ("", ""), kept.message
    assert whole.result != kept.result
    assert "has other bits when this process computes it again" in lost.message


def test_the_comparison_notices_a_chunk_that_ran_twice_or_never(alone):
    outcome = alone("by_hand")
    for chunks in (outcome.chunks + outcome.chunks[:1], outcome.chunks[1:]):
        with pytest.raises(AssertionError):
            check_chunks([replace(outcome, chunks=chunks)], outcome)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("modules", ["empty [0, 3] True", "negative entries left: True"]),
        pytest.param("modules", ["loss on cuda:1 gradient on cuda:0"], marks=cpu_only("one process has one GPU")),
        ("modules", ["without a gradient: ['module.spare.weight', 'module.spare.bias']"]),
        ("gradients", ["0 alive"]),
        ("draws", ["the same draws: True"]),
    ],
)
def test_scripts_find_what_they_would_on_four_gpus(alone, name, lines):
    assert set(lines) <= set(alone(name).stdout.splitlines())


def test_some_chunks_of_the_script_that_detaches_do_and_some_do_not(alone):
    assert any(f"detached chunks: {count} of 4" in alone("values").stdout for count in (1, 2, 3))


def test_gradients_hold_no_memory_but_their_own(alone):
    result = alone("resume").result
    assert [result[f"/bytes/{k}"] for k in range(4)] == [len(result[f"/grads/{k}"].data) for k in range(4)]


def test_a_modules_own_generators_draw_anew_in_each_chunk_and_step_and_are_put_back(alone):
    result = alone("draws").result
    steps = [result[f"/own_generators/drawn/{step}"].tensor() for step in range(3)]
    chunks = [chunk for step in steps for chunk in step.chunk(4)]
    assert not any(torch.equal(a, b) for i, a in enumerate(chunks) for b in chunks[:i])
    outside = [result[f"/own_generators/outside/{step}"].tensor().item() for step in range(3)]
    untouched = random.Random(1)
    assert outside == [untouched.random() for _ in range(3)]


def test_a_written_zero_dim_input_stays_as_the_caller_had_it(alone):
    assert alone("draws").result["/zero_dim_input/temperature"].tensor().item() == 0.5


def test_exceptions_keep_their_class_and_text_and_the_loop_goes_on(alone):
    result = alone("errors").result
    expected = [("row 0 is too bright",) * 2, ("row 2 is too bright",) * 2, ("code 3", 3), ("code 3", 3)]
    skipped = [tuple(result[f"/exceptions_of_its_own/skipped/{k}/{i}"] for i in (0, 1)) for k in range(4)]
    assert skipped == expected
    assert alone("errors").stdout.count("skipped: ") == 2
    for name in ("exceptions_of_its_own", "anomaly_detected"):
        assert len([path for path in result if path.startswith(f"/{name}/losses")]) == 2


def test_prints_inside_the_forward_come_once_and_in_the_order_of_the_chunks(worlds, tmp_path, alone):
    firsts = [line.split(" on")[0] for line in alone("prints_inside").stdout.splitlines() if line.startswith("rows")]
    assert firsts[:4] == [f"rows {[4.0 * row for row in rows]}" for rows in ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9,))]
    assert alone("prints_inside").stdout.count("done with") == 8
    assert run(worlds, 3, script("prints_inside"), cwd=tmp_path)[0].stderr.count("to the other stream\n") == 8


def test_attributes_written_in_the_forward_are_named(worlds, tmp_path):
    stderr = run(worlds, 2, script("buffers"), cwd=tmp_path)[0].stderr
    assert "num_calls" in stderr
    assert "last_mean" in stderr


def test_what_a_script_saves_is_read_in_plain_pytorch(worlds, tmp_path):
    run(worlds, 2, script("resume"), cwd=tmp_path)
    saved = torch.load(tmp_path / "checkpoints" / "last.pth.tar", weights_only=True)
    assert list(saved["state_dict"]) == ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]
    assert {type(value) for value in saved["state_dict"].values()} == {torch.Tensor}
    assert {value.device.type for value in saved["state_dict"].values()} == {DEVICE}


REFUSED = {
    "momentum_encoder": ("DeterminismError", "parameter key.weight was written", "after optimizer.step()"),
    "data_written": ("DeterminismError", "parameter fc.weight was written"),
    "parameter_changed": ("DeterminismError", "parameter fc.weight was written"),
    "attribute_with_gradients": ("DeterminismError", "the attribute shift holds"),
    "noise_in_a_hook": ("DeterminismError", "random numbers were drawn in the backward", "by a hook"),
    "noise_of_numpy_in_a_hook": ("DeterminismError", "random numbers were drawn in the backward", "by a hook"),
    "noise_in_a_backward": ("DeterminismError", "random numbers were drawn in the backward", "by a custom Function"),
    "leaf_in_a_closure": ("DeterminismError", "a tensor of shape [4]", "pass it to the forward as an input"),
    "prompt_computed_outside": ("DeterminismError", "computed outside", "Pass it to the forward as an input"),
    "parameter_in_a_list": ("DeterminismError", "gain", "plain list"),
    "modules_in_a_list": ("DeterminismError", "a parameter of shape [4, 4]", "use nn.ModuleList"),
    "tensor_changed": ("DeterminismError", "the attribute level was changed in place"),
    "list_grown": ("DeterminismError", "the attribute history was changed in place"),
    "array_changed": ("DeterminismError", "an array, list or number among the arguments was changed"),
    "checkpointing_reentrant": ("DeterminismError", "use_reentrant=False"),
    "forward_mode": ("UsageError", "forward-mode differentiation"),
    "hidden_on_the_wrong_dim": ("UsageError", "hidden state", "[2, 12, 4]"),
    "scripted_module": ("UsageError", "jit"),
    "replicas_used": ("UsageError", "a replica of Linear itself", "parallel_apply as it is"),
    "replicate_overridden": ("UsageError", "by a function of its own", "torch.nn.parallel.replicate"),
    "containers": ("UsageError", "other containers"),
    "keys": ("UsageError", "other keys"),
    "numbers": ("UsageError", "numbers and strings that differ"),
    "counts": ("UsageError", "different things"),
    "widths": ("UsageError", "[3, 1] torch.float32, [3, 4] torch.float32"),
    "dims": ("UsageError", "[3, 4] torch.float32, [3] torch.float32"),
    "dtypes": ("UsageError", "[3, 4] torch.float32, [3, 4] torch.float64"),
    "sparse": ("UsageError", "layout torch.sparse_coo"),
    "lone_row": ("UsageError", "module 1 (BatchNorm1d) needs two samples", "chunk 2 (of 3) has one", "drop_last=True"),
}


@pytest.mark.parametrize("n", [1, 2])
def test_what_would_give_other_numbers_is_refused_by_name_and_the_processes_stay_in_step(worlds, tmp_path, n):
    outcomes = run(worlds, n, script("refused"), cwd=tmp_path)
    for outcome in outcomes:
        assert not outcome.error, outcome.message
        assert outcome.result.keys() == {"/after", *(f"/{name}" for name in REFUSED)}
        for name, (error, *texts) in REFUSED.items():
            assert outcome.result[f"/{name}"].startswith(f"{error}: "), name
            assert all(text in outcome.result[f"/{name}"] for text in texts), (name, outcome.result[f"/{name}"])


@pytest.mark.parametrize("n", [1, 3])
def test_what_a_chunk_raises_the_script_raises_from_its_own_line(worlds, tmp_path, n):
    outcome = run(worlds, n, script("ends"), argv=("raise in a chunk",), cwd=tmp_path)[0]
    assert (outcome.error, outcome.message) == ("ValueError", "a pixel of 100 in these 1 rows")
    assert ("ends.py", line_of("ends", "# fails")) in outcome.frames
    assert outcome.stdout == "step 0\n"
    # Of a worker's the lines are in a note.
    raised = line_of("ends", "raise ValueError")
    assert outcome.frames[-1] == ("ends.py", raised) or f'ends.py", line {raised}' in "".join(outcome.notes)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("how", "ended", "stdout"),
    [
        ("exit in a chunk", ("", 7), "step 0\nbad input, stopping\n"),
        ("exit", ("", 3), "step 0\nstep 1\nstep 2\n"),
        ("interrupt", ("KeyboardInterrupt", None), "step 0\nstep 1\nstep 2\n"),
    ],
)
def test_a_script_may_end_itself(worlds, tmp_path, n, how, ended, stdout):
    outcomes = run(worlds, n, script("ends"), argv=(how,), cwd=tmp_path)
    assert [(outcome.error, outcome.exit_code) for outcome in outcomes] == [ended] * n
    assert outcomes[0].stdout == stdout
    assert all(outcome.result == outcomes[0].result for outcome in outcomes)
    assert len(outcomes[0].result) == {"exit in a chunk": 0, "exit": 1, "interrupt": 3}[how]


@pytest.mark.parametrize("n", [1, 2])
def test_a_backward_on_another_thread_is_refused_and_the_next_forward_runs_in_chunks(worlds, tmp_path, n):
    outcomes = run(worlds, n, script("backward_on_a_thread"), cwd=tmp_path)
    for outcome in outcomes:
        assert not outcome.error, outcome.message
        (failure,) = [value for path, value in outcome.result.items() if path.startswith("/failures")]
        assert failure.startswith("DeterminismError: backward was called on the thread second")
    assert outcomes[0].stdout == "rows 2\n" * 8
    assert len({forward for outcome in outcomes for forward, _ in outcome.chunks}) == 2


def test_scripts_that_seed_nothing_draw_the_same_everywhere_and_say_so(worlds, tmp_path):
    one, three, other = (
        run(worlds, n, script("unseeded"), cwd=tmp_path, seed=seed)[0] for n, seed in ((1, None), (3, None), (1, 7))
    )
    assert one.result == three.result != other.result
    assert "--seed" in one.stderr


@pytest.mark.parametrize("n", [1, 2])
def test_a_hook_that_collects_inside_of_a_wrapped_module_is_named_and_what_it_fills_refused(worlds, tmp_path, n):
    outcome = run(worlds, n, script("collects"), cwd=tmp_path)[0]
    assert outcome.stderr.count("a hook of the script's is on 1 of the wrapped Sequential, and sees this device's") == 1
    assert outcome.error == "DeterminismError"
    assert "changes a list of 0 entries, to which its code refers" in outcome.message
