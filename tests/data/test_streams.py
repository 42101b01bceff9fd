"""A stream for each microbatch: read by the rank that executes it, alike on every number of devices."""

import json
from collections import Counter
from typing import ClassVar

import pytest
import torch
from torch.utils.data import IterableDataset
from worlds import in_turns

from samestep import Mean
from samestep.data import streams as streams_module
from samestep.data.streams import Stream, StreamState
from samestep.errors import CheckpointError, DataError, UsageError
from samestep.run.run import Run
from samestep.run.trainer import Trainer

LENGTHS = (8, 4, 0, 14, 6, 6, 2, 20)  # some end early, one is empty
LENGTHS_OF_FOUR = (9, 3, 0, 14)


class Numbers(IterableDataset):
    """The samples (stream, place, a draw) of one stream, which may be shuffled and has a state, if asked."""

    def __init__(self, index, length, shuffle=False):
        self.index, self.length, self.shuffle = index, length, shuffle
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.length) if self.shuffle else torch.arange(self.length)
        for place in order:
            yield torch.tensor([self.index, int(place), self.epoch]), torch.rand(3)


class WithState:
    """A stream with a state of its own that counts what is read of it; `lost` of the state is not restored."""

    read: ClassVar = Counter()

    def __init__(self, index, length, lost=0):
        self.index, self.length, self.lost = index, length, lost
        self.place = 0

    def __iter__(self):
        while self.place < self.length:
            self.place += 1
            self.read[self.index] += 1
            yield torch.tensor([self.index, self.place - 1, 0]), torch.rand(3)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"] + self.lost


def numbers(index, count):
    return Numbers(index, (LENGTHS if count == 8 else LENGTHS_OF_FOUR)[index])


def shuffled(index, count):
    return Numbers(index, LENGTHS[index], shuffle=True)


def small_model():
    return torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    )


def loss_of(model, batch):
    names, draws = batch
    errors = (model(draws).flatten() - names[:, 0]).square()
    return Mean(errors.sum(), len(errors)), {"streams": names[:, 0].float().mean()}


def train(communicator, make):
    run = Run(16, 8, communicator=communicator)
    model = small_model()
    with Trainer(run, model, torch.optim.Adam(model.parameters(), 0.01), loss_of) as trainer:
        history = trainer.fit(run.loader(streams=make), 2)
        return trainer.digest, [(record.train_loss, record.scalars) for record in history]


def samples_of(batches):
    """The samples of some batches by microbatch: [[(stream, place), …], …]."""
    return [
        {m: [tuple(row[:2]) for row in names.tolist()] for m, (names, _) in batch.microbatches.items()}
        for batch in batches
    ]


def merged(by_rank):
    """What the ranks read of each batch together; each microbatch is read by one."""
    batches = [{} for _ in by_rank[0]]
    for rows in by_rank:
        assert len(rows) == len(batches)
        for whole, part in zip(batches, rows, strict=True):
            assert not whole.keys() & part.keys()
            whole.update(part)
    return [dict(sorted(whole.items())) for whole in batches]


def read_epoch(communicator, make=numbers, global_batch_size=16, **options):
    return samples_of(Run(global_batch_size, 8, communicator=communicator).loader(streams=make, **options))


def test_streams_that_depend_on_the_rank_train_to_other_bits():
    def by_rank(communicator):
        return train(communicator, lambda index, count: Numbers(index + communicator.rank, 8))

    assert in_turns(2, by_rank)[0] != in_turns(1, by_rank)[0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_stream_fills_its_own_microbatch_until_it_ends(world_size):
    batches = merged(in_turns(world_size, read_epoch))
    expected = []
    for start in range(0, max(LENGTHS), 2):
        there = {i: [(i, k) for k in range(start, min(start + 2, n))] for i, n in enumerate(LENGTHS) if start < n}
        expected.append(there)
    assert batches == expected


def test_an_epoch_ends_with_the_first_stream_if_incomplete_batches_are_dropped():
    def make(index, count):
        return Numbers(index, LENGTHS[index] + 5)

    batches = merged(in_turns(2, read_epoch, make, 16))
    assert len(batches) == 13
    whole = merged(in_turns(2, lambda communicator: read_epoch(communicator, make, drop_last=True)))
    assert whole == batches[:2]  # of the shortest stream, of 5 samples


def test_draws_depend_on_the_epoch_and_the_place_alone():
    def draws(communicator):
        loader = Run(16, 8, communicator=communicator).loader(streams=shuffled)
        epochs = [[value for batch in loader for value in batch.microbatches.values()] for _ in range(2)]
        return {
            (int(e), int(i), int(k)): d
            for epoch in epochs
            for n, ds in epoch
            for (i, k, e), d in zip(n, ds, strict=True)
        }

    whole = in_turns(1, draws)[0]
    assert len(whole) == 2 * sum(LENGTHS)
    parts = in_turns(3, draws)
    assert sum(map(len, parts)) == len(whole)
    for part in parts:
        assert all(torch.equal(whole[key], value) for key, value in part.items())
    assert not any(torch.equal(whole[0, i, k], whole[1, i, k]) for i, n in enumerate(LENGTHS) for k in range(n))


def test_reading_leaves_the_generators_of_the_script_alone():
    loader = Run(16, 8).loader(streams=shuffled)
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    assert len(list(loader)) == 10
    assert torch.equal(torch.rand(()), expected)


def stop_and_save(communicator, num_batches, make, exact_states=False):
    loader = Run(16, 8, communicator=communicator).loader(streams=make, exact_states=exact_states)
    batches = iter(loader)
    first = samples_of(next(batches) for _ in range(num_batches))
    return first, json.loads(json.dumps(loader.state_dict()))


def go_on(communicator, state, make, exact_states=False):
    loader = Run(16, 8, communicator=communicator).loader(streams=make, exact_states=exact_states)
    loader.load_state_dict(state)
    return samples_of(loader)


@pytest.mark.parametrize("make", [numbers, shuffled], ids=["in order", "shuffled"])
@pytest.mark.parametrize("num_batches", [1, 5, 10])
def test_a_resume_on_other_devices_repeats_no_sample_and_misses_none(num_batches, make):
    whole = merged(in_turns(1, read_epoch, make))
    results = in_turns(3, stop_and_save, num_batches, make)
    states = [state for _, state in results]
    assert states == [states[0]] * 3
    rest = merged(in_turns(2, go_on, states[0], make))
    assert merged([first for first, _ in results]) + rest == whole


def with_state(index, count):
    return WithState(index, 40)


def lossy(index, count):
    return WithState(index, 40, lost=1)


@pytest.fixture
def often(monkeypatch):
    """States of streams are exchanged every third batch."""
    monkeypatch.setattr(streams_module, "BATCHES_A_STATE", 3)


def test_a_stream_with_a_state_goes_on_without_reading_what_is_before(often):
    whole = merged(in_turns(1, read_epoch, with_state))
    results = in_turns(3, stop_and_save, 10, with_state, True)
    state = results[0][1]
    assert {(saved["consumed"], saved["place"]) for saved in state["streams"]} == {(16, 20)}
    WithState.read.clear()
    rest = merged(in_turns(2, go_on, state, with_state, True))
    assert merged([first for first, _ in results]) + rest == whole
    assert set(WithState.read.values()) == {24}  # of 40, those after the state
    WithState.read.clear()
    assert merged(in_turns(2, go_on, state, with_state)) == rest
    assert set(WithState.read.values()) == {40}  # all again, unless the caller says that states are exact


def test_a_state_that_loses_samples_is_found_and_left(often, capsys):
    whole = merged(in_turns(1, read_epoch, lossy))
    results = in_turns(3, stop_and_save, 10, lossy, True)
    rest = merged(in_turns(2, go_on, results[0][1], lossy, True))
    assert merged([first for first, _ in results]) + rest == whole
    assert "stream 0 cannot go on from its own state (it goes on with another sample)" in capsys.readouterr().err


def test_a_state_that_cannot_be_loaded_is_left(often, capsys):
    class Refusing(WithState):
        def load_state_dict(self, state):
            raise ValueError("another version")

    def make(index, count):
        return Refusing(index, 40)

    state = in_turns(1, stop_and_save, 10, make, True)[0][1]
    assert merged(in_turns(1, go_on, state, make, True)) == merged(in_turns(1, read_epoch, make))[10:]
    assert "(ValueError: another version)" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_stream_goes_to_any_place_forwards_and_back(place):
    stream = Stream("stream 0", lambda: range(5), 0, (1, 2), streams_module.Generators(torch.device("cpu")))
    for before in range(6):
        stream.go_to(before, StreamState())
        stream.go_to(place, StreamState())
        assert stream.take(9) == list(range(place, 5))


def test_a_state_that_json_cannot_carry_is_not_used():
    class Odd(WithState):
        def state_dict(self):
            return {"place": {1, 2}}

    stream = Stream("stream 0", lambda: Odd(0, 5), 0, (1, 2), streams_module.Generators(torch.device("cpu")))
    stream.take(2)
    assert stream.save() == StreamState()
    assert len(stream.take(9)) == 3


ONCE = iter(range(100))
SHARED = WithState(0, 100)
REFUSED = [  # the options of a loader, and why no batch is read of it
    ({"streams": 3}, "got an int as streams; needed: a function of (index, count)"),
    ({"streams": numbers, "dataset": [1]}, "got a dataset and streams; needed: one of them"),
    ({"streams": numbers, "num_workers": 2}, "StatefulDataLoader(dataset, batch_size=None, num_workers=1)"),
    ({"streams": numbers, "shuffle": True}, "shuffle inside them"),
    ({"dataset": [1], "exact_states": True}, "got exact_states=True, which is of streams"),
    ({"streams": numbers, "cache": "device"}, "shuffle or cache with streams"),
    ({"streams": lambda *_: None}, "streams(0, 8) returned NoneType; needed: an iterable of samples"),
    ({"streams": lambda *_: ONCE}, "streams(1, 8) returned an iterator that is read already"),
    ({"streams": lambda *_: SHARED}, "streams(1, 8) returned the same object as for another stream"),
    ({"streams": lambda *_: []}, "no batch came of 8 streams"),
    ({"streams": lambda *_: [0], "drop_last": True}, "no batch came of 8 streams"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_streams_that_cannot_be_read_and_arguments_that_do_not_go_with_them_are_refused(options, message):
    with pytest.raises((UsageError, DataError)) as caught:
        list(Run(16, 8).loader(**options))
    assert message in str(caught.value)


def test_streams_that_would_never_be_read_are_refused():
    with pytest.raises(UsageError, match="got 8 microbatches for a global batch of 4"):
        Run(4, 8).loader(streams=numbers)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"streams": [{}] * 4, "epoch": 0, "position": 0}, "got a state of 4 streams for 8"),
        ({"epoch": 0, "position": 16, "num_samples": 40}, "got the state of a loader over a dataset"),
    ],
)
def test_the_state_of_another_loader_is_refused(state, message):
    with pytest.raises(UsageError, match=message):
        Run(16, 8).loader(streams=numbers).load_state_dict(state)


def test_a_checkpoint_of_a_dataset_is_refused_with_streams(tmp_path):
    run = Run(16, 8)
    model = torch.nn.Linear(3, 1)
    step = run.train_step(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, batch: model(batch[1]).mean())
    run.save_checkpoint(tmp_path, step, run.loader((torch.zeros(32, 3), torch.zeros(32, 3))))
    with pytest.raises(CheckpointError):
        run.load_checkpoint(tmp_path, step, run.loader(streams=numbers), allow_contract_change=True)


def test_a_stream_that_has_become_shorter_is_named():
    state = in_turns(1, stop_and_save, 5, numbers)[0][1]
    with pytest.raises(DataError, match="stream 0 ends after 3 of 8 samples"):
        in_turns(1, go_on, state, lambda index, count: Numbers(index, min(3, LENGTHS[index])))


def test_what_a_stream_and_its_first_sample_draw_differs():
    class Drawing(IterableDataset):
        def __iter__(self):
            return self.samples(torch.rand(()))  # drawn here, before the first sample

        def samples(self, first):
            yield torch.stack([first, torch.rand(())])

    (batch,) = Run(8, 8).loader(streams=lambda index, count: Drawing())
    values = torch.cat([value.flatten() for value in batch.microbatches.values()]).tolist()
    assert len(set(values)) == 16


def test_an_error_in_a_stream_names_it():
    def failing(index, count):
        yield from range(5)
        raise RuntimeError("the file is damaged")

    with pytest.raises(RuntimeError) as caught:
        list(Run(16, 8).loader(streams=failing))
    assert caught.value.__notes__ == ["samestep: in stream 0, of whose samples 4 are consumed"]


def test_an_epoch_within_an_epoch_is_refused_in_a_sentence():
    loader = Run(16, 8).loader(streams=numbers)
    batches = iter(loader)
    next(batches)
    next(iter(loader))
    with pytest.raises(UsageError, match="the loader of streams was iterated again within an epoch"):
        next(batches)


def test_a_microbatch_of_one_sample_is_explained_by_its_stream():
    def train_on(communicator):
        run = Run(16, 8, communicator=communicator)
        model = small_model()
        step = run.train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss_of)
        for batch in run.loader(streams=lambda index, count: Numbers(index, 3 if index == 2 else 4)):
            step(batch)

    with pytest.raises(
        UsageError, match=r"microbatch 2 \(of 8\) has one: .* or let each stream end with two samples or more"
    ):
        in_turns(1, train_on)


def test_a_state_between_two_epochs_is_of_the_beginning_of_the_next(often):
    def program(communicator):
        loader = Run(16, 8, communicator=communicator).loader(streams=with_state, exact_states=True)
        first = samples_of(loader)
        return first, loader.state_dict()["streams"]

    for first, state in in_turns(2, program):
        assert len(first) == 20
        assert state == [{"place": 0, "consumed": 0, "state": "", "following": streams_module.END}] * 8
