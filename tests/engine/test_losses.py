"""The loss contract: what a loss function may return, and how it is told that it may not."""

import numpy as np
import pytest
import torch
from engine_programs import bits, in_turns, make_step, mean_squared, perceptron, squared, step_once, table
from torch import nn
from torch.nn import functional

from samestep.engine.losses import Mean, read_loss
from samestep.errors import LossError, NonFiniteError


def linear():
    return nn.Linear(5, 1)


def as_mean(model, batch):
    losses = squared(model, batch)
    return Mean(losses.sum(), len(losses))


@pytest.mark.parametrize("loss", [mean_squared, squared, as_mean])
def test_each_form_of_loss_gives_the_mean_over_the_global_batch(loss):
    model, result = in_turns(1, lambda c: step_once(c, linear, loss, num_microbatches=7))[0]
    torch.manual_seed(0)
    plain = linear()
    expected = functional.mse_loss(plain(table()[0]), table()[1])
    (gradient,) = torch.autograd.grad(expected, plain.weight)
    assert result.loss == pytest.approx(expected.item(), rel=1e-6)  # 24 float32 terms in another order
    assert (result.count, result.num_samples) == (24, 24)
    torch.testing.assert_close(model.weight.grad, gradient, rtol=1e-5, atol=1e-6)


def test_losses_a_sample_and_a_sum_with_a_count_are_the_same_bits():
    results = [in_turns(1, lambda c, loss=loss: step_once(c, perceptron, loss))[0] for loss in (squared, as_mean)]
    assert results[0][1].loss.hex() == results[1][1].loss.hex()
    assert all(torch.equal(a, b) for a, b in zip(*(r[0].state_dict().values() for r in results), strict=True))


@pytest.mark.parametrize("count", [3, 3.0, np.int64(3), torch.tensor(3), torch.tensor([3.0]), torch.tensor(3.0)])
def test_a_count_is_any_one_number(count):
    loss = read_loss(Mean(torch.tensor(6.0), count), 10)
    assert (float(loss.value), loss.weight, float(loss.count)) == (6.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3, 1), "returned a float32 tensor of shape [3, 1]; needed: a 0-d tensor"),
        (torch.zeros(4), "returned 4 losses for a microbatch of 3 samples"),
        (torch.tensor(1), "the loss is an int64 tensor of shape []; it must be of a floating dtype"),
        (torch.tensor(True), "it must be of a floating dtype"),
        (None, "returned None; needed"),
        ("0.5", "returned a str; needed"),
        (0.5, "returned a float; needed"),
        ((torch.tensor(1.0), 3), "returned a pair with an int; needed beside the loss: a dict of scalars by name"),
        ((torch.tensor(1.0), {}, {}), "returned a tuple; needed"),
        (Mean(torch.zeros(3), 3), "0-d tensor as total, got a float32 tensor of shape [3]; sum it first"),
        (Mean(1.0, 3), "0-d tensor as total, got a float"),
        (Mean(torch.tensor(1), 3), "must be of a floating dtype"),
        (Mean(torch.tensor(1.0), torch.ones(3)), "one number as count, got a float32 tensor of shape [3]"),
        (Mean(torch.tensor(1.0), "3"), "one number as count, got a str"),
        (Mean(torch.tensor(1.0), None), "one number as count, got None"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_anything_else_is_refused_with_what_was_got_and_what_is_needed(value, message):
    with pytest.raises(LossError) as caught:
        read_loss(value, 3)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loss", [lambda m, b: m(b[0]).mean().detach(), lambda m, b: b[1].mean()])
def test_a_loss_that_depends_on_no_parameter_is_refused(loss):
    with pytest.raises(LossError, match="depends on no trainable parameter"):
        in_turns(1, lambda c: step_once(c, linear, loss))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [lambda v: v.mean(), lambda v: v, lambda v: Mean(v.mean(), 1)])
def test_a_loss_of_sixteen_bits_is_widened_before_it_is_summed(dtype, form):
    losses = torch.full((4096,), 100.0, dtype=dtype)
    loss = read_loss(form(losses), 4096)
    assert loss.value.dtype == torch.float32
    assert float(loss.value) * loss.weight / loss.count == 100.0


def test_a_batch_in_which_nothing_counts_is_named():
    with pytest.raises(NonFiniteError, match="its count over the whole batch is 0"):
        in_turns(2, lambda c: step_once(c, linear, lambda m, b: Mean(0 * m(b[0]).sum(), 0)))


def test_a_loss_that_was_refused_leaves_the_state_as_it_was():
    def program(communicator):
        model = perceptron()
        before = bits(model, [])
        losses = iter([mean_squared, lambda m, b: "no loss"])
        step = make_step(communicator, model, lambda m, b: next(losses)(m, b), num_microbatches=4)
        with pytest.raises(LossError):
            step(table())
        return (
            bits(model, []) == before,
            step.num_steps,
            make_step(communicator, model, num_microbatches=4)(table()).loss,
        )

    expected = in_turns(1, lambda c: step_once(c, perceptron))[0][1].loss
    assert in_turns(1, program) == [(True, 0, expected)]


def test_a_replacement_of_torchs_backward_is_called(monkeypatch):
    real, calls = torch.autograd.backward, []

    def counting(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)

    plain = in_turns(1, lambda c: step_once(c, linear))[0][0]
    monkeypatch.setattr(torch.autograd, "backward", counting)
    counted = in_turns(1, lambda c: step_once(c, linear))[0][0]
    assert len(calls) == 4
    assert torch.equal(plain.weight, counted.weight)
