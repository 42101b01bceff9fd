"""Loading: the script's loaders, split over the ranks, give the batches that one process gets."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import loading_programs as programs

NAMES = list(programs.cases(""))
DEALT = [name for name in NAMES if name.startswith("dealt")]
STREAMS = [name for name in NAMES if name.startswith("stream")]
TOGETHER = [name for name in NAMES if name.startswith("together")]


def dealt_sizes(names):
    """Worlds of 2 and 3, in turn; both for the first."""
    return [(names[0], 3), *((name, 2 + number % 2) for number, name in enumerate(names))]


def fetched(folder):
    """How often each sample was fetched, on all ranks together; forgets it."""
    file = folder / "fetched"
    found = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return len(found)


def both(worlds, folder, world_size, name, breaker=""):
    """The results of one process and of each rank, and how many samples were fetched in each case."""
    expected = programs.plain(programs.two_epochs, name, str(folder))
    plainly = fetched(folder)
    got = worlds(world_size).run(programs.two_epochs, name, str(folder), breaker)
    return expected, plainly, got, fetched(folder)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # as many workers as the machine has cores
@pytest.mark.parametrize(("name", "world_size"), dealt_sizes(DEALT))
def test_batches_of_dealt_workers_are_those_of_one_process_and_made_once(worlds, tmp_path, name, world_size):
    (expected, _, _), _, got, num_fetched = both(worlds, tmp_path, world_size, name)
    for seen, _, notices in got:
        assert seen == expected
        assert "data workers split" in notices[0]
    # Workers fetch ahead; how far they come before an epoch is left is a matter of time.
    assert num_fetched <= 22 + 3 * 3 * 3
    assert [left for _, left, _ in got] == [0] * world_size


@pytest.mark.parametrize(("name", "world_size"), dealt_sizes(STREAMS))
def test_a_stream_is_read_by_one_process_and_seen_by_all(worlds, tmp_path, name, world_size):
    (expected, _, _), plainly, got, num_fetched = both(worlds, tmp_path, world_size, name)
    for seen, _, notices in got:
        assert seen == expected
        assert notices == ["batches loaded by rank 0: the dataset is a stream"]
    if "workers" not in name:
        assert num_fetched == plainly


@pytest.mark.parametrize("name", TOGETHER)
def test_what_is_read_without_workers_is_loaded_by_every_rank(worlds, tmp_path, name):
    (expected, _, _), _, got, _ = both(worlds, tmp_path, 2, name)
    for seen, _, notices in got:
        assert seen == expected
        assert notices == ["every rank loads all batches; with num_workers=2 or more, 2 ranks share the work out"]


def test_a_sampler_that_differs_between_processes_is_that_of_rank_0(worlds, tmp_path):
    _, _, got, _ = both(worlds, tmp_path, 2, "chancy")
    assert got[0][0] == got[1][0]


@pytest.mark.parametrize(
    ("name", "breaker"),
    [("stream", "state is not handed over"), ("stream, pipe", "state is not handed over")],
)
def test_without_its_safeguard_a_loader_is_seen_to_differ(worlds, tmp_path, name, breaker):
    (expected, _, _), _, got, _ = both(worlds, tmp_path, 2, name, breaker)
    assert any(seen != expected for seen, _, _ in got)


def test_no_worker_outlives_an_iterator_that_is_abandoned(worlds, tmp_path):
    got = worlds(3).run(programs.abandoned, str(tmp_path))
    assert got == [[2, 0, 0], [1, 0, 0], [1, 0, 0]]
    everywhere = worlds(2).run(programs.abandoned, str(tmp_path), "all workers are everywhere")
    assert everywhere == [[4, 0, 0], [4, 0, 0]]


def test_loaders_zipped_nested_and_side_by_side_do_not_disturb_each_other(worlds, tmp_path):
    expected = programs.plain(programs.nested, str(tmp_path))
    assert worlds(2).run(programs.nested, str(tmp_path)) == [expected] * 2


def without_cause(seen):
    return [entry[:2] if len(entry) == 3 else entry for entry in seen]


def test_an_error_of_the_dataset_is_raised_on_all_ranks_and_blamed_on_the_one_that_met_it(worlds, tmp_path):
    expected = programs.plain(programs.broken, str(tmp_path))
    got = worlds(2).run(programs.broken, str(tmp_path))
    assert [without_cause(seen) for seen in got] == [without_cause(expected)] * 2
    causes = [entry[2] for seen in got for entry in seen if len(entry) == 3]
    assert len(causes) == 2
    assert sum(cause[0] == "PeerLostError" for cause in causes) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [("LocalError", ("LocalError", "this and that")), ("LockedError", ("RuntimeError", "LockedError: here"))],
)
def test_an_error_that_does_not_pickle_arrives_rebuilt_or_as_a_runtime_error_with_its_text(worlds, error, expected):
    got = worlds(2).run(programs.broken_stream, 0, error)
    for seen in got:
        assert [entry[:2] for entry in seen if len(entry) == 3] == [expected]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_stream_is_raised_on_all_ranks(worlds, num_workers):
    expected = programs.plain(programs.broken_stream, num_workers, "KeyError")
    got = worlds(2).run(programs.broken_stream, num_workers, "KeyError")
    assert [without_cause(seen) for seen in got] == [without_cause(expected)] * 2


def test_a_worker_that_takes_too_long_is_an_error_on_all_ranks(worlds, tmp_path):
    got = worlds(2).run(programs.timed_out, str(tmp_path))
    assert got[0] == got[1]
    assert got[0][-1] is True


def test_inside_a_wrapped_forward_a_loader_is_left_alone_and_a_shared_iterator_refused(worlds, tmp_path):
    got = worlds(2).run(programs.elsewhere, str(tmp_path))
    for inside, kind, message in got:
        assert len(inside) == 6
        assert kind == "DeterminismError"
        assert "call iter(loader) there" in message


def test_a_distributed_sampler_keeps_each_rank_its_share(worlds, tmp_path):
    got = worlds(2).run(programs.kept_apart, str(tmp_path))
    assert [batches[0] for batches in got] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_one_rank_iterates_as_torch_does(worlds, tmp_path):
    expected = programs.plain(programs.two_epochs, "dealt", str(tmp_path))
    ((seen, _, notices),) = worlds(1).run(programs.two_epochs, "dealt", str(tmp_path))
    assert seen == expected[0]
    assert notices == []
