"""The help of every command: every option can be read whole on a narrow terminal, and typed in both spellings."""

import sys

import pytest
from cli_commands import COMMANDS, samestep

from samestep.cli.main import main
from samestep.recipes.catalog import NAMES


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
    assert "<bool>" not in said.out, "a flag stands without a type"
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
    ],
)
def test_options_may_be_spelled_with_underscores(words, capsys, monkeypatch):
    code, said = said_by(capsys, monkeypatch, *words)
    assert code == 2
    hyphens = [word.replace("_", "-") if word.startswith("--") else word for word in words]
    assert said_by(capsys, monkeypatch, *hyphens) == (code, said)
    assert "No such option" not in said.err


@pytest.mark.parametrize("words", [("train",), ("run",), ("verify",)], ids=" ".join)
def test_the_options_of_a_long_help_lie_in_panels(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = said_by(capsys, monkeypatch, *words, "--help")[1].out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("╭─ Options"))
    general = {line.split()[1] for line in lines[first : lines.index(f"╰{'─' * 78}╯", first)] if line[2:4] == "--"}
    assert general <= {"--json", "--help"}


def offered(capsys, monkeypatch, *words):
    """What bash is offered for the last word."""
    monkeypatch.setenv("_SAMESTEP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(("samestep", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    code, said = said_by(capsys, monkeypatch)
    assert (code, said.err) == (0, "")
    return said.out.split()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("tr",), ["train"]),
        (("train", ""), list(NAMES)),
        (("run", "--start-method", ""), ["fork", "spawn"]),
        (("run", ""), []),  # files, which the shell offers by itself
        (("verify", "v"), ["vgg", "vary.py"]),
        (("verify", "--tier", "a"), ["allclose"]),
        (("replay", "runs/"), []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_shell_is_offered_what_can_follow(words, wanted, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vary.py").touch()
    assert offered(capsys, monkeypatch, *words) == wanted


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown_for_every_shell(shell, capsys, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # then the shell is named
    code, said = said_by(capsys, monkeypatch, "--show-completion", shell)
    assert code == 0
    assert f"_SAMESTEP_COMPLETE=complete_{shell}" in said.out


def test_completion_imports_no_torch(tmp_path):
    variables = {"COMP_WORDS": "samestep train l", "COMP_CWORD": "2", "_SAMESTEP_COMPLETE": "complete_bash"}
    done = samestep(cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1", **variables)
    assert done.stdout.split() == ["lenet"]
    assert "samestep.cli.main" in done.stderr
    assert not any(line.split("|")[-1].strip() == "torch" for line in done.stderr.splitlines())


def test_what_follows_a_script_keeps_its_underscores(capsys, monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(sys.argv[1:] != ['--batch_size', '3', 'a_b'])\n")
    words = ("run", "--devices", "cpu:1", str(script), "--batch_size", "3", "a_b")
    assert said_by(capsys, monkeypatch, *words)[0] == 0
