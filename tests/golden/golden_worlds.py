"""Where a case of the golden matrix runs: ranks in turns, processes, or the functions that judge scripts."""

import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SEARCHED = [str(path) for path in (ROOT / "src", TESTS, TESTS / "examples", TESTS / "verify")]
sys.path[:0] = [path for path in SEARCHED if path not in sys.path]

from worlds import World, in_turns  # noqa: E402 - from a folder that was just added


@contextmanager
def open_world(label):
    """Ranks with `run(program, *arguments)`: the results by rank.

    "3" take turns in this process; "3 processes", "3 gloo" and "3 nodes" (of two and one rank) are real processes. In
    "here" there are none, and in "verify" is what `judging` gives.
    """
    size, _, transport = label.partition(" ")
    if label == "here":
        yield None
    elif label == "verify":
        with judging() as judge:
            yield judge
    elif not transport:
        yield SimpleNamespace(run=partial(in_turns, int(size)))
    else:
        kind = {"processes": "shared", "gloo": "gloo", "nodes": "auto"}[transport]
        world = World(int(size), kind, nodes=(2, 1) if transport == "nodes" else None)
        try:
            yield world
        finally:
            world.close()


@contextmanager
def judging():
    """`judge(script, devices, steps, tier)`: the causes that `samestep verify` names, and the first step at fault."""
    from samestep.devices.selection import select
    from samestep.launcher.job import Job
    from samestep.launcher.supervisor import supervise
    from samestep.verify.program_runner import KeptPool, ProgramRunner, VerifiedProgram
    from samestep.verify.verdict import reach_verdict

    alone = select("cpu:1")
    pool = KeptPool.make(alone)
    supervise(Job("function", "os:getpid", quiet=True), alone, open_pool=lambda: pool)

    def judge(script, devices, steps, tier):
        program = VerifiedProgram("script", str(script), (), None, str(script))
        with ProgramRunner(program, {name: select(name) for name in devices}, hang_seconds=120.0, pool=pool) as runner:
            found = reach_verdict(runner, devices, steps, tier)
        return sorted(
            cause.key for cause in found.causes
        ), None if found.difference is None else found.difference.step - 1

    try:
        yield judge
    finally:
        pool.end()
