"""A real supervisor and real ranks, which are threads that take turns on a virtual clock, with faults at drawn turns.

Simulated are the clock and the processes alone; the monitor, the page, membership, the rendezvous and the transport
through shared memory are real. What must hold:

    1. An operation is carried out once by all ranks that live, or by none, and its result is what one rank computes.
    2. There are never two quorums: of all sets of ranks that carry out an operation, no two have no rank in common.
    3. All ranks of an operation agree on their order and on the microbatches of each: all on the first ranks, each
       once, none on the spares behind them.
    4. All ranks that live stop after the same step, by the same request, and write checkpoints after the same steps.
    5. They end with the same operations; of two that end in one quorum, with the same members in the same order.
    6. The run ends, and well as long as a rank lives that was not harmed: no rank waits for ever.

Its text is the head of each script of membership that the simulator prints.
"""

import os
import pickle
import random
import selectors
import signal
import threading
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

from samestep.comm import connecting, membership, quorums, rendezvous, segment, shared_memory
from samestep.comm import heartbeat as heartbeat_page
from samestep.comm.communicator import Communicator
from samestep.comm.environment import Environment
from samestep.comm.events import Channel
from samestep.comm.heartbeat import Heartbeat, HeartbeatPage
from samestep.comm.membership import Membership
from samestep.comm.rendezvous import Rendezvous
from samestep.comm.requests import END_OF_FIT
from samestep.comm.transport import LocalTransport
from samestep.engine.result import Agreed, read_headers, write_header
from samestep.errors import PeerLostError
from samestep.launcher import healing, monitor
from samestep.launcher.job import Assignment, Job, Policy
from samestep.launcher.worker_pool import Group, WorkerEvent
from samestep.launcher.worker_states import WORKING, Restarts, report_exception
from samestep.run.signals import stopping_on_request

TIMED = (membership, quorums, rendezvous, heartbeat_page, shared_memory, healing, monitor)
HANG_SECONDS, TIMEOUT_SECONDS, MOST_SECONDS, STEPS_AN_EPOCH = 5.0, 30.0, 500.0, 3
HARMS = ("killed", "hangs", "fails", "given up", "exits")
KINDS = (*HARMS, "breaks", "pauses", "stops", "ends")


@dataclass(frozen=True)
class Fault:
    """What befalls the worker in a slot, at a turn since it has carried out so many operations."""

    kind: str
    slot: int = 0
    operation: int = 0
    turn: int = 0


@dataclass(frozen=True)
class Schedule:
    """A run; `order` draws whose turn is next, and rank 0 asks for checkpoints after some steps."""

    ranks: int = 2
    faults: tuple[Fault, ...] = ()
    order: int = 0
    steps: int = 5
    microbatches: int = 4
    spares: int = 0
    replacements: int = 0
    checkpoints: tuple[int, ...] = ()


class EndedRank(BaseException):
    """The end of a rank: no handler of an `Exception` sees it, as none sees a SIGKILL."""


class Turns:
    """Time that passes only while all wait, in the place of the module `time`; a wait passes the turn to a drawn task.

    A task is a thread: the supervisor's, which is the caller's, or a rank's.
    """

    def __init__(self, order):
        self.now, self.moved, self._draw = 0.0, 0.0, random.Random(order)
        self.running = SimpleNamespace(wake=0.0, turn=threading.Semaphore(0), strike=lambda: None)  # the supervisor
        self.tasks = [self.running]

    def monotonic(self):
        # For the supervisor: a rank reads the time while it ends, too.
        assert self.now < MOST_SECONDS or self.running is not self.tasks[0], "the run does not end"
        return self.now

    perf_counter = monotonic

    def monotonic_ns(self):
        return int(1e9 * self.now)

    def sleep(self, seconds=0.0):
        task = self.running
        # Seldom where all wait for long, or a timeout would take many turns.
        task.wake = self.now + (seconds and max(seconds, (self.now - self.moved) / 100))
        self.pass_turn()
        task.turn.acquire()
        task.strike()

    def pass_turn(self):
        self.now = max(self.now, min(task.wake for task in self.tasks))
        self.running = self._draw.choice([task for task in self.tasks if task.wake <= self.now])
        self.running.turn.release()


class Page(HeartbeatPage):
    """The page, at whose readings and writings the turn passes on."""

    @property
    def number(self):
        self.turns.sleep()
        return super().number

    def post(self, slot, *beat):
        self.turns.sleep()
        if self.posted.get(slot) != beat:
            self.posted[slot], self.turns.moved = beat, self.turns.now
        super().post(slot, *beat)


class Selector(selectors.DefaultSelector):
    """Waits on the virtual clock."""

    def select(self, seconds=None):
        until = monitor.time.now + seconds
        while not (found := super().select(0)) and monitor.time.now < until:
            monitor.time.sleep(0.005)
        return found


class Ranks:
    """The processes of the run, for the supervisor a pool of workers."""

    def __init__(self, schedule):
        self.schedule, self.turns, self.events, self.by_slot = schedule, Turns(schedule.order), [], {}
        self.store, self.page = dist.HashStore(), Page.create(schedule.ranks)
        self.page.turns, self.page.posted = self.turns, {}
        self.ready = set()
        self.done = defaultdict(list)  # by operation: its ranks' slots, ranges, and the slot of the rank
        self.fd, self.requests, self.stops = os.eventfd(0), os.pipe(), False

    def start(self, instruction):
        slot = instruction.assignment.slot
        self.by_slot[slot] = Rank(self, instruction.assignment, Channel(os.dup(instruction.fds["events"])))

    def fileno(self):
        return self.fd

    def poll_events(self):
        events, self.events = self.events, []
        return events

    def signal(self, slot, signum):
        self.by_slot[slot].end(-signum)

    def starters(self):
        return ()

    def groups(self):
        """Where no code of the program runs, only a process that is stopped hangs."""
        return {
            slot: Group(rank.hangs and self.page.beat(slot).phase not in WORKING) for slot, rank in self.by_slot.items()
        }

    def post(self, page):
        pass

    def newcomers(self):
        return ()

    def kill(self):
        for rank in self.by_slot.values():
            rank.end(-signal.SIGKILL)


class Rank:
    """A worker: its thread, its place in the turns, and what it has carried out."""

    def __init__(self, ranks, place, channel):
        self.ranks, self.place, self.slot, self.channel = ranks, place, place.slot, channel
        self.faults = [fault for fault in ranks.schedule.faults if fault.slot == self.slot]
        self.code, self.member, self.seen, self.turns_since = None, None, 0, 0
        self.state, self.is_over = {"value": 0.0, "log": []}, False
        self.has_begun = self.was_harmed = self.hangs = False
        self.wake, self.turn = ranks.turns.now, threading.Semaphore(0)
        ranks.turns.tasks.append(self)
        threading.Thread(target=self.main, daemon=True).start()

    def main(self):
        torch.set_num_threads(1)
        self.turn.acquire()
        try:
            self.train()
            self.code = self.code or 0
        except EndedRank:
            pass
        except BaseException as error:
            self.code = error.code if isinstance(error, SystemExit) else 1
            self.channel.send("failed", **{**report_exception(error), "exit_code": self.code})
        os.close(self.channel.fd)
        self.is_over = True
        self.ranks.events.append(WorkerEvent(self.slot, self.code))
        self.ranks.turns.tasks.remove(self)
        self.ranks.turns.pass_turn()

    def end(self, code):
        """Ends the rank at its next turn, which is due."""
        if not self.is_over and self.code is None:
            self.code, self.wake = code, self.ranks.turns.now

    def strike(self, breaks=False):
        """Does what is to befall the rank at this turn."""
        if self.code is not None:
            raise EndedRank
        done = 0 if self.member is None else self.member.num_operations
        self.turns_since = self.turns_since + 1 if self.seen == done else 0
        self.seen = done
        due = [f for f in self.faults if f.operation <= done and (f.operation < done or f.turn <= self.turns_since)]
        for fault in due if self.has_begun else ():
            if fault not in self.faults or (fault.kind == "breaks" and not breaks):
                continue
            self.faults.remove(fault)
            self.was_harmed = self.was_harmed or fault.kind in HARMS
            self.hangs = fault.kind == "hangs"
            living = [rank for rank in self.ranks.by_slot.values() if not rank.is_over and rank.member is not None]
            is_last = all(rank.hangs for rank in living if not rank.member.is_late)
            if fault.kind in ("killed", "exits") or is_last:  # a run of which all is stopped is left alone
                self.code = 0 if fault.kind == "exits" else -signal.SIGKILL
                raise EndedRank
            if fault.kind == "fails":
                raise torch.AcceleratorError(f"CUDA error on {self.slot}")
            if fault.kind == "breaks":
                raise PeerLostError("the connection broke")
            if fault.kind == "given up":  # its failure is reported, and it goes on until it is killed
                self.channel.send("failed", **report_exception(torch.AcceleratorError(f"CUDA error on {self.slot}")))
            elif fault.kind == "stops":
                # A second request ends all at once.
                os.write(self.ranks.requests[1], b"" if self.ranks.stops else bytes([signal.SIGTERM]))
                self.ranks.stops = True
            elif fault.kind == "ends":
                self.member.requests.asks_end = True
            else:
                self.ranks.turns.sleep(HANG_SECONDS / 2 if fault.kind == "pauses" else 10 * MOST_SECONDS)

    def train(self):
        """The program, as `Trainer` does it."""
        schedule, place, page = self.ranks.schedule, self.place, self.ranks.page
        timeout, device = timedelta(seconds=TIMEOUT_SECONDS), torch.device("cpu")
        ends = (LocalTransport(),) * 2
        if not place.joins and schedule.ranks > 1:
            where = Environment(place.rank, schedule.ranks, place.rank, schedule.ranks, store_is_kept=True)
            ends = connecting.connect_at(Rendezvous(self.ranks.store, where, timeout), device, timeout)
        heartbeat = Heartbeat(page, self.slot)
        if place.joins:
            heartbeat.quorum = page.number
        self.member = member = Membership(
            Communicator(device, *ends),
            schedule.microbatches,
            slots=(0,) if place.joins else None,
            num_active=schedule.ranks - schedule.spares,
            heartbeat=heartbeat,
            timeout_seconds=TIMEOUT_SECONDS,
            healing_store=self.ranks.store if place.joins else None,
            is_late=place.joins,
        )
        with stopping_on_request(member):
            self.ranks.ready.add(self.slot)
            while len(self.ranks.ready) < schedule.ranks:  # until then no loss is healed
                self.ranks.turns.sleep(0.01)
            self.has_begun = True
            if place.joins:
                self.state = pickle.loads(bytes(member.join(lambda group, source: group.share(None, source)).tolist()))
            run_loop(member, self.state, schedule, self.note)
            member.close()
        if member.requests.stop not in (0, END_OF_FIT):
            raise SystemExit(128 + member.requests.stop)

    def note(self):
        """Notes that this rank carries out an operation, and with which."""
        member = self.member
        self.ranks.done[member.num_operations].append((member.plan.slots, member.ranges, self.slot))


def run_loop(member, state, schedule, note=lambda: None):
    """Steps, of which each changes the state and writes it in the end; evaluations, and checkpoints if all agree."""
    log, heart, requests = state["log"], member.heartbeat, member.requests

    def rows(factor, phase):
        heart.enter(phase)
        membership.time.sleep(0.03)  # in which the supervisor looks at what there is
        rows = [[factor * (state["value"] / (k + 3) + k + 0.1)] for k in member.mine]
        heart.enter("exchange")
        return torch.tensor(rows, dtype=torch.float64).view(-1, 1)

    def step():
        heart.step = len(log)
        ours = rows(0.3, "forward")
        asked = Agreed(END_OF_FIT if requests.asks_end else heart.stop_asked, requests.asks_checkpoint, [])
        batch = SimpleNamespace(length=8, epoch=0, position=len(log), checksum=1)
        counts = list(map(len, member.ranges))
        _, headers = member.communicator.gather_header(ours, counts, write_header(batch, len(log), asked))
        agreed = read_headers(headers, 0)
        requests.stop, requests.checkpoint = agreed.stop, agreed.checkpoint
        total = member.communicator.sum_rows(ours, member.ranges).item()
        member.await_exchange()
        heart.enter("update")
        note()
        state["value"] = state["value"] * 0.7 + total
        log.append(("step", state["value"]))

    def evaluate():
        total = member.communicator.sum_rows(rows(1.7, "evaluate"), member.ranges).item()
        note()
        log.append(("evaluation", total))

    def give(communicator, source):
        ours = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
        communicator.share(ours if communicator.rank == source else None, source)

    def steps():
        return sum(name == "step" for name, _ in log)

    kept = 0
    heart.enter("script")
    while steps() < schedule.steps and not requests.stop:
        member.send_state = give if member.can_heal else None
        member.perform(step, "script")
        member.send_state = None
        number = steps()
        is_old = any(kept < asked <= number for asked in schedule.checkpoints)
        requests.asks_checkpoint = is_old and member.rank == 0
        if requests.checkpoint:
            kept, requests.asks_checkpoint = number, False
            log.append(("checkpoint", number))
            member.perform(lambda: member.communicator.meet())
        if number % STEPS_AN_EPOCH == 0 and not requests.stop:
            member.perform(evaluate, "evaluate")
            member.agree_on_end()
    member.perform(lambda: member.communicator.barrier())


def same_results(log):
    """What of a log does not depend on when a checkpoint was asked for."""
    return [entry for entry in log if entry[0] != "checkpoint"]


@contextmanager
def simulated(ranks):
    """The clock and the processes are those of the simulation, within the block."""
    turns = ranks.turns

    def wait(ours, word, value, seconds):
        if ours.words[word] & 0xFFFFFFFF == value & 0xFFFFFFFF:
            turns.sleep(seconds)
            turns.running.strike(breaks=True)

    class Peers:
        """By their process ids, which here are slots."""

        def __init__(self, pids):
            self._pids = pids

        def has_ended(self, rank):
            return ranks.by_slot[self._pids[rank] - 1].is_over

        def close(self):
            pass

    def enter(mapped, rank):
        mapped.words[mapped.lanes[rank].pid] = 1 + turns.running.slot

    with ExitStack() as stack:
        for module in TIMED:
            stack.enter_context(patch.object(module, "time", turns))
        for owner, name, value in (
            (segment.Segment, "enter", enter),
            (shared_memory, "Peers", Peers),
            (shared_memory, "usable_cores", lambda: 0),
            (segment.Segment, "wait", wait),
            (segment, "OUTBOX_SIZES", (1 << 20,)),
            (monitor, "selectors", SimpleNamespace(DefaultSelector=Selector, EVENT_READ=selectors.EVENT_READ)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def check_schedule(schedule):
    """Runs a schedule, and fails if something does not hold."""
    ranks, said = Ranks(schedule), []
    show = SimpleNamespace(notify=said.append, progress=said.append, line=said.append, refused=None)
    policy = Policy(hang_seconds=HANG_SECONDS, replace=schedule.replacements > 0, max_restarts=schedule.replacements)
    whole = {"value": 0.0, "log": []}
    alone = Communicator(torch.device("cpu"), *(LocalTransport(),) * 2)
    with simulated(ranks):
        run_loop(Membership(alone, schedule.microbatches), whole, replace(schedule, checkpoints=()))
        job = Job("function", "simulated:run", policy=policy)
        watch = monitor.Monitor(job, ranks, ranks.page, show, Restarts(policy.max_restarts))
        watch.listen_for_stop(ranks.requests[0])
        try:
            for slot in range(schedule.ranks):
                watch.start(Assignment(slot, schedule.ranks, "cpu", f"CPU worker {slot}", "", {}, slot, slot=slot))
            outcome = watch.run()
        finally:
            ranks.kill()
            while len(ranks.turns.tasks) > 1:
                ranks.turns.sleep(0.01)
            watch.close()
    for fd in (ranks.fd, *ranks.requests):
        os.close(fd)
    ranks.page.close()
    check_run(ranks, outcome, whole, said)


def check_run(ranks, outcome, whole, said):
    """Fails if what must hold does not."""
    schedule, alive = (
        ranks.schedule,
        [rank for rank in ranks.by_slot.values() if rank.code in (0, 128 + signal.SIGTERM)],
    )
    alive = [rank for rank in alive if not rank.was_harmed]
    for rank in ranks.by_slot.values():
        log = same_results(rank.state["log"])
        assert log == same_results(whole["log"])[: len(log)], ("other results", rank.slot, log, whole["log"])
    for operation, entries in ranks.done.items():
        for slots, ranges, slot in entries:
            active = min(schedule.ranks - schedule.spares, len(slots))
            assert [k for each in ranges for k in each] == [*range(schedule.microbatches)], (operation, slots, ranges)
            assert not any(map(len, ranges[active:])), ("a spare has work", operation, slots, ranges)
            assert slot in slots, (operation, slots, slot)
            for others, theirs, _ in entries:
                assert set(slots) & set(others), ("two quorums", operation, slots, others)
                assert slots != others or ranges == theirs, ("other microbatches", operation, slots, ranges, theirs)
    ends = {
        (rank.code, tuple(rank.state["log"]), rank.member.requests.stop, rank.member.num_operations) for rank in alive
    }
    assert len(ends) <= 1, ("other ends", ends)
    last = {(rank.member.heartbeat.quorum, rank.member.plan.slots) for rank in alive}
    assert len({number for number, _ in last}) == len(last), ("other members", last)
    unharmed = {*range(schedule.ranks)} - {fault.slot for fault in schedule.faults if fault.kind in HARMS}
    # A request while a rank fails may reach one that does not stop by itself any more: then all are ended.
    if unharmed and not any(text.startswith("ending by") for text in said):
        assert {rank.slot for rank in alive} >= unharmed, (outcome, said)
        is_cut = any(fault.kind in ("stops", "ends") for fault in schedule.faults)
        assert is_cut or sum(name == "step" for name, _ in alive[0].state["log"]) == schedule.steps
