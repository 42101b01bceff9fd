"""Models and scripts that could give other bits unnoticed: equal to the bit, or refused by name."""

import gc
import weakref

import pytest
import torch
from engine_programs import bits, in_turns, make_step, mean_squared, table
from torch import nn
from torch.nn import functional
from worlds import cpu_only, device_of

from samestep.comm.communicator import Communicator
from samestep.comm.transport import LocalTransport
from samestep.engine.losses import Mean
from samestep.errors import BufferMergeError, DeterminismError
from samestep.run.run import Run


def train(communicator, make, loss=mean_squared, num_steps=4, prepare=None, **options):
    """Some steps on the table; the bits at the end."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = make_step(communicator, model, loss, optimizer, **options)
    after = prepare(model) if prepare else None
    for _ in range(num_steps):
        step(table())
        if after:
            after(model)
    return bits(model, optimizer)


def net(width=8):
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))


class Codebook(nn.Module):
    """A running mean that is written through `.data`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(5))
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        self.average.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.last(x - self.average)


class ConditionalNorm(nn.Module):
    """Buffers of its own that batch_norm writes to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("stored_mean", torch.zeros(5))
        self.register_buffer("stored_var", torch.ones(5))
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        return self.last(functional.batch_norm(x, self.stored_mean, self.stored_var, training=self.training))


class LateBuffer(nn.Module):
    """A buffer that the first forward registers."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        if not hasattr(self, "center"):
            self.register_buffer("center", x.mean(0).detach())
        return self.last(x - self.center)


@pytest.mark.parametrize(
    ("make", "name"), [(Codebook, "average"), (ConditionalNorm, "stored_mean"), (LateBuffer, "center")]
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_buffers_that_microbatches_change_behind_torchs_back_are_refused_by_name(make, name, world_size):
    with pytest.raises(BufferMergeError, match=name):
        in_turns(world_size, train, make)


def keep(model):
    """Uses the gradient of the step before once more: a script that holds on to `.grad`."""
    kept = [None]

    def after(model):
        weight = model[0].weight
        if kept[0] is not None:
            weight.data.add_(kept[0], alpha=-0.01)
        kept[0] = weight.grad

    return after


@pytest.mark.parametrize("width", [8, 4000])  # of which the memory is used again, and more than one small message
def test_a_gradient_that_a_script_keeps_stays_what_it_was(width):
    local = LocalTransport()  # one device as it really is: without a copy in between
    expected = train(Communicator(device_of(0), local, local), lambda: net(width), prepare=keep)
    for world_size in (2, 3):
        results = in_turns(world_size, lambda c: train(c, lambda: net(width), prepare=keep))
        assert results == [expected] * world_size


def hold(communicator):
    """Keeps the gradients of a step over the next one, on ranks that have microbatches and on one that has none."""
    run = Run(12, 4, communicator=communicator, spares=1)
    model = nn.Linear(5, 1)
    step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean())
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    step(x)
    held = [parameter.grad for parameter in model.parameters()]
    copies = [gradient.clone() for gradient in held]
    step(x)
    same = all(torch.equal(gradient, copy) for gradient, copy in zip(held, copies, strict=True))
    return same, [parameter.grad.tolist() for parameter in model.parameters()]


def test_gradients_that_a_rank_without_microbatches_keeps_are_not_overwritten_either():
    results = in_turns(3, hold)
    assert all(result == (True, results[0][1]) for result in results)


def test_a_hook_on_the_gradient_that_is_added_later_counts_on_every_number_of_devices():
    def halve(parameter):
        parameter.grad.mul_(0.5)

    def prepare(model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)

    def program(communicator, hooked):
        return train(communicator, net, prepare=prepare if hooked else None, bucket_bytes=4)

    (expected,) = in_turns(1, program, True)
    assert in_turns(1, program, False) != [expected]
    for world_size in (2, 3, 4):
        assert in_turns(world_size, program, True) == [expected] * world_size


def test_a_loss_that_leaves_the_model_in_evaluation_mode_reaches_its_own_microbatch_only():
    def loss(model, batch):
        value = mean_squared(model, batch)
        model.eval()
        return value

    def make():
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    (expected,) = in_turns(1, train, make, loss)
    for world_size in (2, 3):
        assert in_turns(world_size, train, make, loss) == [expected] * world_size


def penalised(model, batch):
    body, head = model
    z = body(batch[0])
    hidden = head(z)
    total = (hidden * hidden * z[:, :1]).sum() + 3 * (hidden * hidden).sum()
    first = torch.autograd.grad(total, [z, *head.parameters()], create_graph=True)
    return total / 10 + sum(gradient.square().sum() for gradient in first) / 100


class Field(nn.Module):
    """An energy, and the forces, which its forward differentiates."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, positions):
        positions = positions.detach().requires_grad_()
        energy = self.energy(positions)[:, 0]
        return energy, -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]


def test_a_loss_on_energies_and_forces_has_the_same_bits_and_both_count():
    def trained(communicator, weight):
        def loss(model, batch):
            energy, forces = model(batch[0])
            return (energy - batch[1][:, 0]).square().mean() + weight * (forces + 2 * batch[0]).square().mean()

        return train(communicator, Field, loss)

    (expected,) = in_turns(1, trained, 1.0)
    assert in_turns(1, trained, 0.0) != [expected]
    for world_size in (2, 3):
        assert in_turns(world_size, trained, 1.0) == [expected] * world_size


def penalised_after(communicator, num_passes):
    x = torch.ones(1, device=communicator.device, requires_grad=True)
    y = x
    for _ in range(1_000):
        y = y * x
    for _ in range(num_passes):  # of which each numbers thousands of operations: on a GPU, by a thread of autograd
        torch.autograd.grad(y, x, create_graph=True)
    return train(communicator, lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1)), penalised, num_steps=1)


def test_second_derivatives_do_not_depend_on_what_ran_before():
    assert in_turns(1, penalised_after, 0) == in_turns(1, penalised_after, 30)


def test_a_count_that_16_bits_cannot_hold_divides_all_the_same():
    def program(communicator, factor):
        def loss(model, batch):
            return Mean(model(batch[0].half()).float().sum(), 24 // 8 * factor)

        return make_step(communicator, nn.Linear(5, 1).half(), loss)(table()).grad_norm

    # 72,000 elements: above the greatest float16; the quotients are subnormal there, good to 2^-25 / 2^-16
    assert in_turns(1, program, 3000)[0] * 3000 == pytest.approx(in_turns(1, program, 1)[0], rel=2e-2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_failed_on_one_rank_is_not_repeated_by_it_alone(world_size):
    def program(communicator):
        failures = [1] if communicator.rank == world_size - 1 else []

        def loss(model, batch):
            if failures:
                failures.pop()
                raise KeyError("once")
            return mean_squared(model, batch)

        step = make_step(communicator, net(), loss)
        try:
            step(table())
        except KeyError:
            step(table())

    with pytest.raises(DeterminismError, match=f"step 1 failed on rank {world_size - 1}, and its exception was caught"):
        in_turns(world_size, program)


def test_a_step_that_was_interrupted_on_the_only_device_may_be_taken_again():
    def program(communicator):
        interrupts = [1]

        def loss(model, batch):
            if interrupts:
                interrupts.pop()
                raise KeyboardInterrupt
            return mean_squared(model, batch)

        step = make_step(communicator, net(), loss)
        with pytest.raises(KeyboardInterrupt):
            step(table())
        return step(table()).step

    assert in_turns(1, program) == [1]


@cpu_only("the number of threads decides no bits of a GPU")
def test_another_number_of_threads_is_noticed():
    def program(communicator):
        step = make_step(communicator, net())
        torch.set_num_threads(2)
        step(table())

    with pytest.raises(DeterminismError, match="2 threads now, 1 when"):
        in_turns(1, program)


def test_a_step_that_is_dropped_is_freed():
    def program(communicator):
        model = net()
        step = make_step(communicator, model, bucket_bytes=4)
        step(table())
        watched = weakref.ref(step.strategy.gradients)
        del step
        gc.collect()
        return watched() is None, [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()]

    assert in_turns(2, program) == [(True, [0, 0, 0, 0])] * 2
