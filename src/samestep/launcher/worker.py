"""The worker process: one rank of the run, which runs the job and reports its end.

`work` is the same in a fork of the server and in a new program. It sets up what differs from a plain `python`: signals,
streams, variables, cores, seeds. How the program ends decides what the supervisor does: a `failed` event says whether
the program, its device or another rank has failed, an end by a signal or without an event is a loss that may be healed,
and the phase "end" on the page with exit code 0 is success.
"""

import atexit
import contextlib
import faulthandler
import gc
import io
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import zipfile
from collections.abc import Iterator
from typing import Any, NoReturn

from samestep.comm.events import Channel
from samestep.comm.heartbeat import HEALS, HeartbeatPage
from samestep.devices.device import keep_freed_memory
from samestep.launcher import os_processes
from samestep.launcher.job import Instruction, run_program, worker_variables
from samestep.launcher.worker_states import report_exception
from samestep.patch import applied
from samestep.text import showing, tell

COMPRESSING = ("gzip", "bz2", "lzma", "zipfile")


def work(instruction: Instruction) -> int:
    """Runs the job; returns the exit code."""
    _reset_signals()
    _redirect_streams(instruction)
    which = f"{instruction.assignment.rank}/{instruction.assignment.world_size}"
    os_processes.set_title(f"samestep worker {which} {instruction.job.name}", f"samestep-{which}")
    os.environ.update(worker_variables(instruction))
    # Before torch is used: threads inherit the cores of the thread that starts them.
    os_processes.stay_on(instruction.assignment.cores)
    channel = Channel(instruction.fds["events"])
    try:
        os_processes.release_signals()
        _draw_seeds()
        if 0 < len(folder := instruction.assignment.sockets) < 80:  # a socket's address has 108 bytes at most
            multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
        import torch

        torch.set_num_threads(instruction.job.num_threads)  # the bits depend on it
        keep_freed_memory()
        with applied([os_processes.BATCHES_ARE_SENT]), _forks_apart():
            value = run_program(instruction.job, instruction.fds)
        _deliver(value, instruction, channel, HeartbeatPage(instruction.fds["page"]))
        return _post_end(instruction, _printed(0, instruction, channel))
    except SystemExit as stop:
        code = _printed(_report_exit(stop, instruction, channel), instruction, channel)
        if code == 0 and "answer" in instruction.fds:  # else nothing tells it from os._exit
            _deliver(None, instruction, channel, HeartbeatPage(instruction.fds["page"]))
        return _post_end(instruction, code)
    except KeyboardInterrupt as error:
        # Without a report: SIGINT to this worker alone is healed like any other signal.
        sys.last_value = error
        return 128 + signal.SIGINT
    except BaseException as error:
        sys.last_value = error  # as the interpreter does, for handlers at the exit
        report = report_exception(error)
        channel.send("failed", **report)
        _log_message(_text_of(report), instruction)
        return int(report["exit_code"])
    finally:
        _flush()


@contextlib.contextmanager
def _forks_apart() -> Iterator[None]:
    """A process that the program forks, and lets run on, ends as Python ends it: this worker goes on."""
    process, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == process:
            raise
        code, message = exit_code_of(error) if isinstance(error, SystemExit) else (1, _text_of(report_exception(error)))
        if message:
            tell(message, sys.stderr)
    if os.getpid() != process:
        leave(code)


def main() -> None:
    """The worker as a program; its arguments begin with the instruction's descriptor and the parent's id."""
    os_processes.end_with_parent(int(sys.argv[2]), signal.SIGKILL)
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        # From its beginning, whatever the offset: that is shared with the server, which has just written the file.
        instruction = Instruction.from_json(json.loads(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)))
    for fd in instruction.fds.values():
        os.set_inheritable(fd, False)
    leave(work(instruction))


def leave(code: int) -> NoReturn:
    """Ends this process as the interpreter does, but for its finalisation: threads are joined, exit handlers run."""
    # Finalisation would stop a torch thread that frees a tensor in the middle of C++, which aborts the process
    # (pytorch/pytorch#38228).
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does for its workers
        atexit._run_exitfuncs()
        _finish_files()
        _flush()
    finally:
        os._exit(code)


def _finish_files() -> None:
    """Writes what files that the program has left open still hold back, as finalisation does."""
    found = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase) or type(each) is zipfile.ZipFile]
    # In the order in which they write into each other: texts into compressed files and buffers, compressed files into
    # buffers.
    texts = [each.flush for each in found if issubclass(type(each), io.TextIOWrapper)]  # into the others
    compressed = [each.close for each in found if type(each).__module__ in COMPRESSING]
    buffers = [each.flush for each in found if issubclass(type(each), io.BufferedWriter | io.BufferedRandom)]
    for finish in (*texts, *compressed, *buffers):
        with contextlib.suppress(Exception):  # a closed file, a full disk: finalisation is silent about them, too
            finish()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _reset_signals() -> None:
    """Restores Python's own handlers."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)


def _redirect_streams(instruction: Instruction) -> None:
    """Redirects the standard streams as instructed, and crash dumps to the supervisor."""
    fds = instruction.fds
    if instruction.assignment.rank > 0:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
    if "stdout" in fds:
        os.dup2(fds["stdout"], 1)
        os.dup2(fds["stderr"], 2)
        sys.stdout, sys.stderr = _text_stream(1), _text_stream(2)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that a killed worker has printed its lines
    faulthandler.enable(fds["dump"])


def _text_of(report: dict[str, Any]) -> str:
    return str(report["traceback"] or f"{report['type']}: {report['message']}").rstrip()


def _log_message(text: str, instruction: Instruction) -> None:
    """Writes a message, which the supervisor shows too, to the log of a rank above 0."""
    if instruction.assignment.rank > 0:
        _flush()  # the message comes after the program's output
        with contextlib.suppress(OSError):
            os.write(instruction.fds["dump"], f"{text.rstrip()}\n".encode(errors="replace"))


def _text_stream(fd: int) -> io.TextIOWrapper:
    """A standard stream that flushes every line, so that a killed worker's last line is not lost."""
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=True)


def _draw_seeds() -> None:
    """Seeds Python's and NumPy's generators from the system, as in a new process; forked ones share a state."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _deliver(value: Any, instruction: Instruction, channel: Channel, page: HeartbeatPage) -> None:
    """Sends rank 0's result to the supervisor, pickled if the instruction has an "answer", else as JSON."""
    # Rank 0 is the first of the current quorum. Ranks that could go on without it send their results too, in case it
    # fails at the last moment.
    if instruction.job.kind != "function":
        return
    slot = instruction.assignment.slot
    leads = page.quorum().slots[:1] == (slot,)
    if "answer" not in instruction.fds:
        if leads:
            channel.send("result", value=value)
        elif page.beat(slot).flags & HEALS:
            with contextlib.suppress(TypeError, ValueError):
                channel.send("result", value=value)
        return
    if leads:
        import cloudpickle  # workers of a command need it not

        # The caller finds classes of its own in it: those that came by value go back so.
        content = cloudpickle.dumps(value)
        # All workers share the file: an earlier rank 0, lost at its end, may have left a longer answer.
        os.ftruncate(instruction.fds["answer"], 0)
        with open(os.dup(instruction.fds["answer"]), "wb") as file:
            file.seek(0)
            file.write(content)


def exit_code_of(stop: SystemExit) -> tuple[int, str]:
    """The exit code of `sys.exit`, and the message that it may have been given instead."""
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF, ""
    return 1, str(stop.code)


def _report_exit(stop: SystemExit, instruction: Instruction, channel: Channel) -> int:
    """Reports the end of a program by `sys.exit`; returns the exit code."""
    code, message = exit_code_of(stop)
    if message and instruction.assignment.rank == 0:
        tell(message, sys.stderr)
    if code:
        # Rank 0's message is on the terminal already.
        shown = "" if instruction.assignment.rank == 0 else message
        channel.send(
            "failed", type="SystemExit", message=shown, traceback="", user_error=False, exit_code=code, peer_lost=False
        )
        if message:
            _log_message(message, instruction)
    return code


def _printed(code: int, instruction: Instruction, channel: Channel) -> int:
    """The exit code, or 1 if a program that has succeeded cannot write the rest of what it printed to the terminal."""
    if code == 0 and instruction.assignment.rank == 0:
        try:
            if sys.stdout is not None:
                with showing(sys.stdout):
                    sys.stdout.flush()
        except AttributeError:  # what a program may put in its place
            pass
        except OSError as error:
            channel.send("failed", **report_exception(error))
            return 1
    return code


def _post_end(instruction: Instruction, code: int) -> int:
    """Posts the end of the program, whose run may be gone already; returns its exit code."""
    page, slot = HeartbeatPage(instruction.fds["page"]), instruction.assignment.slot
    beat = page.beat(slot)
    page.post(slot, "end", beat.step, beat.flags, beat.quorum)
    return code


if __name__ == "__main__":
    main()
