"""Forwards and backwards that would give other numbers unnoticed on several devices, each refused by name."""

import warnings
from functools import partial

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from usual import CASES, case


class Net(nn.Module):
    """One layer with a list, a tensor and the attributes of a case; `body` makes the result."""

    def __init__(self, body, **attributes):
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body
        self.level, self.history = torch.zeros(4), []
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, *more):
        return self.body(self, x, *more)


def run(body, *more, **attributes):
    """One step of a wrapped net of this kind."""
    model = nn.DataParallel(Net(body, **attributes)).cuda()
    model(torch.randn(12, 4).cuda(), *more).square().mean().backward()


@case
def momentum_encoder():
    """Momentum contrast: the forward moves the weights of its second encoder, by giving them other data."""

    def body(net, x):
        with torch.no_grad():
            for query, key in zip(net.fc.parameters(), net.key.parameters(), strict=True):
                key.data = key.data * 0.9 + query.data * 0.1
            k = net.key(x)
        return net.fc(x) - k - 1

    run(body, key=nn.Linear(4, 4).requires_grad_(False))


@case
def data_written():
    """A weight scaled through .data, which leaves no trace in the version that autograd counts."""

    def body(net, x):
        net.fc.weight.data.mul_(0.9)
        return net.fc(x)

    run(body)


@case
def parameter_changed():
    def body(net, x):
        with torch.no_grad():
            net.fc.weight.mul_(0.9)
        return net.fc(x)

    run(body)


@case
def attribute_with_gradients():
    run(lambda net, x: net.fc(x + net.shift), shift=torch.zeros(4, device="cuda", requires_grad=True))


@case
def noise_in_a_hook():
    def body(net, x):
        h = net.fc(x).relu()
        h.register_hook(lambda grad: grad + 0.1 * torch.randn_like(grad))
        return net.fc(h)

    run(body)


@case
def noise_of_numpy_in_a_hook():
    def body(net, x):
        h = net.fc(x).relu()
        h.register_hook(lambda grad: grad + 0.1 * float(np.random.rand()))
        return net.fc(h)

    run(body)


@case
def noise_in_a_backward():
    class Perturbed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + 0.01 * torch.rand_like(grad)

    run(lambda net, x: Perturbed.apply(net.fc(x)))


@case
def leaf_in_a_closure():
    delta = torch.zeros(4, device="cuda", requires_grad=True)
    run(lambda net, x: net.fc(x + delta))


@case
def prompt_computed_outside():
    prompt = nn.Linear(3, 4).cuda()(torch.randn(3).cuda())
    run(lambda net, x: net.fc(x + prompt))


@case
def parameter_in_a_list():
    def body(net, x):
        return net.fc(x) * net.gains[0]

    gain = nn.Parameter(torch.ones(4))
    run(body, gain=gain, gains=[gain])


@case
def modules_in_a_list():
    run(lambda net, x: net.blocks[0](net.fc(x)), blocks=[nn.Linear(4, 4).cuda()])


@case
def tensor_changed():
    def body(net, x):
        net.level += x.detach().mean(0).cpu()
        return net.fc(x) + net.level.to(x.device)

    run(body)


@case
def list_grown():
    def body(net, x):
        net.history.append(len(x))
        return net.fc(x) * len(net.history)

    run(body)


@case
def array_changed():
    """An array among the inputs, which every chunk gets whole."""

    def body(net, x, scale):
        scale *= 0.5
        return net.fc(x) * float(scale[0])

    run(body, np.ones(2))


@case
def checkpointing_reentrant():
    class CheckpointFunction(torch.autograd.Function):
        """As libraries have of their own."""

        @staticmethod
        def forward(ctx, function, x):
            ctx.function = function
            ctx.save_for_backward(x)
            with torch.no_grad():
                return function(x)

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                ctx.function(x).backward(gradient)
            return None, x.grad

    run(lambda net, x: CheckpointFunction.apply(net.fc, net.fc(x).relu()))


@case
def forward_mode():
    model = nn.DataParallel(nn.Linear(4, 2).requires_grad_(False)).cuda()
    with forward_ad.dual_level():
        model(forward_ad.make_dual(torch.randn(8, 4).cuda(), torch.ones(8, 4).cuda()))


@case
def hidden_on_the_wrong_dim():
    """A recurrent network whose hidden state has the batch on dim 1, while the inputs have it on dim 0."""
    model = nn.DataParallel(nn.LSTM(3, 4, num_layers=2, batch_first=True)).cuda()
    hidden = (torch.zeros(2, 12, 4).cuda(), torch.zeros(2, 12, 4).cuda())
    model(torch.randn(12, 5, 3).cuda(), hidden)


@case
def scripted_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.ReLU()))
    nn.DataParallel(net).cuda()(torch.randn(10, 4).cuda())


@case
def replicas_used():
    replicas = nn.parallel.replicate(nn.Linear(3, 1).cuda(), [0, 1])
    replicas[0](torch.randn(10, 3).cuda())


@case
def replicate_overridden():
    class Own(nn.DataParallel):
        def replicate(self, module, device_ids):
            return [module._replicate_for_data_parallel() for _ in device_ids]

    Own(nn.Linear(3, 1)).cuda()(torch.randn(10, 3).cuda())


@case
def lone_row():
    """A chunk that leaves BatchNorm one row."""
    model = nn.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda())
    model(torch.ones(8, 3))
    model(torch.ones(5, 3))


DIFFERING = {  # what the last of the chunks returns, and what the others do
    "containers": lambda y, is_last: [y] if is_last else (y,),
    "keys": lambda y, is_last: {"b" if is_last else "a": y},
    "numbers": lambda y, is_last: (y, 2.5 if is_last else 1.5),
    "counts": lambda y, is_last: (y, y) if is_last else (y, None),
    "widths": lambda y, is_last: y[:, : 1 if is_last else 4],
    "dims": lambda y, is_last: y.sum(1) if is_last else y,
    "dtypes": lambda y, is_last: y.double() if is_last else y,
    "sparse": lambda y, is_last: y.to_sparse() if is_last else y,
}


def differ(result):
    x = torch.zeros(12, 4)
    x[-1] = 50.0
    nn.DataParallel(Net(lambda net, x: result(net.fc(x), bool(x[-1, 0] == 50.0)))).cuda()(x.cuda())


RESULT = {}
torch.manual_seed(0)
differing = {name: partial(differ, result) for name, result in DIFFERING.items()}
for name, function in {**{each.__name__: each for each in CASES}, **differing}.items():
    try:
        function()
        RESULT[name] = "nothing was raised"
    except Exception as error:
        RESULT[name] = f"{type(error).__name__}: {error}"
# After all that, the ranks are in step.
model = nn.DataParallel(nn.Linear(4, 2)).cuda()
RESULT["after"] = model(torch.randn(10, 4).cuda())
