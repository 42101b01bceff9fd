"""From the command to the first all-reduce or the first finished step, and the memory of all processes then.

    python benchmarks/startup.py [--rounds 5] [--variants samestep-8,torchrun-8] [--output benchmarks/results]

Every variant trains W2, or meets for one all-reduce, and is started anew in each round, the variants taking turns. The
clock runs from the command to the moment at which every worker has finished a step, or the all-reduce; that of `import`
until torch is imported. Memory is then the sum of the proportional set sizes (PSS: shared
pages are divided among those that share them) of all its processes, its launcher too, while all of them wait.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import facts
import psutil
import torch
from contest import Contestant, EntrantError, end_all, rotated, scratch
from rich.console import Console
from roster import BY_NAME, DEFAULT, PACKAGES
from tables import startup_table, terminal, wide_console
from workloads import WORKLOADS

WORKLOAD = "W2"
ENTRANTS = {
    **BY_NAME,
    "meet": replace(BY_NAME["plain"], script="meet"),
    "samestep-meet": replace(BY_NAME[DEFAULT], script="meet", options=()),
}
VARIANTS = {
    "import": ("python, import torch", "meet", 1),
    "samestep-meet-8": ("samestep run, all-reduce, 8 workers", "samestep-meet", 8),
    "torchrun-meet-8": ("torchrun, all-reduce, 8 workers", "meet", 8),
    "python": ("python train.py", "plain", 1),
    "samestep-2": ("samestep run, 2 workers", "samestep", 2),
    "torchrun-2": ("torchrun (DDP), 2 workers", "plain", 2),
    "accelerate-2": ("accelerate launch, 2 workers", "accelerate", 2),
    "samestep-4": ("samestep run, 4 workers", "samestep", 4),
    "torchrun-4": ("torchrun (DDP), 4 workers", "plain", 4),
    "samestep-8": ("samestep run, 8 workers", "samestep", 8),
    "logical-8": ("samestep run --logical-devices 8 (DDP), 2 devices", "logical", 8),
    "torchrun-8": ("torchrun (DDP), 8 workers", "plain", 8),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts all variants in turns, prints the tables and writes startup.json; returns 1 if ours failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", default=",".join(VARIANTS), metavar="NAMES", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args(arguments)
    names = options.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"got {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    console = wide_console()
    left_out = [name for name in names if not ENTRANTS[VARIANTS[name][1]].is_installed]
    for name in left_out:
        console.print(f"left out: {name} is not installed")
    measured: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "megabytes": []} for name in names if name not in left_out
    }
    results: dict[str, Any] = {"facts": {**facts.machine(), "versions": facts.versions(PACKAGES)}}
    failed = take_rounds(measured, options.rounds, console)
    results |= {"rounds": options.rounds, "failed": failed, "left_out": left_out}
    results["variants"] = {
        name: {"title": VARIANTS[name][0], "workers": VARIANTS[name][2], **found} for name, found in measured.items()
    }
    console.print(terminal("From the command to the first step", startup_table(results["variants"])))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "startup.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(name.startswith("samestep") for name in failed))


def take_rounds(measured: dict[str, dict[str, list[float]]], rounds: int, console: Console) -> dict[str, str]:
    """Starts everyone once a round; who fails is left out from then on. Returns their last words."""
    failed: dict[str, str] = {}
    with scratch() as folder:
        data = folder / "data.pt"
        torch.save(WORKLOADS[WORKLOAD].data(), data)
        for number in range(rounds):
            for name in rotated(list(measured), number):
                try:
                    seconds, megabytes = start_once(name, folder, data)
                except EntrantError as error:
                    console.print(f"failed: {error}", style="red", markup=False)
                    failed[name] = str(error)
                    del measured[name]
                    continue
                measured[name]["seconds"].append(round(seconds, 3))
                measured[name]["megabytes"].append(round(megabytes, 1))
            console.print(f"round {number + 1} of {rounds}", style="dim")
    return failed


def start_once(name: str, folder: Path, data: Path) -> tuple[float, float]:
    """Starts a variant; returns the seconds to the first step of all workers, and the megabytes then."""
    _, entrant, workers = VARIANTS[name]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        arguments = [WORKLOAD, "--data", str(data), "--warm-up", "1"]
        contestant = Contestant(ENTRANTS[entrant], workers, Path(own), arguments)
        try:
            return contestant.wait_until_ready(), memory(contestant.processes()) / 1e6
        finally:
            end_all([contestant])


def memory(processes: Sequence[psutil.Process]) -> int:
    """The proportional set sizes of some processes, in bytes; resident sizes where the system has none."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = process.memory_full_info()
            total += getattr(found, "pss", found.rss)
    return total


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # everything is cleaned up, as after Ctrl-C
    sys.exit(main())
