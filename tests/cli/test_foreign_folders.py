"""Run folders of unknown origin: no command writes elsewhere, hangs, runs a program or moves the cursor because of one.

Each entry of a run's folder is replaced by a link, a pipe or an endless file, and each command is called on it.
"""

import hashlib
import json
import os
import shlex
import shutil
import sys
import timeit
import unicodedata
from pathlib import Path

import pytest
from cli_commands import samestep, write_table

from samestep.checkpoint.run_folder import is_signed, signed
from samestep.cli.main import main
from samestep.files import write_json
from samestep.runs.ledger import TIMED_KINDS, to_line
from samestep.runs.recorder import file_sha256
from samestep.text import one_line

CHECKPOINT = "checkpoints/step-00000004"
WRITTEN = ("run.json", "ledger.jsonl", "metrics.jsonl", ".lock")
READ = {  # by entry, the commands that must name it
    "run.json": {"runs", "report", "replay", "audit", "attest"},
    "ledger.jsonl": {"runs", "report", "ledger", "replay", "audit", "attest"},
    "metrics.jsonl": {"report"},
    ".lock": set(),
    "checkpoints/latest": {"latest"},
    f"{CHECKPOINT}/manifest.json": {"export", "audit", "attest"},
    f"{CHECKPOINT}/model.safetensors": {"export", "audit"},
    f"{CHECKPOINT}/state.json": {"export", "audit"},
    "weights.safetensors": {"audit", "attest"},
}
FOLDERS = ("checkpoints", "tensorboard")
COMMANDS = {
    "runs": ("runs", "a"),
    "report": ("report", "a", "--output", "out"),
    "ledger": ("ledger", "show", "a"),
    "replay": ("replay", "a", "--step", "1"),
    "attest": ("attest", "a"),
    "audit": ("audit", "a"),
    "export": ("export", f"a/{CHECKPOINT}", "out.safetensors"),
    "latest": ("export", "a/checkpoints/latest", "latest.safetensors"),
}
RESUME = (
    "train",
    "mlp",
    "--data",
    "table.csv",
    "--epochs",
    "3",
    "--no-portable",
    "--devices",
    "cpu:2",
    "--resume",
    "a",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with a run, `a`, of two epochs on two devices."""
    folder = tmp_path_factory.mktemp("recorded")
    write_table(folder / "table.csv")
    words = ("--epochs", 2, "--devices", "cpu:2", "--run-dir", "a", "--checkpoint-steps", 2)
    words += ("--no-portable",)  # or commands in this process would cap its kernels
    done = samestep("train", "mlp", "--data", folder / "table.csv", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "a" / ".lock").touch()
    return folder


@pytest.fixture
def folder(recorded, tmp_path, monkeypatch):
    """A copy of it, to change, which is the working folder."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    return tmp_path


def said(words, monkeypatch, capsys):
    """The exit code of `samestep WORDS`, called here, and all that it printed."""
    monkeypatch.setattr(sys, "argv", ["samestep", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code, "".join(capsys.readouterr())


def spoil(path, kind, aside):
    """Replaces a file by a link to its content elsewhere, a pipe, or a file that is endless and takes no space."""
    if kind == "link":
        path.rename(aside)
        path.symlink_to(aside)
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        os.truncate(path, 0)
        os.truncate(path, 1 << 40)


def mine(path):
    """What a user has at a path: the content of files, and when they were changed."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {file: (file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else b"") for file in files}


REASONS = {"link": "is a symbolic link", "pipe": "is no regular file", "endless": "bytes"}


# What opens a file refuses links and pipes alike; where it ends is told by each kind of file in its own way.
SPOILT = [*((entry, kind) for kind in ("link", "endless") for entry in READ), ("run.json", "pipe")]


@pytest.mark.parametrize(("entry", "kind"), SPOILT)
def test_no_command_follows_a_link_or_waits_for_a_pipe_or_reads_without_end(folder, monkeypatch, capsys, entry, kind):
    aside = folder / "mine"
    spoil(folder / "a" / entry, kind, aside)
    before = mine(aside) if kind == "link" else None
    for command in COMMANDS if kind == "link" else READ[entry] or COMMANDS:
        code, text = said(COMMANDS[command], monkeypatch, capsys)
        assert code in (0, 1, 2), text
        if command in READ[entry]:
            assert os.path.basename(entry) in text, (command, text)
            assert REASONS[kind] in text, (command, text)
    if (entry in WRITTEN and kind != "endless") or (entry == "run.json"):
        code, text = said(RESUME, monkeypatch, capsys)
        assert code == 2, text
        assert "samestep: error: " in text
        assert f"a/{entry}" in text
        assert REASONS[kind] in text
    assert kind != "link" or mine(aside) == before


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_within_a_run_s_that_is_a_link_is_not_written_to(folder, monkeypatch, capsys, name):
    (folder / "a" / name).rename(folder / "mine")
    (folder / "a" / name).symlink_to(folder / "mine")
    before = mine(folder / "mine")
    code, text = said(RESUME, monkeypatch, capsys)
    assert code == 2
    assert text.startswith(f"samestep: error: a/{name}: it is a symbolic link"), text
    assert mine(folder / "mine") == before


def test_a_run_s_folder_may_itself_be_a_link_or_below_one(folder):
    (folder / "scratch").mkdir()
    (folder / "a").rename(folder / "scratch" / "a")
    (folder / "disk").symlink_to("scratch")
    (folder / "a").symlink_to("disk/a")
    done = samestep(*RESUME, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout


def test_a_run_whose_ledger_is_endless_is_refused_in_a_sentence(folder):
    spoil(folder / "a" / "ledger.jsonl", "endless", None)
    done = samestep(*RESUME, cwd=folder)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "a/ledger.jsonl: it has a line of 16777216 bytes or more" in done.stderr


ODD = "\x1b]0;owned\x07\x1b[31m\x9b2J\r\x08\u202e\u2066\u200b\u2028\nFORGED"
ODD_COMMANDS = (
    *(("runs",), ("runs", "runs/a"), ("runs", "nowhere"), ("report", "runs/a", "runs/b")),
    *(("ledger", "show", "runs/a", "--events"), ("ledger", "diff", "runs/a", "runs/b")),
    *(("replay", "runs/a", "--step", "1"), ("audit", "runs/a"), ("train", "mlp", "--resume", "runs/a")),
    *(("export", "runs/a/checkpoints/latest", "out"), ("export", "runs/a", "out")),
)


def make_odd(folder):
    """Two runs with control characters in every text of their files and in their names, as a stranger's may have."""
    (folder / "runs").mkdir()
    for name, seed in (("a", 0), ("b", 1)):
        place = folder / "runs" / f"{name}{ODD}"
        shutil.copytree(folder / "a", place)
        record = {"data": ODD, "command": ["python", ODD], ODD: ODD, "precision": ODD}
        record |= {"optimizer": {"class": ODD}, "devices": [ODD], "device_kind": ODD, "seed": f"{ODD}{seed}"}
        record |= {"versions": {ODD: f"{seed}"}, "working_folder": ODD, "global_batch_size": 8, "num_microbatches": ODD}
        write_json(place / "run.json", record)
        lines = [{"step": 0, ODD: 1.0}, {"step": 1, "epoch": 1.0, f"{ODD}/eval": 0.5, ODD: 2, f"seconds/{ODD}": 1.0}]
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        step = {"num_samples": 8, "ids": ODD, "loss": "0x1p+0", "grad_norm": "0x1p+0", "lr": [], "world_size": ODD}
        events = [{"event": ODD, "step": 1, "time": ODD, ODD: ODD}, {"event": "death", "step": 1, "cause": ODD}]
        events += [{"event": "resume", "step": 1, "from": ODD}, {"event": "stop", "step": 2, "signal": ODD}]
        entries = [{"step": number, **step, "digest": f"{ODD}{number}{seed}"} for number in range(2)] + events
        (place / "ledger.jsonl").write_bytes(b"".join(map(to_line, entries)) + b'{"step": 9}\n')
        (place / "checkpoints" / "latest").write_text(ODD)
        (place / "checkpoints" / f"step-{ODD}").mkdir()
    return {name: folder / "runs" / f"{name}{ODD}" for name in "ab"}


@pytest.mark.parametrize("words", ODD_COMMANDS, ids=" ".join)
def test_control_characters_of_names_and_values_are_shown_and_never_sent(folder, monkeypatch, capsys, words):
    places = make_odd(folder)
    named = {"runs/a": places["a"], "runs/b": places["b"], "nowhere": f"nowhere{ODD}"}
    for short, name in named.items():
        words = [word.replace(short, str(name)) for word in words]
    code, text = said(words, monkeypatch, capsys)
    assert code in (0, 1, 2)
    assert "Traceback" not in text
    assert not {char for char in text if not char.isprintable()} - {"\n"}, text
    if "samestep: error: " not in text:  # a message may have several lines
        assert not [line for line in text.splitlines() if line.startswith("FORGED")], text
    assert words[0] == "train" or "�" in text or r"\x1b" in text
    pages = [page.read_text() for page in (*folder.rglob("*.html"), *Path().rglob("*.html"))]
    assert bool(pages) == (words[0] == "report" and code == 0), text
    assert not [char for page in pages for char in page if unicodedata.category(char) == "Cf"]


def test_each_character_that_has_no_width_of_its_own_or_turns_a_line_is_replaced():
    kept = {chr(code) for code in range(0x110000)} - {*one_line("".join(map(chr, range(0x110000))))}
    assert {unicodedata.category(each) for each in kept} == {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert one_line("née 数据 \u00a0🤖\ue000\U000e01f0") == "née 数据 \u00a0🤖\ue000\U000e01f0"


def test_what_is_printed_as_json_is_json_whatever_a_folder_holds(folder, monkeypatch, capsys):
    def refused(constant):
        raise AssertionError(constant)

    record = json.loads((folder / "a" / "run.json").read_text())
    write_json(folder / "a" / "run.json", {**record, "momentum": float("inf")})
    with (folder / "a" / "ledger.jsonl").open("ab") as file:
        for event in ({"event": "audit", "step": 4, "found": float("nan")}, {"event": "checkpoint", "step": {}}):
            file.write(to_line(event))
        file.write(to_line({"event": "checkpoint", "step": 2**64}))
        for number, seconds in enumerate((None, {}, {"data": 1.0}, dict.fromkeys(TIMED_KINDS, "1"))):
            step = {"step": 6 + number, "loss": "0x1p+0", "grad_norm": "0x1p+0", "lr": []}
            file.write(to_line({**step, "seconds": seconds}))
    for words, shown in (
        (("ledger", "show", "a", "--last", 99), '"found": "nan"'),
        (("report", "a", "--output", "out"), '"inf"'),
        (("runs", "a"), '"steps": 9'),
    ):
        code, text = said((*words, "--json"), monkeypatch, capsys)
        assert code == 0
        assert shown in text
        json.loads(text, parse_constant=refused)
    assert said(("attest", "a"), monkeypatch, capsys) == (0, "a/attestation.json\n")


MARK = "import pathlib\npathlib.Path({!r}).touch()\n"
TIMEIT = Path(timeit.__file__)
PROGRAMS = {  # case: who made the record, working folder and command, the recorded hash, and why it is not run, or ""
    "one's own": ("me", ".", ["python", "train.py"], "own", ""),
    "one's own module": ("me", ".", ["python", "-m", "train"], "own", ""),
    "a stranger's": ("stranger", ".", ["python", "train.py"], "own", "which you did not make on this machine"),
    "another's signature": ("another", ".", ["python", "train.py"], "own", "which you did not make on this machine"),
    "an edited command": ("edited", ".", ["python", "train.py"], "own", "or which has changed since"),
    "code by another Python": (
        "stranger",
        "lib",
        ["python", "lib/timeit.py", "CODE"],
        TIMEIT,
        "which you did not make",
    ),
    "code by its module": ("stranger", "lib", ["python", "-m", "timeit", "CODE"], TIMEIT, "which you did not make"),
    "another script": ("me", ".", ["python", "train.py"], "0" * 64, "is not the script that made the run"),
    "no hash": ("me", ".", ["python", "train.py"], None, "is not the script that made the run, of SHA-256 None"),
    "in the folder": ("me", "a", ["python", "train.py"], "own", "came with the folder of the run"),
    "beneath it": ("me", ".", ["python", "a/deep/train.py"], "own", "came with the folder of the run"),
    "by a link": ("me", ".", ["python", "link.py"], "own", "came with the folder of the run"),
    "a module in the folder": ("me", "a", ["python", "-m", "train"], "own", "came with the folder of the run"),
    "a package in the folder": ("me", ".", ["python", "-m", "a.deep"], "own", "came with the folder of the run"),
    "a folder that is gone": ("me", "gone", ["python", "train.py"], "own", "gone, where it was run, is gone"),
    "a module that is not there": ("me", ".", ["python", "-m", "nowhere.train"], "own", "is not the script"),
}
TRUSTED = ("a stranger's", "another script", "in the folder")


@pytest.mark.parametrize(
    ("case", "trust"), [*((case, ()) for case in PROGRAMS), *((case, ("--trust",)) for case in TRUSTED)]
)
def test_a_record_chooses_no_program_unless_its_reader_made_it_or_trusts_it(tmp_path, monkeypatch, capsys, case, trust):
    maker, where, command, recorded, why = PROGRAMS[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "lib").mkdir()
    shutil.copy(TIMEIT, tmp_path / "lib/timeit.py")  # that of another Python
    mark, text = tmp_path / "was run", MARK.format(str(tmp_path / "was run"))
    for name in ("train.py", "a/train.py", "a/deep/train.py", "a/deep/__main__.py"):
        (tmp_path / name).write_text(text)
    (tmp_path / "link.py").symlink_to("a/train.py")
    own = hashlib.sha256(text.encode()).hexdigest()
    hashes = {"own": own, TIMEIT: hashlib.sha256(TIMEIT.read_bytes()).hexdigest()}
    command = [word.replace("CODE", text.replace("\n", ";")) for word in command]
    if command[1].startswith("lib"):
        command[1] = str(tmp_path / command[1])
    record = {"command": command, "working_folder": str(tmp_path / where)}
    record["script_sha256"] = hashes.get(recorded, recorded)
    if maker == "another":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    if maker != "stranger":
        record = signed(record)
        assert is_signed(record)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "a" / "run.json", record | ({"command": [*command, "x"]} if maker == "edited" else {}))
    line = {"step": 1, "loss": "0x1p+0", "grad_norm": "0x1p+0", "lr": []}
    (tmp_path / "a" / "ledger.jsonl").write_bytes(to_line(line))
    for words in (("replay", "a", "--step", 1), ("audit", "a", "--all")):
        code, shown = said((*words, *trust), monkeypatch, capsys)
        assert code == 2, shown
        assert f"samestep: running {shlex.join(command)}" in shown
        assert mark.exists() == (not why or bool(trust)), shown
        assert ("ended before a Trainer of its own began to fit" if mark.exists() else why) in shown
        assert mark.exists() or "--trust" in shown
        mark.unlink(missing_ok=True)


RECIPE = ["python", "-m", "samestep.recipes.mlp"]


@pytest.mark.parametrize("command", [["python", "train.py"], RECIPE], ids=["a script", "a recipe"])
def test_a_script_s_record_chooses_no_program_either(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "train.py").write_text(MARK.format(str(tmp_path / "was run")))
    record = {"command": command, "working_folder": str(tmp_path), "exit_code": 0}
    record |= {"script_sha256": file_sha256(tmp_path / "train.py"), "options": {}, "contract": {}, "folders": []}
    write_json(tmp_path / "a" / "script.json", {**record, "files": {"x": "0"}, "changed": []})
    code, text = said(("audit", "a"), monkeypatch, capsys)
    assert code == 2
    assert f"samestep: running {shlex.join(command)}: " in text
    assert "which you did not make on this machine" in text
    assert not (tmp_path / "was run").exists()


PRIVATE = "diary.csv"
ASKS = "which you did not make on this machine, or which has"
RECIPES = {  # the recipe and arguments of a stranger's record, the command, and what it says
    "a file": (("mlp", "--data", PRIVATE), ("audit", "a", "--all"), ASKS),
    "a file to replay": (("mlp", f"--data={PRIVATE}"), ("replay", "a", "--step", 1), ASKS),
    "a folder": (("lenet", "--data", "."), ("audit", "a"), ASKS),
    "a download": (("lenet", "--data", "mnist"), ("audit", "a"), ASKS),
    "a large model": (("gpt", "--head-width", "16384"), ("audit", "a"), "larger than its checkpoint"),
    "a deep model": (("gpt", "--layers", str(10**9)), ("replay", "a", "--step", 1), "larger than its"),
    "an unknown argument": (("mlp", "--nosuch", "1"), ("audit", "a"), "unrecognized arguments: --nosuch 1"),
    "an abbreviation": (("mlp", "--dat", PRIVATE), ("audit", "a"), "unrecognized arguments: --dat"),
    "an odd value": (("mlp", "--seed", "{}"), ("audit", "a"), "argument --seed: got {}; it must be a whole number"),
    "no recipe": (("nosuch",), ("audit", "a"), "is not the script that made the run"),
    "another module": (("catalog",), ("audit", "a"), "is not the script that made the run"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_stranger_s_recipe_reads_no_file_builds_no_large_model_and_is_a_sentence(folder, monkeypatch, capsys, case):
    (name, *words), called, why = RECIPES[case]
    record = json.loads((folder / "a" / "run.json").read_text())
    (folder / PRIVATE).write_text("a,b\n1,2\n3,4\n")
    command = [
        "python",
        "-m",
        f"samestep.recipes.{name}",
        "--global-batch-size",
        "4",
        "--num-microbatches",
        "2",
        *words,
    ]
    write_json(folder / "a" / "run.json", {**record, "command": command, "script_sha256": "0" * 64})
    code, text = said(called, monkeypatch, capsys)
    assert code in (1, 2)
    assert why in text or ASKS in text
    assert "Traceback" not in text


def test_a_stranger_s_recipe_finds_no_module_of_the_folder_that_it_names(tmp_path, monkeypatch, capsys):
    """It runs without asking, wherever its record says that it was run."""
    monkeypatch.chdir(tmp_path)
    words = ("--epochs", 1, "--devices", "cpu:1", "--run-dir", "a", "--no-portable")
    assert samestep("train", "mlp", *words, cwd=tmp_path).returncode == 0
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "lib").mkdir()
    for name in ("argparse", "samestep", "torch", "colorsys"):
        (tmp_path / "lib" / f"{name}.py").write_text(MARK.format(str(tmp_path / "was run")))
    for place in ("/nowhere", str(tmp_path / "lib")):
        write_json(tmp_path / "a" / "run.json", {**record, "signature": None, "working_folder": place})
        for words in (("audit", "a", "--all"), ("replay", "a", "--step", 1)):
            code, text = said(words, monkeypatch, capsys)
            assert code == 0, text
            assert "running the recipe samestep.recipes.mlp --epochs 1" in text
            assert not (tmp_path / "was run").exists()


def test_one_s_own_recipe_is_audited_without_asking_wherever_its_folder_was_moved(folder, monkeypatch, capsys):
    shutil.move("a", "b")
    for _ in range(2):
        code, text = said(("audit", "b"), monkeypatch, capsys)
        assert code == 0, text
        assert "running the recipe samestep.recipes.mlp --data " in text
        shutil.copytree("b", "c/d")
        shutil.rmtree("b")
        shutil.move("c/d", "b")


@pytest.mark.parametrize("name", ["checkpoints", CHECKPOINT])
def test_no_checkpoint_is_read_behind_a_link(folder, monkeypatch, capsys, name):
    (folder / "a" / name).rename(folder / "elsewhere")
    (folder / "a" / name).symlink_to(folder / "elsewhere")
    for words in (("audit", "a"), ("attest", "a"), ("export", f"a/{CHECKPOINT}", "w.safetensors")):
        code, text = said(words, monkeypatch, capsys)
        assert code in (1, 2), text
        assert "is a symbolic link" in text
        assert "Traceback" not in text
    assert not (folder / "w.safetensors").exists()


def test_a_script_that_python_read_from_a_pipe_has_no_hash_and_is_not_read_again(tmp_path):
    os.mkfifo(tmp_path / "train.py")
    assert file_sha256(tmp_path / "train.py") is None


def test_brackets_in_brackets_are_a_sentence(tmp_path, monkeypatch, capsys):
    for depth in (201, 100_000):
        (tmp_path / "run.json").write_text(f'{{"lr": {"[" * depth + "]" * depth}}}')
        code, said_ = said(("replay", tmp_path, "--step", 1), monkeypatch, capsys)
        assert code == 2
        assert "cannot be read" in said_
        assert "it is nested more than 200 levels deep" in said_
        assert len(said_) < 400
