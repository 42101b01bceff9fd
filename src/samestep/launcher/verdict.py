"""The verdict: how the nodes of a round ended, and what follows for all of them. Pure arithmetic, alike on all."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from samestep.launcher.failure import name_signal

EndKind = Literal["done", "failed", "peer", "left", "again", "stopped"]


@dataclass(frozen=True)
class End:
    """How one node's workers ended in a round.

    Attributes:
        kind: "done"; "failed": one failed by itself; "peer": they only saw others vanish, or were ended for that;
            "left": they left after a step, or by a signal, though nobody here asked them to; "again": they left to let
            the nodes change; "stopped": a signal asked this node to stop.
        exit_code: of the node, if nothing else follows.
        text: the message about the worker that failed first.
        is_fault: whether another attempt could not escape it.
    """

    kind: EndKind
    exit_code: int = 0
    text: str = ""
    is_fault: bool = False


@dataclass(frozen=True)
class Verdict:
    """What follows for all nodes but those that a signal asked to stop.

    Attributes:
        again: whether those who are left begin another round.
        exit_code: if not, what they end with.
        text: why, in words; empty where there is nothing to say.
        uses_restart: whether the next round counts as a restart.
    """

    again: bool
    exit_code: int = 0
    text: str = ""
    uses_restart: bool = False


@dataclass(frozen=True)
class Rules:
    """What the verdict goes by, besides what happened.

    Attributes:
        min_nodes: with fewer the run is over.
        max_nodes: if it is more, nodes may come and go.
        restarts_left: how many rounds may follow a loss or a failure.
        resume_hint: says how to go on with a run that is over.
    """

    min_nodes: int
    max_nodes: int
    restarts_left: int
    resume_hint: str


def judge(ends: Mapping[int, End], lost: Mapping[int, str], names: Sequence[str], rules: Rules) -> Verdict:
    """What follows from a round.

    Args:
        ends: how each node ended, by number.
        lost: how those were lost that did not say, by number, in words.
        names: of all nodes, in words.
        rules: what the user allows.
    """
    stopped = {rank: end for rank, end in ends.items() if end.kind == "stopped"}
    left = len(ends) - len(stopped)
    if stopped:
        told = ", ".join(f"{names[rank]} was asked to stop ({_signal_of(end)})" for rank, end in stopped.items())
        if rules.min_nodes < rules.max_nodes and left >= rules.min_nodes:
            return Verdict(True, text=told)
        return Verdict(False, max(end.exit_code for end in stopped.values()), told)
    kinds = {end.kind for end in ends.values()}
    if kinds == {"done"} and not lost:
        return Verdict(False)
    if "again" in kinds and left >= rules.min_nodes:
        return Verdict(True, text="the nodes change")
    failed = {rank: end for rank, end in ends.items() if end.kind == "failed"}
    failed = failed or {rank: end for rank, end in ends.items() if end.kind == "left"}
    fault = next((rank for rank, end in failed.items() if end.is_fault), None)
    if fault is not None:
        return Verdict(False, failed[fault].exit_code, f"{names[fault]}: {failed[fault].text}")
    reasons = [f"{names[rank]} is lost: {how}" for rank, how in lost.items()]
    reasons += [f"{names[rank]}: {end.text or 'its workers left'}" for rank, end in failed.items()]
    if not reasons:
        first = next((rank for rank, end in ends.items() if end.kind == "peer"), next(iter(ends)))
        reasons = [f"{names[first]}: {ends[first].text or 'its connections to other nodes broke'}"]
    return _after_a_failure("\n".join(reasons), left, max((end.exit_code for end in failed.values()), default=1), rules)


def _after_a_failure(reason: str, left: int, exit_code: int, rules: Rules) -> Verdict:
    """What follows for so many nodes that are left."""
    if left < rules.min_nodes:
        nodes = "1 node is" if left == 1 else f"{left} nodes are"
        return Verdict(
            False,
            exit_code,
            f"{reason}\n{nodes} left, and --nnodes asks for {rules.min_nodes}: start all nodes again "
            f"({rules.resume_hint}); with --nnodes {max(left, 1)}:{rules.max_nodes} and --max-restarts those that are "
            "left would go on",
        )
    if rules.restarts_left < 1:
        return Verdict(False, exit_code, f"{reason}\nno restart is left (--max-restarts); {rules.resume_hint}")
    return Verdict(True, text=reason, uses_restart=True)


def _signal_of(end: End) -> str:
    """The signal behind an exit code."""
    return name_signal(max(end.exit_code - 128, int(signal.SIGHUP)))
