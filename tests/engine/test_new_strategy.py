"""A strategy written by CONTRIBUTING's page alone trains to the bits of one device; with a twin that must not."""

from functools import reduce

import pytest
import torch
from engine_programs import bits, in_turns, make_step, mean_squared, perceptron, table
from torch import nn

from samestep.comm.buckets import make_buckets
from samestep.comm.reduction import tree_sum_rows
from samestep.engine import step as step_module
from samestep.engine.buffers import BufferMerge
from samestep.engine.norms import block_norm
from samestep.engine.parameters import check_same_model, move_model
from samestep.engine.strategy import StepGradients, Strategy


class GatheredGradients(StepGradients):
    """Sends the gradient of every microbatch to every rank, which adds them by itself: simple, and V times as much."""

    def __init__(self, parameters, communicator, add):
        self._parameters, self._communicator, self._add = list(parameters), communicator, add
        # One flat tensor with the gaps of the replicated model: a norm adds up by position.
        (self._bucket,) = make_buckets(self._parameters, 2**62, 1)
        self.begin(())

    @property
    def inputs(self):
        return tuple(self._parameters)

    @property
    def used(self):
        return self._used

    @property
    def flats(self):
        return self._flats

    def begin(self, blocks_by_rank):
        self._counts = [sum(block.size for block in blocks) for blocks in blocks_by_rank]
        self._rows, self._flats = [], []
        self._used = [False] * len(self._parameters)
        self._drop()

    def push(self, microbatch, loss):
        self._used = [used or p.grad is not None for used, p in zip(self._used, self._parameters, strict=True)]
        self._rows.append(self._bucket.empty())
        for index, view in zip(self._bucket.members, self._views(self._rows[-1]), strict=True):
            if self._parameters[index].grad is not None:
                view.copy_(self._parameters[index].grad)
        self._drop()
        return self._rows[-1].sum()

    def start(self):
        """Nothing leaves before `finish`."""

    def finish(self):
        rows = torch.stack(self._rows) if self._rows else torch.empty(0, self._bucket.numel)
        self._flats = [self._add(self._communicator.gather_rows(rows, self._counts))]

    def norm(self):
        return block_norm(self._flats[0])

    def assign(self, used):
        for index, view in zip(self._bucket.members, self._views(self._flats[0]), strict=True):
            self._parameters[index].grad = view if used[index] else None

    def abandon(self):
        self.begin(())

    def _views(self, flat):
        return self._bucket.views(flat, self._parameters)

    def _drop(self):
        for parameter in self._parameters:
            parameter.grad = None


class GatheredStrategy(Strategy):
    """Every rank has the whole state."""

    add = staticmethod(tree_sum_rows)

    def __init__(self, membership, model, optimizers, options, exchange):
        super().__init__(membership, model)
        move_model(model, membership.communicator.device)
        membership.perform(lambda: check_same_model(model, membership.communicator))

    def lay_out(self, trainable, optimizers, observers):
        communicator = self._membership.communicator
        self.gradients = GatheredGradients(trainable.values(), communicator, self.add)
        self.buffers = BufferMerge(self._model, communicator)


class InOrder(GatheredStrategy):
    """The twin: adds from the first to the last, and not along the tree."""

    add = staticmethod(lambda rows: reduce(torch.add, [row.clone() for row in rows]))


def train(communicator):
    """Steps on whole and ragged batches, with a clipped gradient, and a layer that is frozen on the way."""
    model = nn.Sequential(*perceptron(), nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = make_step(communicator, model, mean_squared, optimizer, max_grad_norm=0.1)
    losses = []
    for number, samples in enumerate((24, 24, 17, 24)):
        model[0].requires_grad_(number != 1)
        losses.append(step(table(samples)).loss)
    return type(step.strategy), bits(model, optimizer), losses


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_strategy_of_one_method_trains_to_the_bits_of_one_device(world_size, monkeypatch):
    ((_, *reference),) = in_turns(1, train)
    monkeypatch.setattr(step_module, "make_strategy", GatheredStrategy)
    assert in_turns(world_size, train) == [(GatheredStrategy, *reference)] * world_size


def test_twin_a_strategy_that_adds_in_order_is_noticed(monkeypatch):
    ((_, *reference),) = in_turns(1, train)
    monkeypatch.setattr(step_module, "make_strategy", InOrder)
    assert in_turns(2, train)[0] != (InOrder, *reference)
