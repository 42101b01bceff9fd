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
from torch.utils.data import Dataset, default_collate

from samestep.core.seeds import derive_seed
from samestep.data.fetch import MICROBATCH_STREAM, BatchIds, SeededSamples, fetch_batches
from samestep.data.randomness import Generators
from samestep.data.streams import StreamReader
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
    """Samples that draw in some way."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([index, self.draw()], dtype=torch.float64)


def forked():
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


WAYS = {
    "torch, without a trace": forked,
    "torch's seed": lambda: float(torch.initial_seed() % 2**31),
    "numpy, pairs": np.random.randn,
    "python": random.random,
}
BATCHES = [[[4, 2], [7, 1]], [[9, 11, 8]], [[37, 3], [5]], [[6], [12]]]


def by_hand(dataset, collate, seed=3, epoch=1):
    """Each microbatch read after the generators were seeded for it, by its first sample's id."""
    generators, found = Generators(CPU), []
    for batch in BATCHES:
        found.append([])
        for ids in batch:
            generators.seed(derive_seed(seed, MICROBATCH_STREAM, epoch, ids[0]))
            found[-1].append(collate([dataset[index] for index in ids]))
    return found


def by_loader(dataset, collate, num_workers=0, seed=3, epoch=1):
    """The same by the loader's way."""
    requests = (BatchIds(epoch, [np.array(ids) for ids in batch]) for batch in BATCHES)
    return list(fetch_batches(SeededSamples(dataset, seed, collate, CPU), requests, num_workers, None, CPU))


def noisy_collate(samples):
    return torch.stack(samples) + torch.rand(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_whatever_draws_gets_the_draws_of_its_own_seed(way, num_workers):
    dataset = Drawn(WAYS[way])
    expected = str(by_hand(dataset, noisy_collate))
    assert str(by_loader(dataset, noisy_collate, num_workers)) == expected
    assert str(by_hand(dataset, noisy_collate, seed=4)) != expected


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
