"""The ledger: a line a step that parses, loses no bit, and is whole or not there."""

import json
import math
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from train_programs import make_trainer, points
from worlds import in_turns

from samestep.data.batch import Batch
from samestep.engine.result import StepResult
from samestep.errors import RunFolderError
from samestep.train.ledger import LedgerWriter, ids_hash, learning_rates, ledger_entry
from samestep.train.run import Run

FLOATS = [0.1, -0.0, math.pi, 5e-324, 1.7e308, math.inf, -math.inf, math.nan, 1 / 3]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def result_of(total, norm, batch, skipped=0.0):
    scalars = torch.tensor([total, 1.0, norm, skipped, 0.0, total, 1.0, norm], dtype=torch.float64)
    return StepResult(3, batch.length, batch, 1, scalars)


@pytest.mark.parametrize("value", FLOATS)
def test_floats_come_back_to_the_bit(tmp_path, value):
    batch = Batch(2, {}, 1, 4, lambda: np.array([5, 3]))
    entry = ledger_entry(result_of(value, value, batch), batch, [value], 2)
    with LedgerWriter(tmp_path / "ledger.jsonl") as ledger:
        ledger.write(entry)
    (line,) = read(tmp_path / "ledger.jsonl")
    for text in (line["loss"], line["grad_norm"], line["lr"][0]):
        assert np.float64(float.fromhex(text)).tobytes() == np.float64(value).tobytes()


def test_an_entry_says_what_the_step_was():
    batch = Batch(2, {}, 1, 4, lambda: np.array([5, 3]))
    assert ledger_entry(result_of(0.5, 2.0, batch, skipped=1.0), batch, [0.1, 0.2], 3) == {
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
        lines[world_size] = read(tmp_path / str(world_size) / "ledger.jsonl")
        assert {line.pop("world_size") for line in lines[world_size]} == {world_size}
    assert lines[1] == lines[3]
    assert [(line["step"], line["epoch"], line["position"], line["num_samples"]) for line in lines[1]] == [
        (4 * epoch + k, epoch, 16 * k, 16 if k < 3 else 13) for epoch in (0, 1) for k in range(4)
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


def test_a_flush_hands_all_lines_over(tmp_path):
    ledger = LedgerWriter(tmp_path / "ledger.jsonl")
    ledger.write({"step": 0})
    ledger.flush()
    assert read(tmp_path / "ledger.jsonl") == [{"step": 0}]
    ledger.close()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RunFolderError, match=r"cannot write .*nowhere/ledger.jsonl: No such file or directory"):
        LedgerWriter(tmp_path / "nowhere" / "ledger.jsonl")


FULL = """
import resource, signal, sys
from pathlib import Path
from samestep.errors import RunFolderError
from samestep.train.ledger import LedgerWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    with LedgerWriter(Path(sys.argv[1])) as ledger:
        for step in range(2_000):
            ledger.write({"step": step})
except RunFolderError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit on the size of files here")
def test_a_full_disk_is_a_sentence_and_leaves_whole_lines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.startswith(f"cannot write {path}: File too large; free some space, or choose another folder")
    assert done.stdout.count("\n") == 1
    assert path.stat().st_size > 8_000
    assert path.read_bytes().endswith(b"}\n")
    assert [line["step"] for line in read(path)] == list(range(len(read(path))))
