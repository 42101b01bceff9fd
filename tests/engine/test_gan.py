"""Adversarial training: two steps over one model, each with its own optimizer and its own stream of randomness."""

import copy

import pytest
import torch
from engine_programs import bits, in_turns, make_step
from torch import nn
from torch.nn import functional

from samestep.core.seeds import derive_seed
from samestep.engine import microbatch_runner as microbatches_module
from samestep.run.run import Run

NOISE, WIDTH = 4, 6


def networks():
    """A generator and a discriminator, both with dropout and BatchNorm."""
    generator = nn.Sequential(
        nn.Linear(NOISE, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, WIDTH)
    )
    discriminator = nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 1)
    )
    return nn.ModuleList([generator, discriminator])


def noise_like(batch):
    return torch.randn(len(batch), NOISE, device=batch.device)


def discriminator_loss(both, batch):
    generator, discriminator = both
    with torch.no_grad():
        fake = generator(noise_like(batch))
    real = functional.softplus(-discriminator(batch)).mean()
    return real + functional.softplus(discriminator(fake)).mean()


def generator_loss(both, batch):
    generator, discriminator = both
    return functional.softplus(-discriminator(generator(noise_like(batch)))).mean()


def real_samples(count=70):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, WIDTH, generator=generator) * 0.5 + 1


def make_steps(communicator, **losses):
    run = Run(24, 8, seed=9, communicator=communicator)
    both = networks()
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.5, 0.9)) for net in both]
    discriminate = run.train_step(both, optimizers[1], losses.get("discriminator", discriminator_loss), bucket_bytes=64)
    generate = run.train_step(both, optimizers[0], losses.get("generator", generator_loss), bucket_bytes=64)
    return run, both, optimizers, discriminate, generate


def train_gan(communicator):
    """Two epochs: the digest and all losses."""
    run, both, optimizers, discriminate, generate = make_steps(communicator)
    losses = []
    for _ in range(2):
        for batch in run.loader(real_samples(), shuffle=True):
            losses.append((discriminate(batch).loss.hex(), generate(batch).loss.hex()))
    return bits(both, optimizers), losses


def test_a_gan_ends_in_the_same_bits_on_every_number_of_devices():
    reference = in_turns(1, train_gan)[0]
    assert len(set(reference[1])) == len(reference[1])
    for world_size in (2, 3):
        assert all(result == reference for result in in_turns(world_size, train_gan))


def test_twin_a_gan_with_randomness_by_rank_is_noticed(monkeypatch):
    reference = in_turns(1, train_gan)[0]
    calls = []

    def by_call(*parts):
        calls.append(parts)
        return derive_seed(*parts, len(calls))

    monkeypatch.setattr(microbatches_module, "microbatch_seed", by_call)
    assert in_turns(2, train_gan)[0] != reference


def judge(both, batch):
    real, noise = batch
    return (functional.softplus(-both[1](real)) + functional.softplus(both[1](both[0](noise).detach()))).mean()


def deceive(both, batch):
    return functional.softplus(-both[1](both[0](batch[1]))).mean()


def test_the_two_steps_are_those_of_a_plain_loop():
    def program(communicator):
        batch = (real_samples(24), torch.linspace(-1, 1, 24 * NOISE).view(24, NOISE))
        batch = tuple(tensor.to(communicator.device) for tensor in batch)
        both = nn.ModuleList([nn.Linear(NOISE, WIDTH), nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))])
        plain = copy.deepcopy(both).to(communicator.device)
        losses = {judge: 1, deceive: 0}
        for_ours, for_plain = ([torch.optim.Adam(net.parameters(), lr=0.01) for net in each] for each in (both, plain))
        steps = {loss_fn: make_step(communicator, both, loss_fn, for_ours[k]) for loss_fn, k in losses.items()}
        for _ in range(4):
            for loss_fn, k in losses.items():
                plain.zero_grad()
                expected = loss_fn(plain, batch)
                expected.backward()
                for_plain[k].step()
                # 24 float32 terms in another order, eight updates
                assert steps[loss_fn](batch).loss == pytest.approx(expected.item(), rel=1e-5)
        for ours, theirs in zip(both.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # the same

    in_turns(1, program)


def test_a_step_of_one_network_leaves_the_others_gradients_and_parameters_alone():
    def program(communicator):
        _, both, _, discriminate, generate = make_steps(communicator)
        batch = real_samples(24)
        generate(batch)
        kept = [(p, p.grad, p.grad.clone(), p.detach().clone()) for p in both[0].parameters()]
        before = [p.detach().clone() for p in both[1].parameters()]
        discriminate(batch)
        for parameter, gradient, gradient_bits, value in kept:
            assert parameter.grad is gradient
            assert torch.equal(gradient, gradient_bits)
            assert torch.equal(parameter, value)
        assert not any(torch.equal(a, b) for a, b in zip(before, both[1].parameters(), strict=True))

    for world_size in (1, 3):
        in_turns(world_size, program)


def test_each_step_draws_from_a_stream_of_its_own_that_no_device_count_changes():
    def program(communicator):
        drawn = {}

        def noting(name, loss):
            def inner(both, batch):
                drawn[name, len([k for k in drawn if k[0] == name])] = torch.rand(()).item()
                return loss(both, batch)

            return inner

        *_, discriminate, generate = make_steps(
            communicator, discriminator=noting("d", discriminator_loss), generator=noting("g", generator_loss)
        )
        discriminate(real_samples(24))
        generate(real_samples(24))
        return [[value for key, value in sorted(drawn.items()) if key[0] == name] for name in "dg"]

    ((d, g),) = in_turns(1, program)
    assert len(set(d + g)) == 16
    by_rank = in_turns(3, program)
    assert [[draw for rank in by_rank for draw in rank[k]] for k in (0, 1)] == [d, g]
