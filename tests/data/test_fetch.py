"""Fetching: microbatches in order, from here or from worker processes, and streams that can be read again."""

import multiprocessing
import random
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from loader_programs import Noisy, NoisyInGroups
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from samestep.core.seeds import derive_seed
from samestep.data.fetch import SAMPLE_STREAM, BatchIds, SeededSamples, draws_nothing, fetch_batches
from samestep.data.randomness import Generators
from samestep.data.streams import StreamReader
from samestep.data.tensors import TensorData
from samestep.errors import DataError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _generators_put_back():
    """Fetching seeds the global generators."""
    with Generators(CPU).preserved():
        yield


def fetch(dataset, ids_of_microbatches, num_workers=0):
    """All microbatches, as lists of samples."""
    requests = (BatchIds(0, [np.array(ids)]) for ids in ids_of_microbatches)
    samples = SeededSamples(dataset, 3, list, CPU)
    return [microbatch for (microbatch,) in fetch_batches(samples, requests, num_workers, None, CPU)]


def values(microbatches):
    """The samples as plain numbers."""
    return [[(sample.id, sample.noise.tolist()) for sample in microbatch] for microbatch in microbatches]


@pytest.mark.parametrize("kind", [Noisy, NoisyInGroups])
def test_microbatches_come_in_the_order_of_the_requests_whoever_fetches_them(kind):
    asked = [[5, 3], [0], [1, 2, 4], [9, 8], [7]]
    here = values(fetch(kind(10), asked))
    assert [[i for i, _ in microbatch] for microbatch in here] == asked
    assert values(fetch(kind(10), asked, num_workers=2)) == here


def test_samples_fetched_in_groups_are_asked_for_a_microbatch_at_a_time():
    asked = []

    class Groups(Noisy):
        def __getitem__(self, index):
            raise AssertionError("asked one by one")

        def __getitems__(self, ids):
            asked.append(ids)
            return ids

    assert fetch(Groups(10), [[4, 2], [7]]) == [[4, 2], [7]]
    assert asked == [[4, 2], [7]]
    assert all(type(i) is int for ids in asked for i in ids)


def test_a_group_of_another_length_than_was_asked_for_is_refused():
    class Short(Noisy):
        def __getitems__(self, ids):
            return ids[1:]

    with pytest.raises(DataError, match="returned 1 samples for 2 ids"):
        fetch(Short(10), [[4, 2]])


class Large(Dataset):
    """Samples for a batch of which shared memory has no room; they take none themselves."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(1, dtype=torch.uint8).expand(shutil.disk_usage("/dev/shm").total // 2 + 4096)


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="shared memory is a file system on Linux")
def test_a_batch_for_which_shared_memory_has_no_room_is_a_sentence_and_leaves_nothing():
    requests = iter([BatchIds(0, [np.arange(first, first + 4)]) for first in range(0, 64, 4)])
    before, living = set(Path("/dev/shm").glob("torch_*")), multiprocessing.active_children()
    batches = fetch_batches(SeededSamples(Large(), 0, default_collate, CPU), requests, 3, None, CPU)
    with pytest.raises(DataError, match=r"^shared memory \(/dev/shm\) has no room .* --shm-size=8g"):
        next(batches)
    assert {*multiprocessing.active_children()} <= {*living}
    left = set(Path("/dev/shm").glob("torch_*")) - before
    assert [path for path in left if not psutil.pid_exists(int(path.name.split("_")[1]))] == []


def test_samples_are_fetched_only_when_they_are_asked_for():
    fetched = []

    class Watched(Noisy):
        def __getitem__(self, index):
            fetched.append(index)
            return index

    requests = (BatchIds(0, [np.array([i])]) for i in range(10))
    batches = fetch_batches(SeededSamples(Watched(10), 0, default_collate, CPU), requests, 0, None, CPU)
    assert next(batches)[0].tolist() == [0]
    assert set(fetched) == {0}


class Drawn(Dataset):
    """Samples that draw in some way, at some ids."""

    def __init__(self, draw, ids=range(64)):
        self.draw, self.ids, self.reads = draw, ids, []

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.reads.append(index)
        return torch.tensor([index, self.draw() if index in self.ids else 0.0], dtype=torch.float64)


def forked():
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


def put_back():
    state = random.getstate()
    drawn = random.random()
    random.setstate(state)
    return drawn


def unlucky():
    if torch.rand(()) < 0.5:
        return 1.0
    raise ValueError("cannot read this with that draw")


WAYS = {
    "torch": (lambda: torch.rand(()).item(), range(64)),
    "numpy": (np.random.rand, range(64)),
    "numpy pair": (np.random.randn, range(64)),
    "python": (random.random, range(64)),
    "one late sample": (random.random, [37]),
    "state put back": (put_back, range(64)),
    "generators forked": (forked, range(64)),
    "seed read": (lambda: float(torch.initial_seed() % 2**31), range(64)),
    "seeded anew": (lambda: torch.rand(()).item() + torch.manual_seed(7).initial_seed(), range(64)),
    "one forked": (forked, [37]),
    "one seed read": (lambda: float(torch.initial_seed() % 2**31), [12]),
    "one state put back": (put_back, [5]),
    "nothing": (lambda: 1.0, range(64)),
}
BATCHES = [[[4, 2], [7, 1]], [[9, 11, 8]], [[37, 3], [5]], [[6], [12]]]


def by_hand(dataset, collate, seed=3, epoch=1):
    """Each sample read after the generators were seeded for it."""
    generators, found = Generators(CPU), []
    for batch in BATCHES:
        found.append([])
        for ids in batch:
            samples = []
            for index in ids:
                generators.seed(derive_seed(seed, SAMPLE_STREAM, epoch, index))
                samples.append(dataset[index])
            found[-1].append(collate(samples))
    return found


def by_loader(dataset, collate, num_workers=0, seed=3, epoch=1):
    """The same by the loader's way."""
    requests = (BatchIds(epoch, [np.array(ids) for ids in batch]) for batch in BATCHES)
    return list(fetch_batches(SeededSamples(dataset, seed, collate, CPU), requests, num_workers, None, CPU))


def noisy_collate(samples):
    return torch.stack(samples) + torch.rand(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("collate", [default_collate, noisy_collate])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_whatever_draws_gets_the_draws_of_its_own_seed(way, collate, num_workers):
    expected = str(by_hand(Drawn(*WAYS[way]), collate))
    assert str(by_loader(Drawn(*WAYS[way]), collate, num_workers)) == expected


@pytest.mark.parametrize("way", WAYS)
def test_the_seeds_are_seen_by_all_but_those_that_draw_nothing(way):
    """Else the test above would prove nothing."""
    by_seed = {str(by_hand(Drawn(*WAYS[way]), default_collate, seed)) for seed in (3, 4)}
    assert len(by_seed) == 1 + (way != "nothing")


@pytest.mark.parametrize("way", WAYS)
def test_every_sample_is_read_once(way):
    dataset = Drawn(*WAYS[way])
    by_loader(dataset, default_collate)
    assert dataset.reads == [index for batch in BATCHES for ids in batch for index in ids]


class Known:
    """Tensors, arrays and other attributes."""

    def __init__(self, read, **attributes):
        self.x, self.rand, self.change = torch.arange(128.0).view(64, 2), 3, None
        self.array, self.objects = np.arange(64), np.array([{}, 1] * 32, dtype=object)
        self.inner = Drawn(*WAYS["torch"])
        for name, value in attributes.items():
            setattr(self, name, value)
        self.__class__ = type("Known", (Known,), {"__getitem__": read})

    def __len__(self):
        return 64

    @property
    def drawn(self):
        return torch.rand(2)

    def method(self, index):
        return torch.rand(2)


def changing(self, index):
    row = torch.as_tensor(self.x[index], dtype=torch.float32)
    if self.change is not None:
        row = self.change(row)
    return row, int(self.array[index])


def importing(self, index):
    import random  # a name that the code brings with it

    return random.random()


def held(value):
    return lambda self, index: value[index]


def by_default(self, index, rows=WAYS):
    return rows["torch"][0]()


DRAWS_NOTHING = {
    "a row": Known(lambda self, index: self.x[index]),
    "rows": Known(lambda self, index: {"x": self.x[index, :1].float() / 255, "y": self.array[index + 1 - 1]}),
    "converted": Known(
        lambda self, index: (torch.tensor(self.array[index], dtype=torch.int64), np.asarray(self.x[index]))
    ),
    "unchanged": Known(changing),
    "part": Subset(Known(lambda self, index: self.x[index]), [*range(64)]),
    "parts": ConcatDataset([Known(lambda self, index: self.x[index]), torch.arange(8)]),
    "list": [1, 2, 3],
    "tensors": TensorDataset(torch.arange(3)),
    "tensor data": TensorData(torch.arange(3)),
}
MAY_DRAW = {
    "torch": Known(lambda self, index: self.x[index] + torch.rand(2)),
    "a name of both": Known(lambda self, index: self.x[index] + torch.rand(self.rand)),
    "numpy": Known(lambda self, index: np.random.rand()),
    "a method": Known(lambda self, index: self.method(index)),
    "a property": Known(lambda self, index: self.drawn),
    "itself": Known(lambda self, index: len(self) + self),
    "passed on": Known(lambda self, index: {"me": self}),
    "a dataset": Known(lambda self, index: self.inner[index]),
    "objects": Known(lambda self, index: self.objects[index]),
    "changed": Known(changing, change=torch.rand_like),
    "an import": Known(importing),
    "a variable": Known(held(Drawn(*WAYS["torch"]))),
    "a default": Known(by_default),
    "a function": Known(lambda self, index: [forked() for _ in range(2)]),
    "a subclass of tensors": type("Noise", (TensorDataset,), {"__getitem__": lambda self, index: torch.rand(2)})(
        torch.ones(3)
    ),
    "a transform": TensorData(torch.arange(3), torch.rand_like),
    "part": Subset(Drawn(*WAYS["one forked"]), [1]),
    "parts": ConcatDataset([[1], Drawn(*WAYS["one forked"])]),
    "in groups": NoisyInGroups(3),
}


@pytest.mark.parametrize(
    ("dataset", "expected"), [*((each, True) for each in DRAWS_NOTHING), *((each, False) for each in MAY_DRAW)]
)
def test_only_what_cannot_draw_is_read_without_seeds(monkeypatch, dataset, expected):
    data = (DRAWS_NOTHING if expected else MAY_DRAW)[dataset]
    assert draws_nothing(data) is expected
    if expected:
        monkeypatch.setattr(Generators, "seed", None)
        (found,) = SeededSamples(data, 3, default_collate, CPU).__getitems__(BatchIds(0, [np.array([0, 2])]))
        assert str(found) == str(default_collate([data[0], data[2]]))


def test_an_attribute_that_is_changed_after_the_first_batch_may_draw():
    data = Known(changing)
    assert draws_nothing(data)
    data.change = torch.rand_like
    assert not draws_nothing(data)


def test_an_error_after_a_draw_is_that_of_the_sample_with_its_own_seed():
    def outcome(way):
        try:
            return str(way(Drawn(unlucky, [3, 5, 6, 12]), default_collate))
        except ValueError as error:
            return str(error)

    assert outcome(by_loader) == outcome(by_hand)


def test_tables_are_read_a_batch_at_a_time(monkeypatch):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": [float(i) for i in range(64)], "words": [f"w{i}" for i in range(64)]})
    calls = []
    real = datasets.Dataset.__getitems__
    monkeypatch.setattr(
        datasets.Dataset, "__getitems__", lambda self, ids: (calls.append(len(ids)), real(self, ids))[1]
    )
    kinds = {
        "table": table,
        "part": Subset(table, list(range(63, -1, -1))),
        "parts": ConcatDataset([table.select(range(10)), Subset(table, range(10, 64))]),
        "missing": datasets.Dataset.from_dict({"x": [None if i % 3 else float(i) for i in range(64)]}),
    }
    for kind, dataset in kinds.items():
        calls.clear()
        found = by_loader(dataset, list)
        assert found == [[[dataset[index] for index in ids] for ids in batch] for batch in BATCHES], kind
        assert len(calls) <= len(BATCHES) * (2 if kind == "parts" else 1), kind
    with pytest.raises(IndexError):
        by_loader(Subset(kinds["parts"], [64] * 64), list)
    shaped = table.with_transform(lambda rows: {"x": [torch.tensor(x) + torch.rand(()) for x in rows["x"]]})
    assert str(by_loader(shaped, default_collate)) == str(by_loader(shaped, default_collate, 2))


class Drawing:
    """A stream without end that draws from every generator, before the first sample too."""

    def __iter__(self):
        self.start = random.random()
        while True:
            yield self.start, torch.rand(()).item(), np.random.randn(), random.random()


def test_a_stream_gives_the_same_samples_when_a_part_of_it_is_skipped_or_others_draw_between_them():
    def read(skip, take, seed=0, epoch=0):
        reader = StreamReader(Drawing(), epoch, seed, Generators(CPU))
        reader.skip(skip)
        found = []
        while len(found) < take:
            found += reader.take(min(2, take - len(found)))
            torch.rand(3), np.random.randn(), random.random()
        return found

    whole = read(0, 8)
    assert len(set(whole)) == 8
    for skip in range(8):
        assert read(skip, 8 - skip) == whole[skip:]
    assert read(0, 8, seed=1) != whole != read(0, 8, epoch=1)


def test_a_stream_may_end_before_the_samples_to_skip():
    reader = StreamReader([1, 2, 3], 0, 0, Generators(CPU))
    reader.skip(5)
    assert reader.take(1) == []
