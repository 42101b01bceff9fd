"""The hash of the data as read: that of the samples, whatever reads them, and another one if one of them is changed."""

import hashlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from worlds import cpu_only, in_turns

from samestep.data.tensors import TensorData
from samestep.errors import UsageError
from samestep.run.data_hash import hash_samples
from samestep.run.run import Run
from samestep.run.trainer import Trainer
from samestep.runs.attestation import statement
from samestep.runs.ledger import read_ledger

NUM_SAMPLES, BATCH, NUM_MICROBATCHES = 26, 8, 4  # 4 steps an epoch, the last one of 2 samples


def points(change=None):
    x = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    if change is not None:
        change(x, y)
    return x, y


class Noisy(Dataset):
    """Samples with a name each, and noise from all global generators."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        x, y = points()
        noise = torch.rand(()) + float(np.random.rand()) + random.random()
        return {"x": x[index] + noise, "y": y[index], "name": f"sample {index}"}


class Stream(IterableDataset):
    """The samples in their order."""

    def __iter__(self):
        yield from zip(*points(), strict=True)


def loss_fn(model, batch):
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return nn.functional.cross_entropy(model(x), y)


def train(communicator, folder, data=None, epochs=1, seed=3, contract=(BATCH, NUM_MICROBATCHES), fit=None, **options):
    """Trains, and returns the digest; `data` makes the data of a run."""
    run = Run(*contract, seed, communicator=communicator)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"hash_data": True, "checkpoint_steps": 1, "keep": 99, "digest_every": 99, **options}
    with Trainer(run, model, optimizer, loss_fn, run_dir=folder, **options) as trainer:
        trainer.fit(points() if data is None else data(run), epochs, **(fit or {}))
        return trainer.digest


def hash_of(folder):
    (*_, end) = (event for event in read_ledger(folder).events if event["event"] == "end")
    return end.get("data")


def hashed(folder, world_size=1, **options):
    """The hash of the data of a run on some ranks, which take turns."""
    in_turns(world_size, lambda communicator: train(communicator, folder, **options))
    return hash_of(folder)


def reference():
    """The hash of the points, by their bytes."""
    form = b"[0] torch.float32 [3] True\n[1] torch.int64 [] True\n"
    whole = hashlib.sha256()
    for index, (x, y) in enumerate(zip(*points(), strict=True)):
        sample = hashlib.sha256(form + x.numpy().tobytes() + y.numpy().tobytes())
        whole.update(index.to_bytes(8, "little") + sample.digest())
    return {"sha256": whole.hexdigest(), "samples": NUM_SAMPLES, "whole": True}


OTHERWISE = {
    **{f"{count} ranks": {"world_size": count} for count in (2, 3, 4)},
    "another order": {"seed": 4},
    "no order": {"fit": {"shuffle": False}},
    "data workers": {"fit": {"num_workers": 2}, "data": lambda run: list(zip(*points(), strict=True))},
    "other batches and microbatches": {"contract": (5, 3), "world_size": 2},
    "more epochs": {"epochs": 2},
    "a stream": {"data": lambda run: Stream()},
    "a loader of the script's": {"data": lambda run: DataLoader(TensorDataset(*points()), BATCH), "world_size": 2},
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_hash_is_that_of_the_samples_in_order_of_their_ids_whatever_reads_them(tmp_path, name):
    assert hashed(tmp_path / "run", **OTHERWISE[name]) == reference()
    assert statement(tmp_path / "run")["predicate"]["data"] == reference()


def one_bit(x, y):
    x[7, 2:].view(torch.int32).bitwise_xor_(1)


def two_exchanged(x, y):
    for each in (x, y):
        each[[3, 9]] = each[[9, 3]]


def one_label(x, y):
    y[20] = 1 - y[20]


@pytest.mark.parametrize(
    "data",
    [
        *[lambda run, change=change: points(change) for change in (one_bit, two_exchanged, one_label)],
        lambda run: tuple(each[:-1] for each in points()),
        lambda run: (*points(), torch.arange(NUM_SAMPLES)),
    ],
    ids=["one bit", "two samples exchanged", "one label", "one sample less", "one tensor more"],
)
def test_twin_another_sample_gives_another_hash(tmp_path, data, monkeypatch):
    monkeypatch.setitem(globals(), "loss_fn", lambda model, batch: model(batch[0]).square().mean())
    assert hashed(tmp_path / "run", data=data)["sha256"] != reference()["sha256"]


def test_no_bit_of_training_depends_on_it(tmp_path):
    digests = [
        in_turns(count, lambda communicator, on=on: train(communicator, None, hash_data=on))
        for count, on in ((1, False), (1, True), (3, True))
    ]
    assert {digest for each in digests for digest in each} == {digests[0][0]}


def noisy(run):
    return Noisy()


def cropped(run):
    def transform(batch):
        return batch[0] + torch.rand(()), batch[1]

    return TensorData(points(), transform)


STREAMS = [range(*part) for part in ((0, 9), (9, 10), (10, 20), (20, NUM_SAMPLES))]


def streams(run):
    data = list(zip(*points(), strict=True))
    return run.loader(streams=lambda index, count: [data[place] for place in STREAMS[index]])


@pytest.mark.parametrize("data", [noisy, cropped, streams])
def test_a_resume_at_any_step_of_the_epoch_on_other_ranks_has_the_hash_of_the_whole_run(tmp_path, data):
    whole = hashed(tmp_path / "whole", data=data, fit={"num_workers": 2} if data is noisy else None)
    assert (whole["samples"], whole["whole"]) == (NUM_SAMPLES, True)
    steps = [path.name for path in sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))]
    for number, step in enumerate(steps, 1):
        fit = {"resume": tmp_path / "whole" / "checkpoints" / step}
        assert hashed(tmp_path / step, 1 + number % 3, data=data, fit=fit) == whole, step


@cpu_only("a resume compares no samples")
def test_of_a_part_of_the_epoch_the_hash_says_so_and_of_one_begun_without_it_there_is_none(tmp_path, capsys):
    part = hashed(tmp_path / "part", fit={"max_steps": 2})
    assert (part["samples"], part["whole"]) == (2 * BATCH, False)
    assert hashed(tmp_path / "part", fit={"resume": "auto"}) == reference()
    capsys.readouterr()
    assert hashed(tmp_path / "late", fit={"max_steps": 2}, hash_data=False) is None
    assert hashed(tmp_path / "late", fit={"resume": "auto"}) is None
    assert "the run was begun without hash_data=True (--hash-data)" in capsys.readouterr().err


def test_twin_hashes_that_are_left_out_of_a_checkpoint_are_missed(tmp_path, monkeypatch):
    hashed(tmp_path / "part", fit={"max_steps": 2})
    monkeypatch.setattr("samestep.run.data_hash.DataHash.load", lambda self, state, has_begun: None)
    assert hashed(tmp_path / "part", fit={"resume": "auto"})["samples"] == NUM_SAMPLES - 2 * BATCH


BATCHES = {
    "tensors": lambda ids: (torch.arange(40.0).view(10, 4)[ids], ids),
    "mappings, strings, arrays": lambda ids: {
        "a": [torch.arange(30).view(10, 3)[ids].bool(), ids.numpy() * 0.5],
        "b": [f"name {place}" for place in ids.tolist()],
    },
    "samples in a list": lambda ids: [(torch.ones(2, 1 + place), place) for place in ids.tolist()],
    "a value for all": lambda ids: (ids, torch.tensor(3.0), 7, None, torch.ones(11)),
    "bfloat16, strides": lambda ids: torch.arange(40.0).view(4, 10).t()[ids].bfloat16(),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_sample_has_its_hash_in_whatever_microbatch_it_is(name):
    make = BATCHES[name]
    rows = hash_samples(make(torch.arange(10)), 10)
    assert len({row.tobytes() for row in rows}) == 10
    for ids in ([4, 3, 9, 0, 6], [8, 5, 1], [7]):
        assert (hash_samples(make(torch.tensor(ids)), len(ids)) == rows[ids]).all()


def test_twin_places_types_and_shapes_are_part_of_a_hash():
    x, ids = torch.zeros(4, 6), torch.arange(4)
    batches = [
        *[(x, ids), (ids, x), {"x": x, "y": ids}, {"x": x, "z": ids}, (x.view(4, 2, 3), ids), (x.int(), ids)],
        *[(x, ids, 1), (x, ids, 1.0), (x, ids, "1"), (x, ids, None), (x, ids.int()), (-x, ids)],
    ]
    assert len({hash_samples(batch, 4)[0].tobytes() for batch in batches}) == len(batches)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"a object at \[1\] that"),
        (torch.eye(4).to_sparse(), "a Tensor at"),
        (np.array([None]), "a ndarray at"),
    ],
)
def test_what_has_no_bytes_is_refused_by_a_sentence(value, said):
    with pytest.raises(UsageError, match=said):
        hash_samples((torch.ones(4), value), 4)
