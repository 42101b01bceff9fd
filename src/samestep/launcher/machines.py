"""Several machines: one supervisor leads the run, and the other machines' supervisors lend it their devices.

The supervisor of the machine where all meet has the monitor, the page and every decision; `MachinesPool` is its pool of
workers, on this machine and on the others. A supervisor elsewhere (`follower`) starts, signals and ends workers as it
is told, and sends what they write and how they end. So a run on several machines heals, stops, restarts, shows lines
and finds hangs by the same code as one on one machine.

Between two pages, each on its own machine, go the quorum, the request to stop and the number of lines shown, from the
leader's, and the heartbeats, to it. A change is sent at once, and an empty message every half second else.

Who is lost: a machine whose connection closes, or that is silent for `Meeting.silence_seconds`. Its workers have ended
for the leader, and the others go on without them. A follower for which the leader is lost ends its own workers. There
are never two halves that both go on: only the leader announces quorums, and connections that fail make no other one
a leader. Without the leader's machine the run ends, and is started again from its newest checkpoint.

Messages to a follower: `refused` (a sentence; `for_now`), `welcome` (number), `start` (`Assignment`; `pipes`: names),
`signal` (slot, number), `page` (what it has, of attempt `attempt`), `kill`, `groups`, `end` (exit code). From one: the
fields of `described`, `beats` ([slot, post] each), `pipe` (slot, name, data, or null at its end), `exited` (slot,
code), `broken` (a text), `groups` (by slot), `stop` (a signal with `ECHOES`, the machine's first, or `AGAIN`).
"""

import base64
import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from samestep.comm.heartbeat import HeartbeatPage, Quorum
from samestep.comm.wire import Wire, listen
from samestep.devices.selection import Selection
from samestep.errors import PeerLostError, UsageError
from samestep.launcher.follower import BUSY_SECONDS, LOOK_SECONDS, StoppedError, described, follow
from samestep.launcher.job import Assignment, Instruction, Job, Outcome, assign, process_variables
from samestep.launcher.meeting import Meeting, machine_name
from samestep.launcher.monitor import ECHOES
from samestep.launcher.os_processes import EarlyServer
from samestep.launcher.supervisor import resolve_start_method, supervise
from samestep.launcher.worker_pool import STARTER, Group, Pool, ServerPool, WorkerEvent
from samestep.text import counted, notify

HELLO_SECONDS = 10.0
RELAYED = ("events", "dump", "stdout", "stderr")


def run_on_machines(job: Job, selection: Selection, meeting: Meeting, early: EarlyServer | None = None) -> Outcome:
    """Runs a job on the devices of this and the other machines, and waits for its end.

    Logical devices count over all machines together, equally many on each.
    """
    job = replace(job, policy=replace(job.policy, min_machines=meeting.min_machines))
    num_workers = selection.count if job.logical_devices is None else meeting.ranks_each(job.logical_devices)
    most, num_others = meeting.max_machines, num_workers * (meeting.max_machines - 1)
    job.policy.check_devices(selection.count * most, num_workers * most, num_others)
    method = resolve_start_method(job.start_method, job.num_threads)
    variables = process_variables(selection, job.num_threads)
    open_pool = partial(ServerPool.executed, variables, job.preload, method, early)
    if meeting.max_machines > 1:
        notify(meeting.waiting)
    door = meeting.open_door()
    try:
        if door is None:
            return follow(job, selection, meeting, open_pool)
        with MachinesPool(job, selection, meeting, door, open_pool) as pool:
            outcome = supervise(job, selection, pool.opened, machines=pool)
            pool.exit_code = outcome.exit_code
        return outcome
    except StoppedError as stop:
        return Outcome(128 + stop.signum)


@dataclass(eq=False)
class Machine:
    """Another machine, as the leader sees it."""

    wire: Wire
    number: int = -1
    name: str = ""
    labels: Sequence[str] = ()
    since: float = field(default_factory=time.monotonic)  # when it came
    is_new: bool = True  # whether it has no worker of this attempt
    running: set[int] = field(default_factory=set)  # slots
    posted: tuple[int, int, int, int] | None = None  # what its page has; None if it has none in this attempt
    groups: dict[int, Group] = field(default_factory=dict)
    pipes: dict[tuple[int, str], int] = field(default_factory=dict)  # the write ends, by slot and name
    unread: deque[dict[str, Any]] = field(default_factory=deque)
    unwritten: tuple[int, bytes] | None = None  # a pipe, and what it had no room for

    def relay(self, slot: int, name: str, data: bytes | None) -> None:
        """Writes what a worker wrote to its pipe of this machine, or closes that."""
        if data is None:
            if (fd := self.pipes.pop((slot, name), None)) is not None:
                os.close(fd)
        elif (slot, name) in self.pipes:
            self.unwritten = self.pipes[slot, name], data
            self.write_on()

    def write_on(self) -> None:
        """Writes what was left over; what comes after it stays unread until then."""
        if self.unwritten is not None:
            fd, data = self.unwritten
            with contextlib.suppress(BlockingIOError):
                try:
                    data = data[os.write(fd, data) :]
                except BrokenPipeError:  # it has no reader any more
                    data = b""
            self.unwritten = (fd, data) if data else None

    def close_pipes(self, slots: Sequence[int]) -> None:
        for slot, name in [key for key in self.pipes if key[0] in slots]:
            os.close(self.pipes.pop((slot, name)))


class MachinesPool(Pool):
    """The workers of all machines; this machine leads.

    Args:
        job: the job.
        selection: the devices of this machine.
        meeting: where the machines meet.
        door: listens there.
        open_pool: makes the pool of this machine's workers.

    Attributes:
        exit_code: of the run, for the other machines.
        stops: a descriptor with the signals that other machines were sent.
    """

    def __init__(
        self,
        job: Job,
        selection: Selection,
        meeting: Meeting,
        door: socket.socket,
        open_pool: Callable[[], ServerPool],
    ) -> None:
        self.exit_code = 1
        self.machines: list[Machine] = []
        self._job, self._selection, self._meeting, self._door = job, selection, meeting, door
        self._open_pool = open_pool
        self._alike = described(job, selection, meeting)["alike"]
        self._own: ServerPool | None = None
        self._store: socket.socket | None = None  # of the next attempt, until its first worker is started
        self._address = ("", 0)
        self._by_slot: dict[int, Machine] = {}
        self._attempt, self._slots = 0, tuple[int, ...]()
        self._template: Assignment | None = None
        self._page: HeartbeatPage | None = None
        self._guests: list[Machine] = []  # that have not said who they are
        self._events: list[WorkerEvent] = []
        self.stops, self._stop_writer = os.pipe()
        os.set_blocking(self._stop_writer, False)
        self._ready = select.epoll()
        door.setblocking(False)
        self._ready.register(door, select.EPOLLIN)
        self._is_over = threading.Event()
        self._voice = threading.Thread(target=self._keep_alive, daemon=True)

    def opened(self) -> "MachinesPool":
        """This pool, with a pool of this machine's workers that has just been opened."""
        self._own = self._open_pool()
        self._ready.register(self._own.fileno(), select.EPOLLIN)
        return self

    def __enter__(self) -> "MachinesPool":
        self._voice.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._is_over.set()
        self._voice.join()
        deadline = time.monotonic() + LOOK_SECONDS
        why = str(error) if isinstance(error, UsageError) else ""
        if isinstance(error, StoppedError):
            self.exit_code = 128 + error.signum
        for machine in self.machines:
            machine.wire.send(end=self.exit_code, why=why)
        while any(m.wire.has_unsent and m.wire.is_open for m in self.machines) and time.monotonic() < deadline:
            time.sleep(BUSY_SECONDS)
            for machine in self.machines:
                machine.wire.flush()
        for machine in self.machines:
            machine.wire.finish()
        while any(m.wire.is_open for m in self.machines) and time.monotonic() < deadline:
            time.sleep(BUSY_SECONDS)
            for machine in self.machines:
                machine.wire.receive()
        for machine in self.machines:
            machine.wire.close()
            machine.close_pipes([slot for slot, _ in machine.pipes])
        self._door.close()
        self._ready.close()
        for fd in (self.stops, self._stop_writer):
            os.close(fd)

    def assign(self, run_id: str, attempt: int, requests: int | None) -> tuple[Assignment, ...]:
        """Waits until enough machines are there; the places of their workers, by machine.

        Raises:
            UsageError: not enough have come in time; `PeerLostError` if enough had come to an earlier attempt.
            StoppedError: a signal has asked to stop, by a byte in the descriptor `requests`.
        """
        self._attempt, self._page = attempt, None
        self._wait_for_machines(requests)
        self._events.clear()  # of the attempt before
        self._by_slot.clear()
        self._store = listen(self._meeting.host, 0)
        self._address = (self._meeting.host, self._store.getsockname()[1])
        job, mine = self._job, self._selection
        if job.logical_devices is not None:
            job = replace(job, logical_devices=self._meeting.ranks_each(job.logical_devices))
        own = [replace(place, device=f"{place.device} of {machine_name()}") for place in assign(job, mine, run_id, 0)]
        self._template = own[0]
        others = sorted(self.machines, key=lambda machine: machine.number)
        places = [*own, *chain.from_iterable(map(self._places_on, others))]
        self._job.policy.check_devices(self._num_devices, len(places), len(places) - len(own))
        self._slots = tuple(range(len(places)))
        for machine in others:
            machine.is_new, machine.posted, machine.unwritten = False, None, None
            machine.running.clear()
            machine.close_pipes([slot for slot, _ in machine.pipes])
        placed = (replace(self._placed(place), world_size=len(places)) for place in places)
        return tuple(replace(place, rank=rank, slot=rank) for rank, place in enumerate(placed))

    def _placed(self, place: Assignment) -> Assignment:
        """A place within a machine, with what it has of the run."""
        return replace(
            place,
            local_rank=place.rank,
            local_world_size=place.world_size,
            attempt=self._attempt,
            num_machines=1 + len(self.machines),
            store=self._address,
        )

    def newcomers(self) -> Sequence[Assignment]:
        places: list[Assignment] = []
        for machine in [each for each in self.machines if each.is_new]:
            machine.is_new = False
            places += map(self._placed, self._places_on(machine))
        return places

    def start(self, instruction: Instruction) -> None:
        place = instruction.assignment
        if place.machine == 0:
            fds = dict(instruction.fds)
            store, self._store = self._store, None
            if store is not None:
                fds["listener"] = store.fileno()
            self._local.start(replace(instruction, fds=fds))
            if store is not None:
                store.close()
            return
        machine = next((each for each in self.machines if each.number == place.machine), None)
        if machine is None:  # it was lost since the places were given
            self._events.append(WorkerEvent(place.slot, None, "its machine was lost"))
            return
        self._by_slot[place.slot] = machine
        machine.running.add(place.slot)
        pipes = [name for name in RELAYED if name in instruction.fds]
        for name in pipes:
            fd = machine.pipes[place.slot, name] = os.dup(instruction.fds[name])
            os.set_blocking(fd, False)
        if machine.posted is None:  # a worker looks at the page as soon as it starts
            self._send_page(machine)
        machine.wire.send(start=asdict(place), pipes=pipes)

    def fileno(self) -> int:
        return self._ready.fileno()

    def poll_events(self) -> list[WorkerEvent]:
        self._tend()
        events, self._events = self._events, []
        return [*self._local.poll_events(), *events]

    def post(self, page: HeartbeatPage) -> None:
        self._page = page
        now = self._attempt, page.number, page.stop, page.shown
        for machine in self.machines:
            if machine.posted not in (None, now):
                self._send_page(machine)

    def signal(self, slot: int, signum: int) -> None:
        if slot < 0:
            for lost in [each for each in self.machines if STARTER - each.number == slot]:
                lost.wire.send(kill=True)
                self._end_all(lost, f"the starter of the workers of {lost.name} was stopped by a signal")
        elif (machine := self._by_slot.get(slot)) is None:
            self._local.signal(slot, signum)
        elif slot in machine.running:
            machine.wire.send(signal=signum, slot=slot)

    def starters(self) -> Sequence[int]:
        return STARTER, *(STARTER - machine.number for machine in self.machines if machine.running)

    def groups(self) -> Mapping[int, Group]:
        """The groups; other machines' as they were when last asked."""
        found = dict(self._local.groups())
        for machine in self.machines:
            found |= machine.groups
            machine.wire.send(groups=True)
        return found

    def kill(self) -> None:
        for machine in self.machines:
            machine.wire.send(kill=True)
        self._local.kill()

    def close(self) -> None:
        """Ends the workers, on the other machines too, whose supervisors stay."""
        for machine in self.machines:
            if machine.running:
                machine.wire.send(kill=True)
        if self._own is not None:
            self._ready.unregister(self._own.fileno())
            self._own.close()
            self._own = None
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def _local(self) -> ServerPool:
        assert self._own is not None, "it was opened"
        return self._own

    def _send_page(self, machine: Machine) -> None:
        """Sends a machine what the page has."""
        quorum, stop, shown = Quorum(0, self._slots), 0, 0
        if self._page is not None:
            quorum, stop, shown = self._page.quorum(), self._page.stop, self._page.shown
        machine.posted = self._attempt, quorum.number, stop, shown
        has = {"number": quorum.number, "slots": quorum.slots, "lost": list(map(dict, quorum.lost))}
        machine.wire.send(page={**has, "stop": stop, "shown": shown}, attempt=self._attempt)

    def _places_on(self, machine: Machine) -> list[Assignment]:
        """Places on another machine, which knows the rest of its devices itself; ranks are those within it."""
        assert self._template is not None, "places on this machine come first"
        count, num_workers = len(machine.labels), len(machine.labels)
        if self._job.logical_devices is not None:
            num_workers = self._meeting.ranks_each(self._job.logical_devices)
        places = []
        for rank in range(num_workers):
            index = rank * count // num_workers
            place = replace(self._template, rank=rank, world_size=num_workers, machine=machine.number, variables={})
            label = f"{machine.labels[index]} of {machine.name}"
            shares = num_workers > count
            places.append(replace(place, device=label, device_index=index, shares_device=shares, cores=(), sockets=""))
        return places

    def _wait_for_machines(self, requests: int | None) -> None:
        """Waits until MIN machines are there, and then for those up to MAX."""
        meeting, began = self._meeting, time.monotonic()
        called: float | None = None
        if self._attempt > 0 and not self._are_enough:
            notify(meeting.waiting)
        while True:
            self._tend()
            now, count = time.monotonic(), 1 + len(self.machines)
            if count >= meeting.max_machines:
                return
            if self._are_enough:
                called = now if called is None else called
                if now - called >= meeting.seconds("last_call_timeout"):
                    return
            elif now - began >= meeting.seconds("join_timeout"):
                raise meeting.absent() if self._attempt == 0 else PeerLostError(str(meeting.absent()))
            fds = [self.fileno(), self.stops, *([] if requests is None else [requests])]
            for fd in select.select(fds, [], [], LOOK_SECONDS)[0]:
                if fd != self.fileno():
                    raise StoppedError(os.read(fd, 1)[0] & ~ECHOES)

    def _keep_alive(self) -> None:
        """Speaks to the machines while the monitor waits for whoever reads its output, such as a pager that pauses."""
        while not self._is_over.wait(LOOK_SECONDS):
            for machine in [*self.machines]:
                machine.wire.keep_alive(LOOK_SECONDS)

    def _tend(self) -> None:
        """Accepts machines, handles what has come from them, and finds those that are lost."""
        with contextlib.suppress(OSError):  # for lack of descriptors, too: those that wait are accepted later
            while True:
                connection, _ = self._door.accept()
                machine = Machine(Wire(connection))
                self._ready.register(connection.fileno(), select.EPOLLIN)
                self._guests.append(machine)
        now = time.monotonic()
        for machine in [*self._guests, *self.machines]:
            machine.write_on()
            machine.unread.extend(machine.wire.receive() if machine.unwritten is None else ())
            while machine.unread and machine.unwritten is None:
                self._handle(machine, machine.unread.popleft())
            machine.wire.keep_alive(LOOK_SECONDS)
            limit, heard_at = self._meeting.silence_seconds, machine.wire.heard_at
            if machine in self._guests:
                limit, heard_at = HELLO_SECONDS, machine.since
            if not machine.wire.is_open and not machine.unread and machine.unwritten is None:
                self._lose(machine, f"{machine.name} has closed its connection")
            elif now - heard_at > limit and machine.unwritten is None:
                self._lose(machine, f"{machine.name} was silent for {limit:g} s")

    def _handle(self, machine: Machine, message: Mapping[str, Any]) -> None:
        """Handles one message."""
        try:
            if machine in self._guests:
                self._greet(machine, message)
            elif message.get("attempt", self._attempt) != self._attempt:
                pass  # of workers that have been started anew
            elif "beats" in message:
                if self._page is not None:
                    for slot, post in message["beats"]:
                        self._page.write_slot(slot, base64.b64decode(post))
            elif "pipe" in message:
                data = message["data"]
                machine.relay(message["slot"], message["pipe"], None if data is None else base64.b64decode(data))
            elif "exited" in message:
                if message["exited"] in machine.running:
                    machine.running.discard(message["exited"])
                    self._events.append(WorkerEvent(message["exited"], message["code"]))
            elif "broken" in message:
                self._end_all(machine, f"{machine.name}: {message['broken']}")
            elif "groups" in message:
                found = {int(slot): Group(*group) for slot, group in message["groups"].items()}
                machine.groups = {slot if slot >= 0 else slot - machine.number: found[slot] for slot in found}
            elif "stop" in message:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._stop_writer, bytes([message["stop"]]))
        except (KeyError, TypeError, ValueError, AttributeError):
            self._lose(machine, f"{machine.name or 'a machine'} has sent what no machine of the run sends")

    def _greet(self, machine: Machine, message: Mapping[str, Any]) -> None:
        """Welcomes a machine to the run, or turns it away."""
        alike = message["alike"]
        differ = [name for name, value in self._alike.items() if alike.get(name) != value]
        number, taken = message["number"], {0, *(each.number for each in self.machines)}
        refusal = ""
        if differ:
            refusal = f"give all machines the same command and packages; these differ: {', '.join(differ)}"
        elif number in taken:
            refusal = f"there is a machine with --node-rank {number} already"
        elif len(taken) >= self._meeting.max_machines:
            refusal = f"the run has its {counted(self._meeting.max_machines, 'machine')} already"
        else:
            refusal = self._lacks(len(message["labels"]))
        if refusal:
            machine.wire.send(refused=refusal, for_now=not differ)
            self._lose(machine, "")
            return
        machine.number = min({*range(self._meeting.max_machines)} - taken) if number is None else number
        machine.name, machine.labels = str(message["hello"]), list(map(str, message["labels"]))
        self._guests.remove(machine)
        self.machines.append(machine)
        machine.wire.send(welcome=machine.number, name=machine_name())

    def _lacks(self, num_devices: int) -> str:
        """What this machine lacks to lead so many more; empty if nothing."""
        count = self._num_devices + num_devices
        try:
            if self._job.logical_devices is None:  # else their number was checked
                replace(self._job.policy, min_devices=1).check_devices(count, count, count - self._selection.count)
        except UsageError as error:
            return f"with it, {error}"
        return ""

    @property
    def _are_enough(self) -> bool:
        """Whether the machines that are there can make a run."""
        policy = self._job.policy
        return 1 + len(self.machines) >= policy.min_machines and self._num_devices >= policy.min_devices

    @property
    def _num_devices(self) -> int:
        return self._selection.count + sum(len(machine.labels) for machine in self.machines)

    def _lose(self, machine: Machine, text: str) -> None:
        """Goes on without a machine, whatever else it has sent."""
        machine.unread.clear()
        with contextlib.suppress(OSError, ValueError):
            self._ready.unregister(machine.wire.fileno())
        machine.wire.close()
        for known in (self._guests, self.machines):
            if machine in known:
                known.remove(machine)
        self._end_all(machine, text)

    def _end_all(self, machine: Machine, text: str) -> None:
        """All workers of a machine have ended."""
        slots = sorted(machine.running)
        machine.running.clear()
        machine.unwritten = None
        machine.close_pipes(slots)
        self._events += [WorkerEvent(slot, None, text) for slot in slots]
