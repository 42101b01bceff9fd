"""Several machines: runs a job by torchrun, whose agents connect, start the workers and restart them.

`hand_over` runs torchrun's launcher in this process, so that the exit code is that of the workers; `main` is the
program of each worker.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from samestep.comm.environment import Environment, WorkerSettings, read_environment, torchrun_defaults
from samestep.devices.selection import Selection
from samestep.errors import UsageError
from samestep.launcher import os_processes
from samestep.launcher.forkserver import LOG_LEVEL
from samestep.launcher.job import Job, Outcome, Torchrun, process_variables, run_program
from samestep.launcher.worker import exit_code_of, leave
from samestep.launcher.worker_states import (
    begin_log,
    describe_ending,
    explain_exception,
    make_log_dir,
    report_exception,
)
from samestep.patch import applied
from samestep.text import counted, notify, tell

TOKENS, STARTED, ABSENT = "tokens", "started-", "absent"  # files beside torchrun's logs; the second with a local rank
DEFAULT_PORT = 29400  # torchrun's
WAIT_SECONDS = "600"  # torchrun's
LOOK_SECONDS, GONE_SECONDS = 0.5, 5.0
STOP_CODES = tuple(128 + signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
PEER_LOST_SECONDS = 0.5  # torchrun polls every tenth of a second, and reports the worker whose end it finds first


def hand_over(job: Job, selection: Selection, torchrun: Torchrun) -> Outcome:
    """Runs a job on the devices of this and the other machines, and waits for its end.

    Logical devices are those of all machines together, equally many on each.
    """
    policy, logical_devices = job.policy, job.logical_devices
    num_workers = selection.count if logical_devices is None else torchrun.ranks_each(logical_devices)
    policy.check_devices(selection.count, num_workers)
    make_log_dir(job.log_dir)
    for sentence in selection.notes:
        notify(sentence)
    wait = MachineWait.of(torchrun)
    if torchrun.max_nodes > 1:
        notify(f"waiting at {wait.place} for {wait.machines}, up to {wait.seconds} s")
    os.environ.update(process_variables(selection, job.num_threads))
    os.environ.setdefault(LOG_LEVEL, "ERROR")  # else a page of C++ frames when another machine ends
    if policy.max_restarts:  # a store for each round: a script's own process groups would meet dead ranks in an old one
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with os_processes.temporary_folder("samestep-torchrun-") as folder:  # torchrun would leave its own behind
        from torch.distributed import DistError, run
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

        worker = [sys.executable, "-P", "-u", "-m", "samestep.launcher.torchrun", json.dumps(asdict(job))]
        own = []
        if logical_devices is not None:
            Path(folder, TOKENS).touch()
            own = [selection.only(index).worker_environment for index in range(selection.count)]
        told = {"folder": folder, "kind": selection.kind, "variables": own}
        worker.append(json.dumps({**told, "numbered": wait.node_rank is not None}))
        given = {**torchrun.options, "nproc-per-node": num_workers, "max-restarts": policy.max_restarts}
        options = [f"--{name}={value}" for name, value in {**given, "log-dir": folder}.items()]
        started = Path(folder, f"{STARTED}0")
        try:
            wait.for_host()
            with ended_by_signals(started) if torchrun.max_nodes > 1 else nullcontext():
                run.run(run.parse_args([*options, "--no-python", *worker]))
        except ChildFailedError as error:
            rank, failed = error.get_first_failure()
            code = failed.exitcode if failed.exitcode > 0 else 128 - failed.exitcode
            is_stopped = code in STOP_CODES  # by a request that reached another machine
            return Outcome(code, failure=None if is_stopped else f"rank {rank} {describe_ending(failed.exitcode)}")
        except SignalException as stop:
            return Outcome(128 + stop.sigval)
        except UsageError:
            raise
        except RendezvousTimeoutError as error:
            raise wait.failure() from error
        except (RendezvousError, DistError, ValueError, AssertionError) as error:
            if started.exists():  # torchrun asks the store, at the other machine, before it looks at its own workers
                return Outcome(1, failure=f"the machine where all meet, {wait.place}, has ended: see its own output")
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UsageError(
                f"torchrun says: {reason.rstrip('.')}; give all machines the same --nnodes, and --rdzv-endpoint or "
                "--master-addr and --master-port with a name and a free port of one of them"
            ) from error
    return Outcome(0)


@dataclass(frozen=True)
class MachineWait:
    """Where a machine waits for the others, for how many, and for how long."""

    place: str  # HOST:PORT
    machines: str  # how many are awaited, in words
    node_rank: str | None  # None if machines have no numbers
    conf: Mapping[str, str]  # torchrun's --rdzv-conf

    @classmethod
    def of(cls, torchrun: Torchrun) -> "MachineWait":
        """The wait by torchrun's options and the variables that stand for them, with torchrun's defaults."""
        defaults = {name.replace("_", "-"): value for name, value in torchrun_defaults().items()}
        known = {"master-port": "29500", "node-rank": "0", **defaults, **torchrun.options}
        place = known.get("rdzv-endpoint") or f"{known.get('master-addr')}:{known['master-port']}"
        conf = dict(part.partition("=")[::2] for part in known.get("rdzv-conf", "").split(","))
        node_rank = known["node-rank"] if known.get("rdzv-backend", "static") == "static" else None
        least, most = torchrun.min_nodes, torchrun.max_nodes
        machines = counted(most, "machine") if least == most else f"{least} to {most} machines"
        found = cls(place, machines, node_rank, conf)
        if not found.seconds.isdecimal():
            raise UsageError(f"got --rdzv-conf {found.option}={found.seconds}; it must be a whole number of seconds")
        return found

    @property
    def option(self) -> str:
        """The name within --rdzv-conf of the time in which all must be there."""
        return "join_timeout" if self.node_rank is None else "timeout"

    @property
    def seconds(self) -> str:
        """The time in which all must be there."""
        return self.conf.get(self.option, WAIT_SECONDS)

    def failure(self, is_silent: bool = False) -> UsageError:
        """The error when the time is up."""
        came = "nothing answered at" if is_silent else f"not all of {self.machines} came to"
        return UsageError(
            f"{came} {self.place} in {self.seconds} s; check that the command was started on every machine with the "
            "same --nnodes, --rdzv-id and place to meet, and that every machine reaches that name and port through "
            f"firewalls, or wait longer by --rdzv-conf {self.option}=SECONDS"
        )

    def for_host(self) -> None:
        """Waits until the machine where all meet, if it is another one, listens: torch would give up after a minute."""
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

        host, port = parse_rendezvous_endpoint(self.place, DEFAULT_PORT)
        if self._is_host(host):
            return
        deadline = time.monotonic() + float(self.seconds)
        while not _answers(host, port):
            if time.monotonic() > deadline:
                raise self.failure(is_silent=True)
            time.sleep(LOOK_SECONDS)

    def _is_host(self, host: str) -> bool:
        """Whether the others come to this machine, or it cannot be said."""
        if self.node_rank is not None:
            return self.node_rank == "0"
        if "is_host" in self.conf:
            return self.conf["is_host"].lower() in ("1", "true", "t", "yes", "y")
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
        except OSError:
            return False
        return True


@contextmanager
def ended_by_signals(started: Path) -> Iterator[None]:
    """Ends this process upon a signal within the block, until a worker has made the file `started`."""
    # torch's store waits for the other machines in C++, where no handler of Python runs. But the interpreter's own, in
    # C, writes the number of each signal to the descriptor of `set_wakeup_fd`, which a thread can read meanwhile.
    is_over = threading.Event()
    signals, ours = socket.socketpair()
    for end in (signals, ours):
        end.setblocking(False)

    def read_signals() -> None:
        while not is_over.wait(LOOK_SECONDS) and not started.exists():
            with suppress(BlockingIOError):
                code = 128 + signals.recv(1)[0]
                # Not at once: the handler may run after all, and leave in good order.
                if code in STOP_CODES and not is_over.wait(LOOK_SECONDS) and not started.exists():
                    os._exit(code)

    thread = threading.Thread(target=read_signals, daemon=True)
    before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(before)
        thread.join(GONE_SECONDS)
        for end in (signals, ours):
            end.close()


def _answers(host: str, port: int) -> bool:
    """Whether something listens at an address."""
    try:
        socket.create_connection((host, port), timeout=LOOK_SECONDS).close()
    except OSError:
        return False
    return True


def main() -> None:
    """One worker, started by torchrun; its arguments are JSON: the job, and the devices of logical ones."""
    os_processes.end_with_parent(os.getppid(), signal.SIGKILL)  # else it would outlive an agent that is killed
    place, job = read_environment(), Job.from_json(json.loads(sys.argv[1]))
    terminal = open(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")  # noqa: SIM115 - until the end
    log = None if job.log_dir is None or place.rank == 0 else str(Path(job.log_dir) / f"rank-{place.rank}.log")
    settings = json.loads(sys.argv[2])
    is_numbered, absent = settings.pop("numbered"), Path(settings["folder"], ABSENT)
    if absent.exists():  # torchrun starts it again all the same
        os._exit(1)
    is_restarted = _begin_worker(place, job.num_threads, **settings)
    if place.rank > 0:
        _redirect(log, anew=not is_restarted)
    report = None
    try:
        with applied([os_processes.BATCHES_ARE_SENT]):
            run_program(job, {})
        code = 0
    except SystemExit as stop:
        code, message = exit_code_of(stop)
        if message:
            tell(message, terminal)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        report = report_exception(error)
        code = int(report["exit_code"])
    if report is not None:
        message = explain_exception(f"rank {place.rank} on {socket.gethostname()}", report, log)
        if is_numbered and report["type"] == "AbsentError":  # of `comm.rendezvous`, which imports torch
            absent.touch()
            message += "\nno further restart is tried without it"
        tell(f"samestep: error: {message}", terminal)
        if report["peer_lost"]:
            time.sleep(PEER_LOST_SECONDS)
    leave(code)


def _begin_worker(
    place: Environment, num_threads: int, folder: str, kind: str, variables: Sequence[Mapping[str, str]]
) -> bool:
    """Marks the start for the agent, and gives a rank its settings and its device; whether it is a restart."""
    # torchrun's count of restarts leaves out those that another machine's failure caused.
    mark = Path(folder, f"{STARTED}{place.local_rank}")
    is_restarted = mark.exists()
    mark.touch()
    settings = WorkerSettings(kind, num_threads)
    if variables:
        index = place.local_rank * len(variables) // place.local_world_size
        os.environ.update(variables[index])
        shares = place.local_world_size > len(variables)
        tokens = {"devices": os.open(Path(folder, TOKENS), os.O_RDWR)} if shares else {}
        settings = replace(settings, device_index=index, fds=tokens)
    os.environ.update(settings.variables())
    return is_restarted


def _redirect(log: str | None, *, anew: bool) -> None:
    """Redirects the output of a rank above 0 to its log; without one, discards its stdout."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if log is not None:
        begin_log(log, anew=anew)
    with open(log or os.devnull, "a") as file:
        os.dup2(file.fileno(), 1)
        if log is not None:
            os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    main()
