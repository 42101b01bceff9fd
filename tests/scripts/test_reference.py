"""The reference against plain autograd and hand-made sums; torch's own runs on accelerators only."""

import torch
from reference import ReferenceDataParallel
from torch import nn


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def rows(count=10, features=5):
    return torch.randn(count, features, generator=torch.Generator().manual_seed(1))


def test_outputs_are_to_the_bit_those_of_the_module_on_each_chunk():
    net = perceptron()
    x = rows()
    ours = ReferenceDataParallel(net, 4)(x)
    assert torch.equal(ours, torch.cat([net(chunk.clone()) for chunk in x.chunk(4)]))


def test_gradients_are_to_the_bit_the_sums_in_pairs_of_those_of_each_chunk():
    net, x = perceptron(), rows()
    ReferenceDataParallel(net, 4)(x).square().sum().backward()
    parts = [torch.autograd.grad(net(chunk.clone()).square().sum(), net[0].weight)[0] for chunk in x.chunk(4)]
    assert torch.equal(net[0].weight.grad, (parts[0] + parts[1]) + (parts[2] + parts[3]))


def test_second_derivatives_are_those_of_the_plain_module():
    # In double precision, where only the order of the sums differs: a few units of 2**-52 on numbers of order 1.
    gradients = []
    for wrap in (lambda net: net, lambda net: ReferenceDataParallel(net, 4)):
        net = perceptron().double()
        x = rows().double().requires_grad_()
        (slope,) = torch.autograd.grad(wrap(net)(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        gradients.append([p.grad for p in net.parameters()] + [x.grad])
    for plain, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)
    assert gradients[0][0].abs().sum() > 0


def test_running_statistics_are_weighted_by_rows_and_other_buffers_are_the_first_chunks():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2, momentum=1.0)
            self.register_buffer("first", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))

        def forward(self, x):
            self.first.copy_(x[0, 0])
            self.replaced = x[0, 0] + 1
            self.seen = len(x)
            return self.norm(x)

    net, x = Net(), torch.arange(20.0).view(10, 2)
    ReferenceDataParallel(net, 4)(x[:9])
    torch.testing.assert_close(net.norm.running_mean, x[:9].mean(0))
    assert net.norm.num_batches_tracked == 1
    assert (net.first, net.replaced) == (0.0, 1.0)
    assert not hasattr(net, "seen")
    ReferenceDataParallel(net, 4)(x[2:])
    assert net.first == 4.0
