"""Runs on fake GPUs whose workers are killed at random instants, from outside: `deaths.py JSON`, a list of such runs.

Each holds "folder", "devices", "seed", "kills" and "seconds" (how many workers are killed, each at most so long after
the one before), "order" of the fake streams, "replace" (how many workers may be started anew), and what
`faulty_training.py` takes. Prints a line of JSON for each.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from healing_runs import SCRIPT, Told, run_script

from samestep.launcher.job import Policy

SOON = 0.3  # seconds: while the others go on without the one before
LIMIT_SECONDS = 120  # of a run, which takes a tenth of it; then this process ends, and its workers with it


class Killer(threading.Thread):
    """Kills workers that have taken a step, as long as two of them are left."""

    def __init__(self, folder, seed, kills, seconds):
        super().__init__(daemon=True)
        self._folder, self._random, self._kills, self._seconds = folder, random.Random(seed), kills, seconds
        self._over = threading.Event()
        self.killed = []

    def run(self):
        while len(self.killed) < self._kills and not self._over.is_set():
            if not self._pids():
                self._over.wait(0.002)
                continue
            limit = SOON if self._random.random() < 0.25 else self._seconds
            self._over.wait(self._random.uniform(0, limit))
            pids = self._pids()
            if len(pids) > 1 and not self._over.is_set():
                slot = self._random.choice(sorted(pids))
                os.kill(pids[slot], signal.SIGKILL)
                self.killed.append(slot)

    def stop(self):
        self._over.set()
        self.join()

    def _pids(self):
        """The processes that have the state, by slot."""
        slots = {int(path.name.removeprefix("pid-")): path.read_text() for path in self._folder.glob("pid-*")}
        over = {
            int(path.stem.partition("-")[2]) for kind in ("ended", "struck") for path in self._folder.glob(f"{kind}-*")
        }
        return {slot: int(pid) for slot, pid in slots.items() if pid and slot not in {*over, *self.killed}}


def run_one(told):
    folder, start = Path(told["folder"]), time.monotonic()
    folder.mkdir()
    os.environ.update({"FAKE_CUDA_ORDER": told.get("order", "late"), "FAKE_CUDA_SEED": str(told["seed"])})
    killer = Killer(folder, told["seed"], told.get("kills", 0), told.get("seconds", 2.0))
    killer.start()
    signal.alarm(LIMIT_SECONDS)
    try:
        replace = told.get("replace", 0)
        policy = Policy(hang_seconds=20.0, replace=replace > 0, max_restarts=max(1, replace))
        told_to_workers = {"faults": [], "resume": "auto", **told, "folder": str(folder / "run")}
        outcome = run_script(SCRIPT, told["devices"], told_to_workers, policy)
    finally:
        killer.stop()
    run = Told(folder, outcome)
    steps = list({step["step"]: step for step in run.steps}.values())
    return {
        "exit_code": outcome.exit_code,
        "failure": outcome.failure,
        "digests": sorted(run.digests),
        "histories": [ended["history"] for ended in run.ended],
        "steps": steps,
        "twice": len(run.steps) - len(steps),
        "differ": [step["step"] for step in run.steps if step not in steps],
        "events": [dict(event) for event in outcome.events],
        "killed": [*killer.killed, *(struck["rank"] for struck in run.struck)],
        "seconds": round(time.monotonic() - start, 1),
    }


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        print(json.dumps(run_one(each)), flush=True)
