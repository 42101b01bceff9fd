"""The time of a step: samestep and its peers on four workloads, in interleaved rounds, compared with the limit.

    python benchmarks/bench.py [--workloads W1,W2] [--processes 1,2,8] [--entrants limit,plain,samestep]
    python benchmarks/bench.py --short              every tool by default, three rounds: ten minutes on two cores
    python benchmarks/bench.py --against COMMIT     samestep at that commit takes its turns beside samestep as it is

Each entrant is started once for a workload and then runs in turns with all others, so that noise of the machine affects
all alike. Each may use two cores: one process with two threads, or two processes with one thread each. Prints two
tables a workload, each tool by default and pairs on equal terms, and writes steps.json into the output folder. An
entrant whose package is not installed is left out with a message.
"""

import argparse
import contextlib
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import facts
import torch
from contest import Contestant, EntrantError, busy_while_paused, contest, rotated, scratch
from rich.console import Console
from roster import BY_NAME, LIMIT, PACKAGES, ROSTER, Entrant, entrants_of
from tables import change_table, default_table, equal_table, terminal, wide_console
from workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results"
BUSY_PERCENT = 5.0
CALIBRATION_STEPS = 3
MIN_STEPS = 3  # for each process: those that share a core end a step up to a step apart
QUICK = {"rounds": 1, "turn_seconds": 0.05, "steps_an_epoch": 40}
SHORT = {"rounds": 3, "turn_seconds": 0.3, "steps_an_epoch": 200}
FULL = {"rounds": 9, "turn_seconds": 0.4, "steps_an_epoch": 200}

Selected = list[tuple[Entrant, int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the contest; returns 1 if the limit or samestep failed, else 0."""
    options = read_options(arguments)
    console = wide_console()
    names = [name for name in options.entrants if not BY_NAME[name].is_installed]
    left_out = [{"entrant": name, "reason": f"{BY_NAME[name].package} is not installed"} for name in names]
    for entry in left_out:
        console.print(f"left out: {entry['entrant']}: {entry['reason']}")
    taking_part = [BY_NAME[name] for name in options.entrants if name not in names]
    with contextlib.ExitStack() as stack:
        if options.against is not None:
            checkout = stack.enter_context(scratch()) / "checkout"
            others = stack.enter_context(entrants_of(options.against, options.entrants, checkout))
            BY_NAME.update(others)
            taking_part += others.values()
        return run(options, console, taking_part, left_out)


def run(
    options: argparse.Namespace, console: Console, taking_part: list[Entrant], left_out: list[dict[str, str]]
) -> int:
    """The contest of those that are installed."""
    selected = [(e, count) for count in options.processes for e in taking_part if count in e.counts]
    results: dict[str, Any] = {
        "facts": {**facts.machine(), "versions": facts.versions(PACKAGES)},
        "settings": {"rounds": options.rounds, "turn_seconds": options.turn_seconds},
        "workloads": {},
        "measurements": [],
        "left_out": left_out,
        "failed": [],
    }
    for name in options.workloads:
        parameters = sum(p.numel() for p in WORKLOADS[name].make_model().parameters())
        results["workloads"][name] = {
            "title": WORKLOADS[name].title,
            "global_batch_size": WORKLOADS[name].global_batch_size,
            "parameters": parameters,
        }
        measure(name, selected, options, results, console)
        title = f"{name}: {WORKLOADS[name].title}"
        for table in (default_table(results, name), equal_table(results, name)):
            if table[1]:
                console.print(terminal(title, table))
    if options.against is not None:
        console.print(terminal("Changes", change_table(results["measurements"], options.against)))
        if options.output == RESULTS:
            return _code(results)  # the published results are without it
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "steps.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {options.output / 'steps.json'}")
    return _code(results)


def _code(results: dict[str, Any]) -> int:
    """1 if the limit or samestep failed."""
    return int(any(BY_NAME[entry["entrant"]].role != "peer" for entry in results["failed"]))


def measure(
    workload: str, selected: Selected, options: argparse.Namespace, results: dict[str, Any], console: Console
) -> None:
    """Runs all rounds of one workload; adds measurements and failures to the results."""
    with scratch() as folder:
        data = folder / "data.pt"
        torch.save(WORKLOADS[workload].data(options.steps_an_epoch), data)
        console.print(f"{workload}: starting {len(selected)} entrants", style="dim")
        with contest(selected, [workload, "--data", str(data)], folder) as (ready, failed):
            busy = busy_while_paused(ready, min(1.0, 5 * options.turn_seconds)) if ready else {}
            for contestant in ready:
                if busy[contestant.name] > BUSY_PERCENT:
                    console.print(f"{contestant.name} uses {busy[contestant.name]} % of a core while it waits: stopped")
                    contestant.freeze()
            rounds = take_rounds(list(ready), failed, options, console)
            for contestant, (num_steps, values) in rounds.items():
                results["measurements"].append(
                    {
                        "workload": workload,
                        "entrant": contestant.entrant.name,
                        "processes": contestant.num_processes,
                        "steps_a_turn": num_steps,
                        "microseconds": [round(value, 2) for value in values],
                    }
                )
            for entrant, num_processes, reason in failed:
                console.print(f"failed: {reason}", style="red", markup=False)
                entry = {"workload": workload, "entrant": entrant.name, "processes": num_processes, "reason": reason}
                results["failed"].append(entry)


def take_rounds(
    ready: list[Contestant], failed: list[tuple[Entrant, int, str]], options: argparse.Namespace, console: Console
) -> dict[Contestant, tuple[int, list[float]]]:
    """A turn of each entrant to find its number of steps per turn, then the rounds."""
    measured: dict[Contestant, tuple[int, list[float]]] = {}
    for number in range(-1, options.rounds):
        for contestant in rotated(ready, max(number, 0)):
            try:
                if number < 0:
                    found = contestant.take_turn(CALIBRATION_STEPS)
                    least = MIN_STEPS * contestant.num_processes
                    num_steps = max(least, round(options.turn_seconds * 1e6 / found))
                    measured[contestant] = (num_steps, [])
                else:
                    num_steps, values = measured[contestant]
                    values.append(contestant.take_turn(num_steps))
            except EntrantError as error:
                failed.append((contestant.entrant, contestant.num_processes, str(error)))
                measured.pop(contestant, None)
        ready = [contestant for contestant in ready if contestant in measured]
        if number >= 0:
            medians = [statistics.median(values) for c, (_, values) in measured.items() if c.entrant.name == LIMIT]
            limits = f"; limits so far {', '.join(f'{value:,.0f}' for value in medians)} µs" if medians else ""
            console.print(f"round {number + 1} of {options.rounds}{limits}", style="dim")
    return measured


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; refuses bad values before anything starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=_list_of(WORKLOADS), default=list(WORKLOADS), metavar="NAMES")
    counts = {str(count): count for count in (1, 2, 8)}
    parser.add_argument("--processes", type=_list_of(counts), default=[*counts.values()], metavar="COUNTS")
    parser.add_argument("--entrants", type=_list_of(BY_NAME), metavar="NAMES", help="all by default")
    parser.add_argument("--rounds", type=int, help=f"{FULL['rounds']} by default")
    parser.add_argument("--short", action="store_true", help="the tools by default, on one and two processes")
    parser.add_argument("--quick", action="store_true", help="one round of a few steps: does it all run?")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--against", metavar="COMMIT", help="samestep as it was at that commit takes part too")
    options = parser.parse_args(arguments)
    options.processes = [int(count) for count in options.processes if not options.short or int(count) <= 2]
    if options.entrants is None:
        options.entrants = [entrant.name for entrant in ROSTER if entrant.is_default or not options.short]
    settings = QUICK if options.quick else SHORT if options.short else FULL
    for name, value in settings.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    if options.rounds < 1:
        parser.error(f"got --rounds {options.rounds}; it must be 1 or more")
    return options


def _list_of(known: Any) -> Any:
    """A reader of `a,b,c`; refuses unknown names."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; there are {', '.join(known)}")
        return list(dict.fromkeys(names))

    return read


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # everything is cleaned up, as after Ctrl-C
    try:
        code = main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = 128 + signal.SIGINT
    sys.exit(code)
