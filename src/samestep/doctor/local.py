"""All checks of this machine: the table's checks, and the collectives between ranks on it."""

import json
import tempfile
from pathlib import Path

from samestep.devices.inventory import discover
from samestep.devices.selection import Selection, select
from samestep.doctor.check_table import Machine, Result, bad, check_node, from_objects, is_good
from samestep.launcher.job import Job, Policy
from samestep.launcher.supervisor import supervise

GRACE_SECONDS = 3.0
WORKER = "samestep.doctor.rank_checks:run_worker"


def check_local(devices: str, timeout_seconds: float, quick: bool) -> tuple[list[Result], int]:
    """Checks this machine, and the collectives between ranks on it; returns the results and the exit code."""
    inventory = discover()
    selection = select(devices, inventory)
    machine = Machine(inventory, selection, selection.count)
    results, stopped = check_node(machine), 0
    if machine.torch.version is not None:  # else it is a bad result, and no rank could start
        found, stopped = check_ranks(selection, timeout_seconds, quick)
        results += found
    return results, 128 + stopped if stopped else 0 if is_good(results) else 1


def check_ranks(
    selection: Selection, timeout_seconds: float, quick: bool, target: str = WORKER
) -> tuple[list[Result], int]:
    """Starts one rank per device; returns their results, and the signal that stopped them, 0 if none did."""
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as folder:
        report = Path(folder, "results.jsonl")
        kwargs = {"report": str(report), "timeout_seconds": timeout_seconds, "quick": quick}
        policy, preload = Policy(heal=False, hang_seconds=0, grace_seconds=GRACE_SECONDS), (target.partition(":")[0],)
        job = Job("function", target, kwargs=kwargs, quiet=True, preload=preload, policy=policy)
        outcome = supervise(job, selection)
        lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    results = from_objects(map(json.loads, lines))
    if outcome.exit_code != 0 and is_good(results):
        after = f" after {results[-1].name!r}" if results else ""
        reason = (outcome.failure or "they were stopped").strip().splitlines()[0]
        advice = "`samestep run` on a small script shows more; SAMESTEP_TRANSPORT=gloo leaves out shared memory"
        results.append(bad("ranks", f"ended{after}: {reason}", advice))
    return results, outcome.exit_code - 128 if outcome.exit_code > 128 and outcome.failure is None else 0
