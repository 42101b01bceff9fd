"""What the command says of names and values that cannot be: a sentence of readable length on each, and exit code 2."""

import io
import json
import os
import re
import subprocess

import pytest
from cli_commands import SAMESTEP
from rich.console import Console

from samestep.errors import RunFolderError, UsageError
from samestep.text import MAX_LINE, MAX_WORD, make_table, print_table, readable

LONG = "a" * 300


@pytest.mark.parametrize(
    "words",
    [
        *(("report", LONG), ("runs", LONG), ("ledger", "show", LONG), ("export", LONG, "x")),
        *(("replay", LONG, "--step", "1"), ("train", LONG)),
        *(("run", LONG), ("verify", LONG)),
    ],
    ids=lambda words: " ".join(words).replace(LONG, "…"),
)
def test_a_name_that_is_too_long_for_a_file_is_a_sentence(refused, words):
    said = refused(*words)
    # Since Python 3.14 `Path.exists` answers no.
    assert re.search("File name too long|there is no|is not there|no folder|it is one of", said)
    assert said.count("\n") == 1


def test_a_name_with_a_nul_character_is_a_sentence(refused):
    assert refused("report", "a\0b").startswith("samestep: error: got a word with a NUL character in it")


def test_what_is_no_regular_file_is_not_read(refused, tmp_path):
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    for name in ("zero", "fifo"):
        assert "is no regular file" in refused("run", tmp_path / name)
        assert "is no regular file" in refused("ledger", "show", tmp_path / name)


@pytest.mark.parametrize("words", [("train", "mlp"), ("run", __file__), ("verify", __file__)], ids=" ".join)
def test_a_number_of_threads_that_no_machine_has_is_a_sentence(refused, words):
    said = refused(words[0], "--num-threads", "9" * 20, *words[1:])
    assert "--num-threads" in said
    assert "1024" in said


def test_values_that_mean_nothing_to_a_command_are_refused_before_it_begins(refused, tmp_path):
    for seconds in ("0", "-1", "nan", "inf"):
        assert "got --hang-seconds" in refused("verify", "--hang-seconds", seconds, "mlp")
    assert "no ledger at" in refused("ledger", "show", tmp_path)


@pytest.mark.parametrize("words", [["explain"], ["devices"], ["devices", "--json"]], ids=" ".join)
def test_output_that_a_full_disk_refuses_is_an_error(words):
    with open("/dev/full", "w") as full:
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run([*SAMESTEP, *words], stdout=full, stderr=subprocess.PIPE, text=True, env=variables)
    said = "samestep: error: what is printed cannot be written: No space left on device; name another file or folder\n"
    assert (done.returncode, done.stderr) == (1, said)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*SAMESTEP, *words], stdout=writer, stderr=subprocess.PIPE, text=True, env=variables)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("words", [["devices"], ["run", "train.py"], ["train", "mlp"]], ids=" ".join)
def test_a_working_folder_that_was_removed_is_a_sentence(tmp_path, words):
    command = 'cd "$1"; rmdir "$1"; shift; exec "$@"'
    folder = tmp_path / "gone"
    folder.mkdir()
    words = ["sh", "-c", command, "sh", str(folder), *SAMESTEP, *words]
    done = subprocess.run(words, capture_output=True, text=True)
    said = "samestep: error: the working folder cannot be used (No such file or directory): change to another\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("place", ["command", "options", "files"])
def test_a_nul_character_in_the_record_of_a_script_is_a_sentence(refused, tmp_path, place):
    record = {"command": ["python", "a.py"], "contract": {}, "options": {}, "files": {}, "folders": [], "changed": []}
    record[place] = {"command": ["python", "a.py", "\0"], "options": {"wrap": "\0"}, "files": {"a\0": ""}}[place]
    (tmp_path / "script.json").write_text(json.dumps({**record, "exit_code": 0}))
    assert "is no record of a script's run: see a NUL character" in refused("audit", tmp_path)


def test_a_script_whose_steps_are_its_own_cannot_be_audited(refused, tmp_path):
    (tmp_path / "script.py").write_text("import torch\nmodel = torch.nn.Linear(1, 1)\n")
    said = refused("run", "--audit", 2, "--devices", "cpu:2", tmp_path / "script.py")
    assert "got --audit 2 for" in said
    assert "only steps of samestep.Run can be computed again by another device. Leave --audit out" in said
    assert "got audit='2:ask'" in refused("run", "--audit", "2:ask", tmp_path / "script.py")
    assert "(--audit)" in refused("train", "mlp", "--audit", 0)


def test_messages_quote_no_more_than_can_be_read_and_nothing_that_moves_the_cursor(refused):
    said = refused("run", "--devices", "x" * 10_000, __file__)
    assert len(said) < MAX_WORD + 400
    assert str(UsageError("a\x1b[2J\tb\udcff\nc")) == "a�[2J   b�\nc"
    assert str(RunFolderError("y " * 9000)) == readable("y " * 9000)
    assert len(readable("y " * 9000)) == MAX_LINE
    assert readable("got " + "z" * MAX_WORD) == "got " + "z" * MAX_WORD


def test_a_run_folder_of_an_earlier_version_is_refused(refused, tmp_path):
    (tmp_path / "run.json").write_text('{"num_shards": 8}')
    (tmp_path / "ledger.jsonl").write_text("")
    assert f"{tmp_path} was written by an earlier samestep" in refused("replay", "--step", 1, tmp_path)


@pytest.mark.parametrize(
    ("width", "titles", "left_out"),
    [
        (60, ["run", "state", "size"], ""),
        (28, ["run", "state"], "left out, for want of width: size; --json shows all"),
        (18, ["run"], "left out, for want of width: size, state; --json shows all"),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_ones(width, titles, left_out):
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    table = make_table("run", "state", "size")
    table.add_row("lenet-20261123", "stopped", "12 MiB")
    print_table(console, table, ["size", "state"], "--json")
    lines = [line.strip() for line in out.getvalue().splitlines() if line.strip()]
    assert lines[0].split() == titles
    assert lines[2].split()[0] == "lenet-20261123"
    assert " ".join(lines[3:]) == left_out
