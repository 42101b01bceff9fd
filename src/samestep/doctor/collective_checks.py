"""The checks between ranks: every possible transport, every collective on it, the clocks. Rank 0 reports the results.

Beside the transport under test the ranks communicate through the store that they met at: each posts there its results
and its stage. So a rank that fails or never answers is named by the others, and a hang ends at a time limit.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from samestep.comm.communicator import Communicator
from samestep.comm.connecting import connect_at, have_own_gpus
from samestep.comm.environment import Environment, read_environment
from samestep.comm.group import ROLL_CALL_SECONDS, GroupTransport
from samestep.comm.rendezvous import rendezvous, roll_call, store_host
from samestep.comm.transport import Connection, Transport
from samestep.devices.inventory import discover
from samestep.devices.selection import select
from samestep.doctor.check_table import Machine, check_node
from samestep.doctor.collectives import COLLECTIVES, Collective, latency
from samestep.doctor.result import Result, bad, good, is_good, note
from samestep.errors import SamestepError
from samestep.train.determinism import own_device

Wrap = Callable[[Transport], Transport]

LAST_RESORT_SECONDS = 15.0
LEAVE_SECONDS = 5.0
NCCL_PATIENCE = 10
"""NCCL's own watchdog ends the process without a message: it must wait that many times longer than the checks."""
NUM_CLOCK_ROUNDS = 10
SKEW_SECONDS = 0.1
ADVICE = {
    "shared": "memory or a kernel that cannot be trusted: SAMESTEP_TRANSPORT=gloo goes around it; test the memory",
    "gloo": "look at the network (GLOO_SOCKET_IFNAME names an interface); try another one, and test the memory",
    "nccl": "try NCCL_P2P_DISABLE=1, and NCCL_DEBUG=INFO to see more; look at PCIe access control (ACS), IOMMU, driver",
}
HANG_ADVICE = "see what that rank does: py-spy dump --pid …, dmesg; --timeout-seconds gives it more time"
GROUP_ADVICE = "see what the other ranks print; do all nodes reach MASTER_ADDR? --timeout-seconds gives them more time"


class LostRankError(SamestepError):
    """The checks cannot go on, since a rank does not answer; rank 0 has reported it."""


@dataclass(frozen=True)
class Session:
    """One rank's view of the checks: `report` takes the results on rank 0, `give_up` ends a process that hangs."""

    environment: Environment
    device: torch.device
    seconds: float
    report: Callable[[Result], None]
    give_up: Callable[[], None]
    wrap: Wrap = lambda transport: transport


@dataclass(frozen=True)
class Verdict:
    """The result of one rank for one collective: its first error, if any, or the seconds of a small message."""

    num_cases: int = 0
    wrong: str = ""
    broken: bool = False
    seconds: float = 0.0


def run_worker(report: str, timeout_seconds: float, quick: bool, wrap: Wrap = lambda transport: transport) -> None:
    """The program of a worker that `local` starts; rank 0 writes its results to a file, one line each."""
    os.dup2(2, 1)  # output of libraries must not get between the lines of --json

    environment = read_environment()

    def write(result: Result) -> None:
        if environment.rank == 0:
            with Path(report).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")

    device = own_device(None, environment)
    run_checks(Session(environment, device, timeout_seconds, write, lambda: os._exit(1), wrap), quick)


def check_group(
    environment: Environment, timeout_seconds: float, quick: bool, show: Callable[[list[Result]], None]
) -> int:
    """Checks the nodes and ranks of a group that torchrun, srun or mpirun started; returns this rank's exit code."""
    results: list[Result] = []
    if environment.local_rank == 0:
        inventory, num_ranks = discover(), environment.local_world_size
        selection = select("auto" if inventory.devices else f"cpu:{num_ranks}", inventory)
        results = check_node(Machine(inventory, selection, num_ranks, -(-environment.world_size // num_ranks)))

    def give_up() -> None:
        if environment.rank == 0:
            show(results)
        os._exit(1)

    lost = False
    try:
        report: Callable[[Result], None] = results.append if environment.rank == 0 else (lambda result: None)
        session = Session(environment, own_device(None, environment), timeout_seconds, report, give_up)
        run_checks(session, quick, tuple(results))
    except SamestepError as error:
        lost = True
        if is_good(results):
            results.append(bad("ranks", str(error), GROUP_ADVICE))
    if environment.rank == 0:
        show(results)
        return 0 if is_good(results) else 1
    return int(lost)


def run_checks(session: Session, quick: bool, about_node: Sequence[Result] = ()) -> None:
    """Takes part in the checks as one of several ranks; `about_node`: those of its node, if it is the first there."""
    environment = session.environment
    if environment.world_size == 1:
        session.report(good("ranks", f"one, on {session.device.type}: there is no other to communicate with"))
        return
    store = rendezvous(environment, timedelta(seconds=session.seconds))
    named = [replace(result, name=f"{result.name} on {socket.gethostname()}") for result in about_node]
    rows = [asdict(result) for result in named if result.state != "good" and environment.rank > 0]
    texts = _gather_texts(session, dist.PrefixStore("machines", store), "ranks", json.dumps(rows))
    session.report(good("ranks", f"{environment.world_size} started and met, on {session.device.type}"))
    for text in texts:
        for row in json.loads(text):
            session.report(Result(**row))
    if not quick:
        _check_transports(session, dist.PrefixStore("transports", store))
    # Rank 0, which may host the store, leaves last.
    bye = dist.PrefixStore("bye", store)
    with suppress(RuntimeError):  # the store is gone, and no rank waits for this one
        if environment.rank > 0:
            bye.set(str(environment.rank), "bye")
        else:
            roll_call(bye, 0, environment.world_size, LEAVE_SECONDS, None)


def transports(environment: Environment, own_gpus: bool) -> dict[str, str]:
    """The transports that the environment allows: "shared", "gloo" or "nccl", each with its SAMESTEP_TRANSPORT."""
    possible = {"nccl": "auto"} if own_gpus else {}
    if environment.local_world_size == environment.world_size:
        possible |= {"shared": "shared", "gloo": "gloo"}
    else:
        possible["gloo"] = "gloo" if own_gpus else "auto"
    return {name: choice for name, choice in possible.items() if environment.transport in ("auto", name)}


def _check_transports(session: Session, store: dist.Store) -> None:
    """Runs every collective on every transport, and compares the clocks on the first."""
    has_clocks, environment, device = False, session.environment, session.device
    seconds = timedelta(seconds=session.seconds)
    own_gpus = device.type == "cuda" and have_own_gpus(store, environment, device, seconds)
    for name, choice in transports(environment, own_gpus).items():
        own = dist.PrefixStore(f"doctor {name}", store)
        communicator = _connect(session, name, choice, own)
        if communicator is None:
            continue
        is_sound = False
        try:
            if not has_clocks:
                with _time_limit(session, name, "clocks", own):
                    clocks = check_clocks(communicator)
                session.report(clocks)
                has_clocks = True
            has_torch = isinstance(communicator.transport, GroupTransport)
            possible = [collective for collective in COLLECTIVES if has_torch or not collective.is_torch]
            is_sound = all(_check_collective(session, name, collective, communicator, own) for collective in possible)
        finally:
            if is_sound:
                communicator.close()
            else:  # the other ranks may be gone: do not wait for them
                for transport in (communicator.transport, communicator.control):
                    if isinstance(transport, Connection):
                        transport.abandon()


def _connect(session: Session, name: str, choice: str, store: dist.Store) -> Communicator | None:
    """Connects the ranks by a transport; None, on all ranks, if that is not possible."""
    environment = replace(session.environment, transport=choice)
    timeout = timedelta(seconds=session.seconds)
    transfer = timeout * (NCCL_PATIENCE if name == "nccl" else 1)
    problem = ""
    transport: Connection | None = None
    control: Connection | None = None
    with _time_limit(session, name, "connecting", store):
        try:
            transport, control = connect_at(store, environment, session.device, timeout, transfer)
        except (SamestepError, RuntimeError) as error:
            problem = _describe(error)
    label = f"{name}: connecting"
    problems = _gather_texts(session, dist.PrefixStore("connected", store), label, problem, not problem)
    failed = [rank for rank, text in enumerate(problems) if text]
    if transport is not None and control is not None and not failed:
        wrapped = session.wrap(transport)
        return Communicator(session.device, wrapped, wrapped if control is transport else session.wrap(control))
    if transport is not None:
        transport.abandon()
    if name == "shared":
        advice = "ranks talk by gloo instead: right, and slower"
        session.report(note(label, problems[failed[0]], advice))
    else:
        session.report(bad(label, f"rank {failed[0]}: {problems[failed[0]]}", ADVICE[name]))
    return None


def _check_collective(
    session: Session, transport: str, collective: Collective, communicator: Communicator, store: dist.Store
) -> bool:
    """Checks and times one collective; returns whether the transport can still be used."""
    own = dist.PrefixStore(collective.name, store)
    name = f"{transport}: {collective.name}"
    with _time_limit(session, transport, collective.name, store):
        verdict = _run_collective(communicator, own, collective)
    mine = json.dumps(asdict(verdict))
    texts = _gather_texts(session, dist.PrefixStore("verdict", own), name, mine, not verdict.broken, verdict.wrong)
    verdicts = [Verdict(**json.loads(text)) for text in texts]
    if communicator.transport.nodes is not None and collective.name == "ordered reduction":
        name += " by nodes"
    session.report(combine(name, transport, verdicts))
    return not any(verdict.broken for verdict in verdicts)


def _run_collective(communicator: Communicator, store: dist.Store, collective: Collective) -> Verdict:
    """This rank's verdict on a collective."""
    num_cases, wrong = 0, ""
    try:
        for error in collective.cases(communicator, store):
            num_cases += 1
            wrong = wrong or error
        seconds = latency(communicator, collective)
    except Exception as failure:
        return Verdict(num_cases, _describe(failure), True)
    return Verdict(num_cases, wrong, False, seconds)


def _describe(error: Exception) -> str:
    """The message of an error; our own need no type."""
    return str(error) if isinstance(error, SamestepError) else f"{type(error).__name__}: {error}"


def combine(name: str, transport: str, verdicts: Sequence[Verdict]) -> Result:
    """The result of the verdicts of all ranks, with the latency of the slowest."""
    wrong = [rank for rank, verdict in enumerate(verdicts) if verdict.wrong]
    if wrong:
        ranks = f"rank {', '.join(map(str, wrong))}" if len(wrong) < len(verdicts) else "all ranks"
        return bad(name, f"wrong on {ranks}: rank {wrong[0]}: {verdicts[wrong[0]].wrong}", ADVICE[transport])
    found, microseconds = f"right in {verdicts[0].num_cases} cases", 1e6 * max(verdict.seconds for verdict in verdicts)
    if not microseconds:
        return good(name, found)
    return replace(good(name, f"{found}; {microseconds:,.0f} μs"), numbers={"latency_us": microseconds})


def _gather_texts(
    session: Session, store: dist.Store, name: str, text: str, wait: bool = True, reason: str = ""
) -> list[str]:
    """The texts of all ranks through the store; raises if a rank does not answer. Without `wait` it fails quickly."""
    environment = session.environment
    seconds = session.seconds + ROLL_CALL_SECONDS if wait else min(ROLL_CALL_SECONDS, session.seconds)
    host = store_host(environment)
    missing = roll_call(store, environment.rank, environment.world_size, seconds, host, text or " ")
    if missing:
        names = ", ".join(map(str, missing))
        found = f"rank {names} does not answer" if len(missing) == 1 else f"ranks {names} do not answer"
        session.report(bad(name, f"{found}{f' ({reason})' if reason else ''}", HANG_ADVICE))
        raise LostRankError(f"{name}: {found}")
    return [store.get(str(rank)).decode().strip() for rank in range(environment.world_size)]


@contextmanager
def _time_limit(session: Session, transport: str, stage: str, store: dist.Store) -> Iterator[None]:
    """Ends this process if a stage takes too long: not every transport notices that a rank does not answer."""
    rank, world_size = session.environment.rank, session.environment.world_size
    stages = dist.PrefixStore("stages", store)
    stages.set(str(rank), stage)
    # The other transports have timeouts of their own, which name the missing rank: let those come first.
    seconds = session.seconds if transport == "nccl" else 2 * session.seconds + LAST_RESORT_SECONDS

    def give_up() -> None:
        if rank == 0:  # others would ask a store that may be gone
            at = [stages.get(str(r)).decode() if stages.check([str(r)]) else "the start" for r in range(world_size)]
            elsewhere = ", ".join(f"rank {r} is still in {other}" for r, other in enumerate(at) if other != stage)
            found = f"does not end within {seconds:g} s: {elsewhere or f'all {world_size} ranks are in it'}"
            session.report(bad(f"{transport}: {stage}", found, HANG_ADVICE))
        session.give_up()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_clocks(communicator: Communicator) -> Result:
    """Clocks of the ranks against rank 0's. Training does not depend on them; logs and certificates do."""
    rounds = []
    for _ in range(NUM_CLOCK_ROUNDS):  # a rank that was late in one round makes its clock seem late
        communicator.barrier()
        rounds.append([row[0] for row in communicator.gather_words([time.time_ns()])])
    offsets = [min((stamps[rank] - stamps[0] for stamps in rounds), key=abs) / 1e9 for rank in range(len(rounds[0]))]
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    if abs(offsets[worst]) < SKEW_SECONDS:
        return good("clocks of ranks", f"less than {1000 * SKEW_SECONDS:g} ms apart")
    found = (
        f"that of rank {worst} is {abs(offsets[worst]):.3g} s {'ahead of' if offsets[worst] > 0 else 'behind'} rank 0's"
    )
    return note("clocks of ranks", found, "let all nodes follow one time server: chronyc tracking, timedatectl status")
