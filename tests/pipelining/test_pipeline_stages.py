"""Splitting a model: the parts are those that its forward applies, and stages are as equal as can be."""

import random
from itertools import combinations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_programs import gpt, mlp
from torch import nn
from worlds import in_turns

from samestep.engine.pipelining.stages import Stage, balanced_starts, cut, parts_of
from samestep.engine.strategy_options import Pipeline
from samestep.recipes.vgg import make_model


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_the_largest_stage_is_as_small_as_any_cut_makes_it(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    starts = balanced_starts(costs, num_stages)
    assert starts[0] == 0
    assert sorted(set(starts)) == starts
    assert len(starts) == num_stages

    def largest(cuts):
        return max(sum(costs[a:b]) for a, b in zip(cuts, [*cuts[1:], len(costs)], strict=True))

    every = combinations(range(1, len(costs)), num_stages - 1)
    assert largest(starts) == min(largest([0, *rest]) for rest in every)


def test_a_sequence_in_a_sequence_is_cut_within():
    assert [name for name, _ in parts_of(mlp())][:5] == ["0", "1.0", "1.1", "1.2", "2.0"]


def test_a_sequence_that_somebody_watches_is_one_part():
    model = mlp()
    model[1].register_forward_hook(lambda *_: None)
    assert [name for name, _ in parts_of(model)][:3] == ["0", "1", "2.0"]


def test_the_parts_one_after_another_are_the_model():
    torch.manual_seed(0)
    model = gpt().eval()
    x = torch.randint(0, 256, (3, 8))
    assert torch.equal(Stage(parts_of(model)).eval()(x), model(x))


def test_the_vgg_recipe_is_cut_as_it_is():
    model = make_model(width=0.125)
    stages = in_turns(1, lambda communicator: cut(model, parts_of(model), Pipeline(), 4, communicator))[0]
    assert [len(stage) > 0 for stage in stages] == [True] * 4


class Slow(nn.Module):
    """Takes long, and has few parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(200))

    def forward(self, x):
        for _ in range(30):
            x = x @ self.weight
        return x


class Drawing(nn.Module):
    """Draws from every generator."""

    def forward(self, x):
        return x + torch.rand(1, device=x.device) + random.random() + np.random.rand() + np.random.randn()


def test_measuring_leaves_every_generator_as_it_was():
    np.random.randn()  # of a pair, of which the other half is held back

    def states():
        return repr((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=False)))

    def draw(communicator):
        options = Pipeline(example=torch.ones(2, 3, device=communicator.device))
        parts = parts_of(nn.Sequential(Drawing(), nn.Linear(3, 3)).to(communicator.device))
        before = states()
        cut(nn.Sequential(), parts, options, 2, communicator)
        return before == states()

    assert in_turns(1, draw) == [True]


def test_what_is_measured_may_write_to_its_input():
    example = -torch.ones(2, 3)
    model = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Hardtanh(0, 0.5, True))
    )
    cuts = in_turns(1, lambda communicator: cut(model, parts_of(model), Pipeline(example=example), 2, communicator))
    assert len(cuts[0]) == 2
    assert torch.equal(example, -torch.ones(2, 3))


def test_measured_stages_are_cut_by_time_and_others_by_parameters():
    model = nn.Sequential(Slow(), nn.Linear(200, 300), nn.Linear(300, 200), Slow())

    def stages(options):
        found = in_turns(1, lambda communicator: cut(model, parts_of(model), options, 2, communicator))[0]
        return [[int(name) for name, _ in stage] for stage in found]

    measured = stages(Pipeline(example=torch.randn(400, 200)))
    assert measured[0][0] == 0
    assert 3 not in measured[0]
    assert stages(Pipeline()) == [[0, 1], [2, 3]]
    assert all(parameter.grad is None for parameter in model.parameters())
