"""The collectives that training uses, over every possible transport: compared to the bit with arithmetic, and timed.

Every rank knows the input of every other rank, so it can name a wrong element and its sender without asking.

Beside the transport under test the ranks communicate through the store that they met at: each posts there its results
and its stage. So a rank that fails or never answers is named by the others, and a hang ends at a time limit. Rank 0
reports the results.
"""

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.comm.connecting import connect_at, have_own_gpus
from samestep.comm.environment import Environment, read_environment
from samestep.comm.group import ROLL_CALL_SECONDS
from samestep.comm.reduction import ALIGNMENT_ELEMENTS, tree_sum_rows
from samestep.comm.rendezvous import Rendezvous, rendezvous, roll_call, store_host
from samestep.comm.transport import Connection, Transport, gather_parts
from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import Block, TreeSum, rank_blocks
from samestep.devices.inventory import discover
from samestep.devices.selection import select
from samestep.doctor.check_table import Machine, Result, bad, check_node, good, is_good, note
from samestep.engine.rank_device import own_device
from samestep.errors import SamestepError

MOVED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
ADDED_DTYPES = (torch.float32, torch.float64)
SIZES = (1, 1003, 65_537)
LATE_SECONDS = 0.05
NUM_TIMED, NUM_WARM = 20, 2

Operation = Callable[[], object]


@dataclass(frozen=True)
class Collective:
    """A collective; the store is a second channel, which does not depend on the transport under test."""

    name: str  # in the table
    cases: Callable[[Communicator, dist.Store], Iterator[str]]  # yields this rank's error for each case, "" for none
    operation: Callable[[Communicator, Tensor], Operation] | None  # the call that is timed on a small tensor


def difference(got: Tensor, expected: Tensor) -> str:
    """The first element in which two flat tensors differ in a bit; empty if all bits are equal."""
    got = got.detach().cpu()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.numel()} elements of {got.dtype} arrived, should be {expected.numel()} of {expected.dtype}"
    if got.numel() == 0:
        return ""
    width = expected.element_size()
    wrong = (got.view(torch.uint8) != expected.view(torch.uint8)).view(-1, width).any(1).nonzero()
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return (
        f"element {first} of {got.numel():,} is {got[first].item()}, should be {expected[first].item()} "
        f"({len(wrong):,} wrong)"
    )


def pattern(source: int, target: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The message of one rank to another: whole numbers that every dtype holds, different by position and ranks."""
    # Below 127: one byte holds them, and the 8 bits of a bfloat16's mantissa.
    numbers = (7 * torch.arange(numel) + 31 * source + 17 * target) % 127
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


def each(
    check: Callable[[Communicator, torch.dtype, int], str], dtypes: Sequence[torch.dtype] = MOVED_DTYPES
) -> Callable[[Communicator, dist.Store], Iterator[str]]:
    """The cases of a check: every dtype in every size."""

    def cases(comm: Communicator, _: dist.Store) -> Iterator[str]:
        for dtype in dtypes:
            for size in SIZES:
                error = check(comm, dtype, size)
                yield f"{str(dtype).removeprefix('torch.')}, about {size:,} elements: {error}" if error else ""

    return cases


def _parts_differ(got: Tensor, parts: Sequence[Tensor]) -> str:
    """The first error in parts from rank 0, 1, …, with the rank that sent the part."""
    if got.numel() != sum(part.numel() for part in parts):
        return difference(got, torch.cat(list(parts)))
    for source, (ours, part) in enumerate(zip(got.split([len(part) for part in parts]), parts, strict=True)):
        if wrong := difference(ours, part):
            return f"{wrong} in what rank {source} sent"
    return ""


def _ragged(size: int, source: int, target: int) -> int:
    """The number of elements in the message of one rank to another: uneven, and sometimes 0."""
    return 0 if size == 1 and (source + target) % 2 else size + (3 * source + 5 * target) % 7


def check_exchange(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """All-to-all of ragged parts."""
    rank, everyone = comm.rank, range(comm.world_size)
    sizes = [_ragged(size, rank, target) for target in everyone]
    expected = [pattern(source, rank, _ragged(size, source, rank), dtype) for source in everyone]
    parts = torch.cat([pattern(rank, target, sizes[target], dtype) for target in everyone]).to(comm.device)
    got = comm.transport.exchange(parts, sizes, [len(part) for part in expected]).wait()
    return _parts_differ(got, expected)


def check_gather(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """All-gather of equal parts, then of ragged ones."""
    equal = [pattern(source, 0, size, dtype) for source in range(comm.world_size)]
    error = _parts_differ(comm.transport.gather(equal[comm.rank].to(comm.device)).wait(), equal)
    ragged = [pattern(source, 0, _ragged(size, source, 0), dtype) for source in range(comm.world_size)]
    sizes = [len(part) for part in ragged]
    got = gather_parts(comm.transport, ragged[comm.rank].to(comm.device), sizes).wait()
    return error or _parts_differ(got, ragged)


def word_cases(comm: Communicator, _: dist.Store) -> Iterator[str]:
    """Gather of 64-bit integers through host memory."""
    for extreme in (0, -1, 2**62):
        got = comm.gather_words([comm.rank, extreme])
        wrong = [source for source, row in enumerate(got) if row != [source, extreme]]
        yield f"{got[wrong[0]]} arrived from rank {wrong[0]}" if wrong else ""


def check_ordered(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """The ordered reduction of random numbers, whose sums depend on the order, for several numbers of microbatches."""
    unit = ALIGNMENT_ELEMENTS * comm.world_size
    numel = unit * -(-4 * size // unit)
    error = ""
    for num_microbatches in (comm.world_size, max(8, comm.world_size), comm.world_size + 3):
        generators = (torch.Generator().manual_seed(microbatch + 1) for microbatch in range(num_microbatches))
        leaves = [torch.randn(numel, generator=own, dtype=torch.float64).to(dtype) for own in generators]
        ranges = microbatch_ranges(num_microbatches, comm.world_size)
        counter: TreeSum[Tensor] = TreeSum(torch.add)
        for microbatch in ranges[comm.rank]:
            counter.push(Block(microbatch, 1), leaves[microbatch].to(comm.device))
        like = torch.empty_like(leaves[0], device=comm.device)
        got = comm.reduce(rank_blocks(ranges, num_microbatches), counter.sums, like).finish()
        wrong = difference(got, tree_sum_rows(torch.stack(leaves)))
        error = error or (f"{num_microbatches} microbatches, {wrong}" if wrong else "")
    return error


def check_broadcast(comm: Communicator, dtype: torch.dtype, size: int) -> str:
    """Broadcast from the first and from the last rank."""
    error = ""
    for source in (0, comm.world_size - 1):
        expected = pattern(source, 1, size, dtype)
        ours = expected if comm.rank == source else torch.zeros_like(expected)
        moved = ours.to(comm.device, copy=True)
        comm.broadcast(moved, source)
        wrong = difference(moved, expected)
        error = error or (f"{wrong} in what rank {source} sent" if wrong else "")
    return error


def barrier_cases(comm: Communicator, store: dist.Store) -> Iterator[str]:
    """No rank leaves a barrier before all have entered it: first rank 0 is late, then the last rank."""
    for late in sorted({0, comm.world_size - 1}):
        if comm.rank == late:
            time.sleep(LATE_SECONDS)
        store.set(f"entered {late}/{comm.rank}", "here")
        comm.barrier()
        # By the store, to which every rank writes before it enters.
        missing = [rank for rank in range(comm.world_size) if not store.check([f"entered {late}/{rank}"])]
        yield f"left it before rank {missing[0]} entered" if missing else ""


def _exchange(comm: Communicator, tensor: Tensor) -> Operation:
    """An all-to-all of equal parts of the tensor."""
    sizes = [tensor.numel() // comm.world_size] * comm.world_size
    return lambda: comm.transport.exchange(tensor, sizes, sizes).wait()


def _gather(comm: Communicator, tensor: Tensor) -> Operation:
    """An all-gather whose result is as large as the tensor."""
    part = tensor.chunk(comm.world_size)[0]
    return lambda: comm.transport.gather(part).wait()


def _ordered(comm: Communicator, tensor: Tensor) -> Operation:
    """An ordered reduction of the tensor, one microbatch per rank."""
    blocks = tuple((Block(rank, 1),) for rank in range(comm.world_size))
    return lambda: comm.reduce(blocks, [tensor], tensor).finish()


COLLECTIVES = (
    Collective("exchange (all-to-all)", each(check_exchange), _exchange),
    Collective("gather (all-gather)", each(check_gather), _gather),
    Collective("gather of words", word_cases, None),
    Collective("ordered reduction", each(check_ordered, ADDED_DTYPES), _ordered),
    Collective("broadcast", each(check_broadcast), lambda comm, tensor: partial(comm.transport.broadcast, tensor, 0)),
    Collective("barrier", barrier_cases, lambda comm, tensor: comm.barrier),
)
"""All collectives."""


def latency(comm: Communicator, collective: Collective) -> float:
    """Seconds of a small message on this rank: the median of calls that all ranks start together; 0 if not timed."""
    if collective.operation is None:
        return 0.0
    # each rank's part of the tensor must have a whole number of these elements
    tensor = torch.zeros(ALIGNMENT_ELEMENTS * comm.world_size, device=comm.device)
    operation, seconds = collective.operation(comm, tensor), []
    for _ in range(NUM_WARM + NUM_TIMED):
        comm.barrier()
        start = time.perf_counter()
        operation()
        if comm.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[NUM_WARM:])


Wrap = Callable[[Transport], Transport]

LAST_RESORT_SECONDS = 15.0
LEAVE_SECONDS = 5.0
NCCL_PATIENCE = 10
"""NCCL's own watchdog ends the process without a message: it must wait that many times longer than the checks."""
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
class RankVerdict:
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
    """Takes part in the checks as one of several ranks; `about_node`: its node's results, if it is the first there."""
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
    """Runs every collective on every transport."""
    environment, device = session.environment, session.device
    seconds = timedelta(seconds=session.seconds)
    own_gpus = device.type == "cuda" and have_own_gpus(
        Rendezvous(store, environment, seconds).gather_words, environment.rank, device, environment.transport == "auto"
    )
    for name, choice in transports(environment, own_gpus).items():
        own = dist.PrefixStore(f"doctor {name}", store)
        communicator = _connect(session, name, choice, own)
        if communicator is None:
            continue
        is_sound = False
        try:
            is_sound = all(_check_collective(session, name, one, communicator, own) for one in COLLECTIVES)
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
            transport, control = connect_at(Rendezvous(store, environment, timeout), session.device, transfer)
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
    verdicts = [RankVerdict(**json.loads(text)) for text in texts]
    if communicator.transport.nodes is not None and collective.name == "ordered reduction":
        name += " by nodes"
    session.report(combine(name, transport, verdicts))
    return not any(verdict.broken for verdict in verdicts)


def _run_collective(communicator: Communicator, store: dist.Store, collective: Collective) -> RankVerdict:
    """This rank's verdict on a collective."""
    num_cases, wrong = 0, ""
    try:
        for error in collective.cases(communicator, store):
            num_cases += 1
            wrong = wrong or error
        seconds = latency(communicator, collective)
    except Exception as failure:
        return RankVerdict(num_cases, _describe(failure), True)
    return RankVerdict(num_cases, wrong, False, seconds)


def _describe(error: Exception) -> str:
    """The message of an error; our own need no type."""
    return str(error) if isinstance(error, SamestepError) else f"{type(error).__name__}: {error}"


def combine(name: str, transport: str, verdicts: Sequence[RankVerdict]) -> Result:
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

    # A thread, since a collective that hangs holds this one in C code, where no signal handler of Python runs.
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
