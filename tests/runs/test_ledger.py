"""The ledger: a line a step that parses, loses no bit, and is whole or not there."""

import math
from contextlib import closing
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from train_programs import make_trainer, points
from worlds import in_turns

from samestep.data.batch import Batch
from samestep.engine.result import StepResult
from samestep.errors import RunFolderError
from samestep.run.run import Run
from samestep.runs.ledger import TIMED_KINDS, LedgerWriter, from_line, ids_hash, learning_rates, ledger_entry, to_line

FLOATS = [0.1, -0.0, math.pi, 5e-324, 1.7e308, math.inf, -math.inf, math.nan, 1 / 3]


def read(path):
    return [from_line(line) for line in path.read_bytes().splitlines()]


def result_of(total, norm, batch, skipped=0.0):
    scalars = torch.tensor([total, 1.0, norm, skipped, 0.0, total, 1.0, norm], dtype=torch.float64)
    return StepResult(3, batch.length, batch, 1, scalars)


@pytest.mark.parametrize("value", FLOATS)
def test_floats_come_back_to_the_bit(tmp_path, value):
    batch = Batch(2, {}, 1, 4, lambda: np.array([5, 3]))
    entry = ledger_entry(result_of(value, value, batch), batch, [value], 2)
    with closing(LedgerWriter(tmp_path / "ledger.jsonl")) as ledger:
        ledger.write(entry)
    (line,) = read(tmp_path / "ledger.jsonl")
    for text in (line["loss"], line["grad_norm"], line["lr"][0]):
        assert np.float64(float.fromhex(text)).tobytes() == np.float64(value).tobytes()


def test_an_entry_says_what_the_step_was():
    batch = Batch(2, {}, 1, 4, lambda: np.array([5, 3]))
    result = result_of(0.5, 2.0, batch, skipped=1.0)
    entry = ledger_entry(result, batch, [0.1, 0.2], 3)
    assert ledger_entry(result, batch, [0.1, 0.2], 3, digest="00ff") == entry | {"digest": "00ff"}
    assert entry == {
        "step": 3,
        "epoch": 1,
        "position": 4,
        "num_samples": 2,
        "ids": ids_hash(np.array([5, 3])),
        "loss": (0.5).hex(),
        "grad_norm": (2.0).hex(),
        "lr": [(0.1).hex(), (0.2).hex()],
        "skipped": True,
        "world_size": 3,
    }


def test_a_batch_of_the_users_own_has_no_ids():
    batch = Batch(2, {})
    entry = ledger_entry(result_of(0.5, 2.0, batch), None, [], 1)
    assert [entry[k] for k in ("epoch", "position", "ids")] == [None, None, None]


def test_the_hash_of_ids_depends_on_each_and_on_their_order():
    hashes = {ids_hash(np.array(ids)) for ids in ([1, 2, 3], [1, 3, 2], [1, 2], [1, 2, 4], [])}
    assert len(hashes) == 5
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in hashes)
    assert ids_hash(np.array([1, 2], dtype=np.int32)) == ids_hash(np.array([1, 2], dtype=np.int64))


def test_learning_rates_are_those_of_every_group():
    weight = torch.nn.Parameter(torch.zeros(1))
    other = torch.nn.Parameter(torch.zeros(1))
    first = torch.optim.SGD([{"params": [weight], "lr": 0.5}, {"params": [other]}], lr=torch.tensor(0.25))
    assert learning_rates([first, torch.optim.Adam([weight], lr=0.1)]) == [0.5, 0.25, 0.1]


def test_a_run_writes_a_line_a_step_that_does_not_depend_on_the_devices(tmp_path):
    def program(communicator, folder):
        with make_trainer(communicator, run_dir=folder) as trainer:
            trainer.fit(points(), 2)

    lines = {}
    for world_size in (1, 3):
        in_turns(world_size, program, tmp_path / str(world_size))
        written = read(tmp_path / str(world_size) / "ledger.jsonl")
        lines[world_size] = [line for line in written if "event" not in line]
        assert {line.pop("world_size") for line in lines[world_size]} == {world_size}
        times = [line.pop("seconds") for line in lines[world_size]]
        assert all(0 < seconds["compute"] < 60 and seconds.keys() == set(TIMED_KINDS) for seconds in times)
    assert lines[1] == lines[3]
    assert [(line["step"], line["epoch"], line["position"], line["num_samples"]) for line in lines[1]] == [
        (4 * epoch + k + 1, epoch, 16 * k, 16 if k < 3 else 13) for epoch in (0, 1) for k in range(4)
    ]
    loader = Run(16, 4, 2).loader(points(), shuffle=True)
    assert [line["ids"] for line in lines[1]] == [
        ids_hash(loader.ids(e, s, min(s + 16, 61))) for e in (0, 1) for s in range(0, 61, 16)
    ]


def test_lines_are_appended_and_closing_twice_does_nothing(tmp_path):
    for number in range(2):
        ledger = LedgerWriter(tmp_path / "ledger.jsonl")
        ledger.write({"step": number})
        ledger.close()
        ledger.close()
    assert read(tmp_path / "ledger.jsonl") == [{"step": 0}, {"step": 1}]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RunFolderError, match=r"cannot write .*nowhere/ledger.jsonl: No such file or directory"):
        LedgerWriter(tmp_path / "nowhere" / "ledger.jsonl")


LINES = [{"step": 0, "loss": "0x1.8p+0"}, {"event": "stop", "step": 1, "signal": "SIGTERM … gé"}, {"step": 1}]
WHOLE = b"".join(map(to_line, LINES))


def test_a_file_cut_anywhere_is_repaired_when_it_is_opened(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for cut in range(len(WHOLE) + 1):
        path.write_bytes(WHOLE[:cut])
        with closing(LedgerWriter(path)) as ledger:
            ledger.write({"step": 7})
        whole = [line for line in LINES if to_line(line).rstrip() in WHOLE[:cut]]
        assert read(path) == [*whole, {"step": 7}], cut


@pytest.mark.parametrize("rest", [b"\x00" * 5000, b"\xe2\x80", b'{"step": 9', b"[1]", b"9", b'"text"', b"[" * 5000])
def test_what_is_no_object_at_the_end_is_removed(tmp_path, rest):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(WHOLE + rest)
    LedgerWriter(path).close()
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize("length", [10, 65_536 - len(WHOLE), 65_535, 65_536, 65_537, 200_000])
def test_a_torn_line_of_any_length_is_removed_and_a_whole_one_kept(tmp_path, length):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(WHOLE + b'{"step": 5, "note": "' + b"x" * length)
    LedgerWriter(path).close()
    assert path.read_bytes() == WHOLE
    line = to_line({"step": 5, "note": "x" * length}).rstrip()
    path.write_bytes(WHOLE + line)
    with closing(LedgerWriter(path)) as ledger:
        assert ledger.last_step() == 5
    assert path.read_bytes() == WHOLE + line + b"\n"


def test_an_event_is_in_the_file_at_once_and_behind_what_gathered(tmp_path):
    path = tmp_path / "ledger.jsonl"
    before = datetime.now(UTC)
    with closing(LedgerWriter(path)) as ledger:
        ledger.write({"step": 0})
        assert read(path) == []
        ledger.write_event("death", 1, rank=2, cause="SIGKILL")
        step, event = read(path)
    assert step == {"step": 0}
    when = datetime.fromisoformat(event.pop("time"))
    assert before.replace(microsecond=0) <= when <= datetime.now(UTC)
    assert event == {"event": "death", "step": 1, "rank": 2, "cause": "SIGKILL"}


def test_the_last_step_is_that_of_the_file_and_events_are_none(tmp_path):
    with closing(LedgerWriter(tmp_path / "ledger.jsonl")) as ledger:
        assert ledger.last_step() is None
        ledger.write_event("start", 0)
        assert ledger.last_step() is None
        ledger.write({"step": 41})
        assert ledger.last_step() is None
        ledger.flush()
        for _ in range(3000):
            ledger.write_event("checkpoint", 42)
        assert ledger.last_step() == 41
        ledger.write({"step": 7})
        ledger.flush()
        assert ledger.last_step() == 7


def test_garbage_in_the_middle_hides_no_step(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(to_line({"step": 3}) + b'{"step\n\xff\xff\n')
    with closing(LedgerWriter(path)) as ledger:
        assert ledger.last_step() == 3


def test_a_ledger_that_was_removed_meanwhile_is_an_error_and_not_written_to_in_vain(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = LedgerWriter(path)
    ledger.write_event("start", 0)
    path.unlink()
    with pytest.raises(RunFolderError, match=r"ledger\.jsonl: it was removed while the run was writing to it"):
        ledger.write_event("checkpoint", 3)
    ledger.close()
    assert not path.exists()


def test_a_ledger_that_was_moved_or_replaced_meanwhile_gets_its_lines_and_is_an_error(tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "ledger.jsonl"
    with closing(LedgerWriter(path)) as ledger:
        (tmp_path / "run").rename(tmp_path / "moved")
        for _ in range(2):
            with pytest.raises(RunFolderError, match=r"it was moved or replaced meanwhile.*--resume FOLDER"):
                ledger.write_event("checkpoint", 3)
            path.parent.mkdir(exist_ok=True)
            path.touch()
    assert path.read_bytes() == b""
    assert [entry["event"] for entry in read(tmp_path / "moved" / "ledger.jsonl")] == ["checkpoint"] * 2
