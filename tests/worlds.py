"""Worlds for tests: ranks that take turns in this process, and pools of real processes that talk to each other."""

import gc
import importlib
import multiprocessing
import os
import tempfile
import traceback
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from samestep.comm.communicator import Communicator
from samestep.comm.sequential import SequentialWorld
from samestep.data.nested import to_host

PATIENCE_SECONDS = 400
DEVICE = os.environ.get("SAMESTEP_TEST_DEVICE", "cpu")  # "cuda": the same tests, on fake GPUs
SHARED = "auto" if DEVICE == "cpu" else "shared"  # the transport for shared memory, which GPUs do not use unless told
PRELOADED = [
    *(
        "torch",
        "torch._dynamo",
        "torch.distributed.tensor.parallel",
        "samestep.run.trainer",
        "samestep.recipes.lenet",
        "samestep.scripts.single_process",
    ),
    *("sklearn.datasets", "matplotlib.pyplot", "torch.utils.tensorboard"),
]


def close_mesh():
    """Destroys the process group of a mesh, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def cpu_only(reason):
    """Marks a test of what only CPUs have or do."""
    return pytest.mark.skipif(DEVICE != "cpu", reason=f"on CPUs alone: {reason}")


def device_of(rank):
    """The device of a rank, one of its own, which becomes the thread's current one."""
    if DEVICE == "cpu":
        return torch.device("cpu")
    # Ranks that take turns must not share one: autograd has one thread a device, and hooks of its wait for other ranks.
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def in_turns(world_size, program, *args):
    """Runs `program(communicator, *args)` on ranks that take turns; the results by rank, in host memory."""

    def rank_main(transport):
        return _result(program(Communicator(device_of(transport.rank), transport, transport), *args))

    return SequentialWorld(world_size).run(rank_main)


def alone(program, *args, **options):
    """What `program(communicator, …)` gives on one device, in this process."""
    return in_turns(1, lambda communicator: program(communicator, *args, **options))[0]


def _result(value):
    """What a program returned, where tests can compare it to that of other ranks."""
    return value if DEVICE == "cpu" else to_host(value)


@contextmanager
def processes(target, arguments):
    """Processes that run `target(*arguments[key], pipe)`; yields each and its pipe by key, and ends those left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    started = {}
    try:
        for key, values in arguments.items():
            ours, theirs = context.Pipe()
            started[key] = context.Process(target=target, args=(*values, theirs)), ours
            started[key][0].start()
            theirs.close()
        yield started
    finally:
        for process, pipe in started.values():
            process.kill()
            process.join()
            pipe.close()


class World:
    """Real processes, one a rank, connected by a transport: "shared" memory, "gloo", or as "auto" chooses.

    Programs are named `module:function`, and are sent arguments. `nodes`, the numbers of ranks on nodes 0, 1, …, makes
    them believe that they are on several ones.
    """

    def __init__(self, world_size, transport="auto", nodes=None):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        self._pipes, self._processes = [], []
        store = str(Path(self._folder.name) / "store")
        places = [(local, size) for size in nodes or (world_size,) for local in range(size)]
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, places[rank], transport, store, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, program, *args):
        """Runs `program(communicator, *args)` on every rank; the results by rank."""
        name = f"{program.__module__}:{program.__qualname__}"
        for pipe in self._pipes:
            pipe.send((name, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE_SECONDS), f"rank {rank} of {self.world_size} does not answer"
            answers.append(pipe.recv())
        errors = [f"rank {rank}:\n{answer[1]}" for rank, answer in enumerate(answers) if answer[0] == "error"]
        assert not errors, "\n".join(errors)
        return [answer[1] for answer in answers]

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank, world_size, place, chosen, store_path, pipe):
    """What a rank of a `World` does: programs, one after another, until the pipe closes."""
    import torch.distributed as dist

    from samestep.comm.connecting import connect_at
    from samestep.comm.environment import Environment
    from samestep.comm.group import GroupTransport
    from samestep.comm.rendezvous import Rendezvous
    from samestep.comm.transport import LocalTransport
    from samestep.data.randomness import seed_process

    # As in supervised workers: what a failed program sent, and no rank received, would end the rank ten minutes later.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    gc.freeze()
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of data workers: another fork server would start anew
    transport = control = LocalTransport()
    device = device_of(rank)
    if world_size > 1:
        store = dist.FileStore(store_path, world_size)
        timeout = timedelta(seconds=180)
        place = Environment(rank, world_size, *place, transport=chosen)
        transport, control = connect_at(Rendezvous(store, place, timeout), device, timeout)
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            break
        try:
            seed_process(
                0
            )  # what a program draws does not depend on those before it, of which ranks may have drawn more
            module, _, function = name.partition(":")
            program = getattr(importlib.import_module(module), function)
            result = _result(program(Communicator(device, transport, control), *args))
            pipe.send(("result", result))
        except Exception:
            pipe.send(("error", traceback.format_exc()))
        result = None
        if not isinstance(transport, GroupTransport):  # what a program has made for its mesh; that of a transport stays
            close_mesh()
        gc.collect()
    transport.close()
