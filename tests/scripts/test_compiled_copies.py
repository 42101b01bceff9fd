"""Copies of modules that torch.compile has made parts of: compiled with the script's options, once."""

import logging

import pytest
import torch
from torch import nn
from worlds import cpu_only

from samestep.patch import applied
from samestep.scripts.simulated.devices import noted_compiler
from samestep.scripts.workers.pickling import Unpickler, pickled

pytestmark = cpu_only("Dynamo asks a build for CUDA for more than the fake has")
LOG = "tests.compiled"  # a copy of this module's code has globals of its own


def counting(graph, inputs):
    logging.getLogger(LOG).warning("a graph of %s", len(inputs))
    return graph.forward


class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def halved(x):
    return x / 2


class Net(nn.Module):
    def __init__(self, compiled, options):
        super().__init__()
        self.layer, self.function = Layer(3, 3), halved
        if compiled == "child":
            self.layer = torch.compile(self.layer, **options)
        elif compiled == "child in place":
            self.layer.compile(**options)
        elif compiled == "function":
            self.function = torch.compile(self.function, **options)
        elif compiled == "decorated function":
            self.function = torch.compile(**options)(self.function)
        else:
            self.compile(**options)

    def forward(self, x):
        return self.function(self.layer(x))


def copy_of(module):
    """The module as a worker has it."""
    data, pickler = pickled(module, False, torch.device("cpu"))
    copied, _, _ = Unpickler(data, [*pickler.tensors, torch.device("cpu")]).load()
    return copied


def num_graphs(caplog):
    return sum(record.name == LOG for record in caplog.records)


@pytest.fixture(autouse=True)
def _noted():
    torch._dynamo.reset()
    with applied([noted_compiler()]):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", ["child", "child in place", "function", "decorated function", "itself"])
def test_a_copy_is_compiled_once_by_the_scripts_backend(compiled, caplog):
    net = Net(compiled, {"backend": counting, "fullgraph": True, "dynamic": False})
    copied = copy_of(net)
    assert not num_graphs(caplog)
    for _ in range(3):
        assert torch.equal(copied(torch.ones(4, 3)), copied(torch.ones(4, 3)))
    assert num_graphs(caplog) == 1
    assert torch.equal(copied(torch.ones(4, 3)), net(torch.ones(4, 3)))
    assert len(copy_of(copied)(torch.ones(5, 3))) == 5


def test_twin_a_module_that_is_not_compiled_calls_no_backend(caplog):
    net = Net("function", {"backend": counting})
    net.function = halved
    copy_of(net)(torch.ones(4, 3))
    assert not num_graphs(caplog)


@pytest.mark.slow
def test_a_copy_compiled_by_inductor_has_the_bits_of_the_module():
    net, x = Net("child", {"mode": "reduce-overhead"}), torch.randn(4, 3)
    assert torch.equal(copy_of(net)(x), net(x))
