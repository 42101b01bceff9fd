"""Causes in the machine and its state: flags that differ, generators without a seed, kernels that race."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.backends import cudnn
from torch.optim import Optimizer

from samestep.data.checksums import checksum
from samestep.data.randomness import seed_process
from samestep.engine.deterministic_kernels import register_kernels
from samestep.engine.kernel_flags import CPU, CUDA, float32_precisions
from samestep.engine.side_effects import Watch
from samestep.text import listed
from samestep.verify.causes.evidence import Cause, Evidence, Facts, on_devices
from samestep.verify.comparison import first_difference
from samestep.verify.recording import Recording
from samestep.verify.wraps import Wrap, around_roots, by_script, wrapped

SEED = 2025
GENERATORS = ("torch", "numpy", "random")


def fact_wraps(facts: Facts) -> list[Wrap]:
    """Records flags while models run in training, and the states of the global generators after each step."""
    # Forks of one process have equal generators. Here they begin anywhere, as in a process of its own.
    torch.default_generator.seed()
    np.random.seed(None)  # noqa: NPY002 - the generator that scripts draw from
    random.seed(None)
    watch = Watch()
    start = list(map(checksum, watch.states()))
    seeded: set[str] = set()

    def before(root: nn.Module) -> None:
        if torch.is_grad_enabled() and next(root.parameters(), None) is not None:
            facts.add_once("flags", **_flags(root))

    def observe_flags(when: str = "after step {}") -> None:
        now = list(map(checksum, watch.states()))
        moved = [name for name, one, other in zip(GENERATORS, start, now, strict=True) if one != other]
        facts.add("generators", states=dict(zip(GENERATORS, now, strict=True)), moved=moved, when=when)

    def seed(name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name not in seeded:  # what was drawn before does not show later
            seeded.add(name)
            observe_flags("when the program seeded it first")
        return inner(*args, **kwargs)

    facts.at_step.append(observe_flags)
    seeds = ((torch, "manual_seed", ("torch.random",)), (np.random, "seed", ()), (random, "seed", ()))
    return [around_roots(before), *(Wrap(at, name, partial(seed, at.__name__), also) for at, name, also in seeds)]


def _flags(root: nn.Module) -> dict[str, Any]:
    """The settings that decide how kernels compute."""
    kind = next(root.parameters()).device.type
    autocast = torch.is_autocast_enabled(kind)
    return {
        **{f"{name}.fp32_precision": value for name, value in float32_precisions().items()},
        "cudnn.benchmark": cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "autocast": str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if autocast else "off",
    }


def _suspect_flags(evidence: Evidence) -> str | None:
    first: dict[str, tuple[Any, str]] = {}
    for run, rank, fact in evidence.facts("flags"):
        where = f"rank {rank} of {run.world_size}"
        for name, value in fact.items():
            known, place = first.setdefault(name, (value, where))
            if known != value and name not in ("kind", "step", "name"):
                return f"{name} was {known} on {place} and {value} on {where}"
    return None


def _with_fixed_flags() -> AbstractContextManager[None]:
    """Flags are put back before every forward, which runs without autocast."""
    threads, mode, benchmark = torch.get_num_threads(), torch.get_deterministic_debug_mode(), cudnn.benchmark
    onednn: Any = torch.backends.mkldnn
    precisions, mkldnn = float32_precisions(), onednn.enabled

    def before(root: nn.Module) -> Any:
        for name, precision in float32_precisions().items():
            if precision != precisions[name]:
                (CUDA | CPU)[name].fp32_precision = precisions[name]
        if torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]  # else samestep's own mode
            torch.set_deterministic_debug_mode(mode)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        cudnn.benchmark = benchmark
        if onednn.enabled != mkldnn:
            onednn.enabled = mkldnn
        parameter = next(root.parameters(), None)
        without = torch.autocast("cpu" if parameter is None else parameter.device.type, enabled=False)
        without.__enter__()
        return without

    return wrapped(around_roots(before, lambda root, without: without.__exit__(None, None, None)))


def _suspect_unseeded(evidence: Evidence) -> str | None:
    for one, other in evidence.repeats:
        runs = f"in two runs on {on_devices(one)}"
        drawn = _drawn_unseeded(one, other)
        if drawn is not None:
            return f"{drawn} {runs}: nothing has seeded it"
        start, found = (first_difference(one, other, tier) for tier in ("bitwise", "allclose"))
        if start is not None and found is not None and found.step == start.step:
            return f"more than rounding differs {runs}: {found.text}"
    return None


def _drawn_unseeded(one: Recording, other: Recording) -> str | None:
    """The global generator that was drawn from, and had another state in each of two runs on the same devices."""
    for rank in range(one.world_size):
        for first, second in zip(one.facts("generators", rank), other.facts("generators", rank), strict=False):
            for name in GENERATORS:
                drawn = name in first["moved"] and name in second["moved"]
                if drawn and first["states"][name] != second["states"][name]:
                    when = first["when"].format(first["step"] + 1)
                    return f"the global generator of {name} was drawn from and stood elsewhere {when}"
    return None


def _with_seeds() -> AbstractContextManager[None]:
    """The global generators begin with a seed, and those that are made without one get one."""

    def seed(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else next(iter(kwargs.values()), None)
        return inner(SEED) if given is None else inner(*args, **kwargs)

    def make(inner: Callable[..., None], self: Any, x: Any = None) -> None:
        inner(self, SEED if x is None and by_script() else x)

    def default_rng(inner: Callable[..., Any], seed: Any = None) -> Any:
        return inner(SEED if seed is None and by_script() else seed)

    def torch_seed(_: Any) -> int:
        torch.manual_seed(SEED)
        return SEED

    seed_process(SEED)
    return wrapped(
        Wrap(random, "seed", seed),
        Wrap(random.Random, "__init__", make),
        Wrap(np.random, "seed", seed),
        Wrap(np.random, "default_rng", default_rng, ("numpy.random._generator",)),
        Wrap(torch, "seed", torch_seed),
    )


def _suspect_races(evidence: Evidence) -> str | None:
    for one, other in evidence.repeats:
        found, more = (first_difference(one, other, tier) for tier in ("bitwise", "allclose"))
        if found is None or (more is not None and more.step == found.step):
            continue  # more than rounding: the model was given something else
        if found.quantity != "metric" and _drawn_unseeded(one, other) is None:
            return (
                f"two runs on {on_devices(one)} differ in step {found.step}, although every generator had the same "
                "state: a kernel adds in the order in which its threads happen to arrive"
            )
    return None


@contextmanager
def _with_deterministic_kernels() -> Iterator[None]:
    """torch takes deterministic kernels if there are any, and does not try which are fastest."""
    mode, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark, cudnn_attention = cudnn.benchmark, torch.backends.cuda.cudnn_sdp_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    register_kernels()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it has no deterministic form
    cudnn.benchmark = False
    try:
        with wrapped(Wrap(torch, "use_deterministic_algorithms", lambda *args, **kwargs: None)):
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
        cudnn.benchmark = benchmark


FLAGS = Cause(
    "flags",
    "precision flags differ between runs or ranks",
    "Set them in one place, before anything is computed, and not by the number of devices or the rank.",
    _suspect_flags,
    _with_fixed_flags,
)
UNSEEDED = Cause(
    "unseeded",
    "random numbers are drawn from a generator without a seed",
    "Seed torch, numpy and random at the start of the program, alike on every rank; samestep.Run does.",
    _suspect_unseeded,
    _with_seeds,
)


def _suspect_start(evidence: Evidence) -> str | None:
    for run in evidence.shared if evidence.is_ddp else ():
        for one, other in product(run.lines("parameters"), run.lines("parameters", run.world_size - 1)):
            if one["optimizer"] == other["optimizer"] and one["names"] == other["names"] and not one["divided"]:
                pairs = zip(one["names"], one["bits"], other["bits"], strict=True)
                if apart := [name for name, ours, theirs in pairs if ours != theirs]:
                    return f"{listed(apart)} began with other values on rank {run.world_size - 1} than on rank 0"
    return None


def _with_one_start() -> AbstractContextManager[None]:
    """Until the first optimizer is made, whatever seed the program gives torch is the same on all ranks."""
    made: list[None] = []

    def seed(inner: Callable[..., Any], number: Any) -> Any:
        return inner(number if made else SEED)

    def make(inner: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        made.append(None)
        inner(*args, **kwargs)

    return wrapped(Wrap(torch, "manual_seed", seed, ("torch.random",)), Wrap(Optimizer, "__init__", make))


START = Cause(
    "start",
    "copies of the model begin with other values on other ranks",
    "Build the model with one seed on all ranks, and give each rank a seed of its own after that; or build it on the "
    "meta device and load one checkpoint. DistributedDataParallel copies rank 0's, fully_shard copies nothing.",
    _suspect_start,
    _with_one_start,
)
HASH_ORDER = Cause(
    "hash_order",
    "each rank orders a set of strings by a hash seed of its own",
    "Sort what a set holds before its order counts: for name in sorted(names). Or set PYTHONHASHSEED=0 for all ranks, "
    "as samestep run does.",
    lambda evidence: None,  # found by a run of its own
    nullcontext,
)
RACES = Cause(
    "nondeterministic",
    "an operation adds in the order in which threads arrive",
    "Call torch.use_deterministic_algorithms(True), which names operations that have no deterministic form; "
    "samestep.Run does.",
    _suspect_races,
    _with_deterministic_kernels,
)
