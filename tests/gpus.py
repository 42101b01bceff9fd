"""Fake GPUs for tests: the environment that gives them to a process, and small programs that run on them."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import fake_cuda
import pytest
from marked import free_port

SITE = Path(fake_cuda.__file__).parents[1]

CONNECT = """
    import datetime, json, os, signal, sys, time
    import torch, torch.distributed as dist
    from torch import nn
    rank, size, store, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    def connect(seconds=600, **options):
        timeout = datetime.timedelta(seconds=seconds)
        store_ = dist.FileStore(store, size)
        dist.init_process_group(backend, store=store_, rank=rank, world_size=size, timeout=timeout, **options)
    def tell(**what):
        print("RESULT", json.dumps(what), flush=True)
"""

LEAVE = """
    if not on_gpu:  # gloo's threads may end a process by SIGABRT while the interpreter is taken down
        sys.stdout.flush()
        os._exit(0)
"""

SERVER = """
    import gc, importlib, os, sys
    from multiprocessing.connection import Connection
    connection = Connection(int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1
    def serve():
        while True:
            pids = []
            try:
                programs = connection.recv()
            except EOFError:
                sys.exit()
            for program in programs:
                pids.append(os.fork())
                if not pids[-1]:
                    return become(*program)
            connection.send(pids)
            connection.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
    def become(text, args, variables, *files):
        connection.close()
        os.environ.clear()
        os.environ.update(variables)
        for fd, path in enumerate((os.devnull, *files)):
            file = os.open(path, os.O_RDWR | os.O_APPEND)
            os.dup2(file, fd)
            os.close(file)
        sys.argv[1:] = args
        names = vars(sys.modules["__main__"])
        for name in [name for name in names if not name.startswith("__")]:
            del names[name]
        return compile(text, "<string>", "exec"), names
    exec(*serve())
"""
IMPORTED = ("torch", "torch._dynamo", "torch.distributed.tensor.parallel", "numpy")
AT_IMPORT = ("OMP_NUM_THREADS", "PYTHONPATH", "FAKE_CUDA_NVML", "FAKE_CUDA_MEMORY_MIB")
"""Variables that are read while torch is imported, so that their values have a server of their own."""


needs_fake_gpus = pytest.mark.fake_gpus  # skipped where they are not built (conftest.py)


def environment(devices=2, order="late", **variables):
    """The environment of a process with so many fake GPUs; variables of None are left out."""
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"FAKE_CUDA_DEVICES": str(devices), "FAKE_CUDA_ORDER": order, "PYTHONPATH": os.pathsep.join(paths)}
    wanted = {**os.environ, **ours, **variables}
    return {name: value for name, value in wanted.items() if value is not None}


def run(program, *args, devices=2, order="late", timeout=300, **variables):
    """Runs a program's text on fake GPUs; its output."""
    ((status, output, errors),) = _run_all(program, [(args, environment(devices, order, **variables))], timeout)
    assert status == 0, output + errors
    return output


def run_ranks(folder, program, size=2, backend="nccl", timeout=120, **variables):
    """Runs a program on every rank; by rank its exit status, what it told, and its other output."""
    text = textwrap.dedent(CONNECT) + textwrap.dedent(program) + textwrap.dedent(LEAVE)
    own = environment(size, OMP_NUM_THREADS="1", **variables)
    ranks = [((rank, size, folder / "store", backend), own) for rank in range(size)]
    results = []
    for status, output, _ in _run_all(text, ranks, timeout, stderr=subprocess.STDOUT):
        lines = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
        results.append((status, json.loads(lines[-1]) if lines else None, output))
    return results


def told(results):
    """What all ranks told; all must have ended well."""
    assert all(status == 0 for status, _, _ in results), "\n".join(output for _, _, output in results)
    return [found for _, found, _ in results]


def run_processes(program, *places, devices=2, order="late", timeout=300, **variables):
    """Runs a program's text in one process for each dict of variables; what each wrote to stdout and stderr."""
    own = [((), environment(devices, order, **{**variables, **place})) for place in places]
    results = _run_all(program, own, timeout)
    assert not any(status for status, _, _ in results), results
    return [(output, errors) for _, output, errors in results]


def _run_all(program, processes, timeout, stderr=subprocess.PIPE):
    """Runs a program's text in processes, (arguments, environment) each; by process its exit status, stdout, stderr.

    They are forks of a process that has imported torch, which takes more time than most of these programs.
    """
    text, programs = textwrap.dedent(program), []
    with tempfile.TemporaryDirectory() as folder:
        for number, (arguments, own) in enumerate(processes):
            files = [Path(folder, f"{number}.{name}") for name in ("stdout", "stderr")]
            for file in files:
                file.touch()
            written = files if stderr == subprocess.PIPE else files[:1] * 2
            programs.append((files, (text, [*map(str, arguments)], own, *map(str, written))))
        server = _server(tuple((name, processes[0][1].get(name)) for name in AT_IMPORT))
        server.send([each for _, each in programs])
        pids = server.recv()
        try:
            if not server.poll(timeout):
                raise subprocess.TimeoutExpired(text, timeout)
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


_servers = {}
SERVER_PIDS = set()


def _server(variables):
    """The connection to the server with these variables, one of the last two."""
    if variables not in _servers:
        while len(_servers) > 1:
            _end_server(next(iter(_servers)))
        ours, theirs = Pipe()
        own = {name: value for name, value in {**os.environ, **dict(variables)}.items() if value is not None}
        command = [sys.executable, "-c", textwrap.dedent(SERVER), str(theirs.fileno()), *IMPORTED]
        started = subprocess.Popen(command, env={**own, "FAKE_CUDA_DEVICES": "1"}, pass_fds=[theirs.fileno()])
        theirs.close()
        SERVER_PIDS.add(started.pid)
        _servers[variables] = ours, started
    return _servers[variables][0]


def _end_server(variables):
    connection, process = _servers.pop(variables)
    connection.close()
    process.wait()


@atexit.register
def _end_servers():
    for variables in [*_servers]:
        _end_server(variables)


def places(world_size, **variables):
    """The variables of each rank of one host, as torchrun sets them."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {"WORLD_SIZE": str(world_size), **meeting, **variables}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
