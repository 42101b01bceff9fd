"""The simulator: draws programs from seeds, runs their checks, and prints the smallest program of each that fails.

    python tests/simulation/run.py --seed 7
    python tests/simulation/run.py --minutes 10 --kind faults

A seed and a commit repeat a failure. See MAINTAINING.md. SIGTERM and Ctrl-C end the search, with what it found.
"""

import argparse
import os
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1]))

import hypothesis
import psutil
import torch
from checks import Refused, cases, run_script, script

from samestep.launcher.os_processes import end_with_parent

KINDS = ("programs", "faults", "collectives", "scripts", "membership", "processes")
EXAMPLES = 10  # of a seed
FEW_EXAMPLES = {"scripts": 5, "processes": 3}  # which start processes
GATE_SEEDS = 6  # from 1 on: a faster machine runs no others
SHRINKING_SECONDS = 60
ENDING = signal.SIGRTMIN  # to the process that searches: the runs in it take SIGTERM and SIGINT for their own


class Ended(KeyboardInterrupt):
    """The search is asked to end, at once or, where what runs has gone on nevertheless, before the next program."""

    is_asked = False

    @classmethod
    def ask(cls, *_):
        cls.is_asked = True
        raise cls


@dataclass
class Search:
    """What was run so far, and what came of it."""

    shrinking_seconds: float = SHRINKING_SECONDS
    known: dict = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)
    refusals: Counter = field(default_factory=Counter)
    failed_at: float | None = None
    failures: dict = field(default_factory=dict)

    def attempt(self, text):
        """Runs a script once; raises what it raised, again too."""
        if Ended.is_asked:
            raise Ended
        if text not in self.known:
            if self.failed_at is not None and time.monotonic() - self.failed_at > self.shrinking_seconds:
                return  # what is known is small enough
            self.known[text] = None
            self.counts["programs"] += 1
            try:
                run_script(text)
            except Refused as error:
                self.counts["refused"] += 1
                self.refusals[str(error)[:160]] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                self.failed_at = self.failed_at or time.monotonic()
                self.known[text] = "".join(traceback.format_exception(error)[-4:])
        if self.known[text] is not None:
            self.failures[text] = self.known[text]
            raise AssertionError("fails")

    def smallest(self, kind, seed, examples=None):
        """The smallest failing script that a seed leads to, and its error; None if all hold."""
        self.failed_at, self.failures = None, {}
        profile = hypothesis.settings(
            max_examples=examples or FEW_EXAMPLES.get(kind, EXAMPLES),
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=[*hypothesis.HealthCheck],
            verbosity=hypothesis.Verbosity.quiet,
        )

        @hypothesis.seed(seed)
        @profile
        @hypothesis.given(cases(kind))
        def search(case):
            self.attempt(script(case))

        try:
            search()
        except AssertionError:
            text = min(self.failures, key=len)
            return text, self.failures[text]
        return None


def search_on(search, kinds, first, minutes, last=None):
    """Runs what the first seed draws and, for some minutes, the next ones, to a last one; the number that fail."""
    print(f"{', '.join(kinds)}: seeds from {first} on", flush=True)
    began, before, failed, seed = time.monotonic(), search.counts.copy(), 0, first
    try:
        while seed == first or (minutes and time.monotonic() - began < 60 * minutes and seed != (last and last + 1)):
            for kind in kinds:
                found = search.smallest(kind, seed)
                if found is not None:
                    failed += 1
                    print(f"# --seed {seed} --kind {kind} fails; the smallest program that does:\n\n{found[0]}")
                    print("".join(f"# {line}\n" for line in found[1].splitlines()), flush=True)
            seed += 1
    except Ended:
        print("ended by a signal")
        seed += 1
    seconds, done = time.monotonic() - began, search.counts - before
    print(f"seeds {first} to {seed - 1}: {done['programs']} programs in {seconds:.0f} s, {done['refused']} refused, "
          f"{failed} seeds fail", flush=True)  # fmt: skip
    return failed


def main(arguments=None):
    """The command line; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="the seed, or the first of them; by the clock if left out")
    parser.add_argument("--minutes", type=float, help="go on with the next seeds for so long")
    parser.add_argument("--kind", choices=KINDS, action="append", help="of what is drawn; all by default")
    parser.add_argument("--gate", action="store_true", help=f"of each kind seeds 1 to {GATE_SEEDS}, or half a minute")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    kinds, search = chosen.kind or KINDS, Search()
    if chosen.gate:
        failed = sum(search_on(search, [kind], 1, 0.5, GATE_SEEDS) for kind in kinds)
    else:
        new = int(time.time()) % 1_000_000 if chosen.seed is None else chosen.seed
        failed = search_on(search, kinds, new, chosen.minutes)
    for text, count in search.refusals.most_common():
        print(f"  refused {count} times: {text}")
    return 1 if failed else 0


def in_a_session():
    """`main` in a process that leads a session of its own, which this one asks to end if it is asked."""
    parent, child = os.getpid(), os.fork()
    if child:
        for signum in signal.SIGTERM, signal.SIGINT:
            signal.signal(signum, lambda *_: os.kill(child, ENDING))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.setsid()
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(ENDING, Ended.ask)
    code = main()
    sys.stdout.flush()
    for process in psutil.Process().children(recursive=True):  # of a run that was interrupted
        process.kill()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(in_a_session())
