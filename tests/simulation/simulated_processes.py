"""Ranks that are processes, of which some end, hang or are told to stop in the n-th call of a function.

Its text follows `simulated_ranks.py` in scripts over processes.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import psutil
from forked_pool import forked_pool
from simulated_ranks import check_same, checkpoints_in

import samestep
from samestep.comm.environment import read_settings
from samestep.devices.selection import select
from samestep.launcher.job import Job, Policy, process_variables
from samestep.launcher.supervisor import supervise

PACKAGE = str(Path(samestep.__file__).parent)
NO_POLICY = {}
SECONDS = 30  # for what ends by itself


class Calls:
    """Counts the calls of samestep's and the program's functions from `fit` on, in one of which the rank may end."""

    def __init__(self, faults, notes):
        self.seen, self._notes, self._begun = Counter(), notes, False
        self._slot = read_settings().slot
        self._faults = {name: (nth, how) for rank, name, nth, how in faults if rank == self._slot}

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith((PACKAGE, "<simulated", __file__)):
            return
        self._begun = self._begun or code.co_name == "fit"
        if not self._begun or code.co_name.startswith("<"):
            return
        name = f"{event} of {code.co_qualname} in {Path(code.co_filename).name}"
        self.seen[name] += 1
        nth, how = self._faults.get(name, (0, ""))
        note = self._notes / f"ended-{self._slot}"
        if self.seen[name] != nth or note.exists():  # not in its replacement too
            return
        note.touch()
        if how == "exception":
            raise RuntimeError("the program fails")
        if how == "stop":
            os.kill(int(os.environ["SIMULATED_SUPERVISOR"]), signal.SIGTERM)
        elif how == "hang":
            time.sleep(SECONDS)  # in files that is waited for, and the rank goes on
        else:
            os.kill(os.getpid(), getattr(signal, how))


def in_processes(ranks, train, *args, faults=(), policy=NO_POLICY, **options):
    """What `train` returns in each of as many workers, by slot, their calls, and the outcome."""
    before, shared = set(psutil.Process().children(recursive=True)), set(os.listdir("/dev/shm"))
    selection, supervisor = select(f"cpu:{ranks}"), str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="simulated-") as notes:

        def rank_main():
            os.environ["SIMULATED_SUPERVISOR"] = supervisor
            calls = Calls(faults, Path(notes))
            threading.setprofile(calls)
            sys.setprofile(calls)
            try:
                found = train(None, *args, **options)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
            Path(notes, f"found-{read_settings().slot}").write_bytes(pickle.dumps((found, calls.seen)))

        hang_seconds = 8.0 if {"hang", "SIGSTOP"} & {each[3] for each in faults} else 60.0
        job = Job("function", "simulated:train", quiet=True, policy=Policy(hang_seconds=hang_seconds, **policy))
        outcome = supervise(job, selection, lambda: forked_pool(rank_main, process_variables(selection, 1)))
        found = [pickle.loads(path.read_bytes()) for path in sorted(Path(notes).glob("found-*"))]
    deadline = time.monotonic() + SECONDS
    while left := [*_left(shared), *(set(psutil.Process().children(recursive=True)) - before)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
    if not faults:
        assert (outcome.exit_code, len(found)) == (0, ranks), outcome.failure
    return [each for each, _ in found], [seen for _, seen in found], outcome


def _left(shared):
    """What processes that have ended have left in shared memory."""
    new = [name for name in {*os.listdir("/dev/shm")} - shared if name.startswith("torch_")]
    return [name for name in new if not Path("/proc", name.split("_")[1]).exists()]


def drawn_fault(calls, rank, place, how):
    """A fault of a rank in a function that it called, each as likely as any other, and in one of the calls."""
    # A rank that dies once the end is agreed on misses no step: its script fails, and nothing is healed.
    names = sorted(name for name in calls[rank] if not name.startswith("return of Membership.agree_on_end"))
    name = names[place % len(names)]
    return rank, name, 1 + place // len(names) % calls[rank][name], how


def train_by_command():
    """What the script does if it is given a folder: what `train` returns goes there."""
    if sys.argv[1:]:
        Path(sys.argv[1], str(os.getpid())).write_bytes(pickle.dumps(train()))  # noqa: F821 (of the program)
        sys.exit()


def by_command(script, options, folder):
    """What the `train` of a script returns in each process of a command."""
    with tempfile.TemporaryDirectory(dir=folder) as found:
        ended = subprocess.run(
            [sys.executable, *options, script, found], stderr=subprocess.PIPE, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return [pickle.loads(path.read_bytes()) for path in Path(found).iterdir()]


def ledger(folder):
    """The rows of a ledger by step, without what ranks and time leave in them."""
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return {
        row["step"]: {k: v for k, v in row.items() if k not in ("world_size", "seconds", "crc")}
        for row in rows
        if "loss" in row
    }


def check_strategies(train, one, folder, n):
    one = in_processes(1, train, **n.first)[0][0] if n.has_own_bits else one
    for found in in_processes(n.ranks_first, train, folder / "run", **n.first)[0]:
        check_same(found, one, but=("weights",))
    places = checkpoints_in(folder / "run")
    place = places[n.place % len(places)]
    but = ("weights", "draws", "drawn") if place == places[-1] else ("weights",)
    for found in in_processes(n.ranks_second, train, None, place, **n.second)[0]:
        check_same(found, one, int(place.name[5:]), but)


def check_struck(train, one, folder, n):
    one = in_processes(1, train, **n.first)[0][0] if n.has_own_bits else one
    whole, calls, _ = in_processes(n.ranks_first, train, folder / "whole", **n.first)
    for found in whole:
        check_same(found, one, but=("weights",))
    faults = [drawn_fault(calls, *each) for each in n.faults]
    found, _, outcome = in_processes(n.ranks_first, train, folder / "run", faults=faults, policy=n.policy, **n.first)
    if outcome.exit_code:
        assert not n.heals, outcome.failure
        found = in_processes(n.ranks_second, train, folder / "run", resume="auto", **n.second)[0]
    assert found
    for each in found:
        check_same(each, one, 1 << 30, ("weights", "draws", "drawn"))
    check_same(ledger(folder / "run"), ledger(folder / "whole"))


def check_launchers(train, one, folder, n):
    ways = f"run --devices cpu:{n.ranks_first}", f"torch.distributed.run --nproc-per-node {n.ranks_first}"
    for options in [f"-m samestep {ways[0]}", f"-m {ways[1]}", ""]:
        for found in by_command(__file__, options.split(), folder):
            check_same(found, one)
    with patch.object(sys, "path", [str(Path(__file__).parent), *sys.path]):  # by which workers find this module
        check_same(samestep.launch(train, devices=f"cpu:{n.ranks_first}"), one)
