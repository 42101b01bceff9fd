"""Parameters that not every microbatch uses, or that are frozen, or that appear in two places."""

import pytest
import torch
from engine_programs import bits, mean_squared, table
from torch import nn
from torch.nn import functional
from worlds import in_turns

from samestep.engine.gradients import GradientSum
from samestep.errors import UsageError
from samestep.train.run import Run


class Branches(nn.Module):
    """`left` where the first feature is high, `right` where the second one is, `never` nowhere."""

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right, self.never = (
            nn.Linear(5, 4),
            nn.Linear(4, 1),
            nn.Linear(4, 1),
            nn.Linear(4, 1),
        )

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        output = hidden.sum(1, keepdim=True)
        for branch, chosen in ((self.left, x[:, :1] > 1), (self.right, x[:, 1:2] > 1)):
            if chosen.any():
                output = output + torch.where(chosen, branch(hidden), 0.0)
        return output


def batches():
    """Some where only one microbatch uses a branch, some where none does."""
    result = []
    for k, (lefts, rights) in enumerate([([5], [0, 23]), ([], [11]), ([1, 2, 3], []), ([], []), ([20], [7])]):
        x, y = table(24, seed=k)
        x[:, :2] = -1
        x[lefts, 0], x[rights, 1] = 2, 2
        result.append((x, y))
    return result


def make_optimizer(model, name):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train_branches(communicator, optimizer_name="sgd"):
    run = Run(24, 8, communicator=communicator)
    model = Branches()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model, optimizer_name)
    step = run.train_step(model, optimizer, mean_squared, bucket_bytes=16)
    absent, losses = [], []
    for batch in batches():
        losses.append(step(batch).loss.hex())
        absent.append(sorted(name for name, p in model.named_parameters() if p.grad is None))
    return bits(model, optimizer), losses, absent, model, optimizer, start


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_union_over_the_microbatches_decides_what_has_a_gradient(optimizer, world_size):
    reference = in_turns(1, train_branches, optimizer)[0]
    never = ["never.bias", "never.weight"]
    left, right = ["left.bias", "left.weight"], ["right.bias", "right.weight"]
    assert reference[2] == [never, left + never, never + right, left + never + right, never]
    for result in in_turns(world_size, train_branches, optimizer):
        assert result[:3] == reference[:3]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_what_no_microbatch_used_is_neither_decayed_nor_moved_on(name):
    *_, model, optimizer, start = in_turns(2, train_branches, name)[0]
    assert torch.equal(model.never.weight, start["never.weight"])
    assert model.never.weight not in optimizer.state
    plain = Branches()
    plain.load_state_dict(start)
    plain_optimizer = make_optimizer(plain, name)
    for batch in batches():
        plain_optimizer.zero_grad()
        mean_squared(plain, batch).backward()
        plain_optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        # Five float32 steps, sums of 24 in another order; Adam divides small differences by small roots.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if name == "adamw":
        assert int(optimizer.state[model.left.weight]["step"]) == 3


def test_twin_a_zero_in_the_place_of_none_is_noticed(monkeypatch):
    reference = in_turns(1, train_branches)[0]
    real = GradientSum.assign
    monkeypatch.setattr(GradientSum, "assign", lambda self, used: real(self, [True] * len(used)))
    assert in_turns(1, train_branches)[0][0] != reference[0]


def test_twin_what_one_rank_alone_used_is_noticed_if_the_others_do_not_hear_of_it(monkeypatch):
    real = GradientSum.assign
    monkeypatch.setattr(GradientSum, "assign", lambda self, used: real(self, self.used))
    results = in_turns(3, train_branches)
    assert len({result[0] for result in results}) > 1


def train_thawing(communicator):
    """The trunk is frozen for two steps, thawed for two, frozen again; the head the other way round at the end."""
    run = Run(24, 8, communicator=communicator)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    step = run.train_step(model, optimizer, mean_squared, bucket_bytes=64)
    trunk, moved = list(model[0].parameters()), []
    for thawed in (False, False, True, True, False, True):
        for parameter in trunk:
            parameter.requires_grad_(thawed)
        before = model[0].weight.detach().clone()
        step(table())
        moved.append(not torch.equal(before, model[0].weight))
        assert thawed == (model[0].weight.grad is not None)
    return bits(model, optimizer), moved


def test_parameters_can_be_frozen_and_thawed_in_mid_run():
    reference = in_turns(1, train_thawing)[0]
    assert reference[1] == [False, False, True, True, False, True]
    for world_size in (2, 3):
        assert all(result == reference for result in in_turns(world_size, train_thawing))


def test_a_model_that_is_frozen_altogether_is_refused():
    def program(communicator):
        model = nn.Linear(5, 1).requires_grad_(False)
        Run(24, 4, communicator=communicator).train_step(model, torch.optim.SGD(model.parameters()), mean_squared)

    with pytest.raises(UsageError, match="no parameter of the optimizer is trainable; set requires_grad"):
        in_turns(1, program)


class Tied(nn.Module):
    """One matrix as the first layer and, transposed, as the last; one module used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.middle(self.first(x))))))


def train_tied(communicator):
    run = Run(24, 8, communicator=communicator)
    model = Tied()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = run.train_step(model, optimizer, lambda m, b: functional.mse_loss(m(b[0]), b[0]), bucket_bytes=64)
    for _ in range(3):
        step(table())
    return bits(model, optimizer), model, start


def test_a_parameter_in_two_places_is_summed_once_and_stays_tied():
    digest, model, start = in_turns(1, train_tied)[0]
    for world_size in (2, 3):
        for result in in_turns(world_size, train_tied):
            assert result[0] == digest
            assert result[1].last.weight is result[1].first.weight
    plain = Tied()
    plain.load_state_dict(start)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        functional.mse_loss(plain(table()[0]), table()[0]).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # sums of 24 in another order, float32


def test_parameters_that_join_the_optimizer_later_are_trained():
    def program(communicator):
        run = Run(24, 4, communicator=communicator)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        step = run.train_step(model, optimizer, mean_squared)
        step(table())
        optimizer.add_param_group({"params": list(model[0].parameters())})
        before = model[0].weight.detach().clone()
        step(table())
        return torch.equal(before, model[0].weight)

    assert not in_turns(1, program)[0]


def test_sparse_gradients_of_embeddings_are_summed_as_dense_ones():
    def program(communicator, sparse):
        run = Run(24, 8, communicator=communicator)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = run.train_step(model, optimizer, mean_squared)
        words = torch.arange(48).view(24, 2) * 7 % 10
        step((words, table()[1]))
        return bits(model, optimizer)

    reference = in_turns(1, program, False)[0]
    for world_size in (1, 3):
        assert set(in_turns(world_size, program, True)) == {reference}
