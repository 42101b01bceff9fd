"""Seeds of a script's generators: whatever it leaves unseeded has a fixed seed, and one line says what that was.

In a multi-process script each rank has a seed of its own. Where the script asks for a seed of chance (`random.seed()`,
`numpy.random.default_rng()`), a number derived from the run's seed stands in.

Who calls decides (`caller_of`). A seed that the script sets is taken as it is. Code that saves and restores states, or
seeds the workers of a loader, is machinery: what it sets says nothing about the script. A library's seeds count as set,
but no number stands in for one that it leaves out. A generator whose state is no longer the one it began with, before
anything has set it, has been drawn from without a seed.
"""

import functools
import linecache
import os
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import Any

import numpy as np
import rich.default_styles  # noqa: F401 - draws from Python's random at its first import, which may be scikit-learn's
import torch
from numpy.random import mtrand
from torch.utils.data import get_worker_info

from samestep.callsite import is_own_file, is_script_file
from samestep.core.seeds import derive_seed
from samestep.data.randomness import seed_process
from samestep.patch import Patch, applied
from samestep.scripts.script_state import ScriptState
from samestep.text import notify

CHANCE = re.compile(r"\b(time|time_ns|perf_counter|monotonic|now|getpid|urandom|uuid4|token_bytes|randbits)\(")
"""What differs from run to run, in a line that seeds a generator."""
MACHINERY = re.compile(
    r"[/\\](multiprocessing|concurrent|importlib|asyncio|triton|numba|filelock)[/\\]|[/\\]tempfile\.py$|"
    r"[/\\]torch[/\\](_inductor|_dynamo|_functorch|multiprocessing|distributed|utils[/\\](data|cpp_extension))[/\\]"
)
"""Files whose code sets generators for itself, such as in a loader's workers, or puts back what it found."""
UNSEEDED = 0x0E_ED
"""The stream of the numbers that stand in for seeds that were not given."""
STATES: dict[str, Callable[[], bytes]] = {
    "torch": lambda: torch.default_generator.get_state().numpy().tobytes(),
    "NumPy": lambda: pickle.dumps(np.random.get_state()),  # noqa: NPY002 - scripts draw from it
    "Python's random": lambda: pickle.dumps(random.getstate()),
}
"""The state of each global generator of this process."""
SETTERS: tuple[tuple[Any, str, str, str], ...] = (
    *((torch, name, "torch", "torch.random") for name in ("manual_seed", "set_rng_state", "seed")),
    *(
        (torch.cuda, name, "torch", "torch.cuda.random")
        for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")
    ),
    *((np.random, name, "NumPy", "numpy.random.mtrand") for name in ("seed", "set_state")),
    *((random, name, "Python's random", "") for name in ("seed", "setstate")),
)
"""The functions that set them, each with its module, the name of the generator, and another module that has it."""


class Caller(Enum):
    """Kinds of calling code."""

    SCRIPT = 0  # a file of the user's
    LIBRARY = 1
    MACHINERY = 2


def caller_of(frame: FrameType) -> Caller:
    """The kind of the code that a frame runs."""
    filename = frame.f_code.co_filename
    if is_script_file(filename):
        return Caller.SCRIPT
    is_machinery = is_own_file(filename) or filename.startswith("<frozen") or MACHINERY.search(filename)
    return Caller.MACHINERY if is_machinery else Caller.LIBRARY


class Seeds:
    """The seeds of a run, and what the script draws from without a seed of its own; `ScriptState.seeding`."""

    def __init__(self, seed: int, may_draw: Callable[[], bool]) -> None:
        self.seed = seed  # this rank's
        self.may_draw = may_draw  # whether a call comes at a point where numbers can be derived
        self.drawn: dict[str, None] = {}  # in order
        self.by_chance: dict[str, None] = {}  # the lines that seed a generator by what differs from run to run
        self.asked: set[Any] = set()  # the code that has called os.urandom
        self._num_derived = 0
        self._starts = {name: state() for name, state in STATES.items()}

    def derived(self, name: str) -> int:
        """The next number to stand in for a seed, of the generator of that name."""
        self._num_derived += 1
        self.drawn.setdefault(name)
        return derive_seed(self.seed, UNSEEDED, self._num_derived)

    def find_drawn(self, *names: str) -> None:
        """Notes which generators have been drawn from; called before the script sets one, and at the end."""
        for name in names:
            if name in self._starts and STATES[name]() != self._starts[name]:
                del self._starts[name]
                self.drawn.setdefault(name)

    def find_chance(self, frame: FrameType) -> None:
        """Notes a line of the script's or a library's that seeds a generator by a clock, a process id or os.urandom."""
        if caller_of(frame) is not Caller.MACHINERY:
            path, line = frame.f_code.co_filename, frame.f_lineno
            is_known = frame.f_code in self.asked and frame.f_code.co_name != "<module>"  # of a script the line alone
            if is_known or CHANCE.search(linecache.getline(path, line)):
                self.by_chance[f"{path.partition('-packages/')[2] or path}, line {line}"] = None

    def mark_set(self, name: str, is_state: bool) -> None:
        """A generator was set: to a seed, or to a state, which may be the one that it began with."""
        # Code that puts back the state with which a generator began has not seeded it.
        if name in self._starts and not (is_state and STATES[name]() == self._starts[name]):
            del self._starts[name]


@contextmanager
def seeded(script: ScriptState, seed: int | None) -> Iterator[None]:
    """Seeds the generators of torch, NumPy and Python for a block."""

    def count(owner: Any, name: str, given: Any) -> None:
        # Seeds that a chunk sets are its own; the driver's next forward must not depend on them.
        if owner in (torch, torch.cuda) and script.may_meet():
            script.num_since_reseed = getattr(given, "num_forwards", 0) if name == "set_rng_state" else 0

    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    of_numpy = mtrand.get_bit_generator()
    before = script.seeding
    try:
        with _watched(seed or 0, seed, script.may_meet, script.notice, count) as seeds:
            script.seeding = seeds
            yield
    finally:
        script.seeding = before
        torch.set_rng_state(states[0])
        mtrand.set_bit_generator(of_numpy)  # the script may have chosen another
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


@contextmanager
def seeded_rank(rank: int, seed: int | None) -> Iterator[None]:
    """Seeds the generators of one rank of a multi-process script: forks of one process would draw the same."""
    process = os.getpid()

    tell = notify if rank == 0 else lambda text: None
    with (
        _watched(derive_seed(seed or 0, rank), seed, lambda: os.getpid() == process, tell) as seeds,
        applied(_made_by_chance(lambda: seeds, in_chunk=lambda: False)),
    ):
        yield


@contextmanager
def _watched(
    own: int,
    seed: int | None,
    may_draw: Callable[[], bool],
    tell: Callable[[str], None],
    on_set: Callable[[Any, str, Any], None] = lambda owner, name, given: None,
) -> Iterator[Seeds]:
    """Seeds this process; tells at the end of the block what was drawn without a seed, or with one of chance."""
    with torch._C.DisableTorchFunction():  # simulated devices do not matter here
        seed_process(own)
        seeds = Seeds(own, may_draw)
    process = os.getpid()

    def tell_drawn() -> None:
        if os.getpid() != process:  # a process that the script has forked, in which Python seeds `random` anew
            return
        with torch._C.DisableTorchFunction():
            seeds.find_drawn(*STATES)
        for line in seeds.by_chance:
            tell(
                f"{line}, seeds a generator by a clock, a process id or os.urandom: it draws other numbers in every "
                "run; look for an option that gives it a seed, such as deterministic=True or seed=…"
            )
        if seeds.drawn and seed is None:
            *others, last = seeds.drawn
            names = f"{', '.join(others)} and {last}" if others else last
            tell(f"the script draws from {names} without a seed: seeded by 0 here (--seed)")

    urandom = os.urandom

    def noted(size: int) -> bytes:
        seeds.asked.add(sys._getframe(1).f_code)
        return urandom(size)

    with applied([Patch(os, "urandom", noted), *(_setting(seeds, on_set, *setter) for setter in SETTERS)]):
        try:
            yield seeds
        except SystemExit:
            tell_drawn()
            raise
        tell_drawn()


def _setting(
    seeds: Seeds, on_set: Callable[[Any, str, Any], None], owner: Any, name: str, generator: str, alias: str
) -> Patch:
    """A function that sets a global generator; by a derived number where the script leaves the seed to chance."""
    original: Callable[..., Any] = getattr(owner, name)
    is_torch = owner in (torch, torch.cuda)
    is_state = name.startswith("set") or owner is torch.cuda  # a device's seed is none of the host's

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        caller = caller_of(sys._getframe(1)) if seeds.may_draw() else Caller.MACHINERY
        given = args[0] if args else next(iter(kwargs.values()), None)
        if caller is Caller.MACHINERY:
            result = original(*args, **kwargs)
            on_set(owner, name, given)
            return result
        with torch._C.DisableTorchFunction():
            seeds.find_drawn(generator)
        if name.startswith("seed") and given is None and caller is Caller.SCRIPT:
            # torch returns the seed that it has found; NumPy takes no more than 32 bits.
            number = seeds.derived(generator)
            result = (getattr(owner, "manual_" + name)(number), number)[1] if is_torch else original(number % 2**32)
        else:
            seeds.find_chance(sys._getframe(1))
            result = original(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            seeds.mark_set(generator, is_state)
        on_set(owner, name, given)
        return result

    return Patch(owner, name, replacement, aliases=(alias,))


def patches(script: ScriptState) -> list[Patch]:
    """Patches that seed the generators which the script makes without a seed, and that let a saved state be put back.

    Inside a chunk of a wrapped forward an unseeded `default_rng()` or `Random()` draws its seed from `random`, which
    each chunk seeds.
    """
    # A chunk's seed is a function of torch's generator and of the forwards since that was set. Code that saves and
    # restores the state (above all activation checkpointing, which repeats a forward) must get the same seeds again, so
    # a saved state carries the number of forwards.
    save = torch.get_rng_state

    @functools.wraps(save)
    def get_rng_state() -> torch.Tensor:
        state = save()
        state.num_forwards = script.num_since_reseed  # type: ignore[attr-defined]  # tensors take attributes
        return state

    return [
        Patch(torch, "get_rng_state", get_rng_state, aliases=("torch.random",)),
        *_made_by_chance(lambda: script.seeding, in_chunk=lambda: script.in_chunk),
    ]


def _made_by_chance(seeds: Callable[[], Seeds | None], in_chunk: Callable[[], bool]) -> list[Patch]:
    """Generators that the script makes without a seed get one; the generators of libraries are left alone."""
    generator, construct = np.random.default_rng, random.Random.__init__

    def stand_in(given: Any) -> Any:
        current = seeds()
        if given is not None:
            if current is not None and current.may_draw():
                current.find_chance(sys._getframe(2))
            return given
        # Two frames up: past `default_rng` or `__init__`, to the line that makes the generator.
        if current is None or caller_of(sys._getframe(2)) is not Caller.SCRIPT:
            return None
        if current.may_draw():
            return current.derived("generators of its own")
        # torch seeds the workers of a loader, each with a number of its own
        return random.getrandbits(64) if in_chunk() or get_worker_info() is not None else None

    @functools.wraps(generator)
    def default_rng(seed: Any = None) -> np.random.Generator:
        return generator(stand_in(seed))

    @functools.wraps(construct)
    def init(self: random.Random, x: Any = None) -> None:
        construct(self, stand_in(x))

    return [
        Patch(np.random, "default_rng", default_rng, aliases=("numpy.random._generator",)),
        Patch(random.Random, "__init__", init),
    ]
