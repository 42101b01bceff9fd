"""How fast is a single-process script? LeNet with and without DataParallel under `samestep run`, DDP and Python.

    python benchmarks/single_process.py [--rounds 5] [--json FILE]

Every variant runs in processes of its own, one after another, in rounds; what counts is the ratio of the medians of
the rounds, on the same cores: 2 processes of one thread each, or one process of one thread.
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
VARIANTS = {
    "DDP, 2 processes": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", DDP],
    "samestep, 2 processes, 2 microbatches": [*RUN, "--devices", "cpu:2", DATA_PARALLEL],
    "plain, 2 processes, 2 microbatches": [*RUN, "--devices", "cpu:2", DATA_PARALLEL, "plain"],
    "plain Python, 1 process": [sys.executable, DATA_PARALLEL],
    "samestep, 1 process, 1 microbatch": [*RUN, "--devices", "cpu:1", DATA_PARALLEL],
    "samestep, 1 process, 2 microbatches": [*RUN, "--devices", "cpu:1", "--logical-devices", "2", DATA_PARALLEL],
}
PAIRS = [
    ("samestep, 2 processes, 2 microbatches", "DDP, 2 processes", 1.15),
    ("plain, 2 processes, 2 microbatches", "DDP, 2 processes", None),
    ("samestep, 1 process, 1 microbatch", "plain Python, 1 process", 1.05),
    ("samestep, 1 process, 2 microbatches", "plain Python, 1 process", None),
]


def measure(command):
    """The median step of one run, in milliseconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr}")
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)["step_ms"]


def main():
    """Measures all variants and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    options = parser.parse_args()
    console = Console()
    measured = {name: [] for name in VARIANTS}
    for number in range(options.rounds):
        for name, command in VARIANTS.items():
            measured[name].append(measure(command))
        console.print(f"round {number + 1} of {options.rounds}", style="dim")
    medians = {name: statistics.median(values) for name, values in measured.items()}

    table = Table("LeNet, batch 256", "ms a step", "fastest to slowest round")
    for name, values in measured.items():
        table.add_row(name, f"{medians[name]:.1f}", f"{min(values):.1f} to {max(values):.1f}")
    console.print(table)
    ratios = Table("ratio", "of the medians", "round by round", "aim")
    for ours, theirs, aim in PAIRS:
        each = [a / b for a, b in zip(measured[ours], measured[theirs], strict=True)]
        spread = f"{min(each):.2f} to {max(each):.2f}"
        ratios.add_row(
            f"{ours} / {theirs}", f"{medians[ours] / medians[theirs]:.3f}", spread, f"{aim:.2f}" if aim else ""
        )
    console.print(ratios)
    if options.json:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({**facts, "step_ms": measured}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
