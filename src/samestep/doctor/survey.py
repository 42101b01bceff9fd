"""The survey: the ranks of a group try every transport and collective that they have, and rank 0 tells what came of it.

Besides the transport under test the ranks talk through the store that they met at: what each found, and where it is.
So a rank that fails, or never comes, is named by the others, and a hang ends after a time that the caller sets.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from samestep.comm.communicator import Communicator
from samestep.comm.connecting import Connection, connect_at
from samestep.comm.environment import Environment
from samestep.comm.group import ROLL_CALL_SECONDS, meet, roll_call, store_host
from samestep.comm.transport import Transport
from samestep.doctor.clocks import check_offsets, measure_offsets
from samestep.doctor.collectives import COLLECTIVES, Collective, Ranks
from samestep.doctor.findings import Finding, bad, good, note
from samestep.doctor.timing import describe_speed, large_bytes, measure, speed
from samestep.errors import PeerLostError, SamestepError

Tell = Callable[[Finding], None]
Wrap = Callable[[Transport], Transport]

LAST_RESORT_SECONDS = 15.0
NCCL_PATIENCE = 10
"""How many times longer NCCL's own watchdog waits, which ends the process without a word, than we do."""
ADVICE = {
    "shared": "memory or a kernel that cannot be trusted: SAMESTEP_TRANSPORT=gloo goes around it; test the memory",
    "gloo": "look at the network (GLOO_SOCKET_IFNAME names an interface); try another one, and test the memory",
    "nccl": "try NCCL_P2P_DISABLE=1, and NCCL_DEBUG=INFO to see more; look at PCIe access control (ACS), IOMMU, driver",
}
HANG_ADVICE = "see what that rank does: py-spy dump --pid …, dmesg; --timeout-seconds gives it more time"


@dataclass(frozen=True)
class Way:
    """A way for the ranks to talk.

    Attributes:
        name: "shared", "gloo" or "nccl".
        choice: what SAMESTEP_TRANSPORT says for it.
    """

    name: str
    choice: str


@dataclass(frozen=True)
class Verdict:
    """What one rank found of one collective.

    Attributes:
        num_cases: how many it tried.
        wrong: what is wrong with the first that is; empty if none is.
        broken: whether the transport can no longer be used.
        lost: ranks that did not answer.
        small: seconds of a small message.
        large: seconds of a large one.
    """

    num_cases: int = 0
    wrong: str = ""
    broken: bool = False
    lost: tuple[int, ...] = ()
    small: float = 0.0
    large: float = 0.0


class LostRankError(SamestepError):
    """The survey cannot go on, since a rank is missing; it has been told of."""


@dataclass(frozen=True)
class Survey:
    """What a survey needs to know.

    Attributes:
        place: ours among the ranks.
        device: this rank's.
        patience: how long to wait for others.
        tell: takes the findings, on rank 0.
        give_up: ends this process, after a hang that nothing else ended.
        wrap: put around every transport; what a test breaks.
    """

    place: Environment
    device: torch.device
    patience: timedelta
    tell: Tell
    give_up: Callable[[], None]
    wrap: Wrap = lambda transport: transport

    @property
    def seconds(self) -> float:
        """How long to wait for others."""
        return self.patience.total_seconds()


def ways(place: Environment, device: torch.device) -> tuple[Way, ...]:
    """The ways in which ranks can talk: those that the environment allows."""
    is_alone_on_host = place.local_world_size == place.world_size
    has_own_gpu = device.type == "cuda" and place.local_world_size <= torch.cuda.device_count()
    possible = [Way("nccl", "auto")] if has_own_gpu else []
    if is_alone_on_host:
        possible += [Way("shared", "shared"), Way("gloo", "gloo")]
    else:
        possible.append(Way("gloo", "gloo" if has_own_gpu else "auto"))
    if place.transport == "auto":
        return tuple(possible)
    return tuple(way for way in possible if way.name == place.transport)


def carry_out(survey: Survey, store: dist.Store) -> None:
    """Tries every way and every collective.

    Args:
        survey: what to know.
        store: that the ranks met at.

    Raises:
        LostRankError: a rank is missing; rank 0 has told of it.
    """
    has_clocks = False
    for way in ways(survey.place, survey.device):
        ours = dist.PrefixStore(f"doctor {way.name}", store)
        communicator = _connect(survey, way, ours)
        if communicator is None:
            continue
        is_sound = False
        try:
            if not has_clocks:
                with _cut_off(survey, way, "clocks", ours):
                    offsets = measure_offsets(communicator)
                _tell(survey, check_offsets(offsets))
                has_clocks = True
            possible = [collective for collective in COLLECTIVES if collective.is_possible(communicator)]
            is_sound = all(_try(survey, way, collective, communicator, ours) for collective in possible)
        finally:
            communicator.close() if is_sound else _drop(communicator)


def _drop(communicator: Communicator) -> None:
    """Drops connections that failed, without waiting for anybody."""
    for transport in (communicator.transport, communicator.control):
        if isinstance(transport, Connection):
            transport.abandon()


def start(survey: Survey) -> dist.Store:
    """Meets the other ranks.

    Raises:
        SamestepError: they did not come.
    """
    return meet(survey.place, survey.patience)


def _tell(survey: Survey, finding: Finding) -> None:
    """Hands over a finding, on rank 0."""
    if survey.place.rank == 0:
        survey.tell(finding)


def _connect(survey: Survey, way: Way, store: dist.Store) -> Communicator | None:
    """Connects the ranks in one way; None, on all of them, where that cannot be."""
    place = replace(survey.place, transport=way.choice)
    transfer = survey.patience * (NCCL_PATIENCE if way.name == "nccl" else 1)
    problem = ""
    transport: Connection | None = None
    control: Connection | None = None
    with _cut_off(survey, way, "connecting", store):
        try:
            transport, control = connect_at(store, place, survey.device, survey.patience, transfer)
        except SamestepError as error:
            problem = str(error)
        except RuntimeError as error:
            problem = f"{type(error).__name__}: {error}"
    words = _hear(survey, dist.PrefixStore("connected", store), way, "connecting", problem, not problem)
    failed = [rank for rank, word in enumerate(words) if word]
    if transport is None or control is None or failed:
        if transport is not None:
            transport.abandon()
        reason = words[failed[0]] if failed else problem
        if way.name == "shared":
            _tell(survey, note("shared: connecting", reason, "ranks talk by gloo instead: right, and slower"))
        else:
            _tell(survey, bad(f"{way.name}: connecting", f"rank {failed[0]}: {reason}", ADVICE[way.name]))
        return None
    wrapped = survey.wrap(transport)
    return Communicator(survey.device, wrapped, wrapped if control is transport else survey.wrap(control))


def _try(survey: Survey, way: Way, collective: Collective, communicator: Communicator, store: dist.Store) -> bool:
    """Tries one collective; whether the transport can be used any further.

    Raises:
        LostRankError: a rank is missing.
    """
    own = dist.PrefixStore(collective.name, store)
    ranks = Ranks(communicator, own)
    with _cut_off(survey, way, collective.name, store):
        verdict = _judge(ranks, collective)
    told = json.dumps(asdict(verdict))
    words = _hear(survey, dist.PrefixStore("verdict", own), way, collective.name, told, not verdict.broken, verdict)
    verdicts = [_read_verdict(word) for word in words]
    is_by_nodes = communicator.transport.nodes is not None and collective.name == "ordered reduction"
    name = f"{way.name}: {collective.name}{' by nodes' if is_by_nodes else ''}"
    _tell(survey, judge(name, way.name, collective, verdicts, large_bytes(survey.device)))
    return not any(verdict.broken for verdict in verdicts)


def _judge(ranks: Ranks, collective: Collective) -> Verdict:
    """What this rank finds of a collective."""
    num_cases, wrong = 0, ""
    try:
        for found in collective.cases(ranks):
            num_cases += 1
            wrong = wrong or found
        small, large = measure(ranks, collective)
    except PeerLostError as error:
        return Verdict(num_cases, str(error), True, error.ranks)
    except Exception as error:
        return Verdict(num_cases, f"{type(error).__name__}: {error}", True)
    return Verdict(num_cases, wrong, small=small, large=large)


def _read_verdict(word: str) -> Verdict:
    """The verdict that a rank wrote."""
    row = json.loads(word)
    return Verdict(**{**row, "lost": tuple(row["lost"])})


def judge(name: str, way: str, collective: Collective, verdicts: Sequence[Verdict], num_bytes: int) -> Finding:
    """What the verdicts of all ranks say.

    Args:
        name: of the finding.
        way: the transport's name.
        collective: which was tried.
        verdicts: by rank.
        num_bytes: of the large message.
    """
    wrong = [rank for rank, verdict in enumerate(verdicts) if verdict.wrong]
    if wrong:
        who = f"rank {', '.join(map(str, wrong))}" if len(wrong) < len(verdicts) else "all ranks"
        return bad(name, f"wrong on {who}: rank {wrong[0]}: {verdicts[wrong[0]].wrong}", ADVICE[way])
    small = max(verdict.small for verdict in verdicts)
    large = max(verdict.large for verdict in verdicts)
    numbers = speed(collective, small, large, num_bytes, len(verdicts))
    words = [f"right in {verdicts[0].num_cases} cases", describe_speed(numbers, num_bytes)]
    return good(name, "; ".join(filter(None, words)), numbers)


def _hear(
    survey: Survey, store: dist.Store, way: Way, stage: str, word: str, wait: bool, verdict: Verdict | None = None
) -> list[str]:
    """What every rank says about a stage.

    Args:
        survey: what to know.
        store: of the stage.
        way: which is tried.
        stage: what it is called.
        word: what we say.
        wait: whether to be patient; whoever lost the others already is not.
        verdict: ours; knows who did not answer.

    Raises:
        LostRankError: a rank does not say anything.
    """
    place = survey.place
    seconds = survey.seconds + ROLL_CALL_SECONDS if wait else min(ROLL_CALL_SECONDS, survey.seconds)
    missing = roll_call(store, place.rank, place.world_size, seconds, store_host(place), word or " ")
    if missing:
        reason = "" if verdict is None else verdict.wrong
        _tell(survey, lost(way.name, stage, missing, reason))
        raise LostRankError(f"rank {', '.join(map(str, missing))} did not answer in {stage} over {way.name}")
    return [store.get(str(rank)).decode().strip() for rank in range(place.world_size)]


def lost(way: str, stage: str, missing: Sequence[int], reason: str) -> Finding:
    """The finding about ranks that do not answer."""
    names = ", ".join(map(str, missing))
    found = f"rank {names} does not answer" if len(missing) == 1 else f"ranks {names} do not answer"
    return bad(f"{way}: {stage}", f"{found}{f' ({reason})' if reason else ''}", HANG_ADVICE)


@contextmanager
def _cut_off(survey: Survey, way: Way, stage: str, store: dist.Store) -> Iterator[None]:
    """Ends a stage that nothing else ends: where a wait raises nothing, or a rank does not come back from a call."""
    rank = survey.place.rank
    places = dist.PrefixStore("places", store)
    places.set(str(rank), stage)
    seconds = survey.seconds if way.name == "nccl" else 2 * survey.seconds + LAST_RESORT_SECONDS

    def give_up() -> None:
        if rank == 0:
            survey.tell(_hang(survey, places, way, stage, seconds))
        survey.give_up()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hang(survey: Survey, places: dist.Store, way: Way, stage: str, seconds: float) -> Finding:
    """The finding about a stage that does not end: who is not even in it."""
    world_size = survey.place.world_size
    at = [places.get(str(rank)).decode() if places.check([str(rank)]) else "the start" for rank in range(world_size)]
    elsewhere = [f"rank {rank} is still in {where}" for rank, where in enumerate(at) if where != stage]
    who = ", ".join(elsewhere) or f"all {world_size} ranks are in it"
    return bad(f"{way.name}: {stage}", f"does not end within {seconds:g} s: {who}", HANG_ADVICE)
