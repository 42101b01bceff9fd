"""Streams of other libraries: stopped on three devices and resumed on two, they give each sample once, in order."""

import io
import json
import random
import tarfile

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from worlds import in_turns

from samestep.data import streams as streams_module
from samestep.run.run import Run

COUNT = 203  # samples of all streams


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """States of streams are exchanged every second batch."""
    monkeypatch.setattr(streams_module, "BATCHES_A_STATE", 2)


def draw(sample):
    """A sample as others make it: with a draw of its own, which does not depend on the rank that reads it."""
    return {"id": int(sample["id"]), "noise": float(np.random.random())}


def hugging_face(folder, num_shards=16, is_shuffled=False):
    """Iterable datasets of the library `datasets`, split as its documentation says."""
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    table = datasets.Dataset.from_dict({"id": list(range(COUNT))})

    def stream(index, count):
        dataset = table.to_iterable_dataset(num_shards=num_shards)
        if is_shuffled:
            dataset = dataset.shuffle(seed=3, buffer_size=20)
        return split_dataset_by_node(dataset, rank=index, world_size=count).map(draw)

    return stream


def web_dataset(folder, is_shuffled=False):
    """Shards of WebDataset, of which each stream reads every eighth."""
    wds = pytest.importorskip("webdataset")
    shards = []
    for shard, ids in enumerate(torch.arange(COUNT).chunk(20)):
        shards.append(str(folder / f"{shard:03}.tar"))
        with tarfile.open(shards[-1], "w") as tar:
            for number in ids.tolist():
                data = json.dumps({"id": number}).encode()
                info = tarfile.TarInfo(f"{number:05}.json")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))

    def stream(index, count):
        dataset = wds.WebDataset(shards[index::count], shardshuffle=False, nodesplitter=lambda shards: shards)
        if is_shuffled:
            dataset = dataset.shuffle(20, rng=random.Random(random.getrandbits(64)))
        return dataset.decode().map(lambda sample: draw(sample["json"]))

    return stream


class Range(IterableDataset):
    """Every eighth number, with a state."""

    def __init__(self, index, count):
        self.index, self.count, self.place = index, count, 0

    def __iter__(self):
        while (number := self.index + self.place * self.count) < COUNT:
            self.place += 1
            yield {"id": number, "noise": random.random()}

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def stateful_loader(folder=None, num_workers=0):
    """torchdata's StatefulDataLoader, which may have workers of its own."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def stream(index, count):
        return loaders.StatefulDataLoader(Range(index, count), batch_size=None, num_workers=num_workers)

    return stream


def nodes(folder):
    """torchdata's nodes."""
    nodes = pytest.importorskip("torchdata.nodes")

    def stream(index, count):
        source = nodes.IterableWrapper(range(index, COUNT, count))
        return nodes.Loader(nodes.Mapper(source, lambda number: {"id": number, "noise": random.random()}))

    return stream


def read(communicator, stream, num_batches=None, state=None, exact_states=False):
    """This rank's samples of the batches to read, by microbatch; and the state after them."""
    loader = Run(16, 8, communicator=communicator).loader(streams=stream, exact_states=exact_states)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for batch in loader:
        values = batch.microbatches.items()
        found.append({m: list(zip(v["id"].tolist(), v["noise"].tolist(), strict=True)) for m, v in values})
        if len(found) == num_batches:
            break
    return found, json.loads(json.dumps(loader.state_dict()))


def merged(by_rank):
    """What the ranks read of each batch together."""
    return [dict(sorted(entry for part in parts for entry in part.items())) for parts in zip(*by_rank, strict=True)]


LIBRARIES = {
    "datasets, in order": (hugging_face, {}),
    "datasets, fewer shards than streams": (hugging_face, {"num_shards": 3}),
    "datasets, shuffled": (hugging_face, {"is_shuffled": True}),
    "webdataset, in order": (web_dataset, {}),
    "webdataset, shuffled": (web_dataset, {"is_shuffled": True}),
    "torchdata, a loader": (stateful_loader, {}),
    "torchdata, nodes": (nodes, {}),
}
EXACT = ("datasets, in order", "datasets, fewer shards than streams", "torchdata, a loader")  # by their own states


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_stop_on_three_devices_and_a_resume_on_two_read_each_sample_once(tmp_path, capsys, name):
    make, options = LIBRARIES[name]
    stream = make(tmp_path, **options)
    whole = merged([in_turns(1, read, stream)[0][0]])
    samples = [sample for batch in whole for samples in batch.values() for sample in samples]
    assert sorted(number for number, _ in samples) == list(range(COUNT))
    assert len({noise for _, noise in samples}) == COUNT
    for num_batches in (1, 7):
        for exact_states in (False, True) if name in EXACT else (False,):
            begun = in_turns(3, read, stream, num_batches, None, exact_states)
            state = begun[0][1]
            assert [saved for _, saved in begun] == [state] * 3
            if num_batches > 1 or not exact_states:  # at once where a batch is read ahead
                assert all(bool(saved["state"]) == exact_states for saved in state["streams"])
            rest = merged([found for found, _ in in_turns(2, read, stream, None, state, exact_states)])
            assert merged([found for found, _ in begun]) + rest == whole
    assert capsys.readouterr().err == ""


def read_with_workers(communicator, *args):
    """`read` of loaders with a worker each."""
    return read(communicator, stateful_loader(num_workers=1), *args)


def test_workers_of_streams_draw_the_same_numbers_on_every_number_of_devices(worlds):
    whole = merged([worlds(1).run(read_with_workers)[0][0]])
    assert len({noise for batch in whole for samples in batch.values() for _, noise in samples}) == COUNT
    begun = worlds(3).run(read_with_workers, 4)
    rest = worlds(2).run(read_with_workers, None, begun[0][1])
    assert merged([found for found, _ in begun]) + merged([found for found, _ in rest]) == whole
