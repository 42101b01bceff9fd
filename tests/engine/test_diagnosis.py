"""Operations without a deterministic form are named with the module that called them; so are lone samples."""

import pytest
import torch
from engine_programs import in_turns, make_step, mean_squared, table
from torch import nn
from torch.nn import functional

from samestep.engine.diagnosis import explain_nondeterminism
from samestep.errors import DeterminismError, UsageError
from samestep.run.run import Run


def put(x):
    """On a CPU too, `put_` that does not accumulate has no deterministic form."""
    return x.clone().put_(torch.tensor([0], device=x.device), torch.tensor([1.0], device=x.device))


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


def stack(*modules):
    return nn.Sequential(nn.Linear(5, 8), nn.Sequential(*modules, nn.Tanh()), nn.Linear(8, 1))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("modules", "loss", "place"),
    [
        ([Puts()], mean_squared, "in module 1.0 (Puts)"),
        ([PutsBackward()], mean_squared, "in the loss function or a backward;"),
        ([], lambda m, b: functional.mse_loss(put(m(b[0])), b[1]), "in the loss function or a backward;"),
    ],
)
def test_the_operation_and_the_module_are_named(modules, loss, place, world_size):
    def program(communicator):
        model = stack(*modules)
        step = make_step(communicator, model, loss, num_microbatches=3, bucket_bytes=1)
        with pytest.raises(DeterminismError) as caught:
            step(table())
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
        return str(caught.value)

    (text,) = set(in_turns(world_size, program))
    assert text.startswith("put_ has no deterministic form on this device")
    assert place in text


LAYERS = nn.Sequential(nn.AvgPool3d(2), nn.Sequential(nn.AdaptiveMaxPool2d(3)), nn.Linear(2, 2))
REFUSED = {
    "avg_pool3d_backward_cuda": "in the backward of module 0 (AvgPool3d); replace it by a Conv3d of one group a",
    "adaptive_max_pool2d_backward_cuda": "in the backward of module 1.0 (AdaptiveMaxPool2d); replace it by MaxPool",
    "max_unpooling2d_forward_out": "in the loss function or a backward; replace it by Tensor.scatter by the flattened",
    "kthvalue CUDA": "in the loss function or a backward; replace it by torch.sort and Tensor.select",
    "median CUDA with indices output": "replace it by torch.sort and Tensor.select, or median without a dimension",
    "_unknown_cuda": "_unknown_cuda has no deterministic form on this device, and was called in the loss function or a "
    "backward; replace it",
}


@pytest.mark.parametrize("operation", REFUSED)
def test_a_replacement_is_named_and_the_modules_whose_backward_it_may_be(operation):
    message = f"{operation} does not have a deterministic implementation, but you set 'torch.use_deterministic_…'"
    text = str(explain_nondeterminism(RuntimeError(message), LAYERS))
    assert text.startswith(f"{operation} has no deterministic form")
    assert REFUSED[operation] in text


CUBLAS = (  # torch 2.13, ATen/Context.cpp
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS "
    "and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment variable "
    "before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
)


@pytest.mark.parametrize("value", [None, ":0:0"])
def test_a_refusal_of_cublas_names_the_variable_and_when_it_must_be_set(value, monkeypatch):
    def refused(model, batch):
        raise RuntimeError(CUBLAS)

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    if value is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    with pytest.raises(DeterminismError, match=rf"CUBLAS_WORKSPACE_CONFIG is {value!r} now.*[Ii]mport samestep before"):
        in_turns(1, lambda communicator: make_step(communicator, stack(), refused)(table()))


def test_other_errors_stay_what_they_are():
    def broken(model, batch):
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        in_turns(1, lambda communicator: make_step(communicator, stack(), broken)(table()))


@pytest.mark.parametrize(
    ("rows", "strategy", "said"),
    [
        (
            100,
            "replicate",
            r"of the 4 samples of step 5 microbatch 0 \(of 6\) has one.*drop_last=True.*microbatches=2 or",
        ),
        (
            97,
            "replicate",
            r"of the 1 samples of step 5 microbatch 0 \(of 6\) has one.*drop_last=True.*global_batch_size",
        ),
        (100, "sharded", r"of the 4 samples of step 5 microbatch 0 \(of 6\) has one.*num_microbatches=2 or less"),
    ],
)
def test_a_batch_that_leaves_batchnorm_one_sample_is_named(rows, strategy, said):
    run = Run(24, 6)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    step = run.train_step(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m(b[0]).square().mean(), strategy=strategy
    )
    *batches, last = run.loader((torch.randn(rows, 3),))
    for batch in batches:
        step(batch)
    with pytest.raises(UsageError, match=rf"module 1 \((FSDP)?BatchNorm1d\) needs two .*{said}"):
        step(last)
