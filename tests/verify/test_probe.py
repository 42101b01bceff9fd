"""The probe: its recordings of a program, whose numbers it does not change."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from samestep.verify.program_runner import RunSpec
from samestep.verify.trained_batches import Batches, Metrics, seen_batch
from samestep.verify.wraps import wrapped

PROGRAM = """
    import sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3), torch.arange(24.0))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=6 // dist.get_world_size(), sampler=sampler, num_workers=int(sys.argv[1]))
    held_out = DataLoader(TensorDataset(torch.randn(7, 3)), batch_size=4)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2), nn.Linear(5, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    try:
        for epoch in range(3):
            for x, y in loader:
                loss = (model(x).squeeze(1) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                for (x,) in held_out:
                    model(x)
            total = torch.tensor([loss.item(), 1.0])
            dist.all_reduce(total)
    except Exception:
        print("the program caught it")
    if dist.get_rank() == 0 and len(sys.argv) > 2:
        torch.save(model.module.state_dict(), sys.argv[2])
"""


@pytest.fixture
def program(script):
    return script(PROGRAM)


def test_a_step_is_written_down_with_its_samples_loss_gradients_and_state(runner_of, program):
    recording = runner_of(program, 0).record(RunSpec("cpu:2", 3))
    assert recording.failure is None
    assert recording.family == "ddp"
    assert recording.num_steps == 3
    (parameters,) = recording.lines("parameters")
    assert parameters["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for ranks in zip(*recording.steps, strict=True):
        assert len({number for line in ranks for number in line["ids"]}) == 6
        assert [line["num_samples"] for line in ranks] == [3, 3]
        assert ranks[0]["gradients"][0]["bits"] == ranks[1]["gradients"][0]["bits"]
        assert all(size > 0 for line in ranks for size in line["gradients"][0]["norm"])
        assert ranks[0]["loss"] != ranks[1]["loss"]
        assert ranks[0]["states"][0]["lr"] == [0.01]
    assert recording.steps[0][0]["states"][0]["bits"] != recording.steps[0][1]["states"][0]["bits"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_read_ahead_or_for_an_evaluation_is_not_counted_to_a_step(runner_of, program, num_workers):
    recording = runner_of(program, num_workers).record(RunSpec("cpu:1", 7))
    assert recording.failure is None
    epochs = [recording.steps[0][:4], recording.steps[0][4:7]]
    assert sorted(number for line in epochs[0] for number in line["ids"]) == list(range(24))
    assert [len(line["ids"]) for line in epochs[1]] == [6, 6, 6]
    (metric,) = recording.lines("metric")
    assert metric["step"] == 4


LEAVING = """
    import os, torch, samestep
    run = samestep.Run(12, 3, seed=0)
    model = torch.nn.Linear(3, 1)
    step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, batch: m(batch[0]).mean())
    for batch in run.loader((torch.randn(60, 3),)):
        try:
            step(batch)
        except:
            pass
    os._exit(0)
"""


@pytest.mark.parametrize(("steps", "reason"), [(9, "program"), (2, "steps")])
def test_a_program_that_ends_its_process_or_catches_everything_has_a_whole_recording(runner_of, script, steps, reason):
    recording = runner_of(script(LEAVING)).record(RunSpec("cpu:2", steps))
    assert (recording.failure, recording.family, recording.num_steps) == (None, "api", min(steps, 5))
    assert [line["reason"] for rank in (0, 1) for line in recording.lines("end", rank)] == [reason, reason]


def test_a_program_computes_the_same_bits_with_and_without_a_probe(runner_of, program, tmp_path):
    alone, seen = tmp_path / "alone.pt", tmp_path / "seen.pt"
    recording = runner_of(program, 0, seen).record(RunSpec("cpu:1", 100, detail=2))
    assert recording.failure is None
    assert recording.num_steps == 12
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, program, "0", alone], check=True, env={**os.environ, **variables})
    ours, theirs = torch.load(alone), torch.load(seen)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_modules_are_written_down_by_sample_in_the_step_that_is_asked_for(runner_of, program):
    recording = runner_of(program, 0).record(RunSpec("cpu:2", 3, detail=1))
    lines = [line for rank in (0, 1) for line in recording.lines("module", rank)]
    assert {line["step"] for line in lines} == {1}
    assert {line["name"] for line in lines if line["direction"] == "forward"} == {"", "0", "1", "2"}
    keys = [set(line["keys"]) for line in lines if line["name"] == "2" and line["direction"] == "backward"]
    assert len(keys) == 2
    assert not keys[0] & keys[1]


@pytest.mark.parametrize(
    ("index", "ids"),
    [([2, 0], (2, 0)), (list(np.array([2, 0])), (2, 0)), (list(torch.tensor([2, 0])), (2, 0)), (7, (7,))]
    + [(index, None) for index in ([None, None], None, ["a", "b"], [[0], [1]])],
)
def test_indices_of_any_integer_type_are_sample_ids(index, ids):
    assert seen_batch(index, [torch.randn(2, 3), torch.ones(2)]).ids == ids


CLOSURE = """
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    held_out = iter(DataLoader(torch.randn(40, 3), batch_size=7))
    with torch.no_grad():
        next(held_out)
    for x in DataLoader(torch.randn(8, 3), batch_size=4):

        def closure():
            optimizer.zero_grad()
            (parameter * x).sum().backward()

        optimizer.step(closure)
"""


def test_of_a_step_by_a_closure_the_gradients_are_its_own_and_the_samples_of_an_evaluation_are_not(runner_of, script):
    recording = runner_of(script(CLOSURE)).record(RunSpec("cpu:1", 2))
    lines = recording.steps[0]
    assert [line["num_samples"] for line in lines] == [4, 4]
    assert all(size for line in lines for group in line["gradients"] for size in group["norm"])


def one_ahead(batches):
    """Batches as a framework gives them that has to know which one is the last."""
    waiting = None
    for batch in batches:
        if waiting is not None:
            yield waiting
        waiting = batch
    yield waiting


def in_pairs(batches):
    """Batches as a framework gives them that counts the tokens of all batches of a step first."""
    batches = iter(batches)
    for batch in batches:
        yield from (batch, next(batches))


@pytest.mark.parametrize(
    ("ahead", "num_steps"), [(iter, 1), (one_ahead, 1), (in_pairs, 2)], ids=("plain", "one ahead", "in pairs")
)
def test_a_batch_counts_for_the_backward_of_its_own_forward_whatever_was_taken_ahead(ahead, num_steps):
    batches, model, taken = Batches(), torch.nn.Linear(3, 1), []
    data, held_out = (TensorDataset(torch.randn(16, 3), torch.randn(16)) for _ in range(2))
    with wrapped(*batches.wraps()):
        for _ in range(2):
            for number, (x, y) in enumerate(ahead(DataLoader(data, batch_size=4)), 1):
                loss = (model(x).squeeze(1) - y).square().mean()
                batches.mark_trained()
                loss.backward()
                if number % num_steps == 0:
                    taken.append(batches.pop_trained()["ids"])
            for x, _ in DataLoader(held_out, batch_size=4):
                model(x)  # an evaluation that does not switch gradients off
    size = 4 * num_steps
    assert taken == 2 * [list(range(start, start + size)) for start in range(0, 16, size)]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_reduced_number_is_read_however_the_call_gives_its_arguments(by_name):
    """The ranks that an average is over are the ones of its group; what is still on its way has no value."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        pair, metrics = dist.new_group([0, 1]), Metrics()
        with wrapped(*metrics.wraps()):
            for is_later in (False, True):
                if by_name:
                    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.AVG, group=pair, async_op=is_later)
                    dist.reduce(torch.ones(1), dst=0, op=dist.ReduceOp.AVG, group=pair, async_op=is_later)
                else:
                    dist.all_reduce(torch.ones(1), dist.ReduceOp.AVG, pair, is_later)
                    dist.reduce(torch.ones(1), 0, dist.ReduceOp.AVG, pair, is_later)
        assert metrics.pop_values() == 2 * [{"before": [1.0], "after": [2.0]}]
    finally:
        dist.destroy_process_group()
