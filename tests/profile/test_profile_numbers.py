"""A profile's arithmetic: what is recorded, what a step is made of, and what is advised."""

import pytest

from samestep.comm.heartbeat import Heartbeat
from samestep.comm.recording import KEPT_STEPS, MAX_EVENTS, SKIPPED_STEPS, Recording
from samestep.errors import UsageError
from samestep.train.profile.advice import advise
from samestep.train.profile.files import RankProfile, Step, read_ranks
from samestep.train.profile.numbers import KINDS, Numbers
from samestep.train.profile.trace import make_trace

CALM = {"data": 0.1, "forward": 4, "backward": 5, "exchange": 0.2, "update": 0.6, "script": 0.1}


def rank_of(milliseconds, rank=0, num_steps=5, num_microbatches=1, **facts):
    """A rank all of whose steps are alike; forward and backward of each of its microbatches."""
    steps, now = [], 0
    for number in range(num_steps):
        events = []
        parts = [(phase, ms) for phase, ms in milliseconds.items() if phase not in ("forward", "backward")]
        both = [("forward", milliseconds["forward"]), ("backward", milliseconds["backward"])]
        for phase, ms in [*parts[:1], *(both * num_microbatches), *parts[1:]]:
            events.append((phase, now, now + round(1e6 * ms)))
            now = events[-1][2]
        steps.append(Step(number, tuple(events)))
    return RankProfile(rank, "cpu", {"world_size": 1, **facts}, tuple(steps))


def advice_on(*ranks):
    return {advice.about: advice.text for advice in advise(Numbers.of(ranks))}


def play(recording, first, last, *extra):
    """Steps of one millisecond of each phase."""
    now = first * 1.0
    for step in range(first, last):
        for phase in (*extra, "data", "forward", "backward", "exchange", "update"):
            recording.add(phase, now, now + 0.001, step, True)
            now += 0.001


def test_nothing_is_wrong_with_a_step_that_computes():
    assert list(advice_on(rank_of(CALM))) == ["nothing"]


@pytest.mark.parametrize(
    ("phase", "much", "little", "about"),
    [
        ("exchange", 5, 0.5, "exchange"),
        ("data", 5, 0.5, "data"),
        ("checkpoint", 1, 0.1, "checkpoint"),
        ("script", 5, 0.5, "script"),
    ],
)
def test_what_takes_too_long_is_named_and_what_does_not_is_not(phase, much, little, about):
    assert list(advice_on(rank_of({**CALM, phase: much}))) == [about]
    assert list(advice_on(rank_of({**CALM, phase: little}))) == ["nothing"]


def test_checksums_are_named_where_they_were_taken_and_take_long():
    heavy = {**CALM, "ledger": 1}
    assert list(advice_on(rank_of(heavy, digest_every=1))) == ["ledger"]
    assert list(advice_on(rank_of({**CALM, "ledger": 0.1}, digest_every=1))) == ["nothing"]
    for without in ({}, {"digest_every": None}, {"digest_every": 100}):
        assert list(advice_on(rank_of(heavy, **without))) == ["nothing"]


def test_of_the_ledger_only_what_a_checksum_adds_counts():
    usual, due = rank_of({**CALM, "ledger": 1}, num_steps=10).steps, rank_of({**CALM, "ledger": 6}, num_steps=10).steps
    steps = tuple(due[number] if number in (4, 8) else usual[number] for number in range(10))
    share = Numbers.of([RankProfile(0, "cpu", {"digest_every": 4}, steps)]).slowest.checksum_share
    assert share == pytest.approx(2 * 5 / (8 * 11 + 2 * 16))


def test_what_cannot_be_done_is_not_advised():
    waits = {**CALM, "data": 20}
    assert 'cache="device"' in advice_on(rank_of(waits, cacheable=True))["data"]
    assert 'cache="device"' not in advice_on(rank_of(waits))["data"]
    tiny = {"data": 0.01, "forward": 0.1, "backward": 0.15, "exchange": 0.01, "update": 0.05}
    assert "or --compile, train_step(compile=True)" in advice_on(rank_of(tiny, num_microbatches=8))["microbatches"]
    assert "compile" not in advice_on(rank_of(tiny, num_microbatches=8, compiles=True))["microbatches"]


def test_the_advice_quotes_its_number():
    step = {"data": 0.0, "forward": 30, "backward": 30, "exchange": 34, "update": 6}
    assert advice_on(rank_of(step))["exchange"].startswith("exchange exposed 34 %: larger buckets")


def test_a_rare_checkpoint_counts_by_its_part_of_the_time_although_its_median_is_nothing():
    steps = rank_of(CALM, num_steps=10).steps
    late = steps[-1]
    long = Step(late.number, (*late.events, ("checkpoint", late.end, late.end + 50_000_000)))
    rank = RankProfile(0, "cpu", {"world_size": 1}, (*steps[:-1], long))
    assert Numbers.of([rank]).slowest.median_ms("checkpoint") == 0
    assert list(advice_on(rank)) == ["checkpoint"]


def test_ranks_of_unlike_speed_get_shares_and_ranks_of_unlike_microbatches_another_number_of_devices():
    slow = {**CALM, "forward": 12, "backward": 15, "exchange": 0.1}
    quick = {**CALM, "exchange": 18}
    text = advice_on(rank_of(quick), rank_of(slow, rank=1))["ranks"]
    assert "--shares 3,1" in text
    many, few = (
        rank_of({**CALM, "exchange": 0.1}, num_microbatches=3),
        rank_of({**CALM, "exchange": 9.1}, 1, num_microbatches=2),
    )
    text = advice_on(many, few)["ranks"]
    assert "3 and 2 microbatches" in text
    assert "--shares" not in text


def test_even_ranks_are_left_alone():
    nearly = {**CALM, "forward": 4.2}
    assert "ranks" not in advice_on(rank_of(CALM), rank_of(nearly, rank=1))


def test_tiny_microbatches_are_named_and_a_single_one_is_not():
    tiny = {"data": 0.01, "forward": 0.1, "backward": 0.15, "exchange": 0.01, "update": 0.05}
    assert list(advice_on(rank_of(tiny, num_microbatches=8))) == ["microbatches"]
    assert list(advice_on(rank_of(tiny, num_microbatches=1))) == ["nothing"]


def test_an_adopted_script_is_not_advised_to_use_what_it_has_not():
    waits = {**CALM, "exchange": 20, "data": 20}
    ranks = rank_of(waits, adopted=True), rank_of({**waits, "forward": 12}, rank=1, adopted=True)
    text = " ".join(advice_on(*ranks).values())
    assert "exchange exposed" in text
    assert "DataLoader(num_workers=N)" in text
    assert not any(word in text for word in ("bucket_bytes", "--shares", "--num-workers", "compile"))


def test_the_slowest_rank_is_the_one_that_works_longest_not_the_one_that_waits():
    waits, works = {**CALM, "exchange": 50}, {**CALM, "forward": 40}
    numbers = Numbers.of([rank_of(waits), rank_of(works, rank=1)])
    assert numbers.slowest.rank == 1
    assert numbers.slowest.limit_ms == pytest.approx(40 + 5 + 0.6)
    assert numbers.ratio == pytest.approx(46 / 45.6)


def test_an_evaluation_is_no_part_of_a_step():
    rank = rank_of({**CALM, "evaluate": 500})
    assert Numbers.of([rank]).slowest.step_ms == pytest.approx(10)


def test_the_last_steps_are_kept_and_the_first_left_out():
    recording = Recording()
    play(recording, 0, 4)
    assert [step.number for step in recording.steps] == [2, 3]
    play(recording, 4, SKIPPED_STEPS + 20)
    assert [step.number for step in recording.steps] == list(range(SKIPPED_STEPS, SKIPPED_STEPS + 20))
    play(recording, SKIPPED_STEPS + 20, 1000)
    assert [step.number for step in recording.steps] == list(range(1000 - KEPT_STEPS, 1000))


def test_an_evaluation_is_one_event_with_the_data_and_the_exchange_in_it():
    recording = Recording()
    play(recording, 0, 5)
    play(recording, 5, 6, "evaluate", "data", "evaluate", "exchange", "script")
    phases = [phase for phase, _, _ in recording.steps[-1].events]
    assert phases == ["evaluate", "script", "data", "forward", "backward", "exchange", "update"]


def test_a_loop_that_takes_no_step_does_not_fill_the_memory():
    recording = Recording()
    for number in range(5 * MAX_EVENTS):
        recording.add(("data", "script")[number % 2], number, number + 1, 0, True)
    play(recording, 5 * MAX_EVENTS, 5 * MAX_EVENTS + 1)
    (step,) = recording.steps
    assert len(step.events) <= MAX_EVENTS + 5
    assert step.events[0][:2] == ("script", 0)
    assert all(before[2] == after[1] for before, after in zip(step.events, step.events[1:], strict=False))


def test_signs_of_life_do_not_cut_a_phase():
    heartbeat = Heartbeat()
    heartbeat.recording = Recording()
    for phase in ("data", "forward", "forward", "backward", "update", "update", "script", "data"):
        heartbeat.enter(phase)
    (step,) = heartbeat.recording.steps
    assert [phase for phase, _, _ in step.events] == ["data", "forward", "backward", "update"]


def test_without_a_recording_a_detail_is_no_phase():
    heartbeat = Heartbeat()
    heartbeat.enter("script")
    assert heartbeat.enter_detail("ledger") == "script"
    assert heartbeat.phase == "script"
    heartbeat.recording = Recording()
    assert heartbeat.enter_detail("ledger") == "script"
    assert heartbeat.phase == "ledger"


def test_what_leaves_during_the_backward_is_hidden_until_that_ends():
    events = (("forward", 0, 10), ("backward", 10, 30), ("exchange", 30, 35), ("update", 35, 40))
    assert Step(0, events, (15, 20, 31)).hidden == (15, 30)
    assert Step(0, events, (31,)).hidden is None
    assert Step(0, (*events, ("regroup", 40, 50)), (15,)).hidden is None


def test_every_kind_has_its_place_in_the_sum_of_a_step():
    step = {**CALM, "ledger": 1, "checkpoint": 2, "regroup": 3}
    (kinds,) = Numbers.of([rank_of(step, num_steps=1)]).slowest.steps
    assert sum(kinds[kind] for kind in KINDS) == pytest.approx(sum(step.values()))


def test_the_trace_says_which_process_is_which_rank():
    trace = make_trace([rank_of(CALM), rank_of(CALM, rank=1)])
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0 (cpu)", 1: "rank 1 (cpu)"}


def test_a_folder_without_a_profile_is_an_error_that_says_so(tmp_path):
    with pytest.raises(UsageError, match="holds no profile"):
        read_ranks(tmp_path)
    (tmp_path / "rank-0.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        read_ranks(tmp_path)
