"""The monitor: supervises the workers of one attempt, handles failures and signals, and shows lines and progress.

Its phases:

    running                 a worker fails: the others go on without it if they can (`healing`)
    running -> finishing    a signal asked to stop: the workers finish their step and leave by themselves
    running -> settling     a worker failed and the others cannot go on: they get a moment to end, or to report why
    settling -> ending      the others got SIGTERM
    running -> ending       a signal asked to stop and was forwarded to all, as some would not leave by themselves
    ending -> killing       the grace is over: those that are left got SIGKILL
    … -> killed             a second signal came, or even SIGKILL did not help: all processes of the run were killed

The rules of running apply to finishing too. Each restart has a monitor of its own.

A failure is known by whichever comes first, the worker's own `failed` event or its end, and is handled once: a worker
that has reported is no longer among the living, and its end adds nothing. A worker that the run goes on without
(`is_lost`) has no further failures.
"""

import codecs
import contextlib
import os
import select
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from samestep.comm import events as pipe
from samestep.comm.events import Event
from samestep.comm.heartbeat import MAX_SLOTS, STOPS_ON_REQUEST, Beat, HeartbeatPage
from samestep.launcher.hang_detector import HangDetector
from samestep.launcher.healing import LINGER_SECONDS, Healing
from samestep.launcher.job import RESUME_HINT, Assignment, Instruction, Job, Outcome
from samestep.launcher.worker_pool import STARTER, Pool, WorkerEvent
from samestep.launcher.worker_states import (
    Failure,
    Restarts,
    Worker,
    Workers,
    begin_log,
    describe_waiting,
    exit_code,
    explain,
    read_available,
)
from samestep.text import counted, show, showing

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REFRESH_SECONDS = 0.1
LINE_SECONDS = 30.0


class Display:
    """Shows a run by a bar on stderr, removed at the end; without a terminal by a line every half minute."""

    def __init__(self, quiet: bool, lines_to: Literal["stdout", "stderr"]) -> None:
        self._quiet = quiet
        self._lines: TextIO = sys.stdout if lines_to == "stdout" else sys.stderr
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._begun = self._shown = time.monotonic()
        self._first: tuple[float, float] | None = None  # when the first progress was seen, and how much was done
        self.refused: OSError | None = None  # why something is not shown

    def progress(self, event: Event) -> None:
        """Moves the bar, at most ten times a second."""
        now = time.monotonic()
        last = event.get("step") == event.get("steps")
        left = self._left(event, now)
        if self._quiet:
            return
        if not sys.stderr.isatty():
            if now - self._shown >= LINE_SECONDS:  # so that a long epoch does not look hung
                self._shown = now
                steps = f"step {event.get('step')} of {event.get('steps') or '?'}"
                self._print(f"epoch {event.get('epoch')}, {steps}, {_figures(event)}{left}", sys.stderr)
            return
        if now - self._shown < REFRESH_SECONDS and not last:
            return
        self._shown = now
        if self._bar is None or self._task is None:
            self._bar = _new_bar()
            self._task = self._bar.add_task("", total=None, figures="", clock="")
        self._bar.update(
            self._task,
            description="epoch "
            + "/".join(str(event[name]) for name in ("epoch", "epochs") if event.get(name) is not None),
            completed=event.get("step") or 0,
            total=event.get("steps"),
            figures=_figures(event) + left,
            clock=str(timedelta(seconds=int(now - self._begun))),
        )
        with self.keeping(sys.stderr):
            self._bar.start()  # does nothing the second time
            self._bar.refresh()

    def _left(self, event: Event, now: float) -> str:
        """The time until the last epoch ends, at the pace so far, if that is known."""
        epoch, part = event.get("epoch") or 1, (event.get("step") or 0) / (event.get("steps") or inf)
        done = (epoch - 1 + part) / (event.get("epochs") or inf)
        # The pace is that since the first progress: a run that is resumed has done the rest before.
        self._first = self._first or (now, done)
        pace = (done - self._first[1]) / max(now - self._first[0], REFRESH_SECONDS)
        return f", {timedelta(seconds=int((1 - done) / pace))} left" if pace > 0 else ""

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._quiet:
            return
        self._print(text, self._lines)

    @contextlib.contextmanager
    def keeping(self, stream: TextIO) -> Iterator[None]:
        """For a block that prints: if a full disk refuses it, the run goes on, and has failed at its end."""
        try:
            with showing(stream):
                yield
        except OSError as error:
            self.refused = error

    def notify(self, text: str) -> None:
        """Prints a message about the run on stderr, above the bar if there is one; even if the display is quiet."""
        self._print(f"samestep: {text}", sys.stderr)

    def _print(self, text: str, stream: TextIO) -> None:
        # If bar and text share the terminal the bar's console must print it.
        with self.keeping(stream):
            if self._bar is not None and stream.isatty():
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                show(text, stream)

    def close(self) -> None:
        if self._bar is not None:
            with self.keeping(sys.stderr):
                self._bar.stop()


def _new_bar() -> "Progress":
    """A bar that is refreshed by calls, so that the supervisor needs no thread."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TextColumn("{task.fields[clock]}"),  # rich's own stops when an epoch is complete
        console=Console(file=sys.stderr),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _figures(event: Event) -> str:
    """Loss and speed, if they are known."""
    loss, speed = event.get("loss"), event.get("samples_per_second")
    figures = [f"loss {loss:.4g}"] if isinstance(loss, int | float) else []
    figures += [f"{speed:,.0f} samples/s"] if isinstance(speed, int | float) else []
    return ", ".join(figures)


Stream = Literal["stdout", "stderr"]

POLL_SECONDS = 0.05
# Of heartbeats; with nothing to read, a calm run wakes the supervisor as often.
CHECK_SECONDS = 0.5
# For the report of the worker that failed first: the others lose their connections to it, and may be read before it.
SETTLE_SECONDS = 0.5
ECHOES, AGAIN = 128, 64  # added to the number of another machine's signal: its first one, and any later one
LEAVE_SECONDS = 2.0  # for workers that see by the page that the run is over, and clean up
KILL_SECONDS = 5.0
# After SIGABRT, for `faulthandler` to write the stacks; a worker that blocks the signal is killed then.
ABORT_SECONDS = 2.0


class Monitor:
    """A running attempt; pool, page and display are closed by the caller. `fds` are descriptors for all workers."""

    def __init__(
        self,
        job: Job,
        pool: Pool,
        page: HeartbeatPage,
        display: Display,
        restarts: Restarts,
        fds: Mapping[str, int] | None = None,
    ) -> None:
        self._pool = pool
        self._page = page
        self.workers = Workers(page)
        self.events: list[dict[str, Any]] = []
        self.is_broken = False
        self._display = display
        self._job = job
        self._restarts = restarts
        self._fds = fds or {}
        self._hangs = HangDetector(job.policy.hang_seconds)
        self._healing = Healing(self.workers, job.policy, display.notify, self._record_event)
        self._decoders: dict[tuple[int, Stream], codecs.IncrementalDecoder] = {}
        self._selector = selectors.DefaultSelector()
        self._owned: set[int] = set()
        self._lines = Counter[int]()  # that a rank above 0 has printed, by its number
        self._last: set[int] = set()  # read after the others: a worker's line comes after its output so far
        self._failed: list[Worker] = []  # in the order of detection
        self._hint = ""
        self._saved = ""
        self._phase: Literal["running", "finishing", "settling", "ending", "killing", "killed"] = "running"
        self._deadline = float("inf")
        self._checked_at = float("-inf")
        self._stopped_by: int | None = None
        self._broken = ""
        self._is_fault = False

    @property
    def may_restart(self) -> bool:
        """Whether another attempt could succeed."""
        if self._stopped_by is not None or self._is_fault or any(worker.is_users_fault for worker in self._failed):
            return False  # another attempt would fail by the same fault of the program or the user
        # A starter that broke before any worker had a heartbeat, as by a module that cannot be imported, breaks again.
        return bool(self._failed) or (self.is_broken and any(self.workers.beat(w).seconds for w in self.workers.all))

    @property
    def ended_by(self) -> tuple[Failure, str] | None:
        """The failure that ended the attempt, and its exception's message; None if no worker failed by itself."""
        worker = self._culprit()
        if worker is None or self.is_broken or worker.is_peer_lost:
            return None
        return Failure.of(self.workers, worker), str((worker.report or {}).get("message", ""))

    @property
    def failed_device(self) -> int | None:
        """The position of the device whose worker was killed, hung or met an error of it; None for other failures."""
        worker = self._culprit()
        if worker is None or self.is_broken or worker.ended_itself or worker.is_peer_lost:
            return None
        return worker.place.device_index

    def watch_descriptor(self, fd: int, handle: Callable[[int], bool], *, own: bool = True) -> None:
        """Calls `handle(fd)` whenever `fd` is readable until it returns False, then closes `fd` if it is `own`."""
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, handle)
        if own:
            self._owned.add(fd)

    def listen_for_stop(self, fd: int) -> None:
        """Handles bytes from `fd`, which the caller closes, as numbers of signals that ask to stop.

        A cluster signals all machines: the first signal of each of them, in any order, is one request.
        """
        is_asked_here = False

        def stop(fd: int) -> bool:
            nonlocal is_asked_here
            for byte in read_available(fd) or b"":
                signum = byte & ~(ECHOES | AGAIN)
                is_first = bool(byte & ECHOES) or not (byte & AGAIN or is_asked_here)
                is_asked_here |= not byte & (ECHOES | AGAIN)
                if self._stopped_by is None:
                    self._stop(signum)
                elif is_first:
                    continue
                elif self._phase != "killed" and signum != signal.SIGHUP:  # see `run.signals`
                    self._display.notify("ending at once")
                    self._kill()
            return True

        self.watch_descriptor(fd, stop, own=False)

    def start(self, place: Assignment) -> None:
        # Each worker has pipes of its own: what arrives is its own, and at the end of a pipe all of it has arrived. So
        # the write ends are closed here as soon as the pool has them: a pipe ends with the last process that has one.
        path = None if self._job.log_dir is None else str(Path(self._job.log_dir) / f"rank-{place.rank}.log")
        log = path if place.rank > 0 else None
        worker = self.workers.add(place, log, path)
        with contextlib.ExitStack() as theirs:

            def pipe(handle: Callable[[int], bool], last: bool = False) -> int:
                reader, writer = os.pipe()
                theirs.callback(os.close, writer)
                self.watch_descriptor(reader, handle)
                if last:
                    self._last.add(reader)
                return writer

            given = {**self._fds, "page": self._page.fd}
            if not place.shares_device:
                given.pop("devices", None)
            given["events"] = pipe(lambda fd: self._read_events(worker, fd), last=True)
            given["dump"] = pipe(lambda fd: self._read_output(worker, fd))
            if log is not None:
                begin_log(log, anew=place.attempt == 0 and not place.joins)
            if place.rank > 0 or self._job.relay:  # else it inherits them
                given["stdout"] = pipe(lambda fd: self._read_output(worker, fd, "stdout"))
                given["stderr"] = pipe(lambda fd: self._read_output(worker, fd, "stderr"))
            self._pool.start(Instruction(place, self._job, 0, given))

    def run(self) -> Outcome:
        """Waits until every worker has ended."""
        # Without a handler: it only ends the wait of `_poll`, after which the pool reads its socket itself.
        self._selector.register(self._pool.fileno(), selectors.EVENT_READ)
        while not all(worker.ended for worker in self.workers.all):
            self._poll(self._pause())
            self._handle_ends(self._pool.poll_events())
            self._check_workers()
            self._pool.post(self._page)
            if time.monotonic() > self._deadline:
                self._next_phase()
        self._poll(0)
        return self._outcome()

    def _handle_ends(self, events: Sequence[WorkerEvent]) -> None:
        """Handles the ends of workers; those of a lost machine end together, before anything is decided."""
        if events:
            self._poll(0)  # all that a worker sent before its end is in its pipes by now, and explains the end
        for event in events:
            if event.slot is not None:
                worker = self.workers.all[event.slot]
                worker.ended, worker.code, worker.lost_with = True, event.code, event.text
        for event in events:
            if event.slot is not None:
                self._worker_ended(self.workers.all[event.slot])
            elif self._phase in ("running", "finishing", "settling"):
                self._broken, self.is_broken = event.text.rstrip(), True
                self._end(signal.SIGTERM)

    def _read_events(self, worker: Worker, fd: int) -> bool:
        """Handles a worker's events."""
        events = pipe.read_events(fd, worker.parser)
        for event in events or ():
            name = event.get("event")
            if name == "progress":
                self._display.progress(event)
            elif name == "line":
                self._display.line(str(event.get("text", "")))
                # Rank 0 waits for this count, so that its lines and what it prints by itself come in the order of its
                # calls.
                self._page.count_shown()
            elif name == "ledger":
                self._healing.receive(event)
            elif name == "saved":
                self._saved = str(event.get("path", ""))
            elif name == "result":
                worker.results.append(event.get("value"))
            elif name == "failed" and worker.report is None and not worker.is_lost:
                worker.report = event
                self._add_failure(worker)
        return events is not None

    def _read_output(self, worker: Worker, fd: int, stream: Stream | None = None) -> bool:
        """Keeps a worker's output; prints rank 0's, except crash dumps (no stream), which messages repeat."""
        data = read_available(fd)
        if stream is not None and worker is self.workers.members[0]:
            # A decoder for each stream: a read may end within a character, whose rest comes with the next one.
            decoder = codecs.getincrementaldecoder("utf-8")
            decode = self._decoders.setdefault((worker.slot, stream), decoder("replace")).decode
            target = sys.stdout if stream == "stdout" else sys.stderr
            with self._display.keeping(target):
                target.write(decode(data or b"", data is None))
                target.flush()
        elif stream == "stdout" and self._job.counts_lines and worker.log is None and data:
            self._lines[worker.place.rank] += data.count(b"\n")
        if stream is None or worker.place.rank > 0:  # the output of the first rank 0 has been printed already
            worker.keep(data or b"")
        return data is not None

    def close(self) -> None:
        """Closes this side of the pipes, after printing the rest of their content."""
        self._poll(0)
        if lines := +self._lines:
            *others, last = sorted(lines)
            who = f"ranks {', '.join(map(str, others))} and {last}" if others else f"rank {last}"
            self._display.notify(f"{who} printed {counted(lines.total(), 'line')}, which --log-dir DIR keeps")
        for fd in self._owned:
            os.close(fd)
        self._owned.clear()
        self._selector.close()

    def _record_event(self, event: str, **fields: Any) -> None:
        self.events.append(make_event(event, **fields))

    def _pause(self) -> float:
        """How long to wait for something to read: short while something is pending."""
        is_calm = self._phase in ("running", "finishing") and not self._healing.is_pending
        # A page of memory has no wake-up: while something is pending, it is read often.
        if not is_calm or any(w.kill_at < float("inf") for w in self.workers.all):
            return POLL_SECONDS
        return self._check_seconds

    @property
    def _check_seconds(self) -> float:
        """The interval between readings of heartbeats, short enough for the timeout."""
        timeout = self._job.policy.hang_seconds
        return min(CHECK_SECONDS, timeout / 4) if timeout else CHECK_SECONDS

    def _poll(self, seconds: float) -> None:
        """Handles the descriptors that become readable within that time."""
        # Events last: the lines of a worker's output that it wrote before an event must be shown before it.
        for key, _ in sorted(self._selector.select(seconds), key=lambda ready: ready[0].fd in self._last):
            if key.data is not None and not key.data(key.fd):
                self._selector.unregister(key.fd)
                self._owned.discard(key.fd)
                self._last.discard(key.fd)
                os.close(key.fd)

    def _check_workers(self) -> None:
        """Looks at the heartbeats, without waking the workers."""
        now = time.monotonic()
        for worker in self.workers.all:
            if not worker.ended and now > worker.kill_at:
                worker.kill_at = float("inf")
                self._pool.signal(worker.slot, signal.SIGKILL)
        is_due = now - self._checked_at >= self._check_seconds
        if self._phase not in ("running", "finishing") or not (is_due or self._healing.is_pending):
            return
        if is_due:
            self._checked_at = now
            self._end_hung(now)
        self._healing.handle_due(self._hangs, may_join=self._phase == "running")
        self._replace_lost()
        self._take_in()
        if all(worker.ended or not self.workers.has_state(worker) for worker in self.workers.members):
            self._dismiss(*self.workers.waiting, *self.workers.living)  # no worker has the state any more

    def _end_hung(self, now: float) -> None:
        """Ends hung workers by SIGABRT, upon which `faulthandler` writes their stacks."""
        living = {worker.slot: worker for worker in self.workers.living}
        beats = {slot: self.workers.beat(worker) for slot, worker in living.items()}
        # Starters have no heartbeat: this one never changes, so they are always silent, and are taken for hung only
        # when a signal has stopped their process.
        beats |= dict.fromkeys(self._pool.starters(), Beat(0.0, 0, "end", 0, 0))
        self._hangs.record_beats(beats, now, self.workers.quorum.number, _takes_output())
        for slot in self._hangs.slow:  # no hang: a restart would have to write the same
            who = f"rank {self.workers.rank(living[slot])} on {living[slot].place.device}"
            self._display.notify(f"{who} has used files for longer than --hang-seconds, and is waited for")
        for slot in self._hangs.hung(self._pool.groups):
            if slot == STARTER:
                self._broken, self.is_broken = "the starter of the workers was stopped by a signal", True
                self._kill()
                return
            if slot < 0:  # of another machine, which is lost with it
                self._pool.signal(slot, signal.SIGKILL)
                continue
            living[slot].silent_seconds = self._hangs.silent_seconds(slot)
            living[slot].kill_at = now + ABORT_SECONDS
            self._pool.signal(slot, signal.SIGABRT)

    def _replace_lost(self) -> None:
        """Starts a new worker on the device of each failed one, if the policy allows it."""
        if not self._job.policy.replace or self._phase != "running":
            return
        for worker in [w for w in self.workers.all if w.is_lost and w.ended and not w.is_replaced]:
            worker.is_replaced = True
            # Its device computes wrong bits; or its machine is lost, which joins by itself if it comes back.
            if (worker.report or {}).get("left_out") or worker.lost_with:
                continue
            slot = len(self.workers.all)
            if slot < MAX_SLOTS and self.workers.living and self._restarts.use_one():
                self.start(replace(worker.place, slot=slot, joins=True))

    def _take_in(self) -> None:
        """Starts workers on machines that have come late, if a running run can take them in."""
        living = self.workers.living
        if self._phase == "running" and self._job.policy.heal and living and all(map(self.workers.heals, living)):
            places = self._pool.newcomers()
            for rank, place in enumerate(places, len(living)):
                slot, size = len(self.workers.all), len(living) + len(places)
                if slot < MAX_SLOTS:
                    self.start(replace(place, slot=slot, rank=rank, world_size=size, joins=True))

    def _dismiss(self, *workers: Worker) -> None:
        """Ends workers that wait in vain: to join a run that is over, or for the state."""
        for worker in workers:
            worker.is_lost = worker.is_replaced = True
            self._pool.signal(worker.slot, signal.SIGKILL)

    def _worker_ended(self, worker: Worker) -> None:
        if worker.code != 0 and worker.report is None and not worker.is_lost:
            self._add_failure(worker)

    def _add_failure(self, worker: Worker) -> None:
        """Handles a failure, unless the monitor caused it; the others go on without the worker if they can."""
        # What fails from now on is most often a consequence; the message names the first that failed by itself.
        if self._phase == "settling":
            self._failed.append(worker)
        if self._phase not in ("running", "finishing") or self._left_as_asked(worker):
            return
        if worker.place.joins and not worker.has_joined:
            worker.is_lost = worker.is_replaced = True
            worker.kill_at = time.monotonic() + LINGER_SECONDS
            self._display.notify(describe_waiting(worker))
            return
        decision = self._healing.decide(worker)
        if decision == "heal":
            self._healing.remove(worker)
            return
        self._failed = self._healing.culprits(worker)
        self._is_fault = decision == "fault"
        if decision == "few":
            self._hint = self._too_few()
        # From a quorum of no workers those that would heal see that the run is over: they leave by themselves, and
        # clean up.
        are_left = any(self.workers.heals(other) for other in self.workers.living)
        if are_left:
            self._page.announce(())
        self._phase, self._deadline = "settling", time.monotonic() + (LEAVE_SECONDS if are_left else SETTLE_SECONDS)

    def _left_as_asked(self, worker: Worker) -> bool:
        """Whether a worker ended because it was asked to stop after its step."""
        code = worker.code if worker.report is None else worker.report.get("exit_code")
        return self._phase == "finishing" and self._stopped_by is not None and code == 128 + self._stopped_by

    def _too_few(self) -> str:
        """The reason that the others do not go on although they could, and the way to resume."""
        left, policy = len(self.workers.living), self._job.policy
        devices = f"{left or 'no'} {'device is' if left < 2 else 'devices are'} left"
        asked = f", and --min-devices asks for {policy.min_devices}" if policy.min_devices > 1 else ""
        if 1 < policy.min_machines > len({worker.place.machine for worker in self.workers.living}):
            asked = f", and --nnodes asks for {policy.min_machines} machines (--nnodes 1:{policy.min_machines} goes on)"
        return f"{devices}{asked}; {RESUME_HINT}"

    def _next_phase(self) -> None:
        """Goes on to the next phase when the time of this one is up."""
        if self._phase == "settling":
            self._end(signal.SIGTERM)
        elif self._phase == "ending":
            self._phase, self._deadline = "killing", time.monotonic() + KILL_SECONDS
            self._signal(signal.SIGKILL)
        elif self._phase == "killing":
            self._kill()
        else:
            # SIGKILL did not end them: they wait in the kernel, for a disk or a driver. The run does not wait for them.
            for worker in self.workers.all:
                worker.ended = True

    def _stop(self, signum: int) -> None:
        """Stops after the step under way if all workers do so by themselves, else forwards the signal."""
        self._stopped_by = signum
        name = signal.Signals(signum).name
        self._record_event("stop", signal=name)
        # By the page if all of them look at it after each step. A signal would reach them in different steps, and a
        # script without a `Run` knows of nothing but signals.
        beats = [self.workers.beat(worker) for worker in self.workers.living]
        if self._phase == "running" and beats and all(b.flags & STOPS_ON_REQUEST or b.phase == "end" for b in beats):
            self._phase = "finishing"
            self._page.ask_to_stop(signum)
            self._dismiss(*self.workers.waiting)
            self._display.notify("stopping after this step; once more to end at once")
        else:
            if signum != signal.SIGINT:  # the terminal shows it by itself
                self._display.notify(f"ending by {name}, within {self._job.policy.grace_seconds:g} s")
            self._end(signum)

    def _end(self, signum: int) -> None:
        if self._phase in ("running", "finishing", "settling"):
            self._phase, self._deadline = "ending", time.monotonic() + self._job.policy.grace_seconds
            self._signal(signum)

    def _kill(self) -> None:
        self._phase, self._deadline = "killed", time.monotonic() + KILL_SECONDS
        self._pool.kill()

    def _signal(self, signum: int) -> None:
        for worker in self.workers.all:
            if not worker.ended:
                self._pool.signal(worker.slot, signum)

    def _outcome(self) -> Outcome:
        """The outcome, once all workers have ended."""
        culprit = self._culprit()
        hint, failure = self._hint, None
        if culprit is not None:
            if culprit.report is None and self._saved:
                hint = f"the script last saved {self._saved}: start it again from there"
            failure = explain(culprit, self.workers.rank(culprit)) + (f"\n{hint}" if hint else "")
        # Else the final message is about the failures that are still to be reported.
        if culprit is None or culprit.ended_itself or self._stopped_by is not None:
            self._healing.finish()
        self._healing.give_up_waiting()
        if self._stopped_by is not None and not self._is_complete():
            # A single-process script that handles the signal ends with its own code, as under `python`.
            script, code = self.workers.all[0], 128 + self._stopped_by
            if self._job.runs_once and script.code not in (None, -signal.SIGKILL):
                code = exit_code(script)
                if script.report is not None and script.report.get("type") != "SystemExit":
                    failure = explain(script, 0)
            return Outcome(code, failure=failure)
        if self.is_broken:
            return Outcome(1, failure=self._broken)
        if culprit is not None:
            return Outcome(exit_code(culprit), self.workers.result(), failure)
        if self._stopped_by is not None:
            self._display.notify("the run was at its end, and is complete")
        for error in (self._display.refused, *(worker.refused for worker in self.workers.all)):
            if error is not None:
                place = "" if error.filename is None else f"{error.filename}: "
                failure = f"what was printed cannot be written: {place}{error.strerror}"
                return Outcome(1, self.workers.result(), failure)
        return Outcome(0, result=self.workers.result())

    def _culprit(self) -> Worker | None:
        """The worker of the final message: the first that failed by itself, else the first that failed."""
        return next((w for w in self._failed if not w.is_peer_lost), self._failed[0] if self._failed else None)

    def _is_complete(self) -> bool:
        """Whether all completed their program, although asked to stop after their step."""
        workers = self.workers
        members = [worker for worker in workers.members if not worker.is_lost]  # lost: it waited for the state in vain
        ended_well = all(workers.finished(worker) and not workers.left_early(worker) for worker in members)
        return self._phase == "finishing" and bool(members) and ended_well


def _takes_output() -> bool:
    """Whether stdout and stderr take more output; not if one is a full pipe that is not read, such as a pager's."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, select.POLLOUT)
    return len(poll.poll(0)) == 2


def make_event(event: str, **fields: Any) -> dict[str, Any]:
    """An event of a run, with the time."""
    return {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
