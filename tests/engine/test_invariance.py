"""The promise: the same bits on every number of devices; with twins in which it is broken on purpose.

The recipes run on ranks that take turns, which is the code of real processes but for the transport; real processes run
one of them over each transport.
"""

import pytest
import torch
from programs import agree, masked_loss, small_images, train_recipe, train_small
from torch import nn
from torch.nn import functional
from worlds import in_turns

from samestep.comm import reduction as reduction_module
from samestep.engine import forward_backward as forward_backward_module
from samestep.engine import losses as losses_module
from samestep.engine import microbatch_runner as microbatches_module
from samestep.run.run import Run

CASES = [
    ("lenet", {"max_grad_norm": 0.5, "optimizer": "adam", "lr": 0.001}),
    ("mlp", {"optimizer": "sgd", "lr": 1e-5, "one_by_one": True}),
    ("vgg", {"num_microbatches": 5, "max_grad_norm": 1.0, "precision": "bf16-mixed"}),
    ("gpt", {"optimizer": "adamw", "precision": "bf16-mixed", "max_grad_norm": 1.0}),
]


def check_recipe(name, options, run_on, world_sizes):
    """Fails unless `run_on(world_size, program, …)` gives what one device does."""
    (reference,) = in_turns(1, train_recipe, name, options)
    assert len(set(reference[1])) > 1, "a model whose loss does not move proves nothing"
    assert set(reference[2].values()) <= set(range(1, options.get("num_microbatches", 8) + 1))
    for world_size in world_sizes:
        agree(reference, run_on(world_size, train_recipe, name, options))


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_a_recipe_ends_in_the_same_bits_on_every_number_of_devices(name, options):
    check_recipe(name, options, in_turns, (2, 3))


@pytest.mark.parametrize("transport", ["auto", "gloo"], ids=["shared memory", "gloo"])
def test_real_processes_end_in_the_bits_of_one_device_over_every_transport(worlds, transport):
    options = {"max_grad_norm": 0.5, "optimizer": "adam", "lr": 0.001}
    check_recipe("lenet", options, lambda n, *rest: worlds(n, transport).run(*rest), (2, 3, 4))
    assert worlds(1).run(train_recipe, "lenet", options) == in_turns(1, train_recipe, "lenet", options)


def test_unequal_shares_do_not_change_the_bits():
    (reference,) = in_turns(1, train_small, {"samples": 96})
    results = in_turns(3, train_small, {"samples": 96, "shares": [5, 1, 2]})
    agree(reference, results)
    steps = len(reference[1])
    assert [sum(result[2].values()) for result in results] == [5 * steps, steps, 2 * steps]


def test_microbatches_without_a_valid_token_weigh_nothing():
    def program(communicator):
        images, labels = small_images(32)
        labels[:4] = labels[-4:] = -100  # of the first and the last of eight microbatches
        run = Run(32, 8, communicator=communicator)
        model = nn.Linear(64, 10)
        before = functional.cross_entropy(model(images.flatten(1)[4:-4]), labels[4:-4]).item()
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), masked_loss)
        result = step((images.flatten(1), labels))
        assert result.count == 24
        assert result.loss == pytest.approx(before, rel=1e-6)  # the same float32 terms in another order
        return result.loss.hex(), result.grad_norm.hex()

    assert len({*in_turns(1, program), *in_turns(3, program)}) == 1


# Twins: each breaks one thing on which the promise rests, and the comparison must notice.


def differs(options, world_size=3):
    """Whether a world ends in other bits than one device does, with whatever is broken now."""
    (reference,) = in_turns(1, train_small, options)
    results = in_turns(world_size, train_small, options)
    return any(result[:2] != reference[:2] for result in results)


def test_twin_nothing_broken_agrees():
    assert not differs({})


def test_twin_the_tree_replaced_by_rank_order_is_noticed(monkeypatch):
    class RankOrder(reduction_module.TreeSum):
        def push(self, block, value):
            self._sums = [self._add(self._sums[0], value)] if self._sums else [value]

    monkeypatch.setattr(reduction_module, "TreeSum", RankOrder)
    assert differs({})


def test_twin_randomness_by_rank_is_noticed(monkeypatch):
    real = microbatches_module.MicrobatchRunner.run

    def by_rank(self, *args):
        monkeypatch.setattr(microbatches_module, "microbatch_seed", lambda *parts: 1000 + self._membership.rank)
        return real(self, *args)

    monkeypatch.setattr(microbatches_module.MicrobatchRunner, "run", by_rank)
    assert differs({})


def test_twin_randomness_that_is_not_restored_after_the_step_is_noticed(worlds):
    def draws(world_size, **options):
        return [result[4] for result in worlds(world_size).run(train_small, {"epochs": 1, **options})]

    assert draws(3)[2] == draws(1)[0]
    leaked = draws(3, leak_randomness=True)
    assert leaked[0] != leaked[2]


def test_twin_a_mean_of_means_is_noticed(monkeypatch):
    monkeypatch.setattr(forward_backward_module, "read_loss", lambda value, n: losses_module.read_loss(value, 1))
    options = {"samples": 100, "batch": 100, "num_microbatches": 8, "epochs": 1}
    (broken,) = in_turns(1, train_small, options)
    monkeypatch.undo()
    (right,) = in_turns(1, train_small, options)
    assert broken[1][0][0] != right[1][0][0]


def test_twin_a_rank_that_computes_everything_is_noticed_by_the_count_of_microbatches(monkeypatch):
    (reference,) = in_turns(1, train_small, {"epochs": 1})
    monkeypatch.setattr(
        "samestep.run.run.microbatch_ranges",
        lambda microbatches, world_size, shares=None: (range(microbatches),) * world_size,
    )

    def everything(communicator):
        return train_small(communicator, {"epochs": 1})

    results = [in_turns(1, everything)[0] for _ in range(2)]
    with pytest.raises(AssertionError):
        agree(reference, results)
