"""The starting of ranks on this machine, for an examination, and the collecting of what they found."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.devices.selection import Selection
from samestep.doctor.findings import AREA, Finding, bad
from samestep.launcher.job import Job, Outcome
from samestep.launcher.policy import Policy
from samestep.launcher.supervisor import supervise

GRACE_SECONDS = 3.0
TARGET = "samestep.doctor.ranks:examine"


def examine_ranks(
    selection: Selection, timeout_seconds: float, quick: bool, target: str = TARGET
) -> tuple[list[Finding], int]:
    """Starts a rank a device, lets them try their collectives, and collects what they found.

    Args:
        selection: the devices.
        timeout_seconds: how long ranks wait for each other.
        quick: whether to be content with starting them.
        target: what they run.

    Returns:
        The findings; and the signal that stopped them, 0 for none.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-doctor-") as folder:
        report = Path(folder, "findings.jsonl")
        kwargs: Mapping[str, Any] = {"report": str(report), "timeout_seconds": timeout_seconds, "quick": quick}
        job = Job("function", target, kwargs=kwargs, quiet=True, preload=(target.partition(":")[0],))
        policy = Policy(heal=False, hang_timeout_seconds=0)
        outcome = supervise(job, selection, policy=policy, grace_seconds=GRACE_SECONDS)
        lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    findings = [Finding(**json.loads(line)) for line in lines]
    stopped = outcome.exit_code - 128 if outcome.exit_code > 128 and outcome.failure is None else 0
    findings += _about_end(outcome, findings)
    return [replace(finding, area=finding.area or AREA) for finding in findings], stopped


def _about_end(outcome: Outcome, findings: list[Finding]) -> list[Finding]:
    """The finding about ranks that ended before their time, where they did not say so themselves."""
    if outcome.exit_code == 0 or any(finding.state == "bad" for finding in findings):
        return []
    after = f" after {findings[-1].name!r}" if findings else ""
    reason = (outcome.failure or "they were stopped").strip().splitlines()[0]
    advice = "`samestep run` on a small script shows more; SAMESTEP_TRANSPORT=gloo leaves out shared memory"
    return [bad("ranks", f"ended{after}: {reason}", advice)]
