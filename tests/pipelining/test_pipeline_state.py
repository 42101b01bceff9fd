"""The state of a model in stages: digest, ledger, checkpoints and weights are those of one device."""

from pathlib import Path

import pytest
import torch
from pipeline_programs import convolutions
from safetensors.torch import load_file
from torch.nn import functional

from samestep.comm.mesh import close_mesh
from samestep.engine.strategies import Pipeline, Replicate, Sharded
from samestep.train.run import Run
from samestep.train.runlog.ledger import from_line
from samestep.train.trainer import Trainer

STRATEGIES = {
    "replicate": Replicate(),
    "owned": Replicate(shard_optimizer=True),
    "sharded": Sharded(),
    "pipeline": Pipeline(split=["3"]),
    "interleaved": Pipeline(split=["1", "3", "7"], schedule="interleaved", stages_per_rank=2),
}


def images(num_samples=44):
    """Images of 8×8 with labels."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_samples, 1, 8, 8, generator=generator), torch.arange(num_samples) % 10


def loss(model, batch):
    """A mean over the microbatch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def trained(communicator, strategy, mesh, run_dir, epochs=2, resume=None):
    """Trains by a `Trainer`; the digest, the losses, and the step at which it began."""
    run = Run(16, 4, 5, communicator=communicator, mesh=mesh)
    model = convolutions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"checkpoint_steps": 2, "checkpoint_minutes": None, "keep": 100, "digest_every": 1, "max_grad_norm": 0.5}
    try:
        with Trainer(run, model, optimizer, loss, run_dir=run_dir, strategy=STRATEGIES[strategy], **options) as trainer:
            trainer.fit(images(), epochs, resume=resume)
            return trainer.digest, [record.train_loss.hex() for record in trainer.history]
    finally:
        if type(communicator.transport).__name__ != "GroupTransport":
            close_mesh()


def ledger(folder):
    """What the ledger says of each step, but for who took it."""
    rows = [from_line(row) for row in (Path(folder) / "ledger.jsonl").read_bytes().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("world_size", "seconds")} for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def reference(worlds, tmp_path_factory):
    """What one device gives, and its folder."""
    folder = tmp_path_factory.mktemp("pipeline") / "one"
    return worlds(1).run(trained, "replicate", None, str(folder))[0], folder


@pytest.mark.parametrize(
    ("world_size", "strategy", "mesh"),
    [(2, "pipeline", {"pipe": 2}), (4, "pipeline", {"data": 2, "pipe": 2}), (2, "interleaved", {"pipe": 2})],
    ids=str,
)
def test_digest_ledger_and_weights_are_those_of_one_device(worlds, reference, tmp_path, world_size, strategy, mesh):
    for result in worlds(world_size).run(trained, strategy, mesh, str(tmp_path / "run")):
        assert result == reference[0]
    assert ledger(tmp_path / "run") == ledger(reference[1])
    ours, theirs = (load_file(folder / "weights.safetensors") for folder in (tmp_path / "run", reference[1]))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, "replicate", None), (2, "pipeline", {"pipe": 2})),
        ((2, "pipeline", {"pipe": 2}), (1, "replicate", None)),
        ((4, "pipeline", {"data": 2, "pipe": 2}), (3, "sharded", None)),
        ((3, "sharded", None), (2, "interleaved", {"pipe": 2})),
        ((2, "owned", None), (4, "pipeline", {"data": 2, "pipe": 2})),
    ],
    ids=str,
)
def test_any_strategy_goes_on_from_what_another_has_saved(worlds, reference, tmp_path, before, after):
    folder = str(tmp_path / "run")
    worlds(before[0]).run(trained, before[1], before[2], folder, 1)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    earlier = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[0]
    for checkpoint, target in ((newest, "newest"), (earlier, "in mid-epoch")):
        results = worlds(after[0]).run(trained, after[1], after[2], str(tmp_path / target), 2, str(checkpoint))
        for result in results:
            assert result == reference[0]
