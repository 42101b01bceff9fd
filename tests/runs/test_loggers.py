"""Loggers: what is written can be read back by others, and a full disk is an error that says what to do."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from samestep.errors import RunFolderError, UsageError
from samestep.runs.recorder import JsonlLogger, Logger, TensorBoardLogger


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.fixture(params=[JsonlLogger, TensorBoardLogger])
def logger_class(request):
    return request.param


def test_each_logger_fulfils_the_protocol_and_closes_twice(logger_class, tmp_path):
    logger = logger_class(tmp_path / "deep" / "place")
    assert isinstance(logger, Logger)
    logger.log(1, {"loss/train": 0.5})
    logger.close()
    logger.close()


def test_scalars_are_a_json_object_a_line_and_are_there_before_the_file_is_closed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log(1, {"loss/train": 0.1, "größe": 2})
    logger.log(2, {})
    assert lines(path) == [{"step": 1, "loss/train": 0.1, "größe": 2.0}, {"step": 2}]
    logger.close()


def test_scalars_of_numpy_and_torch_are_taken_and_numbers_that_json_lacks_are_strings_that_float_reads(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    scalars = {"a": np.float32(0.5), "b": torch.tensor(0.25), "c": np.float64("nan"), "d": math.inf, "e": -math.inf}
    logger.log(np.int64(4), scalars | {"f": 1e300})
    logger.close()
    (line,) = lines(path)
    assert line == {"step": 4, "a": 0.5, "b": 0.25, "c": "nan", "d": "inf", "e": "-inf", "f": 1e300}
    assert math.isnan(float(line["c"]))


def test_a_second_logger_appends_and_drops_a_line_that_a_crash_left_unfinished(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        logger = JsonlLogger(path)
        logger.log(step, {"loss": step})
        logger.close()
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo' + b"x" * 200_000)
    logger = JsonlLogger(path)
    logger.log(3, {"loss": 3})
    logger.close()
    assert lines(path) == [{"step": step, "loss": step} for step in (1, 2, 3)]
    path.write_bytes(b'{"step"')
    JsonlLogger(path).close()
    assert path.read_bytes() == b""


def test_a_scalar_named_step_is_refused(tmp_path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    with pytest.raises(UsageError, match="'step'"):
        logger.log(1, {"step": 2.0})
    logger.close()


def test_tensorboard_reads_the_events_back_under_the_tags_given(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log(1, {"loss/train": 0.5, "accuracy/eval": 1})
    logger.log(2, {"loss/train": math.inf})
    read_before_closing = events(tmp_path)
    logger.close()
    assert (
        events(tmp_path) == read_before_closing == {"loss/train": [(1, 0.5), (2, math.inf)], "accuracy/eval": [(1, 1)]}
    )


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path):
    first = TensorBoardLogger(tmp_path)
    for step in range(1, 6):
        first.log(step, {"loss": step})
    first.close()
    second = TensorBoardLogger(tmp_path, purge_step=4)
    for step in range(4, 7):
        second.log(step, {"loss": -step})
    second.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert events(tmp_path) == {"loss": [(1, 1), (2, 2), (3, 3), (4, -4), (5, -5), (6, -6)]}


def test_loggers_in_one_folder_at_one_time_write_files_of_their_own(tmp_path):
    loggers = [TensorBoardLogger(tmp_path) for _ in range(3)]
    for logger in loggers:
        logger.close()
    assert len(list(tmp_path.iterdir())) == 3


LIMITED = """
import resource, sys
from pathlib import Path
from samestep.errors import RunFolderError
from samestep.runs.recorder import {logger}

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
logger = {logger}(Path(sys.argv[1]))
for step in range(1000):
    try:
        logger.log(step, {{"loss/train": 0.5}})
    except RunFolderError as error:
        print(error)
        break
print(step)
logger.close()
"""


def test_a_file_that_cannot_grow_ends_with_a_whole_record_and_one_clear_error(logger_class, tmp_path):
    place = tmp_path / "place"
    script = LIMITED.format(logger=logger_class.__name__)
    done = subprocess.run(
        [sys.executable, "-c", script, place], capture_output=True, text=True, check=True, timeout=120
    )
    message, step = done.stdout.splitlines()
    assert done.stderr == ""
    assert message.startswith(f"cannot write {place}")
    assert "free some space" in message
    assert "--run-dir" in message
    if logger_class is JsonlLogger:
        assert [line["step"] for line in lines(place)] == list(range(int(step)))
    else:
        assert [read for read, _ in events(place)["loss/train"]] == list(range(int(step)))


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_option(logger_class, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", tmp_path / "file"):
        if logger_class is JsonlLogger:
            place = place / "metrics.jsonl"
        with pytest.raises(RunFolderError, match="--run-dir"):
            logger_class(place)
