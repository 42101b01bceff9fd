"""Causes in the machine and its state: flags that differ, generators nobody seeded, kernels that race."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from samestep.data.randomness import seed_process
from samestep.verify.causes.cause import Cause
from samestep.verify.causes.evidence import Evidence, on_devices
from samestep.verify.causes.notes import Notes, Wrap, around_roots, by_script, fingerprint, wrapped
from samestep.verify.recording import Recording

SEED = 2025
GENERATORS = ("torch", "numpy", "random")


def listen(notes: Notes) -> list[Wrap]:
    """Flags while models run in training, and where the global generators stand after each step."""
    _renew()
    start = _states()

    def before(root: nn.Module) -> None:
        if torch.is_grad_enabled() and next(root.parameters(), None) is not None:
            notes.tell_once("flags", **_flags(root))

    def tell() -> None:
        now = _states()
        moved = [name for name, one, other in zip(GENERATORS, start, now, strict=True) if one != other]
        notes.tell("generators", states=dict(zip(GENERATORS, now, strict=True)), moved=moved)

    notes.at_step.append(tell)
    return [around_roots(before, lambda root, token: None)]


def _renew() -> None:
    """Lets the global generators begin anywhere, as in a process of its own: forks of one process all stand alike."""
    torch.default_generator.seed()
    np.random.seed(None)  # noqa: NPY002 - the generator that scripts draw from
    random.seed(None)


def _states() -> list[str]:
    """A fingerprint of each global generator's state."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - what scripts draw from
    return [
        fingerprint(torch.default_generator.get_state().numpy().tobytes()),
        fingerprint(repr(numpy_state["state"]).encode() + numpy_state["state"].get("key", np.zeros(0)).tobytes()),
        fingerprint(repr(random.getstate()).encode()),
    ]


def _flags(root: nn.Module) -> dict[str, Any]:
    """What decides how kernels compute."""
    kind = next(root.parameters()).device.type
    autocast = torch.is_autocast_enabled(kind)
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
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
            if name in ("kind", "step", "name"):
                continue
            known, place = first.setdefault(name, (value, where))
            if known != value:
                return f"{name} was {known} on {place} and {value} on {where}"
    return None


@contextmanager
def _with_fixed_flags() -> Iterator[None]:
    """Flags are put back before every forward, which runs without autocast."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    cudnn = torch.backends.cudnn
    tf32, benchmark, deterministic = cudnn.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    mkldnn = bool(torch.backends.mkldnn.enabled)

    def before(root: nn.Module) -> Any:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        cudnn.allow_tf32, cudnn.benchmark = tf32, benchmark
        if bool(torch.backends.mkldnn.enabled) != mkldnn:
            torch._C._set_mkldnn_enabled(mkldnn)
        parameter = next(root.parameters(), None)
        quiet = torch.autocast("cpu" if parameter is None else parameter.device.type, enabled=False)
        quiet.__enter__()
        return quiet

    with wrapped(around_roots(before, lambda root, quiet: quiet.__exit__(None, None, None))):
        yield


def _suspect_unseeded(evidence: Evidence) -> str | None:
    for one, other in evidence.repeats:
        for rank in range(one.world_size):
            pairs = zip(one.facts("generators", rank), other.facts("generators", rank), strict=False)
            for first, second in pairs:
                for name in GENERATORS:
                    drawn = name in first["moved"] and name in second["moved"]
                    if drawn and first["states"][name] != second["states"][name]:
                        return (
                            f"the global generator of {name} was drawn from and stood elsewhere after step "
                            f"{first['step']} in two runs on {on_devices(one)}: nothing has seeded it"
                        )
    return None


@contextmanager
def _with_seeds() -> Iterator[None]:
    """The global generators begin with a seed, and those that are made without one get one."""

    def without_seed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else next(iter(kwargs.values()), None)
            return inner(SEED) if given is None else inner(*args, **kwargs)

        return seed

    def default_rng(inner: Callable[..., Any]) -> Callable[..., Any]:
        def make(seed: Any = None) -> Any:
            return inner(SEED if seed is None and by_script() else seed)

        return make

    def torch_seed(_: Callable[..., Any]) -> Callable[..., Any]:
        def seed() -> int:
            torch.manual_seed(SEED)
            return SEED

        return seed

    seed_process(SEED)
    with wrapped(
        Wrap(random, "seed", without_seed),
        Wrap(np.random, "seed", without_seed),
        Wrap(np.random, "default_rng", default_rng, ("numpy.random._generator",)),
        Wrap(torch, "seed", torch_seed),
    ):
        yield


def _suspect_races(evidence: Evidence) -> str | None:
    for one, other in evidence.repeats:
        step = _first_difference(one, other)
        if step is None or _suspect_unseeded(evidence) is not None:
            continue
        return (
            f"two runs on {on_devices(one)} differ in step {step}, although every generator stood alike: a kernel adds "
            "in the order in which its threads happen to arrive"
        )
    return None


def _first_difference(one: Recording, other: Recording) -> int | None:
    """The first step whose gradients or states differ between two runs on the same devices."""
    for step in range(min(one.num_steps, other.num_steps)):
        for rank in range(one.world_size):
            for field in ("gradients", "states"):
                parts = [
                    [entry["bits"] for entry in run.steps[rank][step][field]]  # in one run several optimizers may step
                    for run in (one, other)
                ]
                if parts[0] != parts[1]:
                    return step
    return None


@contextmanager
def _with_deterministic_kernels() -> Iterator[None]:
    """torch takes deterministic kernels wherever there are any, and does not try which are fastest."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark

    def kept(_: Callable[..., None]) -> Callable[..., None]:
        def use_deterministic_algorithms(mode: bool, *, warn_only: bool = False) -> None:
            return None

        return use_deterministic_algorithms

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        with wrapped(Wrap(torch, "use_deterministic_algorithms", kept)):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


FLAGS = Cause(
    "flags",
    "precision flags differ between runs or ranks",
    "Set them in one place, before anything is computed, and not by the number of devices or the rank.",
    _suspect_flags,
    _with_fixed_flags,
)
UNSEEDED = Cause(
    "unseeded",
    "random numbers are drawn from a generator that nobody seeded",
    "Seed torch, numpy and random at the start of the program, alike on every rank; samestep.Run does.",
    _suspect_unseeded,
    _with_seeds,
)
RACES = Cause(
    "nondeterministic",
    "an operation adds in the order in which threads arrive",
    "Call torch.use_deterministic_algorithms(True), which names operations that have no deterministic form; "
    "samestep.Run does.",
    _suspect_races,
    _with_deterministic_kernels,
)
