"""Adversarial training: two steps over one model, each with its own optimizer."""

import copy

import pytest
import torch
from engine_programs import in_turns, make_step
from torch import nn
from torch.nn import functional

NOISE, WIDTH = 4, 6


def real_samples(count=70):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, WIDTH, generator=generator) * 0.5 + 1


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
