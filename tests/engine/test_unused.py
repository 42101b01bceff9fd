"""Parameters that not every microbatch uses, or that are frozen, or that appear in two places."""

import pytest
import torch
from engine_programs import bits, in_turns, make_step, mean_squared, table
from torch import nn

from samestep.engine.gradients import GradientSum
from samestep.errors import UsageError


class Branches(nn.Module):
    """`left` if the first feature is high, `right` if the second one is, `never` for no sample."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(5, 4)
        self.left, self.right, self.never = (nn.Linear(4, 1) for _ in range(3))

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        output = hidden.sum(1, keepdim=True)
        for branch, chosen in ((self.left, x[:, :1] > 1), (self.right, x[:, 1:2] > 1)):
            if chosen.any():
                output = output + torch.where(chosen, branch(hidden), 0.0)
        return output


def batches():
    """Some in which only one microbatch uses a branch, some in which none does."""
    result = []
    for k, (lefts, rights) in enumerate([([5], [0, 23]), ([], [11]), ([1, 2, 3], []), ([], []), ([20], [7])]):
        x, y = table(24, seed=k)
        x[:, :2] = -1
        x[lefts, 0], x[rights, 1] = 2, 2
        result.append((x, y))
    return result


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train_branches(communicator):
    model = Branches()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model)
    step = make_step(communicator, model, optimizer=optimizer, bucket_bytes=16)
    absent, losses = [], []
    for batch in batches():
        losses.append(step(batch).loss.hex())
        absent.append(sorted(name for name, p in model.named_parameters() if p.grad is None))
    return bits(model, optimizer), losses, absent, model, optimizer, start


def test_the_union_over_the_microbatches_decides_what_has_a_gradient_is_decayed_and_moves():
    reference = in_turns(1, train_branches)[0]
    never = ["never.bias", "never.weight"]
    left, right = ["left.bias", "left.weight"], ["right.bias", "right.weight"]
    assert reference[2] == [never, left + never, never + right, left + never + right, never]
    for world_size in (3, 8):
        for result in in_turns(world_size, train_branches):
            assert result[:3] == reference[:3]
    *_, model, optimizer, start = reference
    assert torch.equal(model.never.weight, start["never.weight"])
    assert model.never.weight not in optimizer.state
    plain = Branches()
    plain.load_state_dict(start)
    plain_optimizer = make_optimizer(plain)
    for batch in batches():
        plain_optimizer.zero_grad()
        mean_squared(plain, batch).backward()
        plain_optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        # Five float32 steps, sums of 24 in another order; Adam divides small differences by small roots.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert int(optimizer.state[model.left.weight]["step"]) == 3


def test_twin_a_parameter_that_one_rank_alone_used_is_noticed_if_the_others_do_not_learn_of_it(monkeypatch):
    real = GradientSum.assign
    monkeypatch.setattr(GradientSum, "assign", lambda self, used: real(self, self.used))
    assert len({result[0] for result in in_turns(3, train_branches)}) > 1


def test_twin_reused_memory_that_keeps_the_gradient_of_another_microbatch_is_noticed(monkeypatch):
    reference = in_turns(1, train_branches)[0]
    monkeypatch.setattr(torch.Tensor, "zero_", lambda self: self)
    assert in_turns(1, train_branches)[0][0] != reference[0]


def test_parameters_without_a_gradient_are_named_once(capfd):
    def program(communicator):
        step = make_step(communicator, Branches())
        for batch in batches():
            step(batch)

    in_turns(3, program)
    lines = capfd.readouterr().err.splitlines()
    named = [line for line in lines if "got no gradient in the first 3 steps" in line]
    assert named == [next(line for line in lines if "2 of 8 parameters" in line)]
    assert "such as never.weight, never.bias:" in named[0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_of_other_tensors_alone_is_refused_before_anything_moves(world_size):
    def program(communicator):
        model, other = nn.Linear(5, 1), nn.Linear(5, 1).to(communicator.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        step = make_step(communicator, model, lambda _, batch: mean_squared(other, batch), optimizer)
        before = bits(model, optimizer)
        with pytest.raises(UsageError, match="none of the 2 parameters that are trained got a gradient in step 1"):
            step(table())
        return bits(model, optimizer) == before and step.num_steps == 0

    assert all(in_turns(world_size, program))


def test_parameters_that_change_their_order_in_memory_keep_their_gradients():
    def program(communicator, turns):
        model = nn.Sequential(nn.Unflatten(1, (5, 1, 1)), nn.Conv2d(5, 4, 1), nn.Flatten(), nn.Linear(4, 1))
        step = make_step(communicator, model)
        for number in range(3):
            step(table())
            if turns and number == 0:
                model.to(memory_format=torch.channels_last)
                model[1].weight.data = model[1].weight.data.transpose(0, 1).contiguous().transpose(0, 1)
        assert model[1].weight.grad.stride() == model[1].weight.stride()
        return [parameter.detach().contiguous() for parameter in model.parameters()]

    plain, turned = (in_turns(1, program, turns)[0] for turns in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, turned, strict=True))


@pytest.mark.parametrize("join", [True, False], ids=["join", "replace others"])
def test_parameters_that_come_to_the_optimizer_later_are_trained(join):
    def program(communicator):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        step = make_step(communicator, model, optimizer=optimizer)
        step(table())
        first = list(model[0].parameters())
        if join:
            optimizer.add_param_group({"params": first})
        else:
            optimizer.param_groups[0]["params"] = first
        before = [layer.weight.detach().clone() for layer in (model[0], model[2])]
        step(table())
        return [torch.equal(old, model[k].weight) for old, k in zip(before, (0, 2), strict=True)]

    assert in_turns(1, program)[0] == [False, not join]


def test_sparse_gradients_of_embeddings_are_summed_as_dense_ones():
    def program(communicator, sparse):
        model = nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = make_step(communicator, model, optimizer=optimizer)
        step((torch.arange(48).view(24, 2) * 7 % 10, table()[1]))
        return bits(model, optimizer)

    reference = in_turns(1, program, False)[0]
    for world_size in (1, 3):
        assert set(in_turns(world_size, program, True)) == {reference}


class Sparing(nn.Module):
    """A factor that is used only if the first feature is zero."""

    def __init__(self):
        super().__init__()
        self.factor, self.always = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        plain = x.sum(1) * self.always
        return plain + (x[0] * self.factor).sum() if x[0, 0] == 0 else plain


def signs_of_zero(communicator, used):
    """The sign bits of a gradient that is -0 in the microbatch that uses the factor, of two."""
    model = Sparing()
    step = make_step(communicator, model, lambda m, x: m(x), num_microbatches=2)
    x = torch.ones(2, 5)
    x[used] = -0.0
    step(x)
    return torch.signbit(model.factor.grad).tolist(), model.factor.grad.tolist()


@pytest.mark.parametrize("used", [0, 1])
def test_a_gradient_of_minus_zero_has_one_sign_on_every_number_of_devices(used):
    reference = in_turns(1, signs_of_zero, used)[0]
    assert reference == ([False] * 5, [0.0] * 5)  # 0 of the microbatch without it, and -0
    assert in_turns(2, signs_of_zero, used) == [reference] * 2


def gradients_of_one_memory(communicator):
    """Of two parameters whose gradients autograd makes views of one tensor."""
    model = nn.ParameterDict({"a": torch.ones(6), "b": torch.ones(6)})

    def loss_fn(model, x):
        return ((model["a"].view(2, 3) + model["b"].view(2, 3)) * x.view(-1, 2, 3)).sum((1, 2))

    step = make_step(communicator, model, loss_fn, num_microbatches=4)
    step(torch.arange(24.0).view(4, 6))
    return [parameter.grad.tolist() for parameter in model.values()]


def test_gradients_that_share_memory_are_added_once():
    expected = (torch.arange(24.0).view(4, 6).sum(0) / 4).tolist()
    for world_size in (1, 2, 4):
        assert in_turns(world_size, gradients_of_one_memory) == [[expected] * 2] * world_size
