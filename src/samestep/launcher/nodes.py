"""Several nodes: runs a program on the devices of this machine and of others. Torch is not imported before that."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samestep.devices.selection import Selection
from samestep.errors import UsageError
from samestep.launcher.cluster import Cluster
from samestep.launcher.job import Job, Outcome
from samestep.launcher.policy import Policy
from samestep.launcher.store import LOG_LEVEL
from samestep.launcher.supervisor import resolve_start_method


@dataclass(frozen=True)
class Program:
    """What the nodes of a run do; the same on all.

    Attributes:
        job: this node's.
        words: what is run, as the user wrote it.
        is_shared: whether all nodes take the job of node 0, whose run folder and the like are the run's.
    """

    job: Job
    words: str
    is_shared: bool = False

    @property
    def checksum(self) -> str:
        """Of the script's content; empty for what is no file."""
        named = self.job.kwargs if self.job.kind == "function" else {"kind": self.job.kind, "target": self.job.target}
        if named.get("kind") != "script":
            return ""
        return hashlib.sha256(Path(str(named["target"])).read_bytes()).hexdigest()[:16]


def run_on_nodes(
    program: Program,
    selection: Selection,
    cluster: Cluster,
    *,
    threads: int = 1,
    start_method: str | None = None,
    policy: Policy | None = None,
) -> tuple[Outcome, int]:
    """Runs a program on the devices of this machine and of the other nodes of a cluster, and waits for its end.

    Signals do what they do on one machine (`supervisor.supervise`): all nodes finish the same step and end. Whatever
    happens, no process, port or file of the run is left on this machine.

    Args:
        program: what to run.
        selection: the devices of this machine.
        cluster: the nodes.
        threads: CPU threads a worker.
        start_method: "fork" or "spawn"; None takes fork where it is safe.
        policy: what is done about workers that are lost; `Policy()` if None. Workers of several nodes do not heal:
            `max_restarts` says how often they may start again.

    Returns:
        What came of it, and this node's number in the last round.

    Raises:
        UsageError: the arguments cannot be, the nodes do not agree, or too few came in time.
        RunFolderError: the log folder cannot be written.
    """
    policy = policy or Policy()
    policy.check_devices(selection.count)
    if policy.replace:
        raise UsageError(
            "got --replace, which is for one machine; on several a lost node is taken in again when it comes back "
            "(--nnodes MIN:MAX), and --max-restarts starts workers again"
        )
    method = resolve_start_method(start_method, threads)
    with _quiet():
        from samestep.launcher.agent import Agent

        return Agent(program, selection, cluster, threads, method, policy).run()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch's rendezvous from telling in many lines what we tell in a sentence; workers are not concerned.

    Its C++ part reads the variable when it is loaded.
    """
    logger, is_set = logging.getLogger("torch.distributed.elastic"), LOG_LEVEL in os.environ
    level = logger.level
    if not is_set:
        os.environ[LOG_LEVEL] = "ERROR"
        try:
            import torch.distributed  # noqa: F401 - for the variable to be read
        finally:
            del os.environ[LOG_LEVEL]
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
