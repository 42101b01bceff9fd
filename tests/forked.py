"""Programs of tests as forks of a process that has imported what they would import: torch alone takes seconds.

A program about what is imported when, or about the start of Python, is started by `subprocess`. Those that are forked
are known by the mark of a test (`marked.py`) as others are.
"""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path

from marked import MARK

from samestep.launcher.os_processes import PR_SET_CHILD_SUBREAPER

SERVER = """
    import gc, importlib, os, sys, tempfile
    from multiprocessing.connection import Connection
    connection = Connection(int(sys.argv[1]))
    for name in sys.argv[2].split():
        importlib.import_module(name)
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1
    def serve():
        while True:
            pids = []
            try:
                programs, is_waited_for = connection.recv()
            except EOFError:
                sys.exit()
            for program in programs:
                pids.append(os.fork())
                if not pids[-1]:
                    return become(is_waited_for, *program)
            if is_waited_for:
                connection.send(pids)
            connection.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
    def become(is_waited_for, text, args, variables, folder, *files):
        mark(variables.get("SAMESTEP_TEST_MARK", ""))
        for fd, path in enumerate((os.devnull, *files)):
            file = os.open(path, os.O_WRONLY | os.O_APPEND if fd else os.O_RDONLY)
            os.dup2(file, fd)
            os.close(file)
        sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # no fork of it prints a line again
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        if not is_waited_for:  # becomes a child of the process that adopts orphans, when this one has ended
            if pid := os.fork():
                connection.send(pid)
                os._exit(0)
            os.setsid()
        connection.close()
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        tempfile.tempdir = None
        sys.argv[1:] = args
        names = vars(sys.modules["__main__"])
        for name in [name for name in names if not name.startswith("__")]:
            del names[name]
        return compile(text, "<string>", "exec"), names
    def mark(text):  # in what /proc shows of the environment, which is the server's; field 50 of stat is its address
        place = int(open("/proc/self/stat").read().rpartition(")")[2].split()[47])
        place += open("/proc/self/environ", "rb").read().index(b"SAMESTEP_TEST_MARK=") + len("SAMESTEP_TEST_MARK=")
        memory = os.open("/proc/self/mem", os.O_RDWR)
        os.pwrite(memory, text.ljust(32).encode(), place)
        os.close(memory)
    exec(*serve())
"""
AT_IMPORT = ("OMP_NUM_THREADS", "PYTHONPATH", "FAKE_CUDA_NVML", "FAKE_CUDA_MEMORY_MIB")
"""Variables that are read while torch is imported, so that their values have a server of their own."""
SERVERS = 3  # at most: those that were asked for last
TITLE_ROOM = " " * 128  # for processes that show another command line


def run_all(program, processes, timeout, imported, stderr=subprocess.PIPE, on_timeout=lambda pids: None, **at_import):
    """Runs a program's text in processes, (arguments, environment, folder) each; of each its status, stdout and stderr.

    What they are forks of has imported some modules, with further variables `at_import`.
    """
    text, programs = textwrap.dedent(program), []
    with tempfile.TemporaryDirectory() as place:
        for number, (arguments, own, folder) in enumerate(processes):
            files = [Path(place, f"{number}.{name}") for name in ("stdout", "stderr")]
            for file in files:
                file.touch()
            written = files if stderr == subprocess.PIPE else files[:1] * 2
            programs.append((files, (text, [*map(str, arguments)], own, str(folder), *map(str, written))))
        own = {name: processes[0][1].get(name) for name in AT_IMPORT} | at_import
        server = _server(tuple(own.items()), imported)
        server.send(([each for _, each in programs], True))
        pids = server.recv()
        try:
            if not server.poll(timeout):
                on_timeout(pids)
                raise subprocess.TimeoutExpired(text, timeout, *(files[0].read_text() for files, _ in programs[:1]))
        except BaseException:
            for pid in pids:  # a server that is there has not told of their end: none is another's number by now
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            server.recv()
            raise
        statuses = server.recv()
        return [
            (status, *(file.read_text() for file in files))
            for status, (files, _) in zip(statuses, programs, strict=True)
        ]


class Program(subprocess.Popen):
    """A program's text as a child of this process, in a session of its own; its output goes to pipes or files."""

    def __init__(self, program, arguments, imported, env, cwd, streams, **at_import):
        self._at_import, self._imported = at_import, imported
        super().__init__([textwrap.dedent(program), *map(str, arguments)], env=env, cwd=cwd, text=True, **streams)

    def _execute_child(self, args, _executable, _preexec_fn, _close_fds, _pass_fds, cwd, env, *others):
        text, *arguments = args
        pipes = others[3:9]  # both ends of those for stdin, stdout and stderr
        files = [f"/proc/{os.getpid()}/fd/{fd}" for fd in (pipes[3], pipes[5])]
        own = {name: env.get(name) for name in AT_IMPORT} | self._at_import
        server = _server(tuple(own.items()), self._imported)
        with adopting():
            server.send(([(text, arguments, env, str(cwd), *files)], False))
            self.pid = server.recv()
            server.recv()
        self._child_created = True
        self._close_pipe_fds(*pipes)


@contextmanager
def adopting():
    """Makes this process the parent of orphans that descend from it, meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0), 0, 0, 0)


_servers = {}
SERVER_PIDS = set()


def _server(variables, imported):
    """The connection to the server with these variables and modules."""
    if (variables, imported) in _servers:
        _servers[variables, imported] = _servers.pop((variables, imported))
    else:
        while len(_servers) >= SERVERS:
            _end_server(next(iter(_servers)))
        ours, theirs = Pipe()
        own = {name: value for name, value in {**os.environ, **dict(variables)}.items() if value is not None}
        words = [str(theirs.fileno()), " ".join(imported), TITLE_ROOM]
        command = [sys.executable, "-P", "-c", textwrap.dedent(SERVER), *words]
        own |= {"FAKE_CUDA_DEVICES": "1", MARK: " " * 32}
        started = subprocess.Popen(command, env=own, pass_fds=[theirs.fileno()])
        theirs.close()
        SERVER_PIDS.add(started.pid)
        _servers[variables, imported] = ours, started
    return _servers[variables, imported][0]


def _end_server(key):
    connection, process = _servers.pop(key)
    connection.close()
    process.wait()


@atexit.register
def _end_servers():
    for key in [*_servers]:
        _end_server(key)
