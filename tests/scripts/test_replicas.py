"""A wrapped module for the time of one chunk: stand-ins in the places of its parameters, and nothing left of it."""

import pytest
import torch
from core_programs import WIDTH, restless
from torch import nn

from samestep.scripts.split_forward.replicas import Replicas, check_in_place_state, in_place_state, uninitialized


class Net(nn.Module):
    """A module with a child, a buffer, and attributes of several kinds."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2)
        self.tied = nn.Linear(WIDTH, 2)
        self.tied.weight = self.inner.weight
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("level", torch.zeros(2))
        self.count = 0
        self.notes = ["first"]
        self.scratch = torch.zeros(2)

    def forward(self, x):
        return self.tied(self.inner(x) @ self.inner.weight) * self.gain + self.level


def held(module):
    """The replicas of a module, ready for a forward."""
    replicas = Replicas(module)
    assert replicas.hold(module)
    return replicas


def stand_ins(replicas):
    """A copy of each parameter, by number."""
    return {number: (parameter * 2).detach() for number, parameter in enumerate(replicas.parameters)}


def state(module):
    """Which objects a module and its children hold, by place, in order."""
    places = {}
    for prefix, child in module.named_modules():
        for table in ("__dict__", "_parameters", "_buffers", "_modules"):
            entries = vars(child) if table == "__dict__" else getattr(child, table)
            places[prefix, table] = [(key, id(value)) for key, value in entries.items()]
    return places


def test_what_a_chunk_writes_is_taken_back_and_named():
    module, lost = Net(), set()
    before, replicas = state(module), held(module)
    with replicas.swapped({}, lost):
        module.count = 1
        module.notes = [*module.notes, "second"]
        module.new = "made"
        del module.scratch
        module.inner.mine = 3  # of a class of PyTorch's own, which may write such things each time
        module.extra = nn.Identity()
        module.extra_weight = nn.Parameter(torch.ones(1))
        module.tied.register_buffer("table", torch.ones(1))
        del module.tied
    assert state(module) == before
    assert lost >= {"count", "notes", "new", "scratch", "extra", "extra_weight", "tied"}
    assert "gain" not in lost
    assert "level" not in lost


def test_what_a_chunk_wrote_is_taken_back_when_it_raises():
    module, lost = Net(), set()
    before, replicas = state(module), held(module)

    def fail():
        module.count = 1
        module.gain = nn.Parameter(torch.zeros(2))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), replicas.swapped(stand_ins(replicas), lost):
        fail()
    assert state(module) == before
    assert lost == {"count"}


def test_replicas_are_current_until_a_child_or_a_parameter_is_another_object():
    changes = {
        "a child": lambda module: setattr(module, "inner", nn.Linear(WIDTH, 2)),
        "one more child": lambda module: setattr(module, "more", nn.Identity()),
        "a parameter": lambda module: setattr(module, "gain", nn.Parameter(torch.ones(2))),
        "one more parameter": lambda module: setattr(module, "shift", nn.Parameter(torch.ones(2))),
        "one parameter less": lambda module: setattr(module, "gain", None),
        "no longer tied": lambda module: setattr(module.tied, "weight", nn.Parameter(torch.ones(2, WIDTH))),
    }
    for what, change in changes.items():
        module = Net()
        replicas = held(module)
        module.count, module.gain.data = 3, torch.zeros(2)
        assert replicas.hold(module), "values may change"
        change(module)
        assert not replicas.hold(module), what


def test_attributes_replaced_and_tensors_of_inference_mode_are_not_changes_in_place():
    module = Net()
    with torch.inference_mode():
        module.cache = torch.zeros(2)
    modules = list(module.named_modules())
    before = in_place_state(modules)
    module.scratch, module.notes = torch.ones(2), ["other", "entries"]
    check_in_place_state(before, in_place_state(modules))


def test_lazy_layers_are_uninitialized_until_their_first_input():
    module = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))
    assert uninitialized(module)
    module(torch.ones(1, 3))
    assert not uninitialized(module)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_chunk_of_every_forward_finds_the_module_as_the_first_did(worlds, n):
    for found in worlds(n).run(restless):
        assert found["the first call, in every chunk"] == [True, True]
        assert found["left"] == (0, (), True, True)
