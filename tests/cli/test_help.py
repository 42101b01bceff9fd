"""The help of every command: every option can be read whole on a narrow terminal, and typed in both spellings."""

import sys

import pytest
from cli_commands import COMMANDS

from samestep.cli.main import main


def said_by(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["samestep", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code, capsys.readouterr()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_can_be_read_whole_at_80_columns(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, said = said_by(capsys, monkeypatch, *words, "--help")
    assert code == 0
    assert max(map(len, said.out.splitlines())) <= 80
    shown = said.out.replace(",", " ").split()
    options = [name for option in COMMANDS[words].params for name in (*option.opts, *option.secondary_opts)]
    assert [name for name in options if name.startswith("--") and name not in shown] == []


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--nproc_per_node", "0", "train.py"),
        ("run", "--nproc_per_node=0", "train.py"),
        ("verify", "--hang_seconds=x", "train.py"),
        ("train", "--min_devices=0", "lenet"),
        ("train", "--global_batch_size=x", "lenet"),
    ],
)
def test_options_may_be_spelled_with_underscores(words, capsys, monkeypatch):
    code, said = said_by(capsys, monkeypatch, *words)
    assert code == 2
    hyphens = [word.replace("_", "-") if word.startswith("--") else word for word in words]
    assert said_by(capsys, monkeypatch, *hyphens) == (code, said)
    assert "No such option" not in said.err


def test_what_follows_a_script_keeps_its_underscores(capsys, monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(sys.argv[1:] != ['--batch_size', '3', 'a_b'])\n")
    words = ("run", "--devices", "cpu:1", str(script), "--batch_size", "3", "a_b")
    assert said_by(capsys, monkeypatch, *words)[0] == 0
