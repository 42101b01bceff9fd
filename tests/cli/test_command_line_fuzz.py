"""Random command lines: each ends by itself with 0, 1 or 2, without a traceback, in few words, and leaves nothing."""

import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback

import psutil
import pytest
from cli_commands import COMMANDS

from samestep.cli.main import main

MAX_SECONDS = 120
MAX_MESSAGE, MAX_LINE = 6000, 1500
PATHS = (
    *("", ".", "fifo", "zero", "null", "full", "loop", "file.txt", "empty", "missing/x", "run", "run/run.json", "odd"),
    *("a" * 300, "a" * 5000, "bad\udcff", "a\0b", "é☃🜁", "\x1b]0;title\x07", "-", "--", "ok.py", "data.csv"),
)
SHORT = """
    -1 0 1 2 3.5 -0.0 1e400 nan inf -inf ٣ ² x [ {} a=b = , 1,2 1,1 %s * true cpu:1 cpu:0 cuda:0 free:1 1:2
    localhost:0 :: adam
"""
NINES = "9" * 20
WORDS = (*SHORT.split(), NINES, "9" * 5000, f"-{NINES}", "x " * 3000, f"cpu:{NINES}", f"localhost:{NINES}")
FIRST = {"train": ("mlp",), "run": ("ok.py",), "verify": ("ok.py", "mlp")}
ENDLESS = {  # what such a word asks for is right, and has no end
    "--epochs": lambda word: word.lstrip("0").isdecimal(),
    "--open": lambda word: True,
    "--prove": lambda word: True,
    "--timeout-seconds": lambda word: True,
}
OF_NODES = ("--nnodes", "--node-rank", "--rdzv-endpoint", "--master-addr", "--master-port")
SCRIPT = "from torch import nn\ndef model():\n    return nn.Linear(2, 2)\nprint('done')\n"


def command_lines(seed, count):
    """So many command lines."""
    rng = random.Random(seed)
    for _ in range(count):
        name = rng.choice(list(COMMANDS))
        options = [param for param in COMMANDS[name].params if param.param_type_name == "option"]
        arguments = [param for param in COMMANDS[name].params if param.param_type_name == "argument"]
        words = []
        for option in rng.sample(options, min(len(options), rng.choice((0, 1, 1, 2, 3)))):
            spelled = rng.choice([*option.opts, *option.secondary_opts])
            word = rng.choice(PATHS + WORDS)
            if not any(longest in ENDLESS and ENDLESS[longest](word) for longest in option.opts):
                words += [spelled] if option.is_flag else [spelled, word]
        if rng.random() < 0.1:
            words.append(rng.choice(("--no-such-option", "--devices", "-x", "--" + "o" * 300, "--é")))
        if name[0] in ("train", "run", "verify", "doctor") and rng.random() < 0.9:
            words += ["--devices", rng.choice(("none", "cpu:0", "cuda:7", "9" * 5000, "", "-1"))]
        if any(word in OF_NODES for word in words):
            words += ["--rdzv-conf", "join_timeout=1,last_call_timeout=1"]
        if name == ("doctor",):
            words.append("--quick")
        if name == ("replay",) and rng.random() < 0.8:
            words += ["--step", rng.choice(("1", "0", "-1", "9" * 20))]
        firsts = FIRST.get(name[0], ("run", "odd"))
        given = [rng.choice(firsts) if rng.random() < 0.7 else rng.choice(PATHS + WORDS) for _ in arguments]
        given = given[: rng.choice((len(given), len(given), len(given), 0))]
        yield [*name, *words, *given, *(["--epochs", "1"] if name == ("train",) else [])]


def make_place(folder):
    """A folder with all that command lines may name."""
    folder.mkdir()
    for name in ("empty", "tmp", "odd"):
        (folder / name).mkdir()
    (folder / "file.txt").write_text("text\n")
    (folder / "ok.py").write_text(SCRIPT)
    (folder / "data.csv").write_text("a,b\n" + "1,2\n" * 40)
    (folder / "odd" / "run.json").write_text(
        r'{"data": "\udcff", "command": ["python", "-m", "samestep.recipes.mlp", "a\u0000\ud800"], "epochs": 1e9}'
    )
    (folder / "odd" / "ledger.jsonl").write_bytes(b'{"step": 1}\n\xff\n')
    (folder / "loop").symlink_to("loop")
    for name in ("zero", "null", "full"):
        (folder / name).symlink_to(f"/dev/{name}")
    os.mkfifo(folder / "fifo")
    return folder


def listing(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def begin(words, folder, token):
    """Starts a call in a fork of this process; its process id."""
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(folder.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115
        os.environ |= {"TMPDIR": str(folder / "tmp"), "COLUMNS": "200", "SAMESTEP_FUZZ": token}
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        sys.argv = ["samestep", *words]
        try:
            main()
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 71
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def of_call(token):
    """The processes of a call that still live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SAMESTEP_FUZZ") == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


def call(words, place, number):
    """Runs a command line in a fresh copy of a place; what is wrong with how it ended, "" for nothing; and its code."""
    folder = place.parent / "now"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place, folder, symlinks=True, ignore=shutil.ignore_patterns("fifo"))
    os.mkfifo(folder / "fifo")
    before, token, began = listing(folder), f"{os.getpid()}-{number}", time.monotonic()
    pid, status = begin(words, folder, token), None
    while status is None and time.monotonic() - began < MAX_SECONDS:
        done, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0.005)
    seconds = time.monotonic() - began
    left = [process for process in of_call(token) if process.pid != pid] if seconds > 1.5 else []
    for process in of_call(token) if status is None else left:
        process.kill()
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"no end after {MAX_SECONDS} s", None
    said = (folder.parent / "err").read_text(errors="replace")
    made = sorted(listing(folder) - before)
    wrong = [
        *([f"code {status}"] if status not in (0, 1, 2) else []),
        *(["a traceback"] if "Traceback" in said else []),
        *([f"a message of {len(said)} characters"] if len(said) > MAX_MESSAGE else []),
        *(["a long line"] if max(map(len, said.splitlines()), default=0) > MAX_LINE else []),
        *(["no message"] if status == 2 and not said.strip() else []),
        *([f"files {made}"] if made and (status == 2 or any(name.startswith("tmp/") for name in made)) else []),
        *([f"processes {left}"] if left else []),
    ]
    return "; ".join(wrong) + (f"\n{said[-1500:]}" if wrong else ""), status


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The place, with a run in it."""
    folder = make_place(tmp_path_factory.mktemp("fuzz") / "place")
    words = ["train", "mlp", "--epochs", "1", "--devices", "cpu:1", "--run-dir", "run", "--checkpoint-steps", "1"]
    pid = begin(words, folder, f"{os.getpid()}-first")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, (folder.parent / "err").read_text()
    return folder


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 40), pytest.param(1, 200, marks=(pytest.mark.slow, pytest.mark.timeout(1800)))]
)
def test_any_command_line_ends_with_a_sentence_and_leaves_nothing(place, seed, count):
    import torch  # noqa: F401 - once, for all forks

    counts, wrong = {}, []
    for number, words in enumerate(command_lines(seed, count)):
        problem, code = call(words, place, number)
        counts[code] = counts.get(code, 0) + 1
        if problem:
            wrong.append(f"{[word[:60] for word in words]}: {problem}")
            print(wrong[-1], flush=True)
    print(f"{count} calls, by exit code: {dict(sorted(counts.items(), key=str))}; {len(wrong)} went wrong")
    assert not wrong, "\n\n".join([f"{len(wrong)} of {count}; {counts}", *wrong])
    assert 2 in counts
    assert counts.keys() & {0, 1}
