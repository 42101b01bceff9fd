"""The options that are checked before torch is there are those that torch's side knows."""

from samestep.comm.reduction import REDUCTIONS
from samestep.engine.precision import PRECISIONS
from samestep.engine.strategies import STRATEGIES
from samestep.recipes.job import OPTIMIZERS
from samestep.recipes.options import CHOICES


def test_the_choices_at_the_door_are_those_inside():
    inside = {"optimizer": tuple(OPTIMIZERS), "precision": tuple(PRECISIONS), "reduction": tuple(REDUCTIONS)}
    inside["strategy"] = tuple(STRATEGIES)
    assert inside == CHOICES
