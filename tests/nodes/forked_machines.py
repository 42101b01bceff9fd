"""Machines as forks of this process, which has imported what their workers would: each has a supervisor of its own.

A pipe that all processes of a machine inherit tells which they are, and when the last of them has ended.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "healing"))

import faulty_training  # noqa: F401 - for tests that are imported before its folder can be
from forked_pool import forked_pool
from healing_runs import Told, shared_memory
from marked import RANK_NAMES, SECONDS, free_port

from samestep.devices.selection import select as select_devices
from samestep.errors import SamestepError
from samestep.launcher.job import Job, Outcome, Policy, run_program
from samestep.launcher.machines import run_on_machines
from samestep.launcher.meeting import Meeting
from samestep.launcher.worker_pool import ServerPool

CLONE_NEWNET = 0x40000000
SOON = {"keep_alive_interval": "1", "last_call_timeout": "20", "join_timeout": "60"}
"""By these a machine is lost that was silent for three seconds."""
TORCHS = "torchinductor_"  # its cache of compiled code
LEAVE_SECONDS = 10.0  # in which all processes of a machine end after its supervisor


@dataclass
class Machine:
    """The processes of one machine: its supervisor, and all that descend from it."""

    pid: int
    alive: int  # the read end of the pipe that all of them hold
    folder: Path  # with what its supervisor prints
    patience: float = SECONDS
    code: int | None = None

    @property
    def stderr(self):
        return (self.folder / "err").read_text()

    @property
    def stdout(self):
        return (self.folder / "out").read_text()

    def processes(self):
        """The ids of its living processes, its supervisor's first."""
        name, found = f"pipe:[{os.fstat(self.alive).st_ino}]", []
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with suppress(OSError):
                if pid != os.getpid() and any(os.readlink(fd) == name for fd in Path(f"/proc/{pid}/fd").iterdir()):
                    found.append(pid)
        return sorted(found, key=lambda pid: pid != self.pid)

    def signal(self, signum, pids=None):
        for pid in self.processes() if pids is None else pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def wait(self, seconds=None):
        """The exit code of its supervisor."""
        deadline = time.monotonic() + (self.patience if seconds is None else seconds)
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            else:
                assert time.monotonic() < deadline, f"it has not ended: {self.stderr}"
                time.sleep(0.02)
        return self.code

    def is_gone(self, seconds=LEAVE_SECONDS):
        """Whether all its processes end within so many seconds."""
        return bool(select.select([self.alive], [], [], seconds)[0])


@dataclass
class Machines:
    """Starts machines that meet at one place, and looks at what their run leaves behind."""

    folder: Path
    temporary: Path
    port: int = field(default_factory=free_port)
    started: list = field(default_factory=list)
    host: str = "localhost"
    twin: Callable | None = None  # called in the processes of each machine before all, to put a defect in
    patience: float = SECONDS  # with which the end of a machine is waited for
    unread: int | None = None

    @property
    def place(self):
        return f"{self.host}:{self.port}"

    def meeting(self, nnodes, number, name, conf):
        told = ",".join(f"{key}={value}" for key, value in {**SOON, **conf}.items())
        numbered = {} if number is None else {"node_rank": str(number)}
        return Meeting.of(
            {"nnodes": nnodes, "rdzv_endpoint": self.place, "rdzv_conf": told, "rdzv_id": name, **numbered}
        )

    def start(
        self,
        script,
        told,
        nnodes="1:2",
        *,
        number=None,
        devices=1,
        policy=None,
        conf=None,
        name="",
        log_dir=None,
        unread=False,
        network=None,
        **own,
    ):
        """Starts one more machine with a script and its argument.

        With `unread`, what it prints goes to a pipe, as a pager's: the file "out" of its folder, which is opened here.
        """
        folder = self.folder / f"machine-{len(self.started)}"
        folder.mkdir()
        (folder / "err").touch()
        if unread:
            os.mkfifo(folder / "out")
            self.unread = os.open(folder / "out", os.O_RDONLY | os.O_NONBLOCK)
        policy = Policy(hang_seconds=20.0) if policy is None else policy
        argv = (json.dumps(told),) if not isinstance(told, tuple) else told
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                for each in (reader, *(machine.alive for machine in self.started)):
                    os.close(each)
                os.setsid()
                os.set_inheritable(writer, True)
                self._redirect(folder)
                for variable in RANK_NAMES:
                    os.environ.pop(variable, None)
                os.environ.update({"TMPDIR": str(self.temporary), **own})
                tempfile.tempdir = None
                if network is not None:
                    with open(network) as file:
                        assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
                job = Job("script", str(script), argv, quiet=not unread, policy=policy, log_dir=log_dir)
                ServerPool.executed = partial(_forked_pool, job)
                if self.twin is not None:
                    self.twin()
                code = _lead_or_follow(job, devices, self.meeting(nnodes, number, name, conf or {}))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(writer)
        self.started.append(Machine(pid, reader, folder, self.patience))
        return self.started[-1]

    def start_all(self, count, script, told, nnodes=None, **options):
        """Starts several machines with numbers, of which the first leads; the slots are in the order of numbers."""
        nnodes = f"1:{count}" if nnodes is None else nnodes
        return [self.start(script, told, nnodes, number=number, **options) for number in range(count)]

    @staticmethod
    def _redirect(folder):
        for fd, name in enumerate(("out", "err"), 1):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, fd)
            os.close(file)
        sys.stdin = sys.__stdin__ = open(os.devnull)  # noqa: SIM115 - until the end
        sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115

    def left_by(self, outcome_of):
        """What the run left in its folder, with the end of a machine."""
        return Told(self.folder, Outcome(outcome_of.wait(), failure=outcome_of.stderr))


def _forked_pool(job, variables, *_):
    return forked_pool(lambda: run_program(job, {}), variables)


def _lead_or_follow(job, devices, meeting):
    """As the command does, which says why a run has failed."""
    try:
        outcome = run_on_machines(job, select_devices(f"cpu:{devices}"), meeting)
    except SamestepError as error:
        outcome = Outcome(error.exit_code, failure=str(error))
    if outcome.failure is not None:
        print(f"samestep: error: {outcome.failure}", file=sys.stderr)
    return outcome.exit_code


def listens(port):
    """Whether a process listens at a port of this machine; nobody connects for it."""
    wanted = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
            if any(row[1].endswith(wanted) and row[3] == "0A" for row in rows):
                return True
    return False


def wait_until(holds, what, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)
    return found


@contextmanager
def machines_in(tmp_path):
    """Machines; at the end neither processes nor ports nor files of theirs are left."""
    work, temporary = tmp_path / "work", tmp_path / "tmp"
    work.mkdir()
    temporary.mkdir()
    before = shared_memory()
    made = Machines(work, temporary)
    try:
        yield made
        for machine in made.started:
            machine.wait(30)
        left = [machine for machine in made.started if not machine.is_gone()]
        assert not left, f"processes are left: {[machine.processes() for machine in left]}"
    finally:
        for machine in made.started:
            machine.signal(signal.SIGKILL)
            machine.wait(10)
            os.close(machine.alive)
    assert not listens(made.port)
    wait_until(
        lambda: not [path for path in temporary.iterdir() if not path.name.startswith(TORCHS)], "no file is left", 10
    )
    assert shared_memory() <= before


@dataclass
class Networks:
    """Two network namespaces with a cable between them, which can be cut."""

    holders: list  # a process in each
    devices: list

    @property
    def files(self):
        return [f"/proc/{holder.pid}/ns/net" for holder in self.holders]

    def cut(self):
        """Drops what is sent, without a word: it goes to an address at which nothing is."""
        for end, holder in enumerate(self.holders):
            place = [ADDRESSES[1 - end], "lladdr", NOBODY, "dev", self.devices[end], "nud", "permanent"]
            assert inside(holder, "ip", "neigh", "replace", *place) == 0


ADDRESSES, NOBODY = ("10.213.79.1", "10.213.79.2"), "02:00:00:00:00:99"


def inside(holder, *command):
    """The exit code of a command in the network of a process."""
    command = ["nsenter", "-t", str(holder.pid), "-n", *command]
    return subprocess.run(command, capture_output=True).returncode


@contextmanager
def two_networks(skip):
    """Two networks; `skip` is called with a sentence where this machine makes none."""
    if not all(shutil.which(name) for name in ("unshare", "nsenter", "ip")):
        skip("unshare, nsenter or ip is not here")
    holders = [subprocess.Popen(["unshare", "-n", "sleep", "600"], stderr=subprocess.DEVNULL) for _ in range(2)]
    devices = [f"sl{os.getpid() % 100_000}{letter}" for letter in "ab"]
    made = Networks(holders, devices)
    try:
        for _ in range(100):  # until the holders have left this one's network
            links = [os.readlink(path) for path in made.files if os.path.exists(path)]
            if len({*links, os.readlink("/proc/self/ns/net")}) == 3:
                break
            time.sleep(0.02)
        cable = ["ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1]]
        codes = [subprocess.run(cable, capture_output=True).returncode]
        for holder, device, address in zip(holders, devices, ADDRESSES, strict=True):
            move = ["ip", "link", "set", device, "netns", str(holder.pid)]
            codes.append(subprocess.run(move, capture_output=True).returncode)
            codes.append(inside(holder, "ip", "addr", "add", f"{address}/24", "dev", device))
            codes += [inside(holder, "ip", "link", "set", name, "up") for name in (device, "lo")]
        if any(codes):
            subprocess.run(["ip", "link", "del", devices[0]], capture_output=True)
            skip("this machine lets nobody make network namespaces")
        yield made
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
