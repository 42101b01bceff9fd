"""Unchanged scripts and examples on real devices instead of simulated ones: one to four GPUs give the same bits."""

import pickle
import re
import sys
from pathlib import Path

import gpus
import pytest
from test_patterns import PATTERNS, check_chunks, check_same, run_pattern

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from test_examples_on_devices import EXAMPLES

pytestmark = gpus.needs_fake_gpus

TESTS = Path(__file__).resolve().parents[1]
SIZES = (1, 2, 4)
SCRIPTS = [name for name in PATTERNS if name != "modules"]  # whose LSTM has a kernel that fake GPUs do not have
RUN = """
    import pickle, sys
    from pathlib import Path

    target, tests = Path(sys.argv[1]), Path(sys.argv[2])
    sys.path[:0] = [str(tests), str(tests / "scripts"), str(tests / "examples")]
    import test_examples_on_devices as examples
    import test_patterns as patterns
    from worlds import World

    found = {}
    for n in map(int, sys.argv[3].split(",")):
        world = World(n)
        try:
            for name in sys.argv[4].split(","):
                found[name, n] = patterns.run_pattern(lambda n: world, n, name, target.parent / f"{name}-{n}")
            for name in examples.EXAMPLES:
                (target.parent / name).mkdir(exist_ok=True)
                outcome = examples.run(lambda n: world, n, name, target.parent / name)
                saved = [(str(value.dtype), value.shape, value.cpu().tolist()) for value in outcome.saved]
                found[name, n] = outcome.lines, saved, outcome.chunks
        finally:
            world.close()
    target.write_bytes(pickle.dumps(found))
"""


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    """The outcomes of all scripts and examples on one to four GPUs, by name and number."""
    target = tmp_path_factory.mktemp("on_gpus") / "outcomes"
    what = target, TESTS, ",".join(map(str, SIZES)), ",".join(SCRIPTS)
    gpus.run(RUN, *what, devices=4, timeout=600, SAMESTEP_TEST_DEVICE="cuda", OMP_NUM_THREADS="1")
    return pickle.loads(target.read_bytes())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_same_bits_and_prints_on_every_number_of_gpus(on_gpus, name):
    alone = on_gpus[name, 1][0]
    assert alone.result, alone.message
    for n in SIZES[1:]:
        check_same(on_gpus[name, n], alone)
        if PATTERNS[name].counted:
            check_chunks(on_gpus[name, n], alone)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_same_lines_and_bits_on_every_number_of_gpus(on_gpus, name):
    lines, saved, chunks = on_gpus[name, 1]
    assert lines
    assert saved
    for n in SIZES[1:]:
        assert on_gpus[name, n][:2] == (lines, saved)
        assert sorted(chunk for part in on_gpus[name, n][2] for chunk in part) == sorted(chunks[0])


@pytest.mark.parametrize("name", ["by_hand", "errors", "logging_lines", "visible_devices"])
def test_a_script_that_draws_nothing_on_its_devices_has_the_bits_of_simulated_ones(worlds, on_gpus, tmp_path, name):
    expected = run_pattern(worlds, 1, name, tmp_path)[0]
    found = on_gpus[name, 1][0]
    assert {path for path, value in expected.result.items() if found.result.get(path) != value} == set()
    assert re.sub(r"cuda:\d", "cuda:0", expected.stdout) == found.stdout, "a rank has one GPU"
