"""How fast is a single-process script? LeNet with and without DataParallel under `samestep run`, DDP and Python.

    python benchmarks/single_process.py [--rounds 5] [--only TEXT] [--json FILE]

Every variant runs in processes of its own, one after another, in rounds; what counts is the median of the ratios of
the rounds, on the same cores: 2 processes of one thread each, or one process of one thread. Where other programs run
beside it, the ratio of the processor times of all processes says more.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

SCRIPTS = Path(__file__).parent / "scripts"
DATA_PARALLEL, DDP = str(SCRIPTS / "lenet_data_parallel.py"), str(SCRIPTS / "lenet_ddp.py")
RUN = [sys.executable, "-m", "samestep", "run"]
SAMESTEP = {
    "samestep, 2 processes, 2 microbatches": ["--devices", "cpu:2", DATA_PARALLEL],
    "plain, 2 processes, 2 microbatches": ["--devices", "cpu:2", DATA_PARALLEL, "plain"],
    "samestep, 1 process, 1 microbatch": ["--devices", "cpu:1", DATA_PARALLEL],
    "samestep, 1 process, 2 microbatches": ["--devices", "cpu:1", "--logical-devices", "2", DATA_PARALLEL],
}
VARIANTS = {
    "DDP, 2 processes": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", DDP],
    "plain Python, 1 process": [sys.executable, DATA_PARALLEL],
    **{name: [*RUN, *arguments] for name, arguments in SAMESTEP.items()},
}
PAIRS = [
    ("samestep, 2 processes, 2 microbatches", "DDP, 2 processes", 1.15),
    ("plain, 2 processes, 2 microbatches", "DDP, 2 processes", None),
    ("samestep, 1 process, 1 microbatch", "plain Python, 1 process", 1.05),
    ("samestep, 1 process, 2 microbatches", "plain Python, 1 process", None),
]


def measure(command):
    """The median step of one run and the processor time of a step, in milliseconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr}")
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("{")]
    values = json.loads(line)
    return values["step_ms"], values["cpu_ms"]


def main():
    """Measures all variants and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", metavar="TEXT", help="only pairs whose first name has this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    options = parser.parse_args()
    console = Console()
    pairs = [pair for pair in PAIRS if options.only in pair[0]]
    measured = {name: [] for name in VARIANTS if any(name in pair for pair in pairs)}
    for number in range(options.rounds):
        for name in measured:
            measured[name].append(measure(VARIANTS[name]))
        console.print(f"round {number + 1} of {options.rounds}", style="dim")

    table = Table("LeNet, batch 256", "ms a step", "fastest to slowest round", "processor ms a step")
    for name, values in measured.items():
        steps, cpu = zip(*values, strict=True)
        spread = f"{min(steps):.1f} to {max(steps):.1f}"
        table.add_row(name, f"{statistics.median(steps):.1f}", spread, f"{statistics.median(cpu):.1f}")
    console.print(table)
    ratios = Table("ratio", "median of the rounds", "round by round", "processor time", "aim")
    for ours, theirs, aim in pairs:
        rounds = list(zip(measured[ours], measured[theirs], strict=True))
        steps, cpu = [a[0] / b[0] for a, b in rounds], [a[1] / b[1] for a, b in rounds]
        row = (
            f"{statistics.median(steps):.3f}",
            f"{min(steps):.2f} to {max(steps):.2f}",
            f"{statistics.median(cpu):.3f}",
        )
        ratios.add_row(f"{ours} / {theirs}", *row, f"{aim:.2f}" if aim else "")
    console.print(ratios)
    if options.json:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({**facts, "step_and_cpu_ms": measured}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
