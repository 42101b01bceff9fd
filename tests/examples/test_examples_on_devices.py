"""The examples on one device and on three: the same lines and the same bits, and each chunk of the work done once."""

import re
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from cli_commands import samestep
from example_programs import run_example
from scripts import FOLDER

from samestep.data.nested import leaves

NUM_MICROBATCHES = 4
EXAMPLES = {
    "random_linear": [],
    "house_prices": ["--epochs", 3, "--out", "curves"],
    "vgg_parts": ["--epochs", 1, "--samples", 42, "--batch-size", 16, "--workers", 2],
    "from_scratch": ["--epochs", 2, "--samples", 45, "--batch-size", 23, "--num-devices", NUM_MICROBATCHES],
    "simple_gpu": ["--epochs", 2, "--samples", 100],
    "detection": ["--epochs", 2, "--samples", 12, "--batch-size", 7],
}


@dataclass(frozen=True)
class Outcome:
    """What an example came to: its lines without the clock, the tensors it saved, and who ran which chunks."""

    lines: list[str]
    saved: list[torch.Tensor]
    chunks: list[list[tuple[int, int]]]

    def same_as(self, other):
        bits = [(value.dtype, value.shape, value.numpy().tobytes()) for value in self.saved]
        others = [(value.dtype, value.shape, value.numpy().tobytes()) for value in other.saved]
        return self.lines == other.lines and bits == others


def run(worlds, world_size, name, folder, num_microbatches=NUM_MICROBATCHES):
    """Runs an example on so many real processes."""
    folder = folder / f"{world_size} processes, {num_microbatches} microbatches"
    folder.mkdir()
    arguments = [*EXAMPLES[name], "--save", "saved.pt"]
    results = worlds(world_size).run(run_example, name, arguments, folder, num_microbatches)
    lines = re.sub(r", \d+\.\d s$", "", results[0][0], flags=re.MULTILINE).splitlines()
    saved = torch.load(folder / "saved.pt")
    values = list(saved.values()) if isinstance(saved, dict) else leaves(saved)
    return Outcome(lines, values, [chunks for _, chunks in results])


@pytest.fixture(scope="module")
def alone(worlds, tmp_path_factory):
    """What an example comes to on one process; each runs once."""
    known = {}

    def outcome(name):
        if name not in known:
            known[name] = run(worlds, 1, name, tmp_path_factory.mktemp(name))
        return known[name]

    return outcome


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_ends_in_the_same_lines_and_bits_on_three_devices(worlds, alone, tmp_path, name):
    reference, outcome = alone(name), run(worlds, 3, name, tmp_path)
    assert outcome.lines == reference.lines
    assert outcome.same_as(reference)
    if name != "from_scratch":  # there the script cuts the batch, and no forward is wrapped
        counts = Counter(chunk for chunks in outcome.chunks for chunk in chunks)
        assert set(counts.values()) == {1}
        assert counts == Counter(reference.chunks[0])
        assert all(outcome.chunks[:2]), "a rank that runs no chunk does not share the work"


@pytest.mark.parametrize("name", ["from_scratch", "simple_gpu"])
def test_an_example_cut_otherwise_is_noticed(worlds, alone, tmp_path, name):
    assert not run(worlds, 1, name, tmp_path, num_microbatches=3).same_as(alone(name))


def test_the_linear_layer_prints_the_size_of_every_chunk_in_order(alone):
    inside = re.findall(r"inside the model: input torch.Size\(\[(\d+), 5\]\)", "\n".join(alone("random_linear").lines))
    assert list(map(int, inside)) == [8, 8, 8, 6] * 3 + [3, 3, 3, 1]


def command(folder, *arguments):
    """What `samestep` prints when it is run in a folder."""
    done = samestep(*arguments, cwd=folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_shares_a_batch_out_over_three_devices(tmp_path):
    said = command(tmp_path, "run", "--devices", "cpu:3", FOLDER / "random_linear.py")
    slices = "  inside the model: input torch.Size([10, 5]) output torch.Size([10, 2])\n" * 3
    assert "sharing the batches out over 3 devices\n" + slices + "outside: input torch.Size([30, 5])" in said
    assert said.count("inside the model") == 3 * 3 + 3
    assert said.count("outside") == 4
