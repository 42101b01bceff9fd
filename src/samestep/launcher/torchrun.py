"""Several machines: runs a job by torchrun, whose agents connect, start the workers and restart them.

`hand_over` runs torchrun's launcher in this process, so that the exit code is that of the workers; `main` is the
program of each worker.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from samestep.comm.device_token import TOKEN_VARIABLE
from samestep.comm.environment import Environment, read_environment
from samestep.devices.selection import Selection
from samestep.errors import UsageError
from samestep.launcher import process_tree
from samestep.launcher.assignment import process_variables
from samestep.launcher.failures import describe_ending, explain_exception, report_exception
from samestep.launcher.job import Job, Outcome, Policy, Torchrun
from samestep.launcher.program import run_program
from samestep.launcher.worker import exit_code_of, leave
from samestep.launcher.workers import begin_log, make_log_dir

TOKENS = "tokens"  # a file beside torchrun's logs
STOP_CODES = tuple(128 + signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
PEER_LOST_SECONDS = 0.5  # torchrun polls every tenth of a second, and reports the worker whose end it finds first


def hand_over(
    job: Job,
    selection: Selection,
    torchrun: Torchrun,
    num_threads: int,
    policy: Policy,
    logical_devices: int | None = None,
) -> Outcome:
    """Runs a job on the devices of this and the other machines, and waits for its end.

    With `logical_devices` there are as many workers on all machines together, equally many on each.
    """
    num_workers = selection.count if logical_devices is None else torchrun.ranks_each(logical_devices)
    policy.check_devices(selection.count, num_workers)
    make_log_dir(job.log_dir)
    variables = {"SAMESTEP_DEVICE_KIND": selection.kind, "SAMESTEP_THREADS": str(num_threads)}
    os.environ.update({**process_variables(selection, num_threads), **variables})

    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    worker = [sys.executable, "-P", "-u", "-m", "samestep.launcher.torchrun", json.dumps(asdict(job))]
    with tempfile.TemporaryDirectory(prefix="samestep-torchrun-") as folder:  # torchrun would leave its own behind
        if logical_devices is not None:
            Path(folder, TOKENS).touch()
            own = [dict(selection.only(index).environment) for index in range(selection.count)]
            worker.append(json.dumps({"tokens": str(Path(folder, TOKENS)), "variables": own}))
        given = {**torchrun.options, "nproc-per-node": num_workers, "max-restarts": policy.max_restarts}
        options = [f"--{name}={value}" for name, value in {**given, "log-dir": folder}.items()]
        try:
            run.run(run.parse_args([*options, "--no-python", *worker]))
        except ChildFailedError as error:
            rank, failed = error.get_first_failure()
            code = failed.exitcode if failed.exitcode > 0 else 128 - failed.exitcode
            is_stopped = code in STOP_CODES  # by a request that reached another machine
            return Outcome(code, failure=None if is_stopped else f"rank {rank} {describe_ending(failed.exitcode)}")
        except SignalException as stop:
            return Outcome(128 + stop.sigval)
        except (RendezvousError, DistError, ValueError, AssertionError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UsageError(
                f"torchrun says: {reason}; give all machines the same --nnodes, and --rdzv-endpoint or --master-addr "
                "and --master-port with a name and a free port of one of them"
            ) from error
    return Outcome(0)


def main() -> None:
    """One worker, started by torchrun; its arguments are JSON: the job, and the devices of logical ones."""
    process_tree.end_with_parent(os.getppid(), signal.SIGKILL)  # else it would outlive an agent that is killed
    place, job = read_environment(), Job.from_json(json.loads(sys.argv[1]))
    terminal = open(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")  # noqa: SIM115 - until the end
    log = None if job.log_dir is None or place.rank == 0 else str(Path(job.log_dir) / f"rank-{place.rank}.log")
    if place.rank > 0:
        _redirect(log, anew=place.attempt == 0)
    if len(sys.argv) > 2:
        _settle(place, **json.loads(sys.argv[2]))
    report = None
    try:
        run_program(job.restarted() if place.attempt else job, {})
        code = 0
    except SystemExit as stop:
        code, message = exit_code_of(stop)
        if message:
            print(message, file=terminal)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        report = report_exception(error)
        code = int(report["exit_code"])
    if report is not None:
        message = explain_exception(f"rank {place.rank} on {socket.gethostname()}", report, log)
        print(f"samestep: error: {message}", file=terminal)
        if report["peer_lost"]:
            time.sleep(PEER_LOST_SECONDS)
    leave(code)


def _settle(place: Environment, tokens: str, variables: Sequence[Mapping[str, str]]) -> None:
    """Gives a logical device its device of this machine, and the file of the devices' tokens."""
    index = place.local_rank * len(variables) // place.local_world_size
    os.environ.update(variables[index])
    if place.local_world_size > len(variables):
        os.environ[TOKEN_VARIABLE] = f"{os.open(tokens, os.O_RDWR)}:{index}"


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
