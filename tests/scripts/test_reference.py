"""The reference against plain autograd and hand-made sums; torch's own runs on accelerators only."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from reference import ReferenceDataParallel, from_the_left, in_pairs, join, replicate
from torch import Tensor, nn

from samestep.core.tree import tree_sum

Pair = namedtuple("Pair", ["a", "b"])


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def rows(count=10, features=5):
    return torch.randn(count, features, generator=torch.Generator().manual_seed(1))


def test_outputs_are_joined_by_torchs_rules():
    @dataclass
    class Output:
        logits: Tensor
        note: None = None

    outputs = [
        (torch.full((2, 1), float(i)), {"loss": torch.tensor(float(i))}, None, Pair(torch.ones(1), [torch.zeros(1)]))
        for i in range(3)
    ]
    out, table, nothing, pair = join(outputs, 0)
    assert out.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert table["loss"].tolist() == [0, 1, 2]
    assert nothing is None
    assert isinstance(pair, Pair)
    assert len(pair.b[0]) == 3
    joined = join([Output(torch.ones(1, 2)), Output(torch.ones(1, 3))], 1)
    assert joined.logits.shape == (1, 5)


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


@pytest.mark.parametrize("count", range(1, 18))
def test_the_tree_is_the_engines(count):
    values = list(torch.randn(count, 64, generator=torch.Generator().manual_seed(count)))
    assert torch.equal(in_pairs(values), tree_sum(values, Tensor.add))
    if count > 3:
        assert not torch.equal(in_pairs(values), from_the_left(values))


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


def test_a_parameter_that_no_chunk_used_gets_no_gradient_and_one_that_some_used_gets_theirs():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.spare = (nn.Linear(5, 1) for _ in range(3))

        def forward(self, x):
            return self.first(x) if x[0, 0] > 0 else self.second(x)

    net, x = Experts(), torch.ones(8, 5)
    x[:2] = -1
    ReferenceDataParallel(net, 4)(x).sum().backward()
    assert net.spare.weight.grad is None
    assert net.second.weight.grad.tolist() == [[-2.0] * 5]
    assert net.first.weight.grad.tolist() == [[6.0] * 5]


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


def test_replicas_hold_parameters_and_share_weights_as_the_original_does():
    net = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 2), nn.ParameterList([nn.Parameter(torch.ones(2))]))
    net.append(net[0])
    for replica in replicate(net, 2, in_pairs):
        assert len(list(replica.parameters())) == len(list(net.parameters()))
        assert all(isinstance(p, nn.Parameter) and p.grad_fn is not None for p in replica.parameters())
        assert replica[3] is replica[0]
        assert replica[2][0] is not net[2][0]
