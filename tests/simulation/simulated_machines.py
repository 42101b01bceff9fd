"""Real supervisors of several machines and real ranks, on the virtual clock of `simulated_membership.py`.

Simulated are the clock, the processes, what goes over the network, and gloo, which carries exchanges of the ranks.
`run_on_machines`, and by it the leader's pool, the followers, the wire, supervisor, monitor, pages, membership and the
rendezvous, is real. What must hold:

    1. All that a rank computes is what one rank computes.
    2. An operation of an attempt is carried out by quorums of which any two have a rank in common, and those of one
       list of ranks have the same microbatches.
    3. A machine that cannot hear the leader, or is not heard, has soon no worker.
    4. All that a worker has said is there before its end, unless its machine was lost.
    5. All ends, and well if the leader and a worker beside it live that nothing befalls.

Its text follows that of `simulated_membership.py` in each script of machines.
"""

import os
import pickle
import select
import selectors
import signal
import socket
import threading
from collections import defaultdict, deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from simulated_membership import HARMS, MOST_SECONDS, TIMED, EndedRank, Fault, Page, Rank, Turns, run_loop, same_results

from samestep.comm import connecting, transport, wire
from samestep.comm.communicator import Communicator
from samestep.comm.environment import Environment
from samestep.comm.events import Channel
from samestep.comm.heartbeat import Heartbeat
from samestep.comm.membership import Membership
from samestep.comm.rendezvous import Rendezvous
from samestep.comm.requests import END_OF_FIT
from samestep.comm.transport import Connection, LocalTransport
from samestep.devices.selection import select as select_devices
from samestep.errors import SamestepError
from samestep.launcher import follower, machines, monitor, supervisor
from samestep.launcher.job import Job, Outcome, Policy
from samestep.launcher.meeting import Meeting
from samestep.launcher.worker_pool import Group
from samestep.launcher.worker_states import WORKING
from samestep.run.signals import stopping_on_request

HANGING, WAITING, SILENT = 5.0, 30.0, 3.0
SOON = SILENT + 2.0  # in which a follower that is cut off has ended its workers
MACHINE_FAULTS = ("dies", "ends", "returns", "cut", "cut to", "cut from", "half", "late")
SLICE = 0.005  # between looks of a supervisor that waits


@dataclass(frozen=True)
class MachineFault:
    """What befalls a machine, in hundredths of a second after the run began, and for how many tenths."""

    kind: str
    machine: int = 1
    at: int = 0
    tenths: int = 50


@dataclass(frozen=True)
class MachinesSchedule:
    """A run whose machines have so many ranks each, of which the first leads; delays are in milliseconds."""

    ranks: tuple[int, ...] = (1, 1)
    faults: tuple[Fault, ...] = ()
    machine_faults: tuple[MachineFault, ...] = ()
    order: int = 0
    steps: int = 5
    microbatches: int = 4
    replacements: int = 0
    restarts: int = 0
    least: int = 1
    delay: int = 1
    checkpoints: tuple[int, ...] = ()


class Net:
    """What goes between machines, each message after a delay, and while a way is cut, not before that ends."""

    def __init__(self, world, schedule):
        self.world, self.delay, self.draw = world, schedule.delay / 1000, Random(schedule.order)
        self.ends, self.cuts, self.door, self.groups = [], [], None, {}

    def is_cut(self, source, target):
        now = self.world.turns.now
        return any(begin <= now < end and (source, target) in ways for begin, end, ways in self.cuts)

    def cut(self, ways, seconds):
        now = self.world.turns.now
        self.cuts.append((now, now + seconds, ways))

    def arrival(self):
        return self.world.turns.now + self.delay * (0.5 + self.draw.random())

    def connect(self, *_, **__):
        here = self.world.turns.running.machine
        self.world.turns.sleep(2 * self.delay)
        if self.door is None or self.is_cut(here, 0) or self.is_cut(0, here):
            raise ConnectionRefusedError
        ours, theirs = End(self, here, 0), End(self, 0, here)
        ours.peer, theirs.peer = theirs, ours
        self.door.waiting.append(theirs)
        return ours

    def refresh(self):
        """Makes readable what has something to read by now."""
        for end in self.ends:
            end.show(end.is_due)
        if self.door is not None:
            self.door.show(bool(self.door.waiting))


class Shown:
    """A descriptor that is readable, or not."""

    def __init__(self):
        self._fd, self._is_shown = os.eventfd(0, os.EFD_NONBLOCK), False

    def fileno(self):
        return self._fd

    def show(self, is_readable):
        if is_readable != self._is_shown:
            os.eventfd_write(self._fd, 1) if is_readable else os.eventfd_read(self._fd)
            self._is_shown = is_readable

    def setblocking(self, _):
        pass

    def setsockopt(self, *_):
        pass


class Door(Shown):
    """Where the leader listens."""

    def __init__(self, net):
        super().__init__()
        self.net, self.waiting = net, deque()
        net.door = self

    def accept(self):
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.popleft(), None

    def close(self):
        if self.net.door is self:
            self.net.door = None
            for end in self.waiting:
                end.close()
            os.close(self._fd)


class End(Shown):
    """One end of a connection of TCP: bytes come in order, and the end of the other one last."""

    def __init__(self, net, here, there):
        super().__init__()
        self.net, self.here, self.there, self.coming = net, here, there, deque()
        self.closed_at, self.last, self.is_silent = None, 0.0, False
        net.ends.append(self)

    @property
    def is_due(self):
        now = self.net.world.turns.now
        return bool(self.coming) and self.coming[0][0] <= now and not self.net.is_cut(self.there, self.here)

    def put(self, data):
        self.last = max(self.last, self.net.arrival())
        self.peer.coming.append((self.last, data))

    def send(self, data):
        if self.closed_at is not None:
            raise BrokenPipeError
        closed = None if self.peer.is_silent else self.peer.closed_at
        is_cut = self.net.is_cut(self.here, self.there) or self.net.is_cut(self.there, self.here)
        if closed is not None and self.net.world.turns.now > closed + 3 * self.net.delay and not is_cut:
            raise ConnectionResetError
        self.put(bytes(data))
        return len(data)

    def recv(self, _):
        if not self.is_due:
            raise BlockingIOError
        if self.coming[0][1] == b"":
            return b""  # again, too
        return self.coming.popleft()[1]

    def shutdown(self, _):
        if self.closed_at is None:
            self.put(b"")

    def vanish(self):
        """Closes it without a word to the other one."""
        if self.closed_at is None:
            self.is_silent = self.net.world.has_died(self.here)
            self.closed_at = self.net.world.turns.now
            self.net.ends.remove(self)
            os.close(self._fd)

    def close(self):
        if self.closed_at is None and not self.net.world.has_died(self.here):
            self.put(b"")
        self.vanish()


class Waiting(selectors.DefaultSelector):
    """Waits on the virtual clock."""

    def select(self, seconds=None):
        return waited(lambda: super(Waiting, self).select(0), seconds)


def waited(look, seconds):
    """What a look finds within some virtual seconds."""
    world = monitor.time.world
    until = world.turns.now + seconds
    while True:
        world.net.refresh()
        if (found := look()) or world.turns.now >= until:
            return found
        world.turns.sleep(SLICE)


class World:
    """All machines of a run, and its attempts."""

    def __init__(self, schedule):
        self.schedule, self.turns = schedule, Turns(schedule.order)
        self.turns.world, self.turns.running.machine = self, None
        self.net, self.pools, self.dead, self.attempts = Net(self, schedule), [], set(), {}
        self.said, self.monitors, self.outcomes, self.supervisors, self.befell = [], [], {}, [], set()
        self.was_early = False
        self.page = type("Page", (Page,), {"turns": self.turns, "posted": {}})

    def has_died(self, machine):
        return machine in self.dead

    def attempt(self, number, size):
        if number not in self.attempts:
            self.attempts[number] = Attempt(self, number, size)
        return self.attempts[number]

    def begin(self, machine):
        self.dead.discard(machine)
        self.supervisors.append(Supervisor(self, machine))

    def befall(self, fault):
        """Lets a fault happen."""
        attempt = self.attempts[max(self.attempts)]
        self.was_early = self.was_early or len(attempt.ready) < attempt.size  # nothing heals yet
        numbers = range(len(self.schedule.ranks))
        machine, seconds = fault.machine % len(numbers), fault.tenths / 10
        living = [each for each in self.supervisors if each.machine == machine and not each.is_over]
        if fault.kind in ("dies", "ends", "returns"):
            if fault.kind != "returns" or machine:
                self.befell.add(machine)
                self.end(machine, fault.kind != "ends")
                if fault.kind == "returns" and living:
                    self.later.append((self.turns.now + seconds, lambda: self.begin(machine)))
            return
        if fault.kind == "late":
            return
        part = {machine} if fault.kind != "half" else {each for each in numbers if fault.machine >> each & 1}
        out = {(a, b) for a in part for b in numbers if b not in part}
        back = {(b, a) for a, b in out}
        self.befell |= part if fault.kind != "half" else {*numbers} - {0}
        if machine == 0 or fault.kind == "half":
            self.befell |= {*numbers} - {0}
        self.net.cut({"cut from": out, "cut to": back}.get(fault.kind, out | back), seconds)

    def end(self, machine, silently):
        """Ends a machine with all its processes; silently if nothing can say so any more."""
        if silently:
            self.dead.add(machine)
        for rank in self.ranks_on(machine):
            rank.is_silent = silently
            rank.end(-signal.SIGKILL)
        for each in self.supervisors:
            if each.machine == machine and not each.is_over:
                each.code, each.wake = -signal.SIGKILL, self.turns.now
        for end in [end for end in self.net.ends if end.here == machine]:
            (end.vanish if silently else end.close)()
        if machine == 0 and self.net.door is not None:
            self.net.door.close()

    def ranks_on(self, machine):
        return [rank for pool in self.pools if pool.machine == machine for rank in pool.by_slot.values()]

    def check_cut_off(self):
        """A machine that is long cut off from the leader has no worker."""
        for begin, end, ways in self.net.cuts:
            for machine in range(1, len(self.schedule.ranks)):
                if {(machine, 0), (0, machine)} & ways and begin + SOON < self.turns.now < end:
                    left = [r.slot for r in self.ranks_on(machine) if not r.is_over]
                    assert not left, ("workers of a machine that is cut off", machine, left)

    def run(self):
        """Begins the machines, and what befalls them, until all have ended."""
        late = {f.machine: f.at / 20 for f in self.schedule.machine_faults if f.kind == "late" and f.machine}
        count = len(self.schedule.ranks)
        late = {machine % count: at for machine, at in late.items() if machine % count}
        self.later = [(at, lambda machine=machine: self.begin(machine)) for machine, at in late.items()]
        self.befell |= {*late}
        faults = sorted(self.schedule.machine_faults, key=lambda fault: fault.at)
        for machine in range(count):
            if machine not in late:
                self.begin(machine)
        try:
            while any(not each.is_over for each in self.supervisors):
                assert self.turns.monotonic() < MOST_SECONDS
                begun = min((a.began for a in self.attempts.values()), default=float("inf"))
                while faults and faults[0].at / 100 <= self.turns.now - begun:
                    self.befall(faults.pop(0))
                for at, action in [each for each in self.later if each[0] <= self.turns.now]:
                    self.later.remove((at, action))
                    action()
                self.check_cut_off()
                self.turns.sleep(0.01)
        finally:
            self.later = []
            for machine in range(count):
                self.end(machine, True)
            while len(self.turns.tasks) > 1:
                self.turns.sleep(0.01)


class Attempt:
    """What the ranks of an attempt share."""

    def __init__(self, world, number, size):
        self.world, self.number, self.size, self.store = world, number, size, dist.HashStore()
        self.ready, self.done, self.by_slot, self.began = set(), defaultdict(list), {}, world.turns.now


class Supervisor:
    """The command `samestep run` on a machine."""

    def __init__(self, world, machine):
        self.world, self.machine, self.code, self.is_over = world, machine, None, False
        self.is_struck = False
        self.requests = os.pipe()
        self.wake, self.turn = world.turns.now, threading.Semaphore(0)
        world.turns.tasks.append(self)
        threading.Thread(target=self.main, daemon=True).start()

    def strike(self):
        if self.code is not None and not self.is_struck:
            self.is_struck = True  # once: what it holds in this process is given back
            raise EndedRank

    def main(self):
        self.turn.acquire()
        schedule, world = self.world.schedule, self.world
        try:
            most = len(schedule.ranks)
            conf = {"keep_alive_interval": "1", "last_call_timeout": "2", "join_timeout": "8"}
            meeting = SimulatedMeeting("simulated", 1, min(schedule.least, most), most, conf=conf)
            restarts = max(schedule.replacements, schedule.restarts)
            policy = Policy(hang_seconds=HANGING, replace=schedule.replacements > 0, max_restarts=restarts)
            job = Job("function", "simulated:run", policy=policy)
            selection = select_devices(f"cpu:{schedule.ranks[self.machine]}")
            self.outcome = machines.run_on_machines(job, selection, meeting)
        except EndedRank:
            self.outcome = None
        except SamestepError as error:
            self.outcome = Outcome(2, failure=str(error))
        except BaseException as error:
            self.outcome = None if self.is_struck else error
        world.outcomes[self.machine] = self.outcome
        for rank in world.ranks_on(self.machine):
            rank.end(-signal.SIGKILL)
        for fd in self.requests:
            os.close(fd)
        self.is_over = True
        world.turns.tasks.remove(self)
        world.turns.pass_turn()


class SimulatedMeeting(Meeting):
    def open_door(self):
        world = monitor.time.world
        return Door(world.net) if world.turns.running.machine == 0 else None


class MachinePool:
    """The workers that a supervisor has started on its machine."""

    def __init__(self, world):
        self.world, self.machine, self.by_slot, self.events = world, world.turns.running.machine, {}, []
        self.is_lost = False
        self.fd, self.is_closed = os.eventfd(0), False
        world.pools.append(self)

    def start(self, instruction):
        place, fds = instruction.assignment, instruction.fds
        attempt = self.world.attempt(place.attempt, place.world_size)
        for key in [key for key, rank in self.by_slot.items() if rank.attempt is not attempt]:
            del self.by_slot[key]
        channel, page = Channel(os.dup(fds["events"])), self.world.page(os.dup(fds["page"]))
        self.by_slot[place.slot] = attempt.by_slot[place.slot] = MachineRank(self, attempt, place, channel, page)

    def fileno(self):
        return self.fd

    def poll_events(self):
        events, self.events = self.events, []
        return events

    def signal(self, slot, signum):
        if slot in self.by_slot:
            self.by_slot[slot].end(-signum)

    def groups(self):
        return {s: Group(r.hangs and r.page.beat(s).phase not in WORKING) for s, r in self.by_slot.items()}

    def post(self, page):
        pass

    def newcomers(self):
        return ()

    def kill(self):
        for rank in self.by_slot.values():
            rank.end(-signal.SIGKILL)

    def close(self):
        self.kill()
        while any(not rank.is_over for rank in self.by_slot.values()):
            self.world.turns.sleep(0.01)


class MachineRank(Rank):
    """A worker on one of several machines."""

    def __init__(self, pool, attempt, place, channel, page):
        self.pool, self.attempt, self.page, self.machine, self.is_silent = pool, attempt, page, pool.machine, False
        world = pool.world
        faults = world.schedule.faults if place.attempt == 0 else ()
        shared = SimpleNamespace(
            schedule=replace(world.schedule, faults=faults),
            turns=world.turns,
            events=SimpleNamespace(append=lambda event: pool.events.append(event)),  # of which polls make another
            by_slot=attempt.by_slot,
            stops=False,
            requests=next(s for s in world.supervisors if s.machine == pool.machine and not s.is_over).requests,
        )
        super().__init__(shared, place, channel)

    @property
    def has_begun(self):
        return len(self.attempt.ready) >= self.attempt.size  # until then no loss is healed

    @has_begun.setter
    def has_begun(self, _):
        pass

    def train(self):
        schedule, place, attempt = self.ranks.schedule, self.place, self.attempt
        timeout, device, slot = timedelta(seconds=WAITING), torch.device("cpu"), self.slot
        store, ends = Store(self), (LocalTransport(),) * 2
        if not place.joins and place.world_size > 1:
            where = Environment(place.rank, place.world_size, place.rank, place.world_size, store_is_kept=True)
            ends = connecting.connect_at(Rendezvous(store, where, timeout), device, timeout)
        heartbeat = Heartbeat(self.page, slot)
        if place.joins:
            heartbeat.quorum = self.page.number
        self.member = member = Membership(
            Communicator(device, *ends),
            schedule.microbatches,
            slots=(0,) if place.joins else None,
            heartbeat=heartbeat,
            timeout_seconds=WAITING,
            healing_store=store,
            is_late=place.joins,
        )
        with stopping_on_request(member):
            attempt.ready.add(slot)
            if place.joins:
                self.state = pickle.loads(bytes(member.join(lambda group, source: group.share(None, source)).tolist()))
            run_loop(member, self.state, schedule, self.note)
            member.close()
        if member.requests.stop not in (0, END_OF_FIT):
            raise SystemExit(128 + member.requests.stop)
        self.channel.send("result", value=self.state["value"])

    def note(self):
        member = self.member
        self.attempt.done[member.num_operations].append((member.plan.slots, member.ranges, self.slot))


class Store(dist.Store):
    """The store of an attempt, which the leader's machine has."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.world, self.there = rank, rank.pool.world, rank.attempt.store

    def clone(self):
        return self

    def reach(self):
        net, turns, here = self.world.net, self.world.turns, self.rank.machine
        if here:
            turns.sleep(2 * net.delay)
            while net.is_cut(here, 0) or net.is_cut(0, here) or self.world.has_died(0):
                turns.sleep(0.02)
        if not any(each.machine == 0 and not each.is_over for each in self.world.supervisors):
            raise RuntimeError("the store has gone")

    def set(self, key, value):
        self.reach()
        self.there.set(key, value)

    def get(self, key):
        self.reach()
        return self.there.get(key)

    def check(self, keys):
        self.reach()
        return self.there.check(keys)

    def add(self, key, number):
        self.reach()
        return self.there.add(key, number)


class Mail(Connection):
    """Exchanges of ranks on several machines, as gloo has them: a lost process closes its connections."""

    def __init__(self, rank, members, group, timeout, store):
        super().__init__(members.index(rank), len(members), timeout, store)
        self.owner, self.members, self.group, self.number, self.has_left = rank, members, group, 0, False
        group.there[self.rank] = self

    def gather(self, part, sizes=(), into=None):
        self.post(part)
        return Later(self, self.number - 1, part, into)

    def post(self, part):
        if self.has_left:
            raise self.lost([self.rank])
        self.number += 1
        net = self.owner.pool.world.net
        for peer in range(self.world_size):
            self.group.sent[self.rank, peer, self.number - 1] = net.arrival(), part.clone()

    def take(self, peer, number):
        world, waited = self.owner.pool.world, 0.0
        while True:
            machine = self.members[peer].machine
            is_cut = machine != self.owner.machine and world.net.is_cut(machine, self.owner.machine)
            at, part = self.group.sent.get((peer, self.rank, number), (float("inf"), None))
            if at <= world.turns.now and not is_cut:
                return part
            other, rank = self.group.there.get(peer), self.members[peer]
            has_gone = (rank.is_over and not rank.is_silent) or (other is not None and other.has_left)
            if (has_gone and part is None and not is_cut) or self.has_left or waited > self._timeout:
                raise self.lost([peer])
            if self.check_lost is not None:
                self.check_lost()
            before = world.turns.now
            world.turns.sleep(0.005)
            self.owner.strike(breaks=True)
            waited += world.turns.now - before

    def broadcast(self, tensor, source):
        if self.rank == source:
            self.post(tensor.detach().view(-1))
        else:
            self.number += 1
            tensor.view(-1).copy_(self.take(source, self.number - 1))

    def abandon(self):
        self.has_left = True

    close = abandon


class Later:
    def __init__(self, mail, number, part, into):
        self.mail, self.number, self.part, self.into = mail, number, part, into

    def wait(self):
        parts = [
            self.part if peer == self.mail.rank else self.mail.take(peer, self.number)
            for peer in range(self.mail.world_size)
        ]
        return torch.cat(parts)


def connect_at(met, _, timeout):
    """The ranks that have met exchange by mail."""
    rank = monitor.time.running
    rank.connected = getattr(rank, "connected", 0) + 1
    words = met.part("shared").gather_words(f"{rank.slot} {rank.connected}")
    members = [rank.attempt.by_slot[int(word.split()[0])] for word in words]
    key = rank.attempt.number, *words
    group = rank.pool.world.net.groups.setdefault(key, SimpleNamespace(sent={}, there={}))
    mail = Mail(rank, members, group, timeout, met.store)
    return mail, mail


class Watch(monitor.Monitor):
    """The monitor, which is kept with what it knew of each worker at its end."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.had = {}
        monitor.time.world.monitors.append(self)

    def _worker_ended(self, worker):
        self.had[worker.slot] = worker.code, len(worker.results)
        super()._worker_ended(worker)


@contextmanager
def simulated_machines(world):
    """The clock, the processes and the network are those of the simulation, within the block."""
    turns = world.turns

    @contextmanager
    def requests():
        yield turns.running.requests[0]

    waiting = SimpleNamespace(DefaultSelector=Waiting, EVENT_READ=selectors.EVENT_READ)
    show = SimpleNamespace(
        notify=world.said.append, progress=nothing_at_all, line=nothing_at_all, refused=None, close=nothing_at_all
    )
    with ExitStack() as stack:
        for module in (*TIMED, machines, follower, wire, transport):
            stack.enter_context(patch.object(module, "time", turns))
        for owner, name, value in (
            (connecting, "connect_at", connect_at),
            (monitor, "selectors", waiting),
            (follower, "selectors", waiting),
            (machines, "listen", lambda *_: SimpleNamespace(
                getsockname=lambda: ("", 1), fileno=lambda: 0, close=nothing_at_all)),
            (machines, "ServerPool", SimpleNamespace(executed=lambda *_: MachinePool(world))),
            (machines.MachinesPool, "_keep_alive", nothing_at_all),  # a thread, of which the clock knows nothing
            (follower, "stop_requests", requests),
            (supervisor, "stop_requests", requests),
            (supervisor, "HeartbeatPage", world.page),
            (supervisor, "Display", lambda *_: show),
            (supervisor, "Monitor", Watch),
            *((owner, *each) for owner in (machines, follower) for each in (
                ("select", SimpleNamespace(
                    epoll=select.epoll, EPOLLIN=select.EPOLLIN, select=lambda fds, *more: (
                        waited(lambda: select.select(fds, [], [], 0)[0], more[-1]), [], []))),
                ("socket", SimpleNamespace(create_connection=world.net.connect, socket=socket.socket)),
                ("machine_name", lambda: f"machine {turns.running.machine}"),
                ("notify", world.said.append),
                ("HeartbeatPage", world.page),
            )),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        yield


def nothing_at_all(*_, **__):
    pass


def check_machines(schedule):
    """Runs a schedule of several machines, and fails if something does not hold."""
    world, whole = World(schedule), {"value": 0.0, "log": []}
    alone = Communicator(torch.device("cpu"), *(LocalTransport(),) * 2)
    with simulated_machines(world):
        run_loop(Membership(alone, schedule.microbatches), whole, replace(schedule, checkpoints=()))
        world.run()
    for pool in world.pools:
        os.close(pool.fd)
    for attempt in world.attempts.values():
        for rank in attempt.by_slot.values():
            rank.page.close()
    for end in [*world.net.ends]:
        end.vanish()
    check_machines_run(world, whole)
    return world


def check_machines_run(world, whole):
    """Fails if what must hold does not."""
    schedule, log = world.schedule, same_results(whole["log"])
    for machine, outcome in world.outcomes.items():
        assert outcome is None or isinstance(outcome, Outcome), ("an error", machine, outcome)
    for attempt in world.attempts.values():
        for rank in attempt.by_slot.values():
            ours = same_results(rank.state["log"])
            assert ours == log[: len(ours)], ("other results", rank.slot, ours, log)
        for operation, entries in attempt.done.items():
            for slots, ranges, slot in entries:
                assert [k for each in ranges for k in each] == [*range(schedule.microbatches)], (operation, ranges)
                assert slot in slots, (operation, slots, slot)
                for others, theirs, _ in entries:
                    assert {*slots} & {*others}, ("two quorums", operation, slots, others)
                    assert slots != others or ranges == theirs, ("other microbatches", operation, ranges, theirs)
    for watch in world.monitors:
        for worker in watch.workers.all:
            code, results = watch.had.get(worker.slot, (None, 0))
            assert code != 0 or worker.is_lost or results or has_left(schedule), ("not all was there", worker.slot)
    # The first worker of the leader's machine lives unless something befalls it.
    struck = {fault.slot for fault in schedule.faults if fault.kind in HARMS}
    if (
        not world.was_early
        and 0 not in world.befell
        and not struck & {*range(schedule.ranks[0])}
        and schedule.least == 1
    ):
        outcome = world.outcomes[0]
        asked = any(fault.kind in ("stops", "ends") for fault in schedule.faults)
        assert asked or outcome.exit_code == 0, (outcome, world.said)
        last = max(world.attempts)
        ended = [r for r in world.attempts[last].by_slot.values() if r.code == 0 and r.machine == 0]
        assert asked or all(same_results(rank.state["log"]) == log for rank in ended if not rank.was_harmed)


def has_left(schedule):
    """Whether a worker may end well without a result."""
    return any(fault.kind in ("exits", "stops", "ends") for fault in schedule.faults)
