"""Buffers: running statistics merged over the microbatches, everything else left alike or refused by name."""

import copy
from itertools import pairwise

import pytest
import torch
from engine_programs import bits, in_turns, make_step, table
from programs import own_calls
from torch import nn
from worlds import DEVICE

from samestep.comm.communicator import Communicator
from samestep.comm.transport import Arrived
from samestep.core.microbatches import microbatch_bounds
from samestep.engine.buffers import BufferMerge
from samestep.errors import BufferMergeError
from samestep.run.run import Run

LENGTH, NUM_MICROBATCHES = 23, 7


def normalised(**options):
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, **options), nn.Tanh(), nn.Linear(8, 1))


class OverChannels(nn.Module):
    """InstanceNorm with running statistics over the features seen as a signal."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        return self.last(self.norm(x.unsqueeze(1)).squeeze(1))


def in_two_places():
    norm = nn.BatchNorm1d(5)
    return nn.Sequential(norm, nn.Linear(5, 5), norm, nn.Linear(5, 1))


def batch_of(length=LENGTH):
    return tuple(t[:length] for t in table())


def run_steps(communicator, model_fn, num_steps=3, length=LENGTH):
    """Some steps: the digest, the model, and the model before each step."""
    model = model_fn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = make_step(communicator, model, optimizer=optimizer, num_microbatches=NUM_MICROBATCHES)
    before = []
    for _ in range(num_steps):
        before.append(copy.deepcopy(model))
        step(batch_of(length))
    return bits(model, optimizer), model, before


def merged_by_hand(model, length=LENGTH):
    """What each microbatch alone would leave in the buffers, weighted by its samples, in float64."""
    torch.set_num_threads(1)  # as the ranks do
    x, _ = batch_of(length)
    cut = microbatch_bounds(length, NUM_MICROBATCHES)
    total = {name: torch.zeros_like(buffer, dtype=torch.float64) for name, buffer in model.named_buffers()}
    for start, stop in pairwise(cut):
        if start == stop:
            continue
        alone = copy.deepcopy(model).to(DEVICE)
        alone(x[start:stop].clone().to(DEVICE))  # a microbatch lies on a memory border, as here
        for name, buffer in alone.named_buffers():
            total[name] += (stop - start) * buffer.cpu().double()
    return {name: value / length for name, value in total.items()}


@pytest.mark.parametrize(
    ("model_fn", "num_steps", "length", "world_sizes"),
    [
        (normalised, 3, LENGTH, (2, 3)),
        (lambda: normalised(momentum=None), 3, LENGTH, (2, 3)),
        (lambda: normalised(momentum=0.7), 3, LENGTH, (2, 3)),
        (OverChannels, 3, LENGTH, (2, 3)),
        (in_two_places, 3, LENGTH, (2, 3)),
        (OverChannels, 1, 3, (2, 5)),
    ],
    ids=["batch", "cumulative", "fast", "instance", "in two places", "fewer samples than microbatches"],
)
def test_running_statistics_are_the_weighted_mean_of_what_each_microbatch_alone_leaves(
    model_fn, num_steps, length, world_sizes
):
    digest, model, before = in_turns(1, run_steps, model_fn, num_steps, length)[0]
    for start, after in zip(before, [*before[1:], model], strict=True):
        expected = merged_by_hand(start, length)
        for name, buffer in after.named_buffers():
            # One rounding to float32 of a float64 sum whose order may differ.
            torch.testing.assert_close(buffer.double(), expected[name], rtol=1e-7, atol=1e-9)
    for world_size in world_sizes:
        assert {r[0] for r in in_turns(world_size, run_steps, model_fn, num_steps, length)} == {digest}


def unweighted(self, now, num_samples, real=BufferMerge._mean_leaf):
    """Microbatches count alike."""
    return real(self, now, 1) * LENGTH / NUM_MICROBATCHES


@pytest.mark.parametrize(("name", "twin"), [("_mean_leaf", unweighted), ("_restore", lambda self, now, changed: None)])
def test_twin_statistics_that_are_not_weighed_or_not_put_back_between_microbatches_are_noticed(monkeypatch, name, twin):
    reference = in_turns(1, run_steps, normalised)[0][0]
    monkeypatch.setattr(BufferMerge, name, twin)
    one = in_turns(1, run_steps, normalised)[0][0]
    assert one != reference
    assert name == "_mean_leaf" or in_turns(3, run_steps, normalised)[0][0] != one


def calls_of_a_step(num_norms):
    """The calls of functions for buffers and tensors in a later step of a model with so many norms."""
    norms = [layer for _ in range(num_norms) for layer in (nn.Linear(3, 3), nn.BatchNorm1d(3))]
    model = nn.Sequential(*norms)
    step = Run(8, 4).train_step(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, x: model(x).mean())
    for _ in range(3):
        step(torch.ones(8, 3))
    return own_calls(lambda: step(torch.ones(8, 3)), "engine/buffers.py", "data/checksums.py")["buffers.py"]


def test_a_step_goes_over_the_buffers_without_a_call_for_each(monkeypatch):
    assert calls_of_a_step(1) == calls_of_a_step(10) > 0
    # A twin: a call for each is seen.
    monkeypatch.setattr(BufferMerge, "_now", lambda self: [place.get() for place in self._places])
    assert calls_of_a_step(1) < calls_of_a_step(10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batchnorm_in_evaluation_mode_is_left_alone_beside_one_that_learns(dtype):
    def frozen_and_free():
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(dtype)
        model[1].running_mean.copy_(torch.rand(8) / 3)
        model[1].running_var.copy_(torch.rand(8) + 1 / 3)
        model[1].eval()
        return model

    def program(communicator):
        model = frozen_and_free()
        before = [{k: v.clone() for k, v in model[i].named_buffers()} for i in (1, 2)]
        step = make_step(communicator, model, num_microbatches=NUM_MICROBATCHES)
        for _ in range(5):
            step(tuple(t.to(dtype) for t in batch_of()))
        return [[torch.equal(b.cpu(), before[k][n]) for n, b in model[k + 1].named_buffers()] for k in (0, 1)]

    for world_size in (1, 3):
        for frozen, free in in_turns(world_size, program):
            assert frozen == [True, True, True]
            assert free == [False, False, False]


class Counting(nn.Module):
    """Counts its calls in a buffer; `update` says how."""

    def __init__(self, update, start=0.0):
        super().__init__()
        self.last = nn.Linear(5, 1)
        self.update = update
        self.register_buffer("calls", torch.tensor(start))
        self.register_buffer("late", None)

    def forward(self, x):
        self.update(self, x)
        return self.last(x)


def add_in_place(module, x):
    module.calls += 1


def bind_again(module, x):
    module.calls = module.calls + 1


def bind_another_shape(module, x):
    module.calls = torch.full((2, 3), 7.0)


def bind_another_dtype(module, x):
    module.calls = torch.tensor(3, dtype=torch.int64)


@pytest.mark.parametrize("length", [LENGTH, 2])
@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (add_in_place, torch.tensor(3.0)),
        (bind_again, torch.tensor(3.0)),
        (bind_another_shape, torch.full((2, 3), 7.0)),
        (bind_another_dtype, torch.tensor(3)),
    ],
)
def test_a_buffer_that_all_microbatches_change_alike_is_kept_in_whatever_form(update, expected, length):
    for world_size in (1, 2, 4):
        for _, model, _ in in_turns(world_size, run_steps, lambda: Counting(update), 3, length):
            assert torch.equal(model.calls, expected)
            assert model.calls.dtype == expected.dtype


class Carrier:
    """A transport of two ranks that notes the form of what it carries; what they say is what rank 0 says."""

    world_size = 2

    def __init__(self, rank, said):
        self.rank, self.said, self.carried = rank, said, []

    def gather(self, words):
        self.said.append(words)
        return Arrived(self.said[0].repeat(2))

    def broadcast(self, tensor, source):
        self.carried.append((tensor.device.type, tensor.dtype, tensor.shape))


def test_a_buffer_that_is_shared_goes_the_same_way_on_all_ranks_wherever_the_source_has_it():
    for on_host in (True, False):
        said, seen = [], []
        for rank in range(2):
            transport, control = Carrier(rank, said), Carrier(rank, said)
            communicator = Communicator(torch.device("meta"), transport, control)  # stands for an accelerator
            tensor = torch.zeros(2, 3, device="cpu" if on_host else "meta") if rank == 0 else None
            if on_host:  # it is given back in host memory, to which nothing comes from there
                with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
                    communicator.share(tensor)
            else:
                assert communicator.share(tensor).is_meta
            seen.append((transport.carried, control.carried))
        assert seen == [([("meta", torch.float32, (2, 3))], [])] * 2


def add_the_data(module, x):
    module.calls += x.sum()


def remember_the_last(module, x):
    module.calls = x.detach().mean()


def change_where_high(module, x):
    if x[:, 0].max() > 1:
        module.calls += 1


def drop(module, x):
    module.calls = None


def fill_late(module, x):
    module.late = x.detach().mean(0)


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (add_the_data, r"0\.calls ended differently on different microbatches"),
        (remember_the_last, r"0\.calls ended differently on different microbatches"),
        (change_where_high, r"0\.calls ended differently on different microbatches"),
        (fill_late, r"0\.late ended differently on different microbatches"),
        (drop, r"0\.calls was set to None in a forward"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_buffer_that_cannot_be_merged_is_refused_by_name_on_all_ranks(update, said, world_size):
    def program(communicator):
        model = nn.Sequential(Counting(update), nn.BatchNorm1d(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step = make_step(communicator, model, optimizer=optimizer, num_microbatches=NUM_MICROBATCHES)
        before = bits(model, optimizer)
        with pytest.raises(BufferMergeError, match=f"buffer {said}"):
            step(batch_of())
        return before == bits(model, optimizer), step.num_steps

    assert in_turns(world_size, program) == [(True, 0)] * world_size
