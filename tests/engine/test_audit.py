"""Audits: a flipped bit on one rank is found, named and left out before it is written; a clean run has equal bits."""

import pytest
import torch
from bit_flips import COMPUTED, KEPT, Flip, Flipping
from engine_programs import bits, in_turns, make_step, mean_squared, perceptron, squared, table

from samestep.core.seeds import derive_seed
from samestep.engine.audit import AUDIT_STREAM
from samestep.errors import AuditError

V = 8
DRAW = 64 * 345  # bit 25, of the exponent, of a tensor of the first layer


def train(communicator, audit=None, flip=None, steps=4, action="warn", model_fn=perceptron, loss=squared, **options):
    """Steps on tables of their own; the digest, what was found, and the error that ended the run."""
    model = model_fn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    observers = [] if flip is None else [Flipping(flip, communicator, model, optimizer)]
    given = {"audit": audit, "audit_action": action, "observers": observers, **options}
    step = make_step(communicator, model, loss, optimizer, V, **given)
    error = None
    try:
        for number in range(steps):
            step(table(seed=number))
    except AuditError as raised:
        error = str(raised)
    found = [(f.step, f.microbatch, f.ranks, f.names, f.action) for f in step.audit_findings]
    return bits(step), found, error


def audited(step, num_leaves=V):
    """The microbatch that is audited in a step of seed 0."""
    return derive_seed(0, AUDIT_STREAM, 0, step) % num_leaves


def owner(microbatch, world_size):
    """The rank that executes a microbatch."""
    return next(r for r in range(world_size) if r * V // world_size <= microbatch < (r + 1) * V // world_size)


@pytest.fixture(scope="module")
def undisturbed():
    return in_turns(1, train)[0][0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("audit", [1, 2, 3])
def test_a_clean_audit_changes_no_bit_and_finds_nothing(undisturbed, world_size, audit):
    for result in in_turns(world_size, train, audit):
        assert result == (undisturbed, [], None)


@pytest.mark.parametrize(
    "options",
    [
        {"shard_optimizer": True},
        {"bucket_bytes": 64, "overlap": True},
        {"precision": "bf16-mixed"},
        {"precision": "16-mixed"},
        {"max_grad_norm": 0.1},
        {"loss": mean_squared},
        {"on_nonfinite": "skip"},
    ],
    ids=str,
)
def test_a_clean_audit_changes_no_bit_with_other_options(options):
    (expected, _, _), *_ = in_turns(1, lambda c: train(c, **options))
    for world_size in (2, 3):
        for digest, found, _ in in_turns(world_size, lambda c: train(c, 1, **options)):
            assert (digest, found) == (expected, [])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_flip_in_the_audited_microbatch_is_found_named_and_never_written(undisturbed, kind, world_size):
    microbatch = audited(2)
    rank = owner(microbatch, world_size)
    flip = Flip(kind, rank, 2, microbatch, DRAW)
    results = in_turns(world_size, train, 1, flip)
    for digest, found, error in results:
        assert digest == undisturbed
        assert error is None
        [(step, index, ranks, names, action)] = found
        assert (step, index, ranks, action) == (2, microbatch, (rank,), "warn")
        assert "gradient of 0.weight" in names
        if kind == "gradient":
            assert names == ("gradient of 0.weight",)
    # The twin: without the audit it is written, and nothing is found.
    for digest, found, error in in_turns(world_size, train, None, flip):
        assert digest != undisturbed
        assert (found, error) == ([], None)


def test_a_flip_in_another_microbatch_is_not_found(undisturbed):
    microbatch = (audited(2) + 1) % V
    flip = Flip("gradient", owner(microbatch, 3), 2, microbatch, DRAW)
    for digest, found, error in in_turns(3, train, 1, flip):
        assert digest != undisturbed
        assert (found, error) == ([], None)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("draw", [0, 64 * 63, 64 * 165])
def test_a_flip_in_the_state_is_found_in_its_step_by_the_majority(kind, world_size, draw):
    before = in_turns(1, lambda c: train(c, steps=2))[0][0]
    results = in_turns(world_size, train, 1, Flip(kind, 1, 2, 0, draw))
    for rank, (digest, found, error) in enumerate(results):
        assert (digest == before) == (rank != 1)  # nothing of the step was written
        [(step, index, ranks, names, action)] = found
        assert (step, index, ranks, action) == (2, None, (1,) if world_size > 2 else (), "stop")
        assert names == ("0.weight",)
        assert "rank 1" in error
        assert ("cannot be told" in error) == (world_size == 2)
    for _, found, error in in_turns(world_size, train, None, Flip(kind, 1, 2, 0, draw)):
        assert (found, error) == ([], None)
