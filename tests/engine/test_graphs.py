"""CUDA graphs in the step: which microbatches run by one, what is copied in and out, and that the bits stay the same.

What captures is replaced, and only that: see graph_programs. The tests with a real capture are in test_graphs_on_gpu.
"""

import random

import numpy as np
import pytest
import torch
from engine_programs import bits, in_turns, make_step, mean_squared, perceptron, table
from graph_programs import CASES, with_graphs
from torch import nn

from samestep.engine.graphs import MOST_GRAPHS, WARM_UPS, explain_capture, form_of
from samestep.engine.observer import StepObserver, observed_by
from samestep.errors import DeterminismError, LossError, UsageError
from samestep.train.contract import step_contract
from samestep.train.run import Run


def train(
    communicator,
    graphs=True,
    model_fn=perceptron,
    loss=mean_squared,
    epochs=3,
    data=None,
    num_microbatches=4,
    seeded=True,
    **options,
):
    """A few epochs, the last batch of which is shorter; the digest, the losses, and how often was run and replayed."""
    run = Run(16, num_microbatches, communicator=communicator)
    torch.manual_seed(0)
    model = model_fn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = run.train_step(model, optimizer, loss, **options)
    recorders = with_graphs(step, 16) if graphs else []
    if not seeded:
        step.compute.generators.seed = lambda seed: None
    data = table(42) if data is None else data
    losses = [step(batch).loss for _ in range(epochs) for batch in run.loader(data, shuffle=True)]
    return bits(model, [optimizer]), losses, [(recorder.num_runs, recorder.num_replays) for recorder in recorders]


def trained(world_size, **case):
    """What `train` gives on each rank."""
    return in_turns(world_size, lambda communicator: train(communicator, **case))


@pytest.mark.parametrize("case", CASES)
def test_steps_by_graphs_give_the_bits_of_steps_without(case):
    (plain,) = trained(1, graphs=False, **CASES[case])
    (graphed,) = trained(1, **CASES[case])
    assert graphed[:2] == plain[:2]
    assert not plain[2]
    ((_, num_replays),) = graphed[2]
    assert num_replays > 4


@pytest.mark.parametrize("case", ["batchnorm-and-dropout", "buffers-replaced", "two-sizes"])
def test_steps_by_graphs_give_the_same_bits_on_all_numbers_of_devices(case):
    (alone,) = trained(1, **CASES[case])
    for world_size in (2, 3):
        assert [result[:2] for result in trained(world_size, **CASES[case])] == [alone[:2]] * world_size


def test_twin_replays_that_are_not_seeded_are_noticed():
    (alone,) = trained(1)
    assert all(result[:2] != alone[:2] for result in trained(2, seeded=False))


def test_a_form_is_captured_once_and_microbatches_of_a_shorter_batch_run_without():
    ((_, _, recorded),) = trained(1)
    assert recorded == [(WARM_UPS + 1, 3 * 2 * 4)]  # epochs, full batches, microbatches
    ((_, _, recorded),) = trained(1, num_microbatches=3)  # of two sizes
    assert recorded == [(2 * (WARM_UPS + 1), 3 * 2 * 3)]


def alone(program):
    """What a function of a communicator returns on the only device."""
    return in_turns(1, program)[0]


def one_step(communicator, model=None, loss=mean_squared):
    model = perceptron() if model is None else model
    step = make_step(communicator, model, loss, num_microbatches=4)
    return model, step, with_graphs(step, 24)


def test_a_capture_leaves_no_trace_in_what_the_script_draws():
    def program(communicator):
        drawn = []
        for graphs in (False, True):
            _, step, _ = one_step(communicator)
            if not graphs:
                step.microbatches.graphs = None
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)
            step(table())
            drawn.append((torch.rand(3).tolist(), random.random(), np.random.rand()))
        return drawn

    first, second = alone(program)
    assert first == second


def test_moved_parameters_changed_modes_and_autocast_get_graphs_of_their_own():
    def program(communicator):
        model, step, recorders = one_step(communicator)
        step(table())
        step(table())
        assert [len(recorders), len(step.microbatches.graphs)] == [1, 1]
        model[3].eval()
        step(table())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(table())
        assert [len(recorders), len(step.microbatches.graphs)] == [1, 3]
        model[0].weight.data = model[0].weight.data.clone()
        step(table())
        assert [len(recorders), len(step.microbatches.graphs)] == [2, 1]
        model[1].running_mean = model[1].running_mean.clone()
        step(table())
        assert len(recorders) == 3
        model[2] = nn.PReLU()
        step(table())
        assert len(recorders) == 4
        model[0].weight.requires_grad_(False)
        step(table())
        assert len(recorders) == 5
        assert model[0].weight.grad is None

    alone(program)


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand()], ids=["python", "numpy"])
def test_a_loss_that_draws_on_the_host_is_refused(draw):
    def program(communicator):
        _, step, _ = one_step(communicator, loss=lambda model, batch: mean_squared(model, batch) * draw())
        with pytest.raises(UsageError, match="draws random numbers on the host"):
            step(table())

    alone(program)


def test_a_microbatch_that_writes_to_a_parameter_is_noticed_at_the_capture():
    def program(communicator):
        renormed = nn.Sequential(nn.Embedding(7, 3, max_norm=0.01))
        _, step, recorders = one_step(communicator, renormed, lambda model, ids: model(ids).sum(1))
        with pytest.raises(DeterminismError, match=r"parameter 0\.weight was written to"):
            step(torch.arange(24) % 7)
        return recorders[0].num_runs

    assert alone(program) == 1


def test_what_is_no_tensor_is_refused_by_name():
    def program(communicator):
        _, step, _ = one_step(communicator, loss=lambda model, batch: mean_squared(model, batch[:2]))
        with pytest.raises(UsageError, match=r"got a str in a batch; .* leave cuda_graphs out"):
            step((*table(), "train"))

    alone(program)


def test_more_forms_of_microbatches_than_graphs_are_kept_are_refused():
    def program(communicator):
        _, step, _ = one_step(communicator, nn.Linear(1, 1), lambda model, x: model(x[:, :1]).mean())
        for width in range(1, MOST_GRAPHS + 1):
            step(torch.ones(24, width))
        with pytest.raises(UsageError, match=f"more than {MOST_GRAPHS} forms"):
            step(torch.ones(24, MOST_GRAPHS + 1))

    alone(program)


def test_anomaly_mode_is_refused():
    def program(communicator):
        _, step, _ = one_step(communicator)
        with torch.autograd.set_detect_anomaly(True), pytest.raises(UsageError, match="anomaly mode"):
            step(table())

    alone(program)


def test_a_step_whose_modules_are_watched_runs_them():
    class Hooked(StepObserver):
        needs_modules = True

    def program(communicator, observers):
        with observed_by(*observers):
            _, step, recorders = one_step(communicator)
        step(table())
        step(table())
        return sum(recorder.num_replays for recorder in recorders)

    assert in_turns(1, program, [Hooked()]) == [0]
    assert in_turns(1, program, []) == [8]


def test_an_error_of_the_loss_is_its_own():
    def program(communicator):
        model, step, _ = one_step(communicator, loss=lambda model, batch: "none")
        before = bits(model, [])
        with pytest.raises(LossError, match="the loss function returned a str"):
            step(table())
        return before == bits(model, [])

    assert alone(program)


def test_graphs_are_refused_where_there_are_none_and_are_a_part_of_the_contract():
    def program(communicator):
        run = Run(8, communicator=communicator)
        model = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match="got cuda_graphs=True on cpu"):
            run.train_step(model, optimizer, mean_squared, cuda_graphs=True)
        return step_contract(run.train_step(model, optimizer, mean_squared))["cuda_graphs"]

    assert alone(program) is False


def test_the_form_of_a_microbatch_is_its_structure_shapes_strides_and_dtypes():
    x = torch.zeros(4, 6)
    values = [x, x[:2], x.t(), x.double(), (x,), [x], {"a": x}, {"b": x}, (x, x), {"a": x, "b": x}, {"b": x, "a": x}]
    forms = {form_of(value) for value in values}
    assert len(forms) == len(values)
    assert form_of({"a": [x, x]}) == form_of({"a": [torch.ones(4, 6), torch.ones(4, 6)]})
    with pytest.raises(UsageError, match="got a sparse tensor"):
        form_of(x.to_sparse())


def hiding(cause):
    """What the end of a capture raises, after one that failed."""
    end = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    end.__context__ = cause
    return end


def test_a_failed_capture_is_explained_by_what_it_failed_of():
    cause = RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore about it")
    explained = explain_capture(hiding(cause))
    assert isinstance(explained, UsageError)
    assert "(CUDA error: operation not permitted when stream is capturing): keep values on the device" in str(explained)
    assert explained.__cause__ is cause


@pytest.mark.parametrize(
    "cause", [torch.OutOfMemoryError("CUDA out of memory"), LossError("no loss")], ids=["memory", "loss"]
)
def test_a_capture_that_failed_of_something_else_raises_that(cause):
    assert explain_capture(hiding(cause)) is cause
