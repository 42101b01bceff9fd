"""A machine that another one leads: its supervisor lends the devices, and obeys the leader (see `machines`)."""

import base64
import contextlib
import importlib.metadata
import os
import select
import selectors
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from samestep.comm.heartbeat import HeartbeatPage
from samestep.comm.wire import Wire
from samestep.devices.selection import Selection
from samestep.errors import UsageError
from samestep.launcher import os_processes
from samestep.launcher.job import Assignment, Instruction, Job, Outcome
from samestep.launcher.meeting import Meeting, machine_name
from samestep.launcher.monitor import AGAIN, ECHOES
from samestep.launcher.supervisor import stop_requests
from samestep.launcher.worker_pool import STARTER, ServerPool
from samestep.text import notify
from samestep.version import __version__

LOOK_SECONDS, BUSY_SECONDS = 0.5, 0.02  # between looks at a page: of a calm run, and while something changes
STIR_SECONDS = 2.0  # after a change
START_SECONDS = 0.1  # between looks while a worker starts
PIPE_BYTES = 32_768  # of a worker's output in a message: what a pipe holds


def described(job: Job, selection: Selection, meeting: Meeting) -> dict[str, Any]:
    """What a machine tells the leader: `alike` must be the same on all."""
    alike = {
        "--nnodes": [meeting.min_machines, meeting.max_machines],
        "--rdzv-id": meeting.name,
        "--logical-devices": job.logical_devices,
        "--num-threads": job.num_threads,
        "--node-rank (all or none)": meeting.number is not None,
        "the handling of failed workers": asdict(job.policy),
        "the kind of devices": selection.kind,
        "the program and its arguments": [os.path.basename(job.name), *job.kwargs.get("argv", job.argv)],
        "samestep": __version__,
        "torch": importlib.metadata.version("torch"),
    }
    labels = [selection.label(position) for position in range(selection.count)]
    return {"hello": machine_name(), "number": meeting.number, "labels": labels, "alike": alike}


class StoppedError(Exception):
    """A signal asked to stop while the machines waited for each other."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def follow(job: Job, selection: Selection, meeting: Meeting, open_pool: Callable[[], ServerPool]) -> Outcome:
    """Lends the devices of this machine to a run that another one leads, until it ends."""
    with stop_requests() as requests, contextlib.ExitStack() as until:
        fds = dict[str, int]()
        if job.logical_devices is not None:
            fds["devices"] = until.enter_context(tempfile.TemporaryFile()).fileno()
        sockets = ""
        with contextlib.suppress(OSError):
            sockets = until.enter_context(os_processes.temporary_folder("samestep-"))
        deadline, is_told = time.monotonic() + meeting.seconds("join_timeout"), False
        while True:
            wire = _connected(meeting, requests)
            with contextlib.closing(Follower(wire, job, selection, meeting, open_pool, sockets, fds)) as follower:
                try:
                    return follower.run(requests)
                except TurnedAwayError as error:
                    if not error.is_for_now or time.monotonic() > deadline:
                        raise
                    if not is_told:
                        notify(f"{error}; waiting for its place")
                    is_told = True
            _pause(requests)


class TurnedAwayError(UsageError):
    """The leader does not take this machine; for now, if it has the place of one that may be lost."""

    def __init__(self, message: str, is_for_now: bool) -> None:
        super().__init__(message)
        self.is_for_now = is_for_now


def _connected(meeting: Meeting, requests: int | None) -> Wire:
    """The connection to the machine where all meet, once it listens."""
    deadline = time.monotonic() + meeting.seconds("join_timeout")
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return Wire(socket.create_connection((meeting.host, meeting.port), timeout=LOOK_SECONDS))
        _pause(requests)
    raise meeting.absent(is_silent=True)


def _pause(requests: int | None) -> None:
    """Waits for a moment, unless a signal asks to stop."""
    fds = [] if requests is None else [requests]
    if select.select(fds, [], [], LOOK_SECONDS)[0]:
        raise StoppedError(os.read(fds[0], 1)[0])


class Follower:
    """The supervisor of a machine that another one leads.

    Args:
        wire: to the leader.
        job: the job, by this machine's own command.
        selection: its devices.
        meeting: where the machines meet.
        open_pool: makes the pool of its workers.
        sockets: the folder for data workers' sockets.
        fds: further descriptors for all workers.
    """

    def __init__(
        self,
        wire: Wire,
        job: Job,
        selection: Selection,
        meeting: Meeting,
        open_pool: Callable[[], ServerPool],
        sockets: str,
        fds: Mapping[str, int],
    ) -> None:
        self._wire, self._job, self._selection, self._meeting = wire, job, selection, meeting
        self._open_pool, self._sockets, self._fds = open_pool, sockets, fds
        self._selector = selectors.DefaultSelector()
        self._selector.register(wire, selectors.EVENT_READ)
        self._page: HeartbeatPage | None = None
        self._attempt = -1
        self._posts: dict[int, bytes] = {}  # what was last sent, by slot
        self._leader = ""
        self._is_stopping = False  # whether a signal has asked this machine to stop
        self._stirred_at = time.monotonic()
        self._pool: ServerPool | None = None

    def run(self, requests: int | None) -> Outcome:
        """Obeys until the run ends, or the leader is lost."""
        if requests is not None:
            self._selector.register(requests, selectors.EVENT_READ)
        self._wire.send(**described(self._job, self._selection, self._meeting))
        while True:
            for key, _ in self._selector.select(self._pause()):
                if key.data is not None:
                    self._read(key.fd, *key.data)
                elif key.fd == requests:
                    signum = os.read(requests, 1)[0]
                    if not self._posts:  # no worker yet: the others can go on without this machine
                        return Outcome(128 + signum)
                    self._wire.send(stop=signum | (AGAIN if self._is_stopping else ECHOES))
                    self._is_stopping = True
            for message in self._wire.receive():
                if (outcome := self._obey(message)) is not None:
                    return outcome
            self._report_ends()
            self._send_beats()
            self._wire.keep_alive(LOOK_SECONDS)
            if not self._wire.is_open or time.monotonic() - self._wire.heard_at > self._meeting.silence_seconds:
                return Outcome(1, failure=self._meeting.gone())

    def close(self) -> None:
        """Ends the workers of this machine."""
        self._wire.close()
        if self._pool is not None:
            self._pool.close()
        for key in [*self._selector.get_map().values()]:
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()
        if self._page is not None:
            self._page.close()

    def _obey(self, message: Mapping[str, Any]) -> Outcome | None:
        """Does what the leader says; the outcome if the run has ended."""
        if "refused" in message:
            sentence = f"{self._meeting.place} has turned this machine away: {message['refused']}"
            raise TurnedAwayError(sentence, message["for_now"])
        if "welcome" in message:
            self._leader = message["name"]
            self._open()  # so that it imports torch while the others come
        elif "page" in message:
            self._stirred_at = time.monotonic()
            self._take_page(message["attempt"], message["page"])
        elif "start" in message:
            self._start(Assignment.from_json(message["start"]), message["pipes"])
        elif "signal" in message and self._pool is not None:
            self._pool.signal(message["slot"], message["signal"])
        elif "kill" in message and self._pool is not None:
            self._pool.kill()
            self._report_ends()
            self._drop_pool()  # what is started from now on needs another one
        elif "groups" in message and self._pool is not None:
            self._wire.send(
                groups={slot: group for slot, group in self._pool.groups().items() if slot in (STARTER, *self._posts)}
            )
        elif "end" in message:
            code = message["end"]
            if message.get("why"):
                raise UsageError(message["why"])
            said = f"the run has ended with exit code {code}: see the output of {self._leader}, which leads it"
            return Outcome(code, failure=said if 0 < code < 128 else None)
        return None

    def _take_page(self, attempt: int, has: Mapping[str, Any]) -> None:
        """Lays on this machine's page what the leader's has."""
        if attempt != self._attempt or self._page is None:
            if self._page is not None:
                self._page.close()
            for key in [key for key in self._selector.get_map().values() if key.data is not None]:
                self._close_pipe(key.fd)  # which a process of the attempt before still holds
            self._page, self._attempt = HeartbeatPage.create(0), attempt
            self._posts.clear()
        page = self._page
        page.ask_to_stop(has["stop"])
        page.count_shown(has["shown"])
        page.announce(tuple(has["slots"]), has["number"], has["lost"])

    def _start(self, place: Assignment, names: Sequence[str]) -> None:
        """Starts a worker."""
        selection, position = self._selection, place.device_index
        seen = selection if self._job.logical_devices is None else selection.only(position)
        variables, cores = seen.worker_environment, selection.devices[position].cores
        place = replace(place, device_kind=selection.kind, variables=variables, cores=cores, sockets=self._sockets)
        assert self._page is not None, "the page comes first"
        fds = {"page": self._page.fd, **(self._fds if place.shares_device else {})}
        self._posts[place.slot] = b""
        if self._pool is None:
            self._open()
        assert self._pool is not None, "it was opened"
        with contextlib.ExitStack() as theirs:
            for name in names:
                reader, fds[name] = os.pipe()
                theirs.callback(os.close, fds[name])
                os.set_blocking(reader, False)
                self._selector.register(reader, selectors.EVENT_READ, (place.slot, name))
            self._pool.start(Instruction(place, self._job, 0, fds))

    def _open(self) -> None:
        self._pool = self._open_pool()
        self._selector.register(self._pool.fileno(), selectors.EVENT_READ)

    def _drop_pool(self) -> None:
        if self._pool is not None:
            self._selector.unregister(self._pool.fileno())
            self._pool.close()
            self._pool = None

    def _pause(self) -> float:
        """How long to wait for something to read."""
        if time.monotonic() - self._stirred_at <= STIR_SECONDS or self._wire.has_unsent:
            return BUSY_SECONDS
        # The leader must know soon that a worker can heal: it may be lost right after its start.
        page = self._page
        starts = page is not None and any(page.beat(slot).phase == "start" for slot in self._posts)
        return START_SECONDS if starts else LOOK_SECONDS

    def _read(self, fd: int, slot: int, name: str, *, is_last: bool = False) -> bool:
        """Sends on what a worker has written; whether there may be more. The last, of one that has ended, is little."""
        if self._wire.is_full and not is_last:
            time.sleep(BUSY_SECONDS)  # the leader does not keep up, and the worker waits
            return False
        try:
            data = os.read(fd, PIPE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        text = base64.b64encode(data).decode() if data else None
        self._wire.send(pipe=name, slot=slot, data=text, attempt=self._attempt)
        if not data:
            self._close_pipe(fd)
        return bool(data)

    def _close_pipe(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _report_ends(self) -> None:
        """Sends which workers have ended, after all that they wrote."""
        if self._pool is None:
            return
        for event in self._pool.poll_events():
            self._stirred_at = time.monotonic()
            for key in [*self._selector.get_map().values()]:
                while (
                    key.data is not None and key.data[0] == event.slot and self._read(key.fd, *key.data, is_last=True)
                ):
                    pass
            self._send_beats()
            if event.slot is not None:
                self._wire.send(exited=event.slot, code=event.code, attempt=self._attempt)
            else:
                self._wire.send(broken=event.text.rstrip(), attempt=self._attempt)
                break
        if self._pool.is_lost:  # what is started from now on needs another one
            self._drop_pool()

    def _send_beats(self) -> None:
        """Sends the heartbeats that have changed."""
        if self._page is None:
            return
        changed = []
        for slot, before in self._posts.items():
            if (post := self._page.read_slot(slot)) != before:
                self._posts[slot] = post
                changed.append([slot, base64.b64encode(post).decode()])
                if self._page.beat(slot).phase == "regroup":
                    self._stirred_at = time.monotonic()
        if changed:
            self._wire.send(beats=changed, attempt=self._attempt)
