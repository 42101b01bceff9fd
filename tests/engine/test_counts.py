"""Global counts: denominators summed over the global batch before the forward."""

import random

import numpy as np
import pytest
import torch
from engine_programs import in_turns, make_step, table
from torch import nn

from samestep.engine import losses as losses_module
from samestep.errors import LossError
from samestep.run.run import Run

NUM_SAMPLES = 22


def anchors(batch):
    """The numbers of anchors and positives of a microbatch."""
    return {"anchors": batch[0].numel(), "positives": (batch[1] > 0).sum()}


def detection(model, batch, counts):
    """Two terms with denominators of their own."""
    scores = model(batch[0])
    positive = (batch[1] > 0).float()
    spread = (batch[0] - scores).square().sum() / counts["anchors"]
    return spread + 3.0 * (positive * (scores - batch[1]).abs()).sum() / counts["positives"]


def run_detection(
    communicator, counts_fn=anchors, loss=detection, num_samples=NUM_SAMPLES, strategy="replicate", **more
):
    """Three steps; the losses and the model."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = make_step(communicator, model, loss, optimizer, 7, counts_fn=counts_fn, strategy=strategy, **more)
    batch = tuple(rows[:num_samples] for rows in table())
    losses = [step(batch).loss.hex() for _ in range(3)]
    return losses, [] if strategy == "sharded" else [p.detach().clone() for p in model.parameters()]


def test_a_loss_with_two_denominators_is_that_of_the_whole_batch():
    losses, parameters = in_turns(1, run_detection)[0]
    torch.manual_seed(0)
    plain = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    batch = tuple(t[:NUM_SAMPLES] for t in table())
    for loss in losses:
        optimizer.zero_grad()
        expected = detection(plain, batch, anchors(batch))
        expected.backward()
        optimizer.step()
        assert float.fromhex(loss) == pytest.approx(expected.item(), rel=1e-6)  # float32 sums in another order
    for a, b in zip(parameters, plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # the same


def masked(model, batch, count):
    """The loss of the features that a mask leaves, beside noise."""
    scores = model(batch["x"] + 0.01 * torch.randn_like(batch["x"]))
    return ((scores - batch["y"]).square() * batch["mask"]).sum() / count


def run_masked(communicator, strategy="replicate"):
    """Steps whose count is that of weights drawn for it; the losses, the masks, and the script's next draw."""
    masks = {}

    def draw(batch):
        batch["mask"] = torch.rand(len(batch["x"]), 1, device=batch["x"].device) * np.random.rand()
        masks[float(batch["x"][0, 0])] = batch["mask"].flatten().tolist()
        return batch["mask"].sum() + random.random()

    run = Run(24, 7, communicator=communicator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
    step = run.train_step(model, torch.optim.SGD(model.parameters(), 0.1), masked, counts_fn=draw, strategy=strategy)
    x, y = table()
    losses = [step({"x": x + k, "y": y}).loss.hex() for k in range(3)]
    return losses, masks, torch.rand(1).item()


def test_counts_that_are_drawn_depend_on_the_microbatch_alone(worlds):
    ((losses, masks, then),) = in_turns(1, run_masked)
    assert len({tuple(mask) for mask in masks.values()}) == 21, "each microbatch of each step draws anew"
    found = worlds(2).run(run_masked, "sharded")
    assert {key: mask for result in found for key, mask in result[1].items()} == masks
    assert [(result[0], result[2]) for result in found] == [(losses, then)] * 2


def test_twin_counts_drawn_by_one_seed_are_noticed(monkeypatch):
    monkeypatch.setattr(losses_module, "derive_seed", lambda *parts: 1)
    ((_, masks, _),) = in_turns(1, run_masked)
    assert len({tuple(mask) for mask in masks.values()}) < 21


def test_a_rank_that_only_runs_along_has_the_counts_in_their_structure(worlds):
    losses, _ = in_turns(1, run_detection, anchors, detection, 3)[0]
    assert worlds(4).run(run_detection, anchors, detection, 3, "sharded") == [(losses, [])] * 4


def test_a_rank_without_microbatches_audits_one_by_the_counts_in_their_structure():
    losses, _ = in_turns(1, run_detection, anchors, detection, 1)[0]
    found = in_turns(3, lambda c: run_detection(c, num_samples=1, audit=1))
    assert [result[0] for result in found] == [losses] * 3


@pytest.mark.parametrize(
    ("counts_fn", "read"),
    [
        (lambda b: len(b[0]), lambda c: c),
        (lambda b: torch.tensor([float(len(b[0]))]), lambda c: c),
        (lambda b: np.int64(len(b[0])), lambda c: c),
        (lambda b: (len(b[0]), 1), lambda c: c[0]),
        (lambda b: [1, len(b[0])], lambda c: c[1]),
        (lambda b: {"ones": 1, "samples": len(b[0])}, lambda c: c["samples"]),
    ],
)
def test_counts_come_back_in_the_structure_they_were_given(counts_fn, read):
    seen = []

    def loss(model, batch, counts):
        seen.append(float(read(counts)))
        return model(batch[0]).sum() / read(counts)

    in_turns(2, run_detection, counts_fn, loss)
    assert set(seen) == {float(NUM_SAMPLES)}


@pytest.mark.parametrize(
    ("counts_fn", "message"),
    [
        (lambda b: torch.ones(3), "counts_fn returned a float32 tensor of shape [3]; needed: numbers"),
        (lambda b: None, "counts_fn returned None; needed: numbers"),
        (lambda b: {"a": "3"}, "counts_fn returned a str"),
        (lambda b: {}, "counts_fn returned no number"),
        (lambda b: [1] * len(b[0]), "for one microbatch and"),
        (
            lambda b: {"a": 1, "b": 2} if len(b[0]) == 4 else {"b": 2, "a": 1},
            "for one microbatch, ('a', 'b') for another",
        ),
        (lambda b: {"a": 1} if len(b[0]) == 4 else 1, "for one microbatch, ('a',) for another"),
    ],
)
def test_results_of_counts_fn_that_are_no_counts_are_refused(counts_fn, message):
    with pytest.raises(LossError) as caught:
        in_turns(1, run_detection, counts_fn, lambda m, b, c: m(b[0]).sum())
    assert message in str(caught.value)


def test_a_loss_with_global_counts_must_return_its_share():
    with pytest.raises(LossError, match="with counts_fn the loss function must return a 0-d tensor"):
        in_turns(1, run_detection, anchors, lambda m, b, c: m(b[0]).squeeze(1))
