"""The starting of a worker: the pipes for what it has to say, its log, and its instruction."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import RunFolderError
from samestep.launcher.assignment import Assignment, Instruction
from samestep.launcher.job import Job
from samestep.launcher.pipes import relay_to
from samestep.launcher.watch import Watch


@dataclass(frozen=True)
class Starter:
    """How the workers of an attempt are started.

    Attributes:
        watch: listens to them.
        job: what they do.
        log_dir: the folder for their logs.
        relay: print what rank 0 prints by `sys.stdout` of this process.
        fds: further descriptors for all of them, by name.
    """

    watch: Watch
    job: Job
    log_dir: Path | None
    relay: bool
    fds: Mapping[str, int]

    def start(self, place: Assignment) -> None:
        """Starts one worker.

        Raises:
            RunFolderError: its log cannot be written.
        """
        path = None if self.log_dir is None else str(self.log_dir / f"rank-{place.rank}.log")
        log = path if place.rank > 0 else None
        worker = self.watch.workers.add(place, log, path)
        with contextlib.ExitStack() as theirs:

            def pipe(handle: Callable[[int], bool]) -> int:
                reader, writer = os.pipe()
                theirs.callback(os.close, writer)
                self.watch.listen(reader, handle)
                return writer

            given = {**self.fds, "page": self.watch.page.fd}
            given["events"] = pipe(lambda fd: self.watch.read_events(worker, fd))
            given["words"] = pipe(lambda fd: self.watch.read_output(worker, fd))
            if log is not None:
                begin_log(log, anew=place.attempt == 0 and not place.joins)
            if place.rank > 0:
                given["stdout"] = pipe(lambda fd: self.watch.read_output(worker, fd, "stdout"))
                given["stderr"] = pipe(lambda fd: self.watch.read_output(worker, fd, "stderr"))
            elif self.relay:
                given["stdout"], given["stderr"] = pipe(relay_to("stdout")), pipe(relay_to("stderr"))
            self.watch.crew.start(Instruction(place, self.job, 0, given))


def make_log_dir(log_dir: str | None) -> Path | None:
    """The log folder, made if it is not there.

    Raises:
        RunFolderError: it cannot be made.
    """
    if log_dir is None:
        return None
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot make the log folder {log_dir}: {error.strerror}; choose another folder (--log-dir, --run-dir)"
        raise RunFolderError(reason) from error
    return Path(log_dir)


def begin_log(path: str, *, anew: bool) -> None:
    """Makes a worker's log; empty, or with what an earlier worker wrote."""
    try:
        with open(path, "wb" if anew else "ab"):
            pass
    except OSError as error:
        reason = f"cannot write the log {path}: {error.strerror}; choose another folder (--log-dir)"
        raise RunFolderError(reason) from error
