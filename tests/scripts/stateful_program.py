"""A small script for one process with state in an unusual place: what it is, how it is run, and the verdict on it."""

import math
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from textwrap import dedent, indent

from cli_commands import samestep

V = 4
DEVICES = (1, 2)
SECONDS = 60
TOLERANCE = 1e-4  # float32, six steps: the order of a few sums differs

PLAIN = """
device = "cpu"

def wrap(module):
    return module
"""
DATA_PARALLEL = """
device = "cuda" if torch.cuda.is_available() else "cpu"

def wrap(module):
    return nn.DataParallel(module.to(device))
"""
PRELUDE = """
import hashlib
import torch
from torch import nn
from torch.nn import functional as F
{wrapping}
torch.manual_seed(1)
x, y = torch.randn(12, 6).to(device), torch.randn(12, 2).to(device)
losses = []

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)))

def sgd(module, lr=0.1):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=lr)

def learn(model, optimizer, criterion=F.mse_loss):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

def shown(value):
    if isinstance(value, torch.Tensor):
        return shown(value.detach().cpu().double().flatten().tolist())
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(map(shown, value)) + "]"
    if isinstance(value, dict):
        return shown([[str(key), entry] for key, entry in value.items()])
    return float(value).hex() if isinstance(value, float) else repr(value)

def finish(*modules, **seen):
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    text = shown([[t.float() for t in tensors], seen])
    for loss in losses:
        print("loss", loss.hex())
    print("seen", shown(seen))
    print("state", shown([[t.float().norm(), t.float().sum()] for t in tensors]))
    print("digest", hashlib.sha256(text.encode()).hexdigest())
"""


@dataclass(frozen=True)
class Expect:
    """The verdicts that a program may have, and a part of the sentence where it is refused."""

    verdicts: tuple[str, ...]
    sentence: str = ""


EQUAL = Expect(("equal",))
WHOLE = Expect(("whole",))
EITHER = Expect(("equal", "whole", "refused"))


def refused(sentence: str) -> Expect:
    return Expect(("refused",), sentence)


@dataclass(frozen=True)
class Program:
    """A script, after the prelude; `python`: whether it must give what `python` gives, up to rounding."""

    name: str
    source: str
    expect: Expect = EQUAL
    python: bool = True
    files: Mapping[str, str] = field(default_factory=dict)
    data_parallel: bool = False  # whether its module is wrapped by the script
    tolerance: float = TOLERANCE

    @property
    def script(self) -> str:
        wrapping = DATA_PARALLEL if self.data_parallel else PLAIN
        return PRELUDE.format(wrapping=wrapping) + dedent(self.source)

    @property
    def unchanged(self) -> str | None:
        """The script without the lines that change the state; None where it has none."""
        changed = re.sub(r"^( *)\S.*# change$", r"\1pass", self.script, flags=re.MULTILINE)
        return None if changed == self.script else changed


def changing(
    name, result, change, *, before="", init="", after="", each="", learn="learn(model, optimizer)", **options
):
    """A module that returns an expression of `out`, and a statement that changes it after four of six steps."""
    source = (
        dedent(before)
        + "\nclass Net(Base):\n    def __init__(self):\n        super().__init__()\n"
        + indent(dedent(init), " " * 8)
        + f"\n    def forward(self, x):\n        out = super().forward(x)\n        return {result}\n\n"
        + f"net = Net()\nmodel, optimizer = wrap(net), sgd(net)\n{dedent(after)}\n"
        + f"for step in range(6):\n{indent(dedent(each), ' ' * 4)}\n"
        + "".join(f"    if step == 4: {line}  # change\n" for line in change.splitlines())
        + f"    {learn}\nfinish(net)\n"
    )
    return Program(name, source, **options)


@dataclass(frozen=True)
class Ended:
    """How a run of a script ended."""

    code: int | None  # None: it did not end in time
    stdout: str
    stderr: str

    @property
    def is_refusal(self) -> bool:
        """Whether it ended with a sentence of samestep's, not with an error of the script's, torch's or pickle's."""
        return bool(self.code) and REFUSAL.search(self.stderr) is not None

    @property
    def sentence(self) -> str:
        """The line that says why it was refused, or the last one."""
        found = REFUSAL.search(self.stderr)
        return found[0] if found else (self.stderr.strip().splitlines() or [""])[-1]


REFUSAL = re.compile(
    r"^(samestep(\.errors\.\w+|: error): (?!rank \d+ on .* (failed|exited) with )"
    r"|AttributeError: got \.\w+ of a \w+ that a shared out forward returned).*",
    re.MULTILINE,
)


def run_python(program: Program, folder: Path, script: str | None = None) -> Ended:
    """The program under `python`."""
    return _run(program, folder, script, command=(sys.executable,))


def run_samestep(program: Program, folder: Path, devices: int) -> Ended:
    """The program under `samestep run`."""
    return _run(program, folder, None, "run", "--devices", f"cpu:{devices}", "--logical-devices", V)


def _run(program, folder, script, *words, **options):
    for name, text in {**program.files, "train.py": script or program.script}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    try:
        done = samestep(*words, "train.py", cwd=folder, timeout=SECONDS, OMP_NUM_THREADS="1", **options)
    except AssertionError as error:  # it did not end
        return Ended(None, "", str(error))
    return Ended(done.returncode, done.stdout, done.stderr)


def judge(program: Program, python: Ended, runs: Mapping[int, Ended]) -> str:
    """The verdict on runs by their number of devices: "equal", "whole", "refused", or in capitals what is wrong."""
    if python.code:
        return f"BROKEN: python: {python.sentence}"
    for devices, run in runs.items():
        if run.code is None:
            return f"HANG on {devices}"
        if run.code and not run.is_refusal:
            return f"CRASH on {devices}: {run.sentence}"
    done = {devices: run for devices, run in runs.items() if run.code == 0}
    for devices, run in done.items():
        if run.stdout != next(iter(done.values())).stdout:
            return f"SILENTLY DIFFERENT: {_difference(next(iter(done.values())), run)} on {devices}"
    for devices, run in done.items():
        if program.python and (where := _far(python, run, program.tolerance)):
            return f"DIFFERENT FROM PYTHON: {where} on {devices}"
    if len(done) < len(runs):
        first = next(devices for devices in runs if devices not in done)
        if any(devices in done for devices in runs if devices > 1):
            return f"REFUSED ON SOME: on {sorted(runs.keys() - done.keys())} alone: {runs[first].sentence}"
        return "refused"
    if all("called whole on one device" in run.stderr for run in done.values()):
        return "whole"
    if not program.data_parallel and not all("is shared out in" in run.stderr for run in done.values()):
        return "NOT SPLIT"
    return "equal"


def is_expected(program: Program, verdict: str, runs: Mapping[int, Ended]) -> bool:
    """Whether a verdict is one that the program may have."""
    if verdict == "refused":
        refusals = [run for run in runs.values() if run.code]
        return verdict in program.expect.verdicts and all(program.expect.sentence in run.stderr for run in refusals)
    return verdict in program.expect.verdicts


def _difference(one, other):
    for a, b in zip_longest(one.stdout.splitlines(), other.stdout.splitlines(), fillvalue="nothing"):
        if a != b:
            return f"{a[:40]} | {b[:40]}"
    return "line ends"


def _far(python, run, tolerance):
    """The first line in which two runs differ by more than rounding; digests and what a forward printed aside."""
    for a, b in zip_longest(_numbers(python), _numbers(run), fillvalue=("nothing", [])):
        if a[0] != b[0] or len(a[1]) != len(b[1]):
            return f"{a[0][:60]} | {b[0][:60]}"
        if not all(
            math.isclose(p, q, rel_tol=tolerance, abs_tol=tolerance / 10) for p, q in zip(a[1], b[1], strict=True)
        ):
            return f"{a[0][:20]} {a[1][:3]} | {b[1][:3]}"
    return ""


def _numbers(run):
    """The lines about losses, values and tensors: each without its numbers, and those."""
    lines = [line for line in run.stdout.splitlines() if line.startswith(("loss ", "seen ", "state "))]
    return [(HEX.sub("#", line), [float.fromhex(number) for number in HEX.findall(line)]) for line in lines]


HEX = re.compile(r"-?0x[0-9a-f.]+p[+-]\d+|\binf\b|\bnan\b")


def try_program(program: Program) -> tuple[str, dict[int, Ended]]:
    """A program's verdict and its runs."""
    with tempfile.TemporaryDirectory() as folder:
        places = {key: Path(folder, str(key)) for key in ("python", *DEVICES)}
        python = run_python(program, places["python"])
        runs = {count: run_samestep(program, places[count], count) for count in DEVICES}
    return judge(program, python, runs), runs
