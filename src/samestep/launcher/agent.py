"""The agent: runs a job on the devices of this machine, together with the agents of other machines, from start to end.

Agents meet by torchrun's rendezvous (`rendezvous`) and begin a round: each starts a worker a device and watches it as
on one machine (`watch`). A round is over when the workers of all nodes have ended. Then all agents come to the same
verdict: the run is over, or those that are left begin another round, whose workers go on from the newest checkpoint.
"""

import contextlib
import json
import os
import select
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from samestep.comm.heartbeat_page import HeartbeatPage
from samestep.devices.device import counted
from samestep.devices.selection import Selection
from samestep.errors import PeerLostError
from samestep.launcher.assignment import Node, assign, process_variables
from samestep.launcher.cluster import Cluster
from samestep.launcher.crew import Crew, ForkCrew, SpawnCrew
from samestep.launcher.display import Display
from samestep.launcher.failure import Casualty
from samestep.launcher.job import Job, Outcome
from samestep.launcher.nodes import Program
from samestep.launcher.outlook import Outlook
from samestep.launcher.policy import Policy
from samestep.launcher.rendezvous import Introduction, Rendezvous, Round, interface_to, open_rendezvous, told
from samestep.launcher.restarts import Restarts
from samestep.launcher.starting import Starter, make_log_dir
from samestep.launcher.supervisor import stop_requests
from samestep.launcher.verdict import End
from samestep.launcher.watch import Watch

GRACE_SECONDS = 10.0
STOP_CODES = tuple(128 + signum for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


class StopRequest(Exception):
    """A signal asked this node to stop while no workers were there to be asked."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True)
class Agent:
    """What one node goes by, in all rounds.

    Attributes:
        program: what to run.
        selection: the devices of this machine.
        cluster: the nodes.
        threads: CPU threads a worker.
        method: how workers are started, "fork" or "spawn".
        policy: what is done about workers that are lost; `max_restarts` counts rounds.
    """

    program: Program
    selection: Selection
    cluster: Cluster
    threads: int
    method: str
    policy: Policy

    def run(self) -> tuple[Outcome, int]:
        """Runs the job; see `nodes.run_on_nodes`."""
        count, kind = self.selection.count, self.selection.kind
        devices = counted(count, "CPU worker") if kind == "cpu" else f"{count} {kind}"
        program = self.program
        ours = Introduction.of(self.cluster, devices, self.threads, program.words, program.checksum)
        over, rank = False, 0
        with (
            stop_requests() as requests,
            contextlib.closing(Display(program.job.quiet, program.job.lines_to)) as display,
        ):
            rendezvous = None
            try:
                with interruptible():
                    rendezvous = open_rendezvous(self.cluster, ours)
                    rendezvous.check()
                while True:
                    with interruptible():
                        here = rendezvous.meet()
                    rank = here.rank
                    outcome, over = self._round(rendezvous, here, display, requests)
                    if outcome is not None:
                        return outcome, rank
            except StopRequest as stop:
                return Outcome(128 + stop.signum), rank
            except PeerLostError as error:
                return Outcome(1, failure=f"{error}; {program.job.resume_hint}"), rank
            except RendezvousGracefulExitError:
                count = self.cluster.max_nodes
                display.say(
                    f"the run at {self.cluster.endpoint} is over and did not need this node: it was full ({count} of "
                    f"{count} nodes)"
                )
                return Outcome(0), rank
            finally:
                if rendezvous is not None:
                    rendezvous.close(over)

    def _round(
        self, rendezvous: Rendezvous, here: Round, display: Display, requests: int | None
    ) -> tuple[Outcome | None, bool]:
        """One round.

        Returns:
            What came of the run for this node, None if it goes on; and whether it is over for all.

        Raises:
            PeerLostError: the host of the meeting is gone.
        """
        try:
            job = self._job_of(here)
        except RuntimeError as error:
            raise rendezvous.host_lost(error) from error
        if here.number:
            display.say(f"{counted(len(here.nodes), 'node')} in round {here.number}; this is {here.name(here.rank)}")
        outlook = Outlook(rendezvous, here)
        outcome, ours = self._attend(job, rendezvous, here, outlook, display, requests)

        def check() -> None:
            if requests is not None and select.select([requests], [], [], 0)[0]:
                raise StopRequest(os.read(requests, 1)[0])

        limit = self.policy.max_restarts
        verdict = outlook.agree(ours, limit, job.resume_hint, check)
        if verdict.again and ours.kind != "stopped":
            display.say(f"{verdict.text}\nsamestep: starting again with the nodes that are there")
            return None, False
        outlook.part()
        if verdict.again or ours.kind == "stopped":
            return replace(outcome, exit_code=ours.exit_code), not verdict.again
        if verdict.exit_code in STOP_CODES and not any(end.kind == "failed" for end in (ours, *outlook.ends.values())):
            display.say(verdict.text)
            return Outcome(verdict.exit_code), True
        return replace(outcome, exit_code=verdict.exit_code, failure=verdict.text or None), True

    def _job_of(self, here: Round) -> Job:
        """This node's job in a round."""
        job = self.program.job
        if self.program.is_shared:
            kwargs = {"kwargs": dict(job.kwargs), "hint": job.resume_hint, "log_dir": job.log_dir}
            if here.rank == 0:
                here.store.set("job", json.dumps(kwargs))
            else:
                job = told(
                    lambda kwargs, hint, log_dir: replace(job, kwargs=kwargs, resume_hint=hint, log_dir=log_dir),
                    here.store.get("job"),
                )
        return job.restarted() if here.number else job

    def _attend(
        self, job: Job, rendezvous: Rendezvous, here: Round, outlook: Outlook, display: Display, requests: int | None
    ) -> tuple[Outcome, End]:
        """Starts this node's workers and watches them until all have ended."""
        cluster, count = self.cluster, self.selection.count
        interface = interface_to(cluster, rendezvous.own_address)
        name = here.nodes[here.rank].name
        node = Node(here.rank, len(here.nodes), here.address, here.port, interface, name)
        places = assign(
            self.selection,
            self.threads,
            cluster.run_id,
            attempt=here.number,
            max_restarts=self.policy.max_restarts,
            node=node,
        )
        log_dir = make_log_dir(job.log_dir)
        crew, page = self._crew(job), HeartbeatPage.create(count)
        watch = Watch(
            crew,
            page,
            display,
            job,
            self.policy,
            Restarts(0),
            GRACE_SECONDS,
            first_rank=here.rank * count,
            outlook=outlook.look,
        )
        try:
            if requests is not None:
                watch.listen_for_stop(requests)
            starter = Starter(watch, job, log_dir, False, {})
            for place in places:
                starter.start(place)
            outcome = watch.run(starter.start)
        finally:
            crew.close()
            watch.close()
            page.close()
        return outcome, end_of(outcome, watch.culprit, watch.stopped_by, outlook, watch.is_fault)

    def _crew(self, job: Job) -> Crew:
        """What starts the workers of a round."""
        variables = process_variables(self.selection, self.threads)
        return ForkCrew.executed(variables, job.preload) if self.method == "fork" else SpawnCrew(variables)


def end_of(outcome: Outcome, culprit: Casualty | None, stopped_by: int | None, outlook: Outlook, is_fault: bool) -> End:
    """How this node's workers ended, as the other nodes are told.

    Args:
        outcome: of the watch.
        culprit: the worker that failed first by itself, else one that saw others vanish; None if none failed.
        stopped_by: the signal by which the user asked this node to stop.
        outlook: to the other nodes.
        is_fault: whether another attempt could not escape what befell the culprit.
    """
    code, text = outcome.exit_code, outcome.failure or ""
    if stopped_by is not None and code != 0:
        return End("stopped", 128 + stopped_by)
    if outlook.asked == "stop" and code in STOP_CODES:
        return End("again" if outlook.changes else "left", code)
    if culprit is None and code == 0:
        return End("done") if outlook.asked != "end" else End("peer", 1)
    if culprit is not None and culprit.is_peer_lost:
        return End("peer", code or 1, text)
    if culprit is not None and culprit.exit_code in STOP_CODES:
        return End("left", code, text)
    return End("failed", code or 1, text, is_fault)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A time in which a request to stop interrupts what is waited for; those that are ignored stay ignored.

    Raises:
        StopRequest: there was one.
    """

    def stop(signum: int, _frame: FrameType | None) -> None:
        raise StopRequest(signum)

    before: Mapping[int, Any] = {}
    with contextlib.suppress(ValueError):  # outside the main thread Python has no signals
        before = {
            signum: signal.signal(signum, stop)
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(signum) not in (signal.SIG_IGN, None)
        }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
