"""Scalars beside the loss: means over the global batch, the same bits on any number of devices, in every record."""

import json

import pytest
import torch
from resume_programs import BATCH, METRICS, NUM_MICROBATCHES, SEED, plain, points
from torch import nn
from torch.nn import functional
from worlds import in_turns

from samestep.engine.losses import Mean
from samestep.errors import LossError
from samestep.run.run import Run
from samestep.run.trainer import Trainer


def with_scalars(model, batch):
    """A loss with a mean, a value a sample, a ragged mean (of some microbatches: of nothing) and a number."""
    scores = model(batch[0])
    losses = functional.cross_entropy(scores, batch[1], reduction="none")
    rare = batch[1] == 0
    return losses.mean(), {
        "norm": scores.norm(dim=1),
        "square": scores.square().mean(),
        "rare": Mean(losses[rare].sum(), rare.sum()),
        "temperature": 0.5,
    }


def of_means(model, batch):
    return with_scalars(model, batch)[0]


def fit(communicator, run_dir=None, resume=None, loss=with_scalars, epochs=2, **options):
    """Trains; the scalars of each step and each epoch as hex, and the digest."""

    class Look:
        def on_step_end(self, trainer, result):
            steps.append({name: value.hex() for name, value in result.scalars.items()})

    steps = []
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    with Trainer(
        run, model, optimizer, loss, hooks=[Look()], run_dir=run_dir, checkpoint_steps=1, keep=99, **options
    ) as trainer:
        trainer.fit(points(), epochs, eval_data=points(), metrics=METRICS, resume=resume)
        epochs = [{name: value.hex() for name, value in record.scalars.items()} for record in trainer.history]
        return trainer.digest, steps, epochs


@pytest.mark.parametrize("late", [False, True])
def test_scalars_have_the_same_bits_on_all_devices_and_change_none(late):
    reference = in_turns(1, lambda communicator: fit(communicator))[0]
    assert [sorted(step) for step in reference[1]] == [["norm", "rare", "square", "temperature"]] * 6
    assert in_turns(3, lambda c: fit(c, late_check=late)) == [reference] * 3
    assert in_turns(1, lambda c: fit(c, loss=of_means))[0] == (reference[0], [{}] * 6, [{}] * 2)


def test_a_scalar_is_the_mean_over_the_global_batch_and_the_epoch():
    def program(communicator):
        run = Run(20, 4, SEED, communicator=communicator)
        model = nn.Linear(2, 3)
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), with_scalars)
        batch = tuple(tensor[:19] for tensor in points())
        result = step(batch)
        _, expected = with_scalars(model.cpu(), batch)
        got = result.scalars
        assert got["temperature"] == 0.5
        assert got["norm"] == pytest.approx(expected["norm"].mean().item(), rel=1e-6)  # float32 in another order
        assert got["square"] == pytest.approx(expected["square"].item(), rel=1e-6)
        assert got["rare"] == pytest.approx((expected["rare"].total / expected["rare"].count).item(), rel=1e-6)
        assert result.scalar_sums["rare"][1] == (batch[1] == 0).sum()
        assert result.scalar_sums["norm"][1] == 19
        return True

    assert all(in_turns(2, program))


def test_scalars_are_logged_and_kept_by_a_resume_within_an_epoch(tmp_path):
    reference = in_turns(2, lambda c: fit(c, tmp_path / "run"))[0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss/train" in line]
    assert [step["rare/train"].hex() for step in steps] == [step["rare"] for step in reference[1]]
    (first, second) = (line for line in lines if "loss/train_epoch" in line)
    assert first["norm/train_epoch"].hex() == reference[2][0]["norm"]
    assert second["norm/train_epoch"].hex() == reference[2][1]["norm"]
    place = tmp_path / "run" / "checkpoints" / "step-00000005"
    assert in_turns(3, lambda c: fit(c, None, place))[0] == (reference[0], reference[1][5:], reference[2])


def test_counts_beside_a_loss_with_several_denominators():
    def shares(model, batch, counts):
        loss, scalars = with_scalars(model, batch)
        return loss * len(batch[0]) / counts, scalars

    def program(communicator):
        return fit(communicator, loss=shares, counts_fn=lambda batch: len(batch[0]))

    reference = in_turns(1, program)
    assert in_turns(3, program) == reference * 3
    assert all(float.fromhex(step["temperature"]) == 0.5 for step in reference[0][1])


def sometimes(model, batch):
    loss, scalars = with_scalars(model, batch)
    is_first = (batch[0].cpu() == points()[0][3]).all(1).any()  # in one microbatch of an epoch
    return (loss, scalars if is_first else {"norm": scalars["norm"]})


@pytest.mark.parametrize("world_size", [1, 4])
def test_other_names_for_another_microbatch_are_an_error_of_all_ranks(worlds, world_size):
    assert worlds(world_size).run(refused, sometimes) == [True] * world_size


def refused(communicator, loss):
    with pytest.raises(LossError, match="other scalars for one microbatch than for another"):
        fit(communicator, loss=loss)
    return True


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (3, "a pair with an int; needed beside the loss: a dict of scalars by name"),
        ({3: 1.0}, "needed beside the loss: a dict of scalars by name"),
        ({"loss": 1.0}, "a scalar named 'loss', as every step has one"),
        ({"kl": torch.zeros(2, 2)}, "of the scalar 'kl': the loss function returned a float32 tensor of shape"),
        ({"kl": torch.zeros(99)}, "of the scalar 'kl': the loss function returned 99 losses for a microbatch"),
        ({"kl": None}, "of the scalar 'kl': the loss function returned None"),
    ],
)
def test_scalars_that_cannot_be_are_named(beside, message):
    def loss(model, batch):
        return of_means(model, batch), beside

    with pytest.raises(LossError, match=message):
        in_turns(1, lambda communicator: fit(communicator, loss=loss))
