"""The loader: each sample once an epoch; neither order nor randomness depends on devices or workers."""

import itertools
import multiprocessing
import pickle
import random
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from multiprocessing import resource_tracker
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_programs import Noisy, NoisyStream, draws_around, make_loader, read
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from worlds import cpu_only, in_turns

from samestep.core.microbatches import microbatch_bounds
from samestep.data import fetch
from samestep.data import loader as loader_module
from samestep.data.fetch import SeededSamples
from samestep.data.randomness import Generators
from samestep.data.tensors import TensorData
from samestep.errors import DataError, UsageError
from samestep.run.run import Run

KINDS = ["tensors", "scrambled", "gathered", "one by one", "in groups", "stream"]


def joined(results, num_pass=0):
    """The batches of one pass, the microbatches of all ranks together; the ranks agree on the rest."""
    batches = []
    for of_ranks in zip(*(passes[num_pass] for passes, _ in results), strict=True):
        assert len({str(row[:4]) for row in of_ranks}) == 1
        microbatches = {}
        for row in of_ranks:
            assert not microbatches.keys() & row[4].keys(), "two ranks fetched the same microbatch"
            microbatches |= row[4]
        batches.append((*of_ranks[0][:4], dict(sorted(microbatches.items()))))
    return batches


def ids_of(batches):
    """The ids that were fetched, in order."""
    return [i for batch in batches for ids, _ in batch[4].values() for i in ids]


def alone(kind, count, **options):
    """What one device reads."""
    return in_turns(1, lambda communicator: read(communicator, kind, count, **options))


def together(world_size, kind, count, **options):
    """What several devices read."""
    return in_turns(world_size, lambda communicator: read(communicator, kind, count, **options))


@given(
    count=st.integers(1, 70),
    batch=st.integers(1, 40),
    num_microbatches=st.integers(1, 12),
    shuffle=st.booleans(),
    kind=st.sampled_from(["tensors", "one by one"]),
    data=st.data(),
)
@settings(max_examples=60)
def test_every_id_comes_once_an_epoch_on_any_number_of_devices(count, batch, num_microbatches, shuffle, kind, data):
    world_size = data.draw(st.integers(1, num_microbatches))
    options = {"batch": batch, "num_microbatches": num_microbatches, "shuffle": shuffle, "epochs": 2}
    results = together(world_size, kind, count, **options)
    reference = alone(kind, count, **options)
    for epoch in range(2):
        batches = joined(results, epoch)
        assert sorted(ids_of(batches)) == list(range(count))
        assert batches == joined(reference, epoch)
        position = 0
        for got in batches:
            assert got[:3] == (epoch, position, min(batch, count - position))
            assert got[3] == ids_of([got]), "ids() disagrees with what came"
            bounds = microbatch_bounds(got[2], num_microbatches)
            assert [len(ids) for ids, _ in got[4].values()] == [b - a for a, b in pairwise(bounds) if a < b]
            position += got[2]
        assert position == count


def test_the_order_is_a_function_of_seed_and_epoch_and_unshuffled_is_that_of_the_data():
    first, second = (joined(alone("tensors", 50, shuffle=True, epochs=2), epoch) for epoch in range(2))
    other = joined(alone("tensors", 50, shuffle=True, seed=6))
    assert len({tuple(ids_of(batches)) for batches in (first, second, other)}) == 3
    assert ids_of(joined(alone("tensors", 50, shuffle=True, batch=13))) == ids_of(first)
    assert ids_of(joined(alone("tensors", 50))) == list(range(50))


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_batch_is_left_out_only_when_that_is_asked_for(kind):
    for drop_last, lengths in ((False, [8, 8, 3]), (True, [8, 8])):
        results = together(3, kind, 19, drop_last=drop_last)
        assert [batch[2] for batch in joined(results)] == lengths
        if kind != "stream":
            (loader,) = in_turns(1, lambda c, drop=drop_last: make_loader(c, kind, 19, drop_last=drop))
            assert (len(loader), loader.num_samples) == (len(lengths), 19)


@pytest.mark.parametrize(("kind", "options"), [(kind, {}) for kind in KINDS] + [("one by one", {"num_workers": 2})])
def test_a_saved_cursor_continues_with_the_same_batches_on_any_number_of_devices(kind, options):
    shuffle = kind != "stream"
    ((passes, states),) = alone(kind, 19, shuffle=shuffle, epochs=2)
    whole = [batch for batches in passes for batch in batches]
    assert len(states) == len(whole) + 1
    for number, state in enumerate(states):
        if options and number not in (1, 4):
            continue
        results = together(1 + number % 3, kind, 19, shuffle=shuffle, state=state, epochs=2 - state["epoch"], **options)
        rest = [batch for epoch in range(2 - state["epoch"]) for batch in joined(results, epoch)]
        assert rest == whole[number:], f"after {state}"


def test_a_cursor_inside_a_batch_loses_and_repeats_nothing():
    """As when the global batch was another one before: 10 consumed, batches of 8."""
    batches = joined(together(3, "tensors", 25, shuffle=True, state={"epoch": 2, "position": 10}))
    whole = joined(alone("tensors", 25, shuffle=True, state={"epoch": 2, "position": 0}))
    assert ids_of(batches) == ids_of(whole)[10:]
    assert [batch[2] for batch in batches] == [8, 7]


@pytest.mark.parametrize(("kind", "num_workers"), [*((kind, 0) for kind in KINDS), ("one by one", 2)])
def test_a_loop_left_early_has_used_up_its_epoch_and_leaves_no_worker(kind, num_workers):
    shuffle = kind != "stream"
    options = {"shuffle": shuffle, "num_workers": num_workers}
    left = together(2, kind, 19, take=2, epochs=2, **options)
    assert len(left[0][0][0]) == 2
    assert joined(left, 1) == joined(alone(kind, 19, shuffle=shuffle, epochs=2), 1)


def test_a_loop_left_early_goes_on_in_its_epoch_when_its_state_is_loaded():
    def program(communicator):
        loader = make_loader(communicator, "tensors", 19, shuffle=True)
        for batch in loader:
            first = batch.ids().tolist()
            break
        loader.load_state_dict(loader.state_dict())
        return first + [i for batch in loader for i in batch.ids().tolist()]

    assert in_turns(2, program)[1] == ids_of(joined(alone("tensors", 19, shuffle=True)))


def test_the_state_of_a_loader_over_other_data_is_refused():
    with pytest.raises(UsageError, match="sample 20 of 19; needed"):
        alone("tensors", 19, state={"epoch": 0, "position": 20})
    with pytest.raises(UsageError, match="neither can be negative"):
        alone("tensors", 19, state={"epoch": 0, "position": -1})


# A length that changes.


def resized(count):
    """A dataset of so many samples of each kind, and a function that changes its length."""
    samples, rows = Noisy(count), torch.arange(count)
    tensors = TensorDataset(rows)
    by_name = {"rows": rows}
    return {
        "one by one": (samples, lambda count: setattr(samples, "count", count)),
        "tensor dataset": (tensors, lambda count: setattr(tensors, "tensors", (torch.arange(count),))),
        "tensors by name": (by_name, lambda count: by_name.update(rows=torch.arange(count))),
    }


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("one by one", {}),
        ("one by one", {"num_workers": 2, "multiprocessing_context": "fork"}),
        ("tensor dataset", {}),
        ("tensor dataset", {"cache": "device"}),
        ("tensors by name", {}),
    ],
)
def test_a_dataset_that_grows_or_shrinks_between_epochs_is_read_whole(kind, options):
    counts = (16, 21, 11)

    def program(communicator):
        dataset, resize = resized(counts[0])[kind]
        loader = Run(8, 4, 5, communicator=communicator).loader(dataset, shuffle=True, **options)
        epochs = []
        for count in counts:
            resize(count)
            length = len(loader)
            epochs.append((length, loader.num_samples, list(loader)))
        return [(length, num, [b.ids().tolist() for b in batches]) for length, num, batches in epochs]

    results = in_turns(3, program)
    assert results == [results[0]] * 3
    for epoch, (count, (length, num_samples, batches)) in enumerate(zip(counts, results[0], strict=True)):
        ids = [i for batch in batches for i in batch]
        assert (len(batches), num_samples, sorted(ids)) == (length, count, list(range(count)))
        fresh = make_loader(None, "one by one", count, shuffle=True)
        assert ids == fresh.ids(epoch, 0, count).tolist(), "the order is one of the length that the epoch has"


@pytest.mark.parametrize("count", [30, 12])
def test_a_length_that_changes_in_the_middle_of_an_epoch_is_refused(count):
    dataset = Noisy(24)
    batches = iter(Run(8, 4).loader(dataset))
    next(batches)
    dataset.count = count
    with pytest.raises(DataError, match=rf"has {count} samples, and had 24 when epoch 0 began, and 8 of them are"):
        next(batches)


def test_an_epoch_of_another_length_goes_on_where_it_was_with_the_dataset_of_that_epoch():
    def loader_at(count, state):
        loader = make_loader(None, "one by one", 16, shuffle=True)
        loader.load_state_dict(state)
        loader.dataset.count = count
        return loader

    loader = loader_at(21, {"epoch": 3, "position": 0})
    batches = iter(loader)
    first = next(batches).ids().tolist()
    state = loader.state_dict()
    rest = [i for batch in batches for i in batch.ids().tolist()]
    end = loader.state_dict()
    assert sorted(first + rest) == list(range(21))
    assert [i for batch in loader_at(21, state) for i in batch.ids().tolist()] == rest
    with pytest.raises(DataError, match=r"has 16 samples, and had 21 when epoch 3 began, .* go on in the middle"):
        list(loader_at(16, state))
    assert [batch.epoch for batch in loader_at(16, end)] == [4, 4]


def test_nothing_is_left_of_a_last_batch_after_which_the_dataset_has_another_length():
    loader = make_loader(None, "one by one", 16)
    states = [loader.state_dict() for _ in loader]
    again = make_loader(None, "one by one", 21)
    again.load_state_dict(states[-1])
    assert list(again) == []
    assert [batch.length for batch in again] == [8, 8, 5]


# Randomness.


@pytest.mark.parametrize(
    ("kind", "alike"),
    [
        ("stream", [{"batch": 5, "num_microbatches": 5}, {"batch": 16, "num_microbatches": 1}]),
        ("one by one", [{"batch": 4, "num_microbatches": 2}, {"num_workers": 2}]),  # the same microbatches, of two
    ],
)
def test_noise_is_a_function_of_seed_epoch_and_sample_or_microbatch_alone(kind, alike):
    def noise_by_id(**options):
        batches = joined(alone(kind, 16, epochs=2, **options), 1)
        return {i: noise for batch in batches for ids, n in batch[4].values() for i, noise in zip(ids, n, strict=True)}

    reference = noise_by_id()
    assert len({str(noise) for noise in reference.values()}) == 16
    for options in alike:
        assert noise_by_id(**options) == reference
    assert noise_by_id(seed=6) != reference


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_draws_no_number_of_devices_or_workers_changes_it(kind):
    """A sample, a transform in memory, a collate function, a stream that shuffles."""
    options = {"shuffle": kind != "stream", "masking": True}
    reference = joined(alone(kind, 19, **options))
    assert joined(together(3, kind, 19, **options)) == reference
    if kind in ("one by one", "in groups"):
        assert joined(alone(kind, 19, num_workers=2, **options)) == reference


@pytest.mark.parametrize(("kind", "num_workers"), [*((kind, 0) for kind in KINDS), ("one by one", 2)])
@pytest.mark.parametrize("pending", [False, True])
def test_the_scripts_own_draws_do_not_see_the_loader(kind, num_workers, pending):
    options = {"masking": True, "pending": pending}

    def draws(kind, num_workers):
        return in_turns(1, lambda c: draws_around(c, kind, 19, num_workers=num_workers, **options))[0]

    reference = draws("tensors", 0)
    assert len({str(drawn) for drawn in reference}) == len(reference)
    assert draws(kind, num_workers) == reference


def test_draws_on_the_device_belong_to_the_microbatch_too():
    def noise(communicator):
        class OnDevice(Noisy):
            def __getitem__(self, index):
                return torch.rand(2, device=communicator.device)

        loader = Run(8, 4, communicator=communicator).loader(OnDevice(16))
        return {(b.position, k): each.tolist() for b in loader for k, each in b.microbatches.items()}

    reference = in_turns(1, noise)[0]
    assert len({str(row) for rows in reference.values() for row in rows}) == 16
    found = {}
    for part in in_turns(2, noise):
        found.update(part)
    assert found == reference


OWN_GENERATORS = {
    "nothing": (lambda: None, ""),
    "the global one": (lambda: torch.default_generator, ""),
    "numpy": (lambda: np.random.default_rng(0), "Generator"),
    "numpy, the old kind": (lambda: np.random.RandomState(0), "RandomState"),
    "python": (lambda: random.Random(0), "Random"),
    "torch": (lambda: torch.Generator(), "Generator"),
    "in a transform": (lambda: [SimpleNamespace(generator=random.Random(0))], "Random"),
    "in a part": (lambda: Subset(SimpleNamespace(rng=random.Random(0)), [0]), "Random"),
}


@pytest.mark.parametrize("kind", OWN_GENERATORS)
def test_a_generator_of_the_datasets_own_is_named(capsys, kind):
    make, name = OWN_GENERATORS[kind]
    dataset = Noisy(4)
    dataset.held = make()
    loader_of(dataset)
    text = capsys.readouterr().err
    assert (f"a generator of its own ({name})" in text) == bool(name), text
    assert bool(text) == bool(name)


def test_ranks_without_a_microbatch_draw_what_the_others_draw():
    results = in_turns(4, lambda c: draws_around(c, "one by one", 6, batch=3))
    assert all(drawn == results[0] for drawn in results)


NUMBERS = itertools.count()


def by_process(self, request):
    """Reads samples without seeds."""
    return [self._collate([self._dataset[i] for i in ids.tolist()]) for ids in request.microbatches]


@pytest.mark.parametrize(
    ("owner", "name", "twin", "kind"),
    [
        (SeededSamples, "__getitems__", by_process, "one by one"),
        *((fetch, "derive_seed", lambda *_: next(NUMBERS), k) for k in ("one by one", "in groups")),
    ],
)
def test_twin_noise_that_follows_the_process_is_noticed(monkeypatch, owner, name, twin, kind):
    monkeypatch.setattr(owner, name, twin)
    assert joined(together(3, kind, 19)) != joined(alone(kind, 19))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_reads_its_samples_once_an_epoch(world_size):
    """A dataset may have a next view of a sample at each visit."""

    class Views(Noisy):
        def __init__(self, count):
            super().__init__(count)
            self.visits = [0] * count

        def __getitem__(self, index):
            self.visits[index] += 1
            return torch.tensor([float(self.visits[index])])

    def seen(communicator):
        loader = Run(16, 8, communicator=communicator).loader(Views(32))
        return sum(float(x) for _ in range(2) for b in loader for each in b.microbatches.values() for x in each)

    assert sum(in_turns(world_size, seen)) == 32 * (1 + 2)


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("preserved", lambda self: nullcontext()),
        ("save", lambda self, real=Generators.save: real(self)._replace(half={"has_gauss": 0})),
    ],
)
def test_twin_generators_that_are_not_put_back_or_not_whole_are_noticed(monkeypatch, name, twin):
    reference = in_turns(1, lambda c: draws_around(c, "one by one", 19))[0]
    with Generators(torch.device("cpu")).preserved():
        monkeypatch.setattr(Generators, name, twin)
        assert in_turns(1, lambda c: draws_around(c, "one by one", 19))[0] != reference
        monkeypatch.undo()


def test_twin_an_order_by_rank_is_noticed(monkeypatch):
    real = loader_module.permute
    ranks = iter(range(10))

    def program(communicator):
        by_rank = next(ranks)
        monkeypatch.setattr(loader_module, "permute", lambda p, n, seed, epoch: real(p, n, seed + by_rank, epoch))
        return read(communicator, "tensors", 19, shuffle=True)

    results = in_turns(2, program)
    got = Counter(i for passes, _ in results for batch in passes[0] for ids, _ in batch[4].values() for i in ids)
    assert got != Counter(range(19))


# Datasets.


def loader_of(dataset, **options):
    """A loader over a dataset, on one device."""
    return in_turns(1, lambda c: Run(4, 2, communicator=c).loader(dataset, **options))[0]


def test_a_stream_is_told_its_epoch_and_skips_what_is_consumed():
    dataset = NoisyStream(10, buffer=1)
    loader = loader_of(dataset)
    loader.load_state_dict({"epoch": 3, "position": 4})
    batches = list(loader)
    assert dataset.epoch == 3
    assert [batch.position for batch in batches] == [4, 8]
    values = [value for batch in batches for value in batch.microbatches.values()]
    assert torch.cat([value.id for value in values]).tolist() == list(range(3, 9))
    assert batches[0].ids().tolist() == [4, 5, 6, 7]


def test_a_stream_has_no_length():
    with pytest.raises(TypeError, match="has no length"):
        len(loader_of(NoisyStream(4)))
    assert loader_of(NoisyStream(4)).num_samples is None


def test_a_stream_that_can_be_read_only_once_is_refused_the_second_time():
    class Once(IterableDataset):
        def __init__(self):
            self.samples = iter(torch.arange(6))

        def __iter__(self):
            return self.samples

    loader = loader_of(Once())
    assert sum(batch.length for batch in loader) == 6
    with pytest.raises(DataError, match="gave no sample"):
        next(iter(loader))


REFUSED = [
    *((empty, {}, "the dataset is empty") for empty in (torch.zeros(0, 3), [], Noisy(0))),
    *((wrong, {}, f"got {type(wrong).__name__} as a dataset; needed") for wrong in (3, "mnist", object(), None)),
    (torch.zeros(3), {"num_workers": -1}, "num_workers=-1"),
    (list(range(9)), {"cache": "device"}, "got a list as the dataset of cache='device'; needed: tensors"),
    (torch.arange(9), {"cache": "disk"}, "got cache='disk'"),
    (NoisyStream(4), {"shuffle": True}, "cannot be shuffled by position"),
    (NoisyStream(4), {"num_workers": 2}, "num_workers=2 for an iterable dataset"),
]


@pytest.mark.parametrize(("dataset", "options", "message"), REFUSED)
def test_what_cannot_be_loaded_is_refused(dataset, options, message):
    with pytest.raises((DataError, UsageError), match=message):
        loader_of(dataset, **options)


@pytest.fixture(scope="module")
def _tracked():
    """Python's tracker of shared memory, which the first process that is spawned starts, lives on."""
    resource_tracker.ensure_running()


@cpu_only("with an accelerator the default stays")
@pytest.mark.usefixtures("_tracked")
def test_workers_are_forked_where_python_would_start_them_otherwise_unless_that_was_chosen(monkeypatch):
    class Local(Dataset):  # which cannot be sent to a new process
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.tensor(index)

    usual = ["forkserver", "spawn", "fork"]  # on Linux since Python 3.14
    chosen = multiprocessing.get_start_method(allow_none=True)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: usual)
    try:
        multiprocessing.set_start_method("forkserver", force=True)
        assert [batch.ids().tolist() for batch in loader_of(Local(), num_workers=1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        multiprocessing.set_start_method("spawn", force=True)
        with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
            list(loader_of(Local(), num_workers=1))
    finally:
        multiprocessing.set_start_method(chosen, force=True)


def test_lists_arrays_tensor_datasets_and_subsets_are_datasets():
    for dataset in (
        [torch.tensor(i) for i in range(6)],
        np.arange(6),
        torch.arange(6),
        TensorDataset(torch.arange(6)),
        Subset(TensorDataset(torch.arange(10)), range(6)),
    ):
        got = [
            x
            for batch in loader_of(dataset)
            for microbatch in batch.microbatches.values()
            for x in torch.stack([*microbatch]).view(-1)
        ]
        assert [int(x) for x in got] == list(range(6)), type(dataset)


@pytest.mark.parametrize(
    "indices", [range(4, 10), [9, -1, 0, 9, 3, 5], torch.tensor([2, 1, 7, 0, 9, 4])], ids=["range", "list", "tensor"]
)
@pytest.mark.parametrize("options", [{}, {"cache": "device"}], ids=["memory", "device"])
def test_a_part_of_tensors_is_gathered_from_them_as_it_is_read_one_by_one(indices, options):
    whole = TensorDataset(torch.rand(10, 3), torch.arange(10))
    part = Subset(whole, indices)
    for dataset in (part, Subset(part, [1, 5, 0, 2, 2, -1])):
        batches = list(loader_of(dataset, **options))
        rows = [torch.cat([each[k].cpu() for b in batches for each in b.microbatches.values()]) for k in range(2)]
        assert all(torch.equal(rows[k], torch.stack([dataset[i][k] for i in range(6)])) for k in range(2))
    assert type(loader_of(part).dataset) is TensorData
    assert loader_of(part).dataset.tensors[0] is whole.tensors[0]


def test_a_part_that_reaches_beyond_its_tensors_is_refused():
    with pytest.raises(IndexError):
        list(loader_of(Subset(TensorDataset(torch.arange(4)), [1, 4])))


def test_a_part_of_tensors_with_a_transform_keeps_the_draws_of_its_samples():
    data = TensorData(torch.zeros(8), lambda batch: batch + torch.rand(len(batch)))
    batches = list(loader_of(Subset(data, range(8))))
    assert len({x for batch in batches for each in batch.microbatches.values() for x in each.tolist()}) == 8


def test_a_collate_function_is_called_with_samples_of_tensors_too():
    for data in (torch.arange(4)[:, None], TensorDataset(torch.arange(4)), TensorData((torch.arange(4),), lambda x: x)):
        (batch,) = loader_of(data, collate_fn=lambda samples: sum(row for (row,) in samples)[None])
        assert [each.tolist() for each in batch.microbatches.values()] == [[1], [5]]


def test_a_tensor_dataset_with_a_getitem_of_its_own_keeps_it():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] * 2

    (batch,) = loader_of(Doubled(torch.arange(4)))
    assert [microbatch.tolist() for microbatch in batch.microbatches.values()] == [[0, 2], [4, 6]]


def test_an_epoch_of_more_samples_than_are_ordered_at_once_is_whole():
    loader = in_turns(1, lambda c: Run(3, 2, communicator=c).loader(torch.arange(9000), shuffle=True))[0]
    ids = [i for batch in loader for i in batch.ids().tolist()]
    assert sorted(ids) == list(range(9000))


def test_microbatches_of_every_source_begin_at_the_border_of_an_allocation():
    def pointers(communicator):
        found = []
        for dataset, workers in ((torch.arange(24.0), 0), ([torch.rand(3) for _ in range(24)], 2), (Noisy(24), 0)):
            for batch in Run(8, 4, communicator=communicator).loader(dataset, num_workers=workers):
                for value in batch.microbatches.values():
                    tensor = value.noise if hasattr(value, "noise") else value
                    found.append(tensor.data_ptr() % 64)
        return found

    assert set(in_turns(2, pointers)[1]) == {0}


def test_an_error_of_the_dataset_reaches_the_script_and_leaves_its_generators_alone():
    class Broken(Noisy):
        def __getitem__(self, index):
            if index == 5:
                raise KeyError("sample 5 is broken")
            return super().__getitem__(index)

    loader = loader_of(Broken(8))
    torch.manual_seed(1)
    with pytest.raises(KeyError, match="sample 5 is broken"):
        list(loader)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))


def test_a_dataset_kept_on_the_device_gives_the_same_batches():
    def batches(communicator, **options):
        loader = Run(8, 3, communicator=communicator).loader(torch.arange(21), shuffle=True, **options)
        return [[microbatch.tolist() for microbatch in batch.microbatches.values()] for batch in loader]

    assert in_turns(2, lambda c: batches(c, cache="device")) == in_turns(2, batches)
