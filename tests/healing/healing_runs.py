"""Runs of scripts with faults under a real supervisor, and their results."""

import importlib
import json
import os
import time
from pathlib import Path

import torch
from forked_pool import forked_pool
from worlds import DEVICE

from samestep.devices.selection import select
from samestep.launcher.job import Job, Policy, process_variables, run_program
from samestep.launcher.supervisor import supervise
from samestep.runs.ledger import from_line

SCRIPT = str(Path(__file__).with_name("faulty_training.py"))
COMPARED = ("step", "epoch", "position", "num_samples", "ids", "loss", "grad_norm", "lr", "skipped", "digest")


class Told:
    """A run that has ended, with its files."""

    def __init__(self, folder, outcome):
        self.folder, self.outcome = folder, outcome
        self.ended = [json.loads(path.read_text()) for path in sorted(folder.glob("ended-*.json"))]
        self.struck = [json.loads(path.read_text()) for path in sorted(folder.glob("struck-*.json"))]
        self.has_read_a_checkpoint = any(folder.glob("read-a-checkpoint-*"))
        ledger = folder / "run" / "ledger.jsonl"
        lines = [from_line(line) for line in ledger.read_bytes().splitlines()] if ledger.exists() else []
        self.steps = [{name: line.get(name) for name in COMPARED} for line in lines if "event" not in line]
        self.events = [line for line in lines if "event" in line]

    @property
    def digests(self):
        return {ended["digest"] for ended in self.ended}


SHARED_SECONDS = 30
IMPORTED_LATE = ("torch._dynamo", "matplotlib.pyplot", "torch.utils.tensorboard")  # by every run, for seconds


def run_script(script, devices, told, policy=None, start_method=None):
    """Runs a script with an argument on CPU workers; nothing stays in shared memory.

    Without a start method they are forks of this process, which imports once what each would import, or of a clean one
    where forks of this one break.
    """
    policy = Policy(hang_seconds=5.0) if policy is None else policy
    before = shared_memory()
    job = Job("script", script, (json.dumps(told),), quiet=True, start_method=start_method, policy=policy)
    selection = select(f"cpu:{devices}" if DEVICE == "cpu" else f"{DEVICE}:" + ",".join(map(str, range(devices))))
    if start_method is None and not torch.cuda.is_available():
        for name in IMPORTED_LATE:
            importlib.import_module(name)
        variables = process_variables(selection, 1)
        outcome = supervise(job, selection, lambda: forked_pool(lambda: run_program(job, {}), variables))
    else:
        outcome = supervise(job, selection)
    deadline = time.monotonic() + SHARED_SECONDS
    while shared_memory() - before and time.monotonic() < deadline:
        time.sleep(0.1)  # what other tests use beside this one goes by itself
    assert shared_memory() <= before
    return outcome


def shared_memory():
    """What torch's data workers have in shared memory."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}
