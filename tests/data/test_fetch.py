"""Fetching: microbatches in order, from here or from worker processes, and streams that can be read again."""

import random

import numpy as np
import pytest
import torch
from loader_programs import Noisy, NoisyInGroups
from torch.utils.data import default_collate

from samestep.data.fetch import MicrobatchIds, SeededSamples, StreamReader, fetch_microbatches
from samestep.data.randomness import Generators
from samestep.errors import DataError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _generators_put_back():
    """Fetching seeds the global generators."""
    with Generators(CPU).preserved():
        yield


def fetch(dataset, ids_of_microbatches, num_workers=0, seed=3, epoch=0):
    """All microbatches, as lists of samples."""
    requests = (MicrobatchIds(epoch, np.array(ids)) for ids in ids_of_microbatches)
    return list(fetch_microbatches(dataset, requests, list, seed, num_workers, None, CPU))


def values(microbatches):
    """The samples as plain numbers."""
    return [[(sample.id, sample.noise.tolist()) for sample in microbatch] for microbatch in microbatches]


@pytest.mark.parametrize("kind", [Noisy, NoisyInGroups])
def test_microbatches_come_in_the_order_of_the_requests_whoever_fetches_them(kind):
    asked = [[5, 3], [0], [1, 2, 4], [9, 8], [7]]
    here = values(fetch(kind(10), asked))
    assert [[i for i, _ in microbatch] for microbatch in here] == asked
    assert values(fetch(kind(10), asked, num_workers=2)) == here


def test_a_samples_noise_does_not_depend_on_its_neighbours_but_on_seed_and_epoch():
    ((_, first),) = values(fetch(Noisy(10), [[3, 5]]))
    ((again,),) = values(fetch(Noisy(10), [[5]]))
    assert again == first
    for change in ({"seed": 4}, {"epoch": 1}):
        assert values(fetch(Noisy(10), [[5]], **change)) != [[again]]


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


def test_a_dataset_travels_to_workers_without_the_generators_of_this_process():
    samples = SeededSamples(Noisy(4), 0)
    samples.__getitems__(MicrobatchIds(0, np.array([1])))
    assert samples.__getstate__()["_generators"] is None


def test_samples_are_fetched_only_when_they_are_asked_for():
    fetched = []

    class Watched(Noisy):
        def __getitem__(self, index):
            fetched.append(index)
            return index

    requests = (MicrobatchIds(0, np.array([i])) for i in range(10))
    microbatches = fetch_microbatches(Watched(10), requests, default_collate, 0, 0, None, CPU)
    assert next(microbatches).tolist() == [0]
    assert fetched == [0]


class Drawing:
    """A stream without end that draws from every generator, before the first sample too."""

    def __iter__(self):
        self.start = random.random()
        while True:
            yield self.start, torch.rand(()).item(), np.random.randn(), random.random()


def read(skip, take, seed=0, epoch=0):
    """Some samples of a stream."""
    reader = StreamReader(Drawing(), epoch, seed, Generators(CPU))
    reader.skip(skip)
    return reader.take(take)


def test_a_stream_gives_the_same_samples_when_a_part_of_it_is_skipped():
    whole = read(0, 8)
    assert len(set(whole)) == 8
    torch.rand(5), random.random()
    for skip in range(8):
        assert read(skip, 8 - skip) == whole[skip:]
    assert read(0, 8, seed=1) != whole != read(0, 8, epoch=1)


def test_draws_between_the_samples_of_a_stream_do_not_change_them():
    reader = StreamReader(Drawing(), 0, 0, Generators(CPU))
    got = []
    for _ in range(4):
        got += reader.take(2)
        torch.rand(3), np.random.randn(), random.random()
    assert got == read(0, 8)


def test_a_stream_ends_where_its_samples_end():
    reader = StreamReader([1, 2, 3], 0, 0, Generators(CPU))
    assert (reader.take(2), reader.take(2), reader.take(2)) == ([1, 2], [3], [])
    reader = StreamReader([1, 2, 3], 0, 0, Generators(CPU))
    reader.skip(5)
    assert reader.take(1) == []
