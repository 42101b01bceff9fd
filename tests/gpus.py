"""Fake GPUs for tests: the environment that gives them to a process, and small programs that run on them."""

import json
import os
import subprocess
import textwrap
from pathlib import Path

import fake_cuda
import forked
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

IMPORTED = ("torch", "torch._dynamo", "torch.distributed.tensor.parallel", "numpy")


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
    """Runs a program's text in processes, (arguments, environment) each; by process its exit status, stdout, stderr."""
    return forked.run_all(program, [(*each, os.getcwd()) for each in processes], timeout, IMPORTED, stderr)


def places(world_size, **variables):
    """The variables of each rank of one host, as torchrun sets them."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {"WORLD_SIZE": str(world_size), **meeting, **variables}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
