"""Runs a small script on real processes, as `samestep run` does, or on one device under the reference."""

import builtins
import gc
import io
import os
import random
import sys
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import torch
from driving import driving, put_back
from reference import ReferenceDataParallel, from_the_left, in_pairs, reference_data_parallel, replicate
from torch import nn
from worlds import DEVICE

from samestep.comm.transport import LocalTransport
from samestep.launcher.job import run_script
from samestep.patch import Patch, applied
from samestep.scripts.script_state import ScriptState, num_visible

FOLDS = {"tree": in_pairs, "left": from_the_left}
ABSENT = object()
OWNERS = (torch, torch.random, torch.cuda, torch.Tensor, nn.Module, nn.DataParallel, nn.parallel, os, os.path, builtins)


@dataclass(frozen=True)
class Bits:
    """A tensor or a float, to the bit."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def tensor(self) -> torch.Tensor:
        """The values again."""
        return torch.frombuffer(bytearray(self.data), dtype=getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a script on one rank."""

    stdout: str
    stderr: str
    result: dict[str, Any]  # its global `RESULT`: by path, a `Bits` for tensors and floats, anything else as it is
    chunks: tuple[tuple[int, int], ...]  # (forward, chunk) of each that ran on this rank; under the reference, all
    error: str = ""  # the name of the exception that ended it
    message: str = ""
    frames: tuple[tuple[str, int], ...] = ()  # (file, line) of the exception's traceback, the innermost last
    notes: tuple[str, ...] = ()  # of the exception
    exit_code: Any = None


def run(worlds, n, path, num_microbatches=4, argv=(), *, cwd, seed=None, wrap=None, changed=None):
    """Runs a script as `samestep run` does on n processes; its `Outcome` once a process, with that one's chunks.

    What the processes exchange may be `changed`, see `changes`.
    """
    Path(cwd).mkdir(parents=True, exist_ok=True)
    settings = {"num_microbatches": num_microbatches, "num_devices": n, "seed": seed, "wrap": wrap, "changed": changed}
    outcomes = worlds(n).run(run_single_process, str(path), tuple(argv), str(cwd), settings)
    return [replace(outcomes[0], chunks=outcome.chunks) for outcome in outcomes]


def trainer(worlds, folder, prelude):
    """`train(n, body, wrap, …)`: the outcomes of a script on n processes, with tensors on the device of the tests."""

    def train(n, body, wrap=None, num_microbatches=4, prelude=prelude):
        path = folder / "train.py"
        path.write_text(f"import torch\ntorch.set_default_device({DEVICE!r})\n{dedent(prelude)}{dedent(body)}")
        return run(worlds, n, path, num_microbatches, cwd=folder, wrap=wrap)

    return train


def check_close(result, expected, **tolerance):
    """Fails unless floats are within a tolerance, and everything else is equal."""
    assert result.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, Bits):
            torch.testing.assert_close(result[path].tensor(), value.tensor(), msg=f"{path} is not close", **tolerance)
        else:
            assert result[path] == value, path


def run_reference(worlds, path, num_microbatches=4, argv=(), *, cwd, num_devices=4, fold="tree"):
    """Runs a script under the reference, in one process, with gradients added up by the "tree" or from the "left"."""
    Path(cwd).mkdir(parents=True, exist_ok=True)
    return worlds(1).run(run_referenced, str(path), tuple(argv), str(cwd), num_microbatches, num_devices, fold)[0]


def run_single_process(communicator, path, argv, cwd, settings):
    """The script on rank 0, as `samestep run` does; other ranks compute chunks for it."""
    from samestep.scripts.single_process import patched  # compiles much of torch, which the workers have at hand

    script = ScriptState(communicator, settings["num_microbatches"], settings["num_devices"])
    simulated, chunks = communicator.device.type == "cpu", lambda: tuple(script.chunks_run)
    if not simulated:
        torch.cuda.init()  # before it is looked at what a script leaves changed
        torch.cuda.device_count()
    with applied(changes(settings["changed"])), driving(script, cwd) as own:
        if own is None:
            return Outcome("", "", {}, chunks())
        context = patched(own, simulated=simulated, seed=settings["seed"], wrap=settings["wrap"])
        return _run(path, argv, cwd, context, chunks)


def changes(name):
    """Patches of what processes exchange: sums of one's own pieces alone, results that are zeros, small messages."""
    from samestep.scripts.split_forward import calls, derivatives, pieces, shared_forward
    from samestep.scripts.workers import serve
    from samestep.scripts.workers.link import decode

    def own_sums(communicator, items, ranges):
        local = LocalTransport()
        alone = replace(communicator, transport=local, control=local)
        return make_sums(alone, items, (ranges[communicator.rank],))

    def zeros(data):
        head, tensors = decode(data)
        return head, [tensor.zero_() for tensor in tensors]

    make_sums = calls.make_sums
    return {
        None: [],
        "own sums": [Patch(derivatives, "make_sums", own_sums), Patch(serve, "make_sums", own_sums)],
        "zeros": [Patch(shared_forward, "decode", zeros)],
        "small messages": [Patch(pieces, "BUCKET_BYTES", 64), Patch(calls, "BUCKET_BYTES", 64)],
    }[name]


def run_referenced(communicator, path, argv, cwd, num_microbatches, num_devices, fold):
    """On the only rank: the script with the reference in the place of torch's DataParallel."""
    counts: list[int] = []
    context = _referenced(ScriptState(communicator, num_microbatches, num_devices), FOLDS[fold], counts)
    chunks = lambda: tuple((number, chunk) for number, count in enumerate(counts) for chunk in range(count))  # noqa: E731
    return _run(path, argv, cwd, context, chunks)


@contextmanager
def _referenced(script, fold, counts):
    """Replaces torch's DataParallel by the reference for a block, on simulated devices."""
    from samestep.scripts.simulated.devices import simulated_devices

    patches = _substitutes(script.num_microbatches, fold, counts)
    simulated = simulated_devices(partial(num_visible, script), script.notice)
    with _generators_preserved(), simulated, applied(patches):
        yield


def _substitutes(num_microbatches, fold, counts):
    """The reference by the names that scripts use."""

    def number(device_ids):
        return num_microbatches or (torch.cuda.device_count() if device_ids is None else len(device_ids))

    class DataParallel(ReferenceDataParallel):
        def __init__(self, module, device_ids=None, output_device=None, dim=0):
            super().__init__(module, number(device_ids), dim)
            self.device_ids = list(range(self.num_chunks))
            self.output_device = 0

        def forward(self, *inputs, **kwargs):
            if all(getattr(type(self), name) is getattr(DataParallel, name) for name in ("scatter", "gather")):
                return super().forward(*inputs, **kwargs)
            inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            return self.gather(self.parallel_apply(replicas, inputs, kwargs), self.output_device)

        def scatter(self, inputs, kwargs, device_ids):
            return nn.parallel.scatter_gather.scatter_kwargs(inputs, kwargs, device_ids, self.dim)

        def replicate(self, module, device_ids):
            return nn.parallel.replicate(module, device_ids)

        def parallel_apply(self, replicas, inputs, kwargs):
            return nn.parallel.parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs, output_device):
            return nn.parallel.gather(outputs, output_device, self.dim)

    def data_parallel(module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None):
        return reference_data_parallel(module, inputs, number(device_ids), dim, module_kwargs, counts, fold)

    def by_hand(replicas, inputs, kwargs_tup=None, devices=None):
        counts.append(len(replicas))
        calls = zip(replicas, inputs, kwargs_tup or [{}] * len(replicas), strict=True)
        return [
            replica(*(args if isinstance(args, list | tuple) else (args,)), **kwargs) for replica, args, kwargs in calls
        ]

    DataParallel.log, DataParallel.fold = counts, staticmethod(fold)
    DataParallel.__module__, DataParallel.__qualname__ = "torch.nn", "DataParallel"  # so that it pickles
    aliases = ("torch.nn.parallel", "torch.nn.parallel.data_parallel")
    return [
        Patch(nn, "DataParallel", DataParallel, aliases=aliases),
        Patch(nn.parallel, "data_parallel", data_parallel, aliases=aliases[1:]),
        Patch(nn.parallel, "replicate", lambda module, devices: replicate(module, len(devices), fold)),
        Patch(nn.parallel, "parallel_apply", by_hand),
    ]


def _run(path, argv, cwd, context, chunks):
    """Runs a script in a context, and puts everything else back as well."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    before, ended = _fingerprint(), {}
    gc.freeze()  # so that the collection at the end looks at nothing but what the script made
    with put_back(cwd), redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            with context:
                run_script(path, argv)
        except SystemExit as exit:
            ended = {"exit_code": exit.code}
        except BaseException as error:
            frames = tuple(
                (Path(frame.filename).name, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)
            )
            ended = {"error": type(error).__name__, "message": str(error), "frames": frames}
            ended["notes"] = tuple(getattr(error, "__notes__", ()))
        result = dict(_flat(vars(sys.modules["__main__"]).get("RESULT", {})))
        texts = [stream.buffer.getvalue().decode() for stream in streams]
    gc.collect()
    gc.unfreeze()
    left = sorted(name for name, value in _fingerprint().items() if before.get(name, value) != value)
    assert not left, f"the patches left these changed: {left}"
    return Outcome(texts[0], texts[1], result, chunks(), **ended)


def _flat(value, path=""):
    """The entries of a nested value, by path."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        data = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        yield path, Bits(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _flat(entry, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _flat(entry, f"{path}/{index}")
    elif isinstance(value, float):
        yield path, Bits("float64", (), np.float64(value).tobytes())
    else:
        yield path, value


def _fingerprint():
    """Which objects the places hold that patches may change."""
    places = ((owner, name, value) for owner in OWNERS for name, value in list(vars(owner).items()))
    # The first use of a GPU sets `torch.cuda._initialized` for good.
    return {f"{owner.__name__}.{name}": id(value) for owner, name, value in places if name != "_initialized"}


@contextmanager
def _generators_preserved():
    """Restores the process's generators after a block."""
    states, of_numpy = (torch.get_rng_state(), np.random.get_state(), random.getstate()), np.random.get_bit_generator()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_bit_generator(of_numpy)
        np.random.set_state(states[1])
        random.setstate(states[2])
