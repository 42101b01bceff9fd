"""Patches are put in as one, taken out as one, and those of a script call each other in their order."""

import inspect
import random
import sys
import types
from pathlib import Path

import pytest
import torch
from simulated_programs import alone
from torch import nn

from samestep.patch import Patch, applied
from samestep.scripts import seeding
from samestep.scripts.simulated.devices import simulated_devices
from samestep.scripts.single_process import patched


class Base:
    size = 1


class Owner(Base):
    name = "before"

    @staticmethod
    def answer():
        return "static"

    @classmethod
    def own(cls):
        return cls.__name__


def module(name, **entries):
    made = types.ModuleType(name)
    vars(made).update(entries)
    return made


def test_what_is_patched_twice_is_put_back_in_reverse_order():
    with applied([Patch(Owner, "name", "first"), Patch(Owner, "name", "second")]):
        assert Owner.name == "second"
    assert Owner.name == "before"


def test_an_attribute_that_was_absent_or_inherited_is_absent_or_inherited_again():
    with applied([Patch(Owner, "size", 2), Patch(Owner, "made_up", 3)]):
        assert (Owner.size, Owner.made_up, Base.size) == (2, 3, 1)
    assert "size" not in vars(Owner)
    assert not hasattr(Owner, "made_up")
    assert Owner.size == 1


@pytest.mark.parametrize(("name", "answer"), [("answer", "static"), ("own", "Owner")])
def test_methods_of_a_class_come_back_as_what_they_were(name, answer):
    before = vars(Owner)[name]
    with applied([Patch(Owner, name, lambda self=None: "patched")]):
        assert getattr(Owner(), name)() == "patched"
    assert vars(Owner)[name] is before
    assert getattr(Owner, name)() == answer


def test_aliases_are_patched_too_where_they_are_imported(monkeypatch):
    original, replacement = object(), object()
    first, second = module("table_first", thing=original), module("table_second", thing=original)
    monkeypatch.setitem(sys.modules, "table_second", second)
    with applied([Patch(first, "thing", replacement, aliases=("table_second", "table_not_imported"))]):
        assert first.thing is second.thing is replacement
    assert first.thing is second.thing is original
    assert "table_not_imported" not in sys.modules


def test_patches_put_in_so_far_are_taken_out_when_a_place_cannot_be_changed():
    owner = module("table_owner", thing=1)
    with pytest.raises(TypeError), applied([Patch(owner, "thing", 2), Patch(int, "thing", 3)]):
        pytest.fail("the block must not run")
    assert owner.thing == 1


def layers_of(function):
    """The functions of which a patched one is made, the outermost first, as module.function."""
    found = []
    while function is not None:
        code = function.__code__
        found.append(f"{Path(code.co_filename).stem}.{code.co_qualname.partition('.')[0]}")
        function = getattr(function, "__wrapped__", None)
    return found


def test_the_order_of_the_patches_of_a_script_is_that_in_which_they_call_each_other():
    plain_call, seen = nn.Module.__call__, {}
    with patched(alone(), simulated=True):
        # A seed is recorded, and given to the devices' generator.
        seen["torch.cuda"] = layers_of(torch.cuda.manual_seed)
        seen["random"] = layers_of(random.seed)
        # Modules of TorchScript go past what shares forwards out.
        held = inspect.getclosurevars(torch.jit.RecursiveScriptModule.__call__).nonlocals["call"]
        assert nn.Module.__call__ is not plain_call
        assert held is plain_call
    assert seen["torch.cuda"] == ["seeding._setting", "cuda._random"]
    assert seen["random"] == ["seeding._setting", "random.Random"]


def test_patches_in_another_order_are_found_out():
    script = alone()
    with applied(seeding.patches(script)), simulated_devices(lambda: 4, script.notice):
        assert layers_of(torch.cuda.manual_seed) == ["cuda._random"]
