"""A script for V devices on few: the time of examples/ddp.py, and the memory of all its processes, beside torchrun's.

    python benchmarks/ranks.py [--ranks 8,32,64] [--rounds 3,3,1] [--output benchmarks/results]

The script runs from the command to its end on two cores, with one thread a process: by torchrun with V processes, and
by `samestep run --logical-devices V` on one and on two workers. They take turns. Memory is the largest of some samples
of the sum of the proportional set sizes (PSS: a page that n processes share counts as 1/n in each) of the command and
all its descendants, read in at most a twentieth of a core's time. CPU seconds are those of all of them, and depend less
on what else the machine does. What samestep saves must have the same bits on one and on two workers.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import facts
import psutil
from contest import rotated, scratch
from roster import ROOT, torchrun
from startup import memory
from tables import ranks_table, terminal, wide_console

WAYS = ("torchrun", "cpu:1", "cpu:2")
UNITS = ("seconds", "cpu_seconds", "megabytes")
TORCHRUN_BYTES = 350e6  # of a process; more of them than memory is free for are left out


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script in all ways in turns, prints the table and writes ranks.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,32,64", metavar="COUNTS")
    parser.add_argument("--rounds", default="3,3,1", metavar="COUNTS", help="one for each number of ranks")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # all that is started inherits it
    results: dict[str, Any] = {"facts": {**facts.machine(), "versions": facts.versions(("samestep", "torch"))}}
    results["ranks"] = {}
    console = wide_console()
    for count, rounds in zip(options.ranks.split(","), options.rounds.split(","), strict=True):
        ways = WAYS[psutil.virtual_memory().available < int(count) * TORCHRUN_BYTES :]
        found: dict[str, Any] = {way: {unit: [] for unit in UNITS} for way in ways}
        results["ranks"][count] = found
        for number in range(int(rounds)):
            digests = {}
            for way in rotated(ways, number):
                measured, digests[way] = run_once(way, int(count))
                for unit, value in zip(UNITS, measured, strict=True):
                    found[way][unit].append(round(value, 1))
                console.print(f"{count} ranks, {way}: {measured[0]:.1f} s", style="dim")
            if digests["cpu:1"] != digests["cpu:2"]:
                raise SystemExit(f"{count} ranks have other bits on two devices than on one")
    console.print(terminal("examples/ddp.py", ranks_table(results["ranks"])))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "ranks.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def run_once(way: str, count: int) -> tuple[tuple[float, float, float], str]:
    """Runs the script; returns what is measured, in the order of `UNITS`, and the digest of what it saved."""
    logical = [sys.executable, "-m", "samestep", "run", "--devices", way, "--logical-devices", str(count)]
    command = torchrun(count) if way == "torchrun" else logical
    with scratch() as folder, (folder / "output").open("w+b") as output:
        start, greatest, spent = time.perf_counter(), 0, spent_by_children()
        process = psutil.Popen(
            [*command, str(ROOT / "examples" / "ddp.py"), "--save", str(folder / "net.pt")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TMPDIR": str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                before = time.process_time()
                greatest = max(greatest, memory([process, *process.children(recursive=True)]))
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(max(0.2, 20 * (time.process_time() - before)))
            seconds = time.perf_counter() - start
        finally:
            for each in [*process.children(recursive=True), process] if process.is_running() else ():
                each.kill()
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{way} with {count} ranks failed:\n{output.read().decode()[-4000:]}")
        measured = (seconds, spent_by_children() - spent, greatest / 1e6)
        return measured, hashlib.sha256((folder / "net.pt").read_bytes()).hexdigest()


def spent_by_children() -> float:
    """The CPU seconds of all processes that were started here and by those, and have ended."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # everything is ended, as after Ctrl-C
    sys.exit(main())
