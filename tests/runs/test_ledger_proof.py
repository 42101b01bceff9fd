"""Ledgers as proof: what is read from a whole or broken one, and the first step in which two runs differ."""

import json
import subprocess
import sys

import pytest
from ledger_runs import write
from report_runs import make_run
from typer.testing import CliRunner

from samestep.cli import ledger as command
from samestep.cli.main import app
from samestep.errors import DataError, UsageError
from samestep.runs.ledger import (
    Extent,
    FieldDifference,
    Ledger,
    Repeat,
    cause,
    compare,
    extent,
    is_whole,
    number,
    read_ledger,
    to_line,
)

ENTRY = {"num_samples": 2, "ids": "aa", "loss": "0x1.8p+0", "grad_norm": "0x1.0p+1", "lr": ["0x1.0p-3"]}


def line(step, **fields):
    return {"step": step, "epoch": 0, "position": 2 * step, **ENTRY, "skipped": False, "world_size": 1, **fields}


def event(name, step, **fields):
    return {"event": name, "step": step, "time": "2026-01-31T12:00:00.123+00:00", **fields}


def put(path, *lines, rest=b""):
    """A ledger file of objects and of raw lines."""
    raw = [item if isinstance(item, bytes) else to_line(item).rstrip() for item in lines]
    path.write_bytes(b"".join(item + b"\n" for item in raw) + rest)
    return path


def ledger_of(*lines):
    steps = {entry["step"]: entry for entry in lines if "event" not in entry}
    return Ledger(steps, [entry for entry in lines if "event" in entry])


def test_steps_come_by_number_and_events_in_the_order_of_the_file(tmp_path):
    events = [event("start", 0, world_size=2), event("stop", 3, signal="SIGTERM")]
    ledger = read_ledger(put(tmp_path / "ledger.jsonl", events[0], line(0), line(2), line(1), events[1]))
    assert ledger == read_ledger(tmp_path) == Ledger({0: line(0), 1: line(1), 2: line(2)}, events, False, [], 0, [])
    assert list(ledger.steps) == [0, 1, 2]


@pytest.mark.parametrize("rest", [b'{"step": 1, "lo', b"\xe2\x80", b"\x00\x00", to_line(line(1)).rstrip()])
def test_an_unfinished_last_line_is_said_and_left_out(tmp_path, rest):
    ledger = read_ledger(put(tmp_path / "x", line(0), rest=rest))
    assert ledger.torn
    assert list(ledger.steps) == [0]
    assert ledger.problems == []
    assert not read_ledger(put(tmp_path / "x", line(0))).torn


def test_the_later_line_of_a_step_counts_and_an_equal_one_is_no_difference(tmp_path):
    again = line(1, world_size=3)
    ledger = read_ledger(put(tmp_path / "x", line(0), line(1), event("resume", 1), again))
    assert ledger.steps[1] == again
    assert ledger.repeats_that_differ == []


def test_a_step_that_came_out_otherwise_the_second_time_is_told_field_by_field(tmp_path):
    other = line(1, loss="0x1.9p+0", digest="02")
    ledger = read_ledger(put(tmp_path / "x", line(1, digest="01"), event("resume", 1), other))
    assert ledger.repeats_that_differ == [Repeat(1, "loss", "0x1.8p+0", "0x1.9p+0"), Repeat(1, "digest", "01", "02")]


def test_steps_from_before_a_change_of_the_contract_are_not_counted_as_repeated(tmp_path):
    lines = [line(1), line(2), line(3), event("contract_change", 1, fields=[["lr", 1, 2]]), line(2, loss="0x1.0p+0")]
    ledger = read_ledger(put(tmp_path / "x", *lines))
    assert list(ledger.steps) == [1, 2]
    assert ledger.steps[2]["loss"] == "0x1.0p+0"
    assert ledger.repeats_that_differ == []


def raw(entry):
    return to_line(entry).rstrip()


NO_CHECKSUM = "is damaged or none of a ledger: it has no checksum"
GARBAGE = {
    b"\xff\xfe": NO_CHECKSUM,
    b"{": NO_CHECKSUM,
    b"[" * 100_000: NO_CHECKSUM,
    b"[1, 2]": NO_CHECKSUM,
    raw({"loss": "0x1.0p+0"}): "has no number of a step, but None",
    raw({"step": -1}): "has no number of a step, but -1",
    raw({"step": 2**53}): f"has no number of a step, but {2**53}",
    raw({"step": True}): "has no number of a step, but True",
    raw({"step": "1"}): "has no number of a step, but '1'",
    raw({"step": 1, "event": 5}): "has the event 5",
    raw(line(1, loss="1.5")): "has '1.5' as loss; needed: a hexadecimal float such as 0x1.8p+0",
    raw(line(1, loss=None)): "has None as loss; needed: a hexadecimal float such as 0x1.8p+0",
    raw(line(1, grad_norm=2.0)): "has 2.0 as grad_norm; needed: a hexadecimal float such as 0x1.8p+0",
    raw(line(1, lr=[1])): "has 1 as lr; needed: a hexadecimal float such as 0x1.8p+0",
    raw(line(1, digest=7)): "has 7 as digest; needed: hexadecimal digits",
}


@pytest.mark.parametrize(("raw", "problem"), GARBAGE.items(), ids=range(len(GARBAGE)))
def test_a_line_of_garbage_is_named_and_the_others_are_read(tmp_path, raw, problem):
    ledger = read_ledger(put(tmp_path / "x", line(0), raw, b"", b"  ", line(2)))
    assert list(ledger.steps) == [0, 2]
    assert ledger.problems == [f"line 2 {problem}"]


def test_no_bit_of_a_line_can_flip_without_being_noticed():
    whole = raw(line(1, digest="ce9f262ce9b8c095"))
    assert is_whole(whole)
    for place in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        assert not is_whole(bytes(flipped)), place


def test_a_flipped_bit_in_valid_json_is_told_by_every_reader(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    folder = make_run(tmp_path / "run")
    path = folder / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    flipped = lines[4].replace(b'"num_samples": 128', b'"num_samples": 129')
    assert "num_samples" in json.loads(flipped)
    path.write_bytes(b"".join([*lines[:4], flipped, *lines[5:]]))
    sentence = "line 5 is damaged: its checksum does not fit its bytes"
    shown = CliRunner().invoke(app, ["ledger", "show", str(folder)]).stdout
    assert f"note: {sentence}" in shown
    for words in (("ledger", "diff", folder, folder), ("report", folder)):
        assert sentence in CliRunner().invoke(app, list(map(str, words))).stdout, words
    assert "ledger.jsonl: damaged lines: 1 (line 5 first)" in CliRunner().invoke(app, ["runs", str(folder)]).stdout


def test_a_file_that_is_no_ledger_and_one_that_is_not_there_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"x is no ledger: line 1 is damaged or none of a ledger: it has no checksum"):
        read_ledger(put(tmp_path / "x", b"hello", b"world"))
    with pytest.raises(DataError, match=r"no ledger at .*nowhere: No such file.*name a run's folder or a ledger"):
        read_ledger(tmp_path / "nowhere")
    assert read_ledger(put(tmp_path / "y")).steps == {}


@pytest.mark.parametrize("value", ["", "1.5", "0x", "infinity", "0x1.8p+99999", None, 1.5, "0x1.8p+0 "])
def test_what_the_ledger_does_not_write_is_no_number(value):
    assert number(value) is None


DIGEST = {"digest": "00"}
AGREEING = {
    "other devices and events": (
        [event("start", 0, world_size=1), line(0), line(1)],
        [line(0, world_size=3), event("death", 1, rank=2), line(1, world_size=2)],
        Extent(common=2, digests=0, only_a=0, only_b=0),
    ),
    "one that ended early": (
        [line(0), line(1, **DIGEST)],
        [line(0), line(1, **DIGEST), line(2), line(3)],
        Extent(common=2, digests=1, only_a=0, only_b=2),
    ),
    "fields that one alone recorded": ([line(0, ids=None, **DIGEST)], [line(0)], Extent(1, 0, 0, 0)),
    "another spelling": ([line(0, loss="0x1.80000p+0")], [line(0, loss="0x1.8p+0")], Extent(1, 0, 0, 0)),
    "NaN": ([line(0, loss="nan")], [line(0, loss="nan")], Extent(1, 0, 0, 0)),
}


@pytest.mark.parametrize("name", AGREEING)
def test_what_is_no_difference_is_counted(name):
    a, b = (ledger_of(*lines) for lines in AGREEING[name][:2])
    assert compare(a, b) is compare(b, a) is None
    assert extent(a, b) == AGREEING[name][2]


def test_a_difference_says_whether_both_recorded_the_samples():
    assert not compare(ledger_of(line(0, ids=None)), ledger_of(line(0, loss="0x1.9p+0"))).known_samples


def test_the_first_step_that_differs_is_told_with_what_agreed_before():
    a = ledger_of(line(0, digest="00"), line(1), line(2), line(3, loss="0x1.0p+0"))
    b = ledger_of(line(0, digest="00"), line(1), line(2, loss="0x1.9p+0"), line(3))
    difference = compare(a, b)
    assert (difference.step, difference.agreed, difference.proven) == (2, 2, 0)
    (field,) = difference.fields
    assert (field.field, field.a, field.b) == ("loss", "0x1.8p+0", "0x1.9p+0")
    assert field.relative == pytest.approx(1 / 25)


@pytest.mark.parametrize(
    ("a", "b", "relative"),
    [
        (1.0, 1.0 + 2**-52, 2**-52),
        (0.1, 0.30000000000000004, 2 / 3),
        (0.0, -0.0, 0.0),
        (5e-324, -5e-324, 2.0),
        (float("inf"), 1.0, None),
        (float("nan"), 1.0, None),
        (1e308, -1e308, 2.0),
    ],
)
def test_numbers_are_told_apart_by_their_bits_and_their_distance_is_relative(a, b, relative):
    (field,) = compare(ledger_of(line(0, loss=a.hex())), ledger_of(line(0, loss=b.hex()))).fields
    assert field.relative == (None if relative is None else pytest.approx(relative))


def test_learning_rates_are_compared_group_by_group():
    a, b = (ledger_of(line(0, lr=["0x1.0p+0", rate])) for rate in ("0x1.0p+0", "0x1.8p+0"))
    (field,) = compare(a, b).fields
    assert field.field == "lr"
    assert field.relative == pytest.approx(1 / 3)
    assert compare(a, ledger_of(line(0, lr=["0x1.0p+0"]))).fields[0].relative == 0.0


def test_where_all_later_steps_agree_the_record_is_suspected_and_not_the_training():
    a, b = ledger_of(line(0), line(1), line(2)), ledger_of(line(0), line(1, loss="0x1.9p+0"), line(2))
    assert compare(a, b).alone
    assert "one of the ledgers is wrong about this step" in cause(compare(a, b))
    ends = [event("end", 3, digest=digest) for digest in ("aa", "bb")]
    apart = [ledger_of(*ledger.steps.values(), end) for ledger, end in zip((a, b), ends, strict=True)]
    assert not compare(*apart).alone
    assert not compare(ledger_of(line(0), line(1)), ledger_of(line(0), line(1, loss="0x1.9p+0"))).alone


def test_final_states_are_compared_where_both_ended_after_the_same_step():
    a, b = (ledger_of(line(0), event("end", 1, digest=digest)) for digest in ("aa", "bb"))
    assert compare(a, a) is None
    assert compare(a, b).fields == (FieldDifference("final digest", "aa", "bb"),)
    assert extent(a, a).final
    longer = ledger_of(line(0), line(1), event("end", 2, digest="bb"))
    assert compare(a, longer) is None
    assert not extent(a, longer).final
    assert not extent(a, ledger_of(line(0))).final


def cause_of(a, b):
    return cause(compare(ledger_of(*a), ledger_of(*b)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": "bb", "loss": "0x1.0p+0"}, "The data differ"),
        ({"num_samples": 3}, "The data differ"),
        ({"lr": ["0x1.0p+0"], "digest": "01"}, "The learning rates differ"),
        ({"loss": "0x1.0p+0", "grad_norm": "0x1.0p+0"}, "The forward differs, on the same samples"),
        ({"grad_norm": "0x1.0p+0", "digest": "01"}, "The backward or the sum over devices differs"),
        ({"skipped": True}, "One run skipped the update"),
        ({"digest": "01"}, "Only the state differs: the optimizer's update"),
    ],
)
def test_the_first_thing_in_the_order_of_a_step_tells_where_to_look(change, words):
    before = line(0, digest="00")
    text = cause_of([before, line(1, digest="00")], [before, line(1, **{"digest": "00", **change})])
    assert text.startswith(words)
    assert "state before" not in text


def test_where_no_checksum_stands_right_before_the_state_is_a_suspect_too():
    other = line(2, loss="0x1.0p+0")
    assert "(or the state before: no checksum of it was compared;" in cause_of([line(1), line(2)], [line(1), other])
    marked = line(0, digest="00")
    found = cause_of([marked, line(1), line(2)], [marked, line(1), other])
    assert "(or the state before: no checksum of it was compared since step 0;" in found
    assert "no earlier step was compared" in cause_of([line(2)], [other])
    assert "since the last checksum that agreed" in cause_of([line(1, digest="0")], [line(1, digest="1")])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "ledger.jsonl"
    write(path)
    return path


def test_a_run_on_three_devices_agrees_to_the_bit_and_every_rank_sees_the_same_checksums(whole, tmp_path):
    digests = write(tmp_path / "x", world_size=3)
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[0])) == 6
    a, b = read_ledger(whole), read_ledger(tmp_path / "x")
    assert {entry["world_size"] for entry in b.steps.values()} == {3}
    assert compare(a, b) is None
    assert extent(a, b) == Extent(common=6, digests=6, only_a=0, only_b=0)


@pytest.mark.parametrize(
    ("breaker", "fields", "words"),
    [
        ("weights", ["loss", "grad_norm", "digest"], "The forward differs, on the same samples"),
        ("backward", ["grad_norm", "digest"], "The backward or the sum over devices differs"),
        ("rate", ["lr", "digest"], "The learning rates differ"),
        ("momentum", ["digest"], "Only the state differs: the optimizer's update, or a buffer"),
        ("buffer", ["digest"], "Only the state differs: the optimizer's update, or a buffer"),
    ],
)
def test_what_was_broken_in_a_run_is_found_at_its_step(whole, tmp_path, breaker, fields, words):
    write(tmp_path / "x", break_at=3, breaker=breaker)
    difference = compare(read_ledger(whole), read_ledger(tmp_path / "x"))
    assert (difference.step, difference.agreed, difference.proven) == (4, 3, 3)
    assert [change.field for change in difference.fields] == fields
    assert cause(difference).startswith(words)
    assert "state before" not in cause(difference)


def test_another_order_of_the_data_is_the_data_s_difference(whole, tmp_path):
    write(tmp_path / "x", order_seed=5)
    difference = compare(read_ledger(whole), read_ledger(tmp_path / "x"))
    assert difference.step == 1
    assert difference.fields[0].field == "ids"
    assert cause(difference).startswith("The data differ")


def test_without_a_checksum_each_step_a_change_of_state_shows_later(whole, tmp_path):
    write(tmp_path / "x", break_at=3, breaker="momentum", digest_every=100)
    difference = compare(read_ledger(whole), read_ledger(tmp_path / "x"))
    assert difference.step == 5
    assert "or the state before: no checksum of it was compared" in cause(difference)


def run(*arguments):
    result = CliRunner().invoke(command.app, [str(item) for item in arguments])
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_diff_of_equal_runs_says_how_much_is_equal(whole, tmp_path):
    code, shown = run("diff", whole, whole)
    assert code == 0
    assert "the same bits in 6 steps, and in 6 checksums of the state\n" in shown
    assert "settings: not compared" in shown
    ended = put(tmp_path / "x", line(0), event("end", 1, digest="aa"))
    assert "the same bits in 1 step, and in the digest of the final state" in run("diff", ended, ended)[1]
    unproven = put(tmp_path / "y", line(0))
    assert "the same bits in 1 step; no checksum of the state was compared" in run("diff", ended, unproven)[1]


def test_what_a_ledger_holds_does_not_reach_the_terminal_raw(tmp_path):
    evil = "\x1b]0;title\x07\x9b2J\ud800"
    one = put(tmp_path / "a", event(evil, 0, note=evil, **{evil: 1}), line(0, ids=evil, digest=evil), line(0, ids="x"))
    other = put(tmp_path / "b", line(0, ids=evil + evil), b"")
    for words in (("show", one), ("show", one, "--events"), ("diff", one, other)):
        _, shown = run(*words)
        assert not set("\x1b\x07\x9b\ud800") & set(shown), words
        assert "�]0;title��2J�" in shown


def test_diff_names_step_fields_and_cause_and_exits_with_1(whole, tmp_path):
    write(tmp_path / "x", break_at=3, breaker="backward")
    code, shown = run("diff", whole, tmp_path / "x")
    assert code == 1
    headline = "step 4 is the first that differs, in gradient norm and state; the 3 steps before it agree"
    assert headline in shown
    assert "of it" in shown
    assert "The backward or the sum over devices differs: the loss is the same." in shown


def test_diff_shows_how_the_contracts_differ(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        put(tmp_path / name / "ledger.jsonl", line(0))
        (tmp_path / name / "run.json").write_text(json.dumps({"seed": seed, "processor": f"[{name}]", "epochs": seed}))
    code, shown = run("diff", tmp_path / "a", tmp_path / "b")
    assert code == 0
    rows = [row.split() for row in shown.splitlines()]
    assert ["seed", "0", "1", "the", "order"] in [row[:5] for row in rows]
    assert ["processor", "[a]", "[b]"] in [row[:3] for row in rows]
    assert "epochs" not in shown
    code, printed = run("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert json.loads(printed)["contract"][0] == {"field": "seed", "before": 0, "after": 1, "breaks": True}


def test_diff_as_json_tells_everything(whole, tmp_path):
    write(tmp_path / "x", break_at=3, breaker="weights", steps=5)
    code, printed = run("diff", whole, tmp_path / "x", "--json")
    found = json.loads(printed)
    assert code == 1
    assert {key: found[key] for key in ("common", "digests", "only_a", "only_b")} == {
        "common": 5,
        "digests": 5,
        "only_a": 1,
        "only_b": 0,
    }
    assert (found["difference"]["step"], found["difference"]["agreed"]) == (4, 3)
    assert [field["field"] for field in found["difference"]["fields"]] == ["loss", "grad_norm", "digest"]
    assert found["difference"]["cause"].startswith("The forward differs")
    assert found["contract"] is None


def test_diff_tells_of_torn_lines_garbage_and_repeats(tmp_path):
    torn = put(tmp_path / "x", line(0), b"oops", line(0, loss="0x1.9p+0"), rest=b"{")
    _, shown = run("diff", torn, torn)
    assert "note: A: the last line is unfinished, and left out" in shown
    assert f"note: B: line 2 {NO_CHECKSUM}" in shown
    assert "note: A: step 0 was taken twice and came out otherwise: loss 1.5 before, 1.5625 after" in shown


def test_a_run_s_folder_alone_is_shown(tmp_path):
    path = put(tmp_path / "x", line(1))
    assert run(path, "--last", "1") == run("show", path, "--last", "1")


def test_what_is_no_run_is_bad_usage(whole, tmp_path):
    with pytest.raises(UsageError, match="no ledger at") as caught:
        run("diff", whole, tmp_path)
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match=r"without a step in common \(6 in .* and 1 in .*\); name two runs that took"):
        run("diff", whole, put(tmp_path / "x", line(77)))


def test_show_ends_with_the_last_steps_and_what_happened_meanwhile(tmp_path):
    lines = [event("start", 0, world_size=2), *(line(k) for k in range(9)), event("death", 8, rank=1, cause="SIGKILL")]
    path = put(tmp_path / "x", *lines, line(9, skipped=True), rest=b"{")
    _, shown = run("show", path, "--last", "2")
    rows = [row.split() for row in shown.splitlines() if row.strip()]
    assert [row[0] for row in rows if row[0].isdigit()] == ["8", "9"]
    assert ["9", "skipped"] in [row[:2] for row in rows]
    assert any(row[2:] == ["8", "death", "rank", "1,", "cause", "SIGKILL"] for row in rows)
    assert not any("start" in row for row in rows)
    assert "note: the last line is unfinished, and left out" in shown


def test_show_events_and_json(tmp_path):
    path = put(tmp_path / "x", event("start", 0, devices=["cpu", "[b]"]), line(0), event("end", 1, digest="aa"))
    _, shown = run("show", path, "--events")
    assert 'devices ["cpu", "[b]"]' in shown
    assert "gradient norm" not in shown
    _, printed = run("show", path, "--json", "--last", "1")
    assert json.loads(printed) == {
        "num_steps": 1,
        "num_events": 2,
        "steps": [line(0)],
        "events": [event("end", 1, digest="aa")],
        "notes": [],
    }
    assert "no event" in run("show", put(tmp_path / "y", line(0)), "--events")[1]
    assert "no step yet" in run("show", put(tmp_path / "z"))[1]


def test_a_ledger_is_read_without_torch_or_numpy(whole):
    program = f"""
import sys, typer
from samestep.cli.ledger import app
from samestep.cli.runs import runs
try:
    app(["diff", {str(whole)!r}, {str(whole)!r}])
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {{"torch", "numpy", "matplotlib"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
