"""What do strategies cost? samestep's, against FSDP2 and DDP as their tutorials write them, two processes.

    python benchmarks/strategies.py [--rounds 9] [--quick] [--output benchmarks/results]

The workload is the GPT of the other benchmarks. Everyone is started once and takes turns. Prints a table, and writes
strategies.json: microseconds a step, and how many times the limit that is.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import facts
import torch
from bench import FULL, QUICK, take_rounds
from contest import EntrantError, contest, scratch
from rich.table import Table
from roster import BY_NAME, DEFAULT, LIMIT, PACKAGES, PLAIN, Entrant, ours, torchrun
from tables import wide_console
from workloads import WORKLOADS

WORKLOAD, PROCESSES = "W3", 2
TWO = ("--num-microbatches", "2")
SHARDED, ZERO1 = ("--strategy", "sharded"), ("--strategy", "zero1")
ENTRANTS = (
    BY_NAME[LIMIT],
    BY_NAME[PLAIN],
    Entrant("fsdp", "PyTorch tutorial (FSDP2)", "fsdp", torchrun, counts=(2,)),
    BY_NAME["samestep-v2"],
    ours("samestep-v2-zero1", "samestep, 2 microbatches, zero1", (2,), *TWO, *ZERO1),
    ours("samestep-v2-sharded", "samestep, 2 microbatches, sharded", (2,), *TWO, *SHARDED),
    BY_NAME[DEFAULT],
    ours("samestep-zero1", "samestep, 8 microbatches, zero1", (2,), *ZERO1),
    ours("samestep-sharded", "samestep, 8 microbatches, sharded", (2,), *SHARDED),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the contest; returns 1 where somebody failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=FULL["rounds"])
    parser.add_argument("--quick", action="store_true", help="one round of a few steps: does it all run?")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args(arguments)
    settings = {**FULL, **(QUICK if options.quick else {"rounds": options.rounds})}
    options = argparse.Namespace(**{**vars(options), **settings})
    console = wide_console()
    with scratch() as folder:
        data = folder / "data.pt"
        torch.save(WORKLOADS[WORKLOAD].data(int(options.steps_an_epoch)), data)
        selected = [(entrant, PROCESSES) for entrant in ENTRANTS]
        with contest(selected, [WORKLOAD, "--data", str(data)], folder) as (ready, failed):
            rounds = take_rounds(list(ready), failed, options, console)
    limits = next(values for contestant, (_, values) in rounds.items() if contestant.entrant.name == LIMIT)
    table = Table(title=f"{WORKLOADS[WORKLOAD].title}: {PROCESSES} processes of one thread")
    for column in ("entrant", "µs a step", "of the limit"):
        table.add_column(column, justify="left" if column == "entrant" else "right")
    found = []
    for contestant, (_, values) in rounds.items():
        ratio = statistics.median(value / limit for value, limit in zip(values, limits, strict=True))
        step = statistics.median(values)
        table.add_row(contestant.entrant.title, f"{step:,.0f}", f"{ratio:.2f}")
        found.append({"entrant": contestant.entrant.name, "microseconds": values, "of_limit": round(ratio, 3)})
    console.print(table)
    for entrant, count, reason in failed:
        console.print(f"failed: {entrant.name} with {count}: {reason}", style="red", markup=False)
    results = {"facts": {**facts.machine(), "versions": facts.versions(PACKAGES)}, "workload": WORKLOAD, "found": found}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "strategies.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    try:
        code = main()
    except EntrantError as error:
        print(error, file=sys.stderr)
        code = 1
    sys.exit(code)
