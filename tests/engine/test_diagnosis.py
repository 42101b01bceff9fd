"""Operations without a deterministic form are named with the module that called them."""

import pytest
import torch
from engine_programs import mean_squared, table
from torch import nn
from torch.nn import functional
from worlds import in_turns

from samestep.engine.diagnosis import explain_nondeterminism
from samestep.errors import DeterminismError, UsageError
from samestep.train.run import Run


def put(x):
    """On a CPU too, `put_` that does not accumulate has no deterministic form."""
    return x.clone().put_(torch.tensor([0]), torch.tensor([1.0]))


class PutBackward(torch.autograd.Function):
    """The identity, whose backward has no deterministic form."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return put(gradient)


class Puts(nn.Module):
    def forward(self, x):
        return put(x)


class PutsBackward(nn.Module):
    def forward(self, x):
        return PutBackward.apply(x)


class InADict(nn.Module):
    def forward(self, x):
        return {"hidden": [PutBackward.apply(x)]}


class OutOfADict(nn.Module):
    def forward(self, x):
        return x["hidden"][0]


def stack(*modules):
    return nn.Sequential(nn.Linear(5, 8), nn.Sequential(*modules, nn.Tanh()), nn.Linear(8, 1))


def message(world_size, model_fn, loss=mean_squared, reduction="ordered", **options):
    def program(communicator):
        run = Run(24, 3, reduction=reduction, communicator=communicator)
        model = model_fn()
        torch.manual_seed(1)
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **options)
        with pytest.raises(DeterminismError) as caught:
            step(table())
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
        return str(caught.value)

    (text,) = set(in_turns(world_size, program))
    assert text.startswith("put_ has no deterministic form on this device")
    assert "(--reduction native)" in text
    return text


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@pytest.mark.parametrize(
    ("model_fn", "place"),
    [
        (lambda: stack(Puts()), "in module 1.0 (Puts)"),
        (lambda: stack(PutsBackward()), "in the backward of module 1.0 (PutsBackward)"),
        (lambda: stack(nn.Tanh(), PutsBackward()), "in the backward of module 1.1 (PutsBackward)"),
        (lambda: stack(InADict(), OutOfADict()), "in the backward of module 1.0 (InADict)"),
    ],
)
def test_the_module_is_named(model_fn, place, world_size, bucket_bytes):
    assert place in message(world_size, model_fn, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize(
    ("loss", "place"),
    [
        (lambda m, b: functional.mse_loss(put(m(b[0])), b[1]), "called in the loss function;"),
        (lambda m, b: functional.mse_loss(PutBackward.apply(m(b[0])), b[1]), "in the backward of the loss function;"),
    ],
)
def test_the_loss_function_is_named(loss, place):
    assert place in message(2, stack, loss)


def test_the_native_reduction_takes_such_operations():
    def program(communicator):
        run = Run(24, 3, reduction="native", communicator=communicator)
        model = stack(Puts(), PutsBackward())
        return run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared)(table()).loss

    losses = in_turns(2, program, reduction="native")
    assert losses[0] == losses[1]


def test_other_errors_stay_what_they_are():
    assert explain_nondeterminism(RuntimeError("out of memory"), nn.Linear(1, 1), lambda: torch.zeros(())) is None

    def broken(model, batch):
        raise RuntimeError("the user's own")

    def program(communicator):
        run = Run(24, 3, communicator=communicator)
        model = stack()
        run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), broken)(table())

    with pytest.raises(RuntimeError, match="the user's own"):
        in_turns(1, program)


def test_the_search_for_the_module_leaves_no_hooks_behind():
    def program(communicator):
        run = Run(24, 3, communicator=communicator)
        model = stack(PutsBackward())
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_squared)
        with pytest.raises(DeterminismError):
            step(table())
        return [len(module._forward_hooks) for module in model.modules()]

    assert set(in_turns(1, program)[0]) == {0}


@pytest.mark.parametrize(
    ("rows", "strategy", "said"),
    [
        (
            100,
            "replicate",
            r"of the 4 samples of step 4 microbatch 0 \(of 6\) has one.*drop_last=True.*num_microbatches=2 or",
        ),
        (
            97,
            "replicate",
            r"of the 1 samples of step 4 microbatch 0 \(of 6\) has one.*drop_last=True.*global_batch_size",
        ),
        (100, "sharded", r"of the 4 samples of step 4 microbatch 0 \(of 6\) has one.*num_microbatches=2 or less"),
    ],
)
def test_a_batch_that_leaves_batchnorm_one_sample_is_named(rows, strategy, said):
    run = Run(24, 6)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    step = run.train_step(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m(b[0]).square().mean(), strategy=strategy
    )
    batches = list(run.loader((torch.randn(rows, 3),)))
    for batch in batches[:-1]:
        step(batch)
    with pytest.raises(UsageError, match=rf"module 1 \((FSDP)?BatchNorm1d\) needs two .*{said}"):
        step(batches[-1])
