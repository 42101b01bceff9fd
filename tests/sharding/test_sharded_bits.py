"""`strategy="sharded"` and `"zero1"`: the bits of strategy="replicate" on one device; with twins that fail."""

from unittest import mock

import pytest
from programs import agree
from sharded_programs import refused, train

from samestep.core.tree import TreeSum
from samestep.engine import sharded_strategy as gradients_module

CASES = [
    {"num_microbatches": 7, "max_grad_norm": 0.1, "optimizer": "momentum", "precision": "16-mixed"},
    {"model": "fickle", "max_grad_norm": 0.5, "epochs": 1},
    {"model": "layer normed", "samples": 67, "num_microbatches": 4, "precision": "bf16-mixed", "gamma": 0.9},
    {"model": "layer normed", "num_microbatches": 32, "samples": 33, "loss": "counts", "epochs": 1},
    {"loss": "masked", "optimizer": "foreach", "epochs": 1},
    {"model": "looped", "loss": "twice", "samples": 67, "epochs": 1},
]
SIZES_AND_CASES = [*((size, {}) for size in (1, 2, 3, 4)), *((3, case) for case in CASES)]


@pytest.fixture(scope="module")
def references():
    """The results of strategy="replicate" on one device, by case."""
    return {}


def reference_of(references, worlds, options):
    key = str(options)
    if key not in references:
        references[key] = worlds(1).run(train, "replicate", options)[0]
        assert len({loss for loss, _ in references[key][1]}) > 1, "a model whose loss does not move proves nothing"
    return references[key]


@pytest.mark.parametrize(("world_size", "options"), SIZES_AND_CASES, ids=str)
@pytest.mark.parametrize("strategy", ["sharded", "zero1"])
def test_a_sharded_state_has_the_bits_of_one_device(worlds, references, options, strategy, world_size):
    agree(reference_of(references, worlds, options), worlds(world_size).run(train, strategy, options))


FORMS = [  # strategy, numbers of ranks, options
    *((strategy, (3,), {"max_grad_norm": 0.1}) for strategy in ("tiny groups", "offloaded")),
    ("tiny groups", (1, 2), {"model": "written"}),
    ("reused", (3,), {"model": "reused", "epochs": 1}),
    ("reused", (3,), {"model": "reentrant", "epochs": 1}),
    ("tiny groups", (2,), {"model": "reentrant last", "epochs": 1}),
    ("recomputed", (3,), {"model": "layer normed"}),
    ("zero1", (3,), {"optimizer": "fused"}),  # its parts end at multiples of 64 elements, as kernels need
    ("zero1", (3,), {"optimizer": "fused", "bucket_bytes": 1000}),
    ("zero1", (2,), {"bucket_bytes": 256}),
    ("zero1", (2,), {"bucket_bytes": 3000, "overlap": False}),
]


@pytest.mark.parametrize(("strategy", "world_sizes", "options"), FORMS, ids=str)
def test_options_of_the_strategies_and_optimizers_do_not_change_the_bits(
    worlds, references, strategy, world_sizes, options
):
    for world_size in world_sizes:
        agree(reference_of(references, worlds, options), worlds(world_size).run(train, strategy, options))


def test_ranks_that_exchange_by_gloo_end_in_the_same_bits(worlds, references):
    for strategy in ("sharded", "zero1"):
        agree(reference_of(references, worlds, {}), worlds(2, "gloo").run(train, strategy, {}))


@pytest.mark.parametrize("strategy", ["sharded", "zero1"])
def test_a_rank_has_its_shard_of_the_optimizer_state(worlds, references, strategy):
    (whole,) = worlds(1).run(train, "replicate", {})
    parts = [result[4] for result in worlds(4).run(train, strategy, {})]
    steps = 4 * 16  # each rank counts the steps of each parameter
    assert whole[4] <= sum(parts) <= whole[4] + steps
    assert max(parts) < 0.4 * whole[4]


def test_fsdps_own_mixed_precision_gives_equal_bits_on_all_numbers_of_devices(worlds, references):
    options = {"model": "layer normed"}
    (one,) = worlds(1).run(train, "half", options)
    for world_size in (2, 3):
        for result in worlds(world_size).run(train, "half", options):
            assert result[0] == one[0]
    full = reference_of(references, worlds, options)
    assert one[0] != full[0]
    for (half, _), (exact, _) in zip(one[1][:3], full[1][:3], strict=True):
        assert float.fromhex(half) == pytest.approx(float.fromhex(exact), rel=0.05)  # 8 bits of mantissa


# Twins: each breaks one thing on which the promise rests, and the comparison must notice.


class LeftSum(TreeSum):
    """Adds from left to right."""

    def push(self, block, value):
        """Adds to all that is there."""
        self._blocks, self._sums = [block], [value if not self._sums else self._sums[0] + value]


def added_in_rank_order(communicator, options):
    """Training in which what arrives is added from left to right, as FSDP2 adds."""
    with mock.patch.object(gradients_module, "TreeSum", LeftSum):
        return train(communicator, "sharded", options)


def counted_along(communicator, options):
    """Training in which the gradients of ranks that only run along count."""
    arm = gradients_module.ShardedGradientSum.expect

    def arm_all(self, microbatch, is_last):
        arm(self, microbatch, is_last)
        self._num_leaves = 2**30

    with mock.patch.object(gradients_module.ShardedGradientSum, "expect", arm_all):
        return train(communicator, "sharded", options)


@pytest.mark.parametrize("broken", [added_in_rank_order, counted_along])
def test_the_comparison_notices_another_sum(worlds, references, broken):
    options = {"num_microbatches": 7}
    reference = reference_of(references, worlds, options)
    assert all(result[0] != reference[0] for result in worlds(2).run(broken, options))


def test_modules_that_run_in_another_order_on_another_rank_are_noticed(worlds):
    for sentence in worlds(2).run(refused, "tiny groups", {"model": "skipping"}):
        assert sentence.startswith("DeterminismError: the ranks ran different modules")
