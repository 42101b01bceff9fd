"""The table of patches: put in as one, and taken out as one."""

import sys
import types

import pytest

from samestep.patch import Patch, applied


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


def test_patches_hold_in_the_block_and_not_after_it():
    with applied([Patch(Owner, "name", "within")]):
        assert Owner.name == "within"
    assert Owner.name == "before"


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
