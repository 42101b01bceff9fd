"""The state of a divided model: digest, checkpoints and weights are those of the same state on one device."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensor_programs import PLANS, Net, loss, texts, whole_state
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as load_by_torch
from torch.distributed.tensor.parallel import parallelize_module

from samestep.checkpoint.digest import as_hex, state_checksum, state_digest
from samestep.checkpoint.export import export_weights
from samestep.checkpoint.storage import read_checkpoint
from samestep.checkpoint.verified_files import part_name
from samestep.engine.strategy_options import Replicate, Sharded
from samestep.errors import ContractError
from samestep.run.run import Run

STRATEGIES = {
    "replicate": Replicate(),
    "zero1": Replicate(shard_optimizer=True),
    "sharded": Sharded(wrap=lambda module: isinstance(module, nn.LayerNorm)),  # not the layers that a text may skip
}
ONE = (1, "replicate", None)
PLAN = "heads and features"
TENSOR_2, TENSOR_4 = (2, PLAN, {"tensor": 2}), (4, PLAN, {"tensor": 4})
GRID = (4, PLAN, {"data": 2, "tensor": 2})
OTHERS = [ONE, (2, "zero1", None), (3, "sharded", None)]
NUM_STEPS, SAVED = 6, 2
SHARDED = "feed_in.weight"
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # some steps in single precision; see test_tensor_bits.py


def parts_of_run(communicator, strategy, mesh):
    """A run, the step of a model, and its loader."""
    run = Run(12, 4, 5, communicator=communicator, mesh=mesh)
    model = Net()
    if mesh is not None:
        parallelize_module(model, run.mesh["tensor"], PLANS[strategy])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    step = run.train_step(model, optimizer, loss, strategy=STRATEGIES.get(strategy, "replicate"), max_grad_norm=1.0)
    return run, step, run.loader(texts(27), shuffle=True)


def trained(communicator, strategy, mesh, folder=None, resume=None, allow=False, num_steps=NUM_STEPS):
    """A loop that saves after each step.

    Returns:
        For each step from the first on the digest, the checksum, and the loss; and the whole state in the end. What is
        said where another contract is refused.
    """
    run, step, loader = parts_of_run(communicator, strategy, mesh)
    if resume is not None:
        try:
            run.load_checkpoint(resume, step, loader, allow_contract_change=allow)
        except ContractError as error:
            return str(error)
    seen = {step.num_steps: (state_digest(step), as_hex(int(state_checksum(step))), None)}
    while step.num_steps < num_steps:
        for batch in loader:
            result = step(batch)
            seen[step.num_steps] = state_digest(step), as_hex(int(state_checksum(step))), result.loss
            if folder is not None:
                run.save_checkpoint(folder, step, loader, keep=100)
            if step.num_steps == num_steps:
                break
    return seen, whole_state(step)


def spoilt(communicator, element):
    """Digest and checksum before and after one element of the last rank's part of a matrix is another."""
    _, step, _ = parts_of_run(communicator, *TENSOR_2[1:])
    before = state_digest(step), int(state_checksum(step))
    if communicator.rank == communicator.world_size - 1:
        with torch.no_grad():
            step.sharded_state.parts[SHARDED].view(-1)[element] += 1
    return before, (state_digest(step), int(state_checksum(step)))


def checkpoint(folder, step=SAVED):
    return folder / f"step-{step:08d}"


def alone(folder, tmp_path):
    """A copy of a checkpoint, beside which there are none of later steps: another contract would not go on from it."""
    return shutil.copytree(checkpoint(folder), tmp_path / "taken" / checkpoint(folder).name)


@pytest.fixture(scope="module")
def recorded(worlds, tmp_path_factory):
    """`recorded(case)`: the folder of checkpoints that a run left after each step, and what it returned."""
    runs = {}

    def get(case):
        if str(case) not in runs:
            folder = tmp_path_factory.mktemp("divided") / "checkpoints"
            results = worlds(case[0]).run(trained, *case[1:], folder)
            assert all(result[0] == results[0][0] for result in results)
            runs[str(case)] = folder, results[0]
        return runs[str(case)]

    return get


def check_taken_up(worlds, recorded, tmp_path, before, after):
    folder, (seen, _) = recorded(before)
    expected = recorded(ONE)[1]
    for got, state in worlds(after[0]).run(trained, *after[1:], None, alone(folder, tmp_path), True):
        assert got[SAVED][:2] == seen[SAVED][:2]
        assert list(got) == list(range(SAVED, NUM_STEPS + 1))
        assert np.allclose([got[k][2] for k in range(3, 7)], [expected[0][k][2] for k in range(3, 7)], **CLOSE)
        assert state.keys() == expected[1].keys()
        assert all(np.allclose(state[key], expected[1][key], **CLOSE) for key in state)


@pytest.mark.parametrize("after", [ONE, OTHERS[2]], ids=str)
def test_what_a_divided_run_has_saved_is_taken_up_to_the_bit(worlds, recorded, tmp_path, after):
    check_taken_up(worlds, recorded, tmp_path, TENSOR_2, after)


@pytest.mark.parametrize("before", [ONE, OTHERS[1]], ids=str)
def test_a_divided_run_takes_up_to_the_bit_what_another_has_saved(worlds, recorded, tmp_path, before):
    check_taken_up(worlds, recorded, tmp_path, before, TENSOR_2)


@pytest.mark.parametrize(
    ("before", "after"), [(TENSOR_2, GRID), pytest.param(GRID, TENSOR_2, marks=pytest.mark.slow)], ids=str
)
def test_on_another_number_of_ranks_along_data_a_run_goes_on_to_the_same_bits(worlds, recorded, before, after):
    undisturbed = recorded(TENSOR_2)[1]
    for got, state in worlds(after[0]).run(trained, *after[1:], None, checkpoint(recorded(before)[0])):
        assert {k: got[k] for k in range(3, 7)} == {k: undisturbed[0][k] for k in range(3, 7)}
        assert all(state[key].tobytes() == undisturbed[1][key].tobytes() for key in state)


def test_twin_digests_and_checksums_tell_the_steps_and_the_tensor_ranks_apart(recorded):
    (two, _), (one, _) = recorded(TENSOR_2)[1], recorded(ONE)[1]
    assert two[0] == one[0]  # nothing trained yet: the same state, whole and in parts
    for column in (0, 1):
        values = [seen[step][column] for seen in (two, one) for step in range(1, NUM_STEPS + 1)]
        assert len(set(values)) == len(values)


@pytest.mark.parametrize("element", [0, -1])
def test_twin_one_element_of_one_ranks_part_is_enough_for_another_digest(worlds, element):
    for before, after in worlds(2).run(spoilt, element):
        assert before[0] != after[0]
        assert before[1] != after[1]


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (TENSOR_4, "tensor.ranks: 2 before, 4 now"),
        (ONE, "tensor.ranks: 2 before"),
        ((2, "features", {"tensor": 2}), "tensor.plan"),
    ],
    ids=str,
)
def test_sums_that_would_be_cut_elsewhere_are_refused_unless_that_is_accepted(worlds, recorded, tmp_path, case, named):
    place = alone(recorded(TENSOR_2)[0], tmp_path)
    for words in worlds(case[0]).run(trained, *case[1:], None, place):
        assert named in words
        assert "allow_contract_change=True" in words
    for got, _ in worlds(case[0]).run(trained, *case[1:], None, place, True, SAVED):
        assert got[SAVED][:2] == recorded(TENSOR_2)[1][0][SAVED][:2]


def test_each_rank_writes_its_part_and_together_they_are_the_whole_in_order(recorded):
    folder, (_, state) = recorded(TENSOR_2)
    path = checkpoint(folder, NUM_STEPS)
    parts = [load_file(path / part_name("model", rank, 2)) for rank in range(2)]
    assert [part[SHARDED].shape for part in parts] == [(12, 16), (12, 16)]
    whole = read_checkpoint(path).files["model"]
    assert whole.keys() == {name for name in state if " " not in name}
    for name, tensor in whole.items():
        assert tensor.numpy().tobytes() == state[name].tobytes()
    assert parts[0].keys() == parts[1].keys()
    for name in parts[0]:
        assert np.array_equal(torch.cat([part[name] for part in parts]).numpy(), state[name])
    assert "attention_out.weight" in parts[0]  # cut by its columns, written by rows


def test_torchs_reader_of_distributed_checkpoints_and_the_export_have_the_same_weights(recorded, tmp_path):
    folder, (_, state) = recorded(TENSOR_2)
    path = checkpoint(folder, NUM_STEPS)
    sizes = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    found = {name: torch.empty(sizes[name].size) for name in state if " " not in name}
    load_by_torch(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert export_weights(path, tmp_path / "weights.safetensors") is not None
    exported = load_file(tmp_path / "weights.safetensors")
    assert exported.keys() == found.keys()
    for name, tensor in found.items():
        assert tensor.numpy().tobytes() == exported[name].numpy().tobytes() == state[name].tobytes()
