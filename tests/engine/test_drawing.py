"""Drawing: what loading draws and assigns is noticed, wherever it is kept, and can be undone."""

import functools
import random

import numpy as np
import pytest
import torch

from samestep.engine.side_effects import Watch, reachable

MODULE_GENERATOR = np.random.default_rng(1)


class Transform:
    """Something that a dataset holds."""

    def __init__(self, generator):
        self.parts = [{"inner": generator}]

    def __call__(self, x):
        return x


class Holder:
    """A dataset."""

    def __init__(self, transform=None):
        self.transform = transform
        self.opened = None
        self.count = 0


def noisy(x):
    """Draws from a generator of the module's."""
    return x + MODULE_GENERATOR.random()


@pytest.fixture(autouse=True)
def _generators_as_before():
    watch = Watch()
    kept = watch.keep()
    yield
    watch.put_back(kept)


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: np.random.normal(), random.random])
def test_a_draw_from_a_global_generator_is_noticed_and_undone(draw):
    watch = Watch()
    for _ in range(2):  # the second normal number of a pair leaves NumPy's key as it is
        kept = watch.keep()
        assert not watch.has_moved(kept)
        first = draw()
        assert watch.has_moved(kept)
        watch.put_back(kept)
        assert not watch.has_moved(kept)
        assert str(draw()) == str(first)


@pytest.mark.parametrize(
    "generator", [np.random.default_rng(2), np.random.RandomState(3), random.Random(4), torch.Generator()]
)
@pytest.mark.parametrize(
    "hide", [lambda g: Holder(Transform(g)), lambda g: Holder(lambda x: g), lambda g: functools.partial(noisy, g)]
)
def test_a_generator_that_the_dataset_holds_is_found_and_watched(generator, hide):
    generators, _ = reachable([hide(generator)])
    assert generator in generators
    watch = Watch([generator])
    kept = watch.keep()
    torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()
    assert watch.has_moved(kept)
    watch.put_back(kept)
    assert not watch.has_moved(kept)


def test_a_generator_of_the_module_is_found_through_the_function_that_uses_it():
    assert reachable([Holder(noisy)])[0] == [MODULE_GENERATOR]
    assert reachable([Holder(str)])[0] == []


def test_an_assigned_attribute_is_noticed_and_undone_but_not_one_that_was_none():
    holder = Holder(Transform(None))
    watch = Watch(objects=reachable([holder])[1])
    kept = watch.keep()
    holder.opened, holder.cache = "a file", {}
    assert not watch.has_moved(kept)
    holder.transform.parts = ()
    assert watch.has_moved(kept)
    watch.put_back(kept)
    assert holder.transform.parts
    assert not hasattr(holder, "cache")


def test_large_data_is_not_searched():
    holder = Holder()
    holder.samples = [Holder() for _ in range(1000)]
    assert reachable([holder])[1] == [holder]
