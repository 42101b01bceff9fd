"""Modules of many kinds inside the wrapper, trained as usual."""

import os

import torch
from torch import nn
from usual import Net, case, results, rows, train, wrap


@case
def empty_batch():
    """A batch of no rows leaves the running statistics alone."""
    model = wrap(nn.Linear(4, 3), nn.BatchNorm1d(3))
    norm, first = model.module[1], model(torch.randn(8, 4).cuda())
    before = norm.running_mean.clone()
    empty = model(torch.zeros(0, 4).cuda())
    print("empty", list(empty.shape), torch.equal(before, norm.running_mean))
    return first, norm.running_mean, norm.running_var


@case
def channels_last():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    model = nn.DataParallel(net).cuda()
    x = torch.randn(9, 3, 8, 8).cuda().to(memory_format=torch.channels_last)
    state = train(model, lambda: (x,))["state"]
    print(model(x).is_contiguous(memory_format=torch.channels_last), net[0].weight.grad.stride())
    return model(x), state, net[0].weight.grad


@case
def devices_inside():
    """Each chunk believes itself on a device of its own."""

    def forward(net, x):
        assert x.device == net.fc.weight.device == net.norm.running_mean.device
        noise = torch.zeros(len(x), 2, device=x.device)
        print(x.device, noise.device, x.get_device(), torch.zeros_like(x).is_cuda)
        return net.fc(x) + noise + net.norm.running_mean

    model = wrap(Net(forward, fc=nn.Linear(4, 2), norm=nn.BatchNorm1d(2)))
    model.register_full_backward_hook(lambda module, grad_in, grad_out: print("back", grad_out[0].device))
    x = torch.randn(10, 4).cuda().requires_grad_()
    out = model(x)
    out.retain_grad()
    out.square().sum().backward()
    print(out.device, x.grad.device, model.module.fc.weight.grad.device)
    return out.grad, x.grad, model.module.fc.weight.grad


@case
def inplace_relu():
    """A forward that writes to its input in place: the caller's tensor stays as it was."""
    first, model = nn.Linear(4, 6).cuda(), wrap(nn.ReLU(inplace=True), nn.Linear(6, 2))
    h = first(torch.randn(10, 4).cuda())
    trained = train(model, lambda: (h.detach().requires_grad_(),))
    model(h).sum().backward()
    print("negative entries left:", int((h < 0).sum()) > 0)
    return {**trained, "h": h, "grad": first.weight.grad}


@case
def is_parameter():
    """A forward that asks whether its weight is a parameter, and for the type and device of those it has."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 2.0))
            self.register_buffer("fixed", torch.full((3,), 7.0))

        def forward(self, x):
            assert isinstance(self.weight, nn.Parameter)
            assert not isinstance(self.fixed, nn.Parameter)
            count = sum(isinstance(value, nn.Parameter) for value in self.parameters())
            norm = sum(p.square().sum() for name, p in self.named_parameters() if p.requires_grad and "weight" in name)
            steps = torch.arange(3, device=next(self.parameters()).device, dtype=next(self.parameters()).dtype)
            return x * self.weight * count + norm + self.fixed + steps

    return train(wrap(Scale()), rows(10, 3))


@case
def parameter_list():
    def forward(net, x):
        for weight in net.weights:
            x = torch.tanh(x @ weight)
        for layer in net.layers:
            x = layer(x)
        return x * net.named["scale"] + net.named["shift"] + net.weights[-1].mean() * len(net.weights)

    weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)])
    named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(4)), "shift": nn.Parameter(torch.zeros(4))})
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
    return train(wrap(Net(forward, weights=weights, named=named, layers=layers)), rows(9, 4))


@case
def part_wrap():
    """Only the features of a network are wrapped; the module is also called beside its wrapper, and by its forward."""

    def forward(net, x):
        h = net.features(x) + 0.1 * net.features.forward(x) + 0.1 * net.features.module(x)
        return net.classifier(h.view(h.size(0), -1))

    features = nn.DataParallel(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)))
    model = Net(forward, features=features, classifier=nn.Linear(4 * 4 * 4, 3)).cuda()
    return train(model, rows(9, 1, 8, 8), optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))


@case
def output_device():
    """The outputs are wanted on the second device, and the targets follow them."""
    model = nn.DataParallel(nn.Linear(3, 2), device_ids=[0, 1, 2, 3], output_device=1).cuda()
    trained = train(model, rows(8, 3), loss_of=lambda out: (out - torch.ones(8, 2).to(out.device)).square().mean())
    print("loss on", trained["loss"].device, "gradient on", model.module.weight.grad.device)
    return trained


if os.environ.get("SAMESTEP_TEST_DEVICE") != "cuda":  # fake GPUs have no sparse tensors

    @case
    def sparse_embedding():
        model = wrap(nn.Embedding(20, 4, sparse=True))
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        trained = train(model, lambda: (torch.randint(20, (10, 3)).cuda(),), optimizer=optimizer)
        print(model.module.weight.grad.layout)
        return trained


@case
def tied_outside():
    """Weights tied inside the wrapped model, and once more outside of it."""

    def forward(net, ids):
        h = torch.tanh(net.body(net.embed(ids)))
        return h, net.decode(h)

    model = wrap(Net(forward, embed=nn.Embedding(12, 6), body=nn.Linear(6, 6), decode=nn.Linear(6, 12)))
    model.module.decode.weight = model.module.embed.weight

    def loss_of(out):
        return (out[1] + out[0] @ model.module.embed.weight.t()).square().mean()

    return train(model, lambda: (torch.randint(12, (10, 5)).cuda(),), loss_of=loss_of)


@case
def unused_parameter():
    """Parameters that no sample uses, and some that only a few samples use."""

    experts = {name: nn.Linear(4, 2) for name in ("first", "second", "spare")}
    model = wrap(Net(lambda net, x: net.second(x) if x[0, 0] > 5 else net.first(x), **experts))
    x = torch.randn(10, 4)
    x[3:6, 0] = 9.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
    trained = train(model, lambda: (x.cuda(),), optimizer=optimizer)
    print("without a gradient:", [name for name, p in model.named_parameters() if p.grad is None])
    return {**trained, "grads": [p.grad for p in model.parameters()]}


RESULT = results()
