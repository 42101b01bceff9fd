"""Seeds of the script's generators: equal on all ranks at the start, and after every seed that the script sets.

A seed that the script gives may differ between processes (`int(time.time())`), so that of rank 0 holds. Where the
script gives none (`random.seed()`, `numpy.random.default_rng()`), a number derived from the run's seed stands in. That
also makes such a run repeatable: on any number of devices, with `--seed`.
"""

import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from samestep.core.seeds import derive_seed
from samestep.data.randomness import seed_process
from samestep.scripts.adoption import Adoption
from samestep.scripts.files.rank0_files import Caller, origin
from samestep.scripts.patch import Patch

UNSEEDED = 0x0E_ED
"""The stream of the numbers that stand in for seeds that were not given."""


@dataclass
class Seeds:
    """State of the seeds of a run; `Adoption.seeding`."""

    seed: int  # the run's seed
    is_given: bool  # whether the user gave it
    is_set: bool = False  # whether the script, or a library for it, seeded torch
    num_derived: int = 0  # how many numbers stood in for seeds that were not given

    def derived(self) -> int:
        """The next number to stand in for a seed."""
        self.num_derived += 1
        return derive_seed(self.seed, UNSEEDED, self.num_derived)


@contextmanager
def seeded(adoption: Adoption, seed: int | None) -> Iterator[None]:
    """Seeds the generators of torch, NumPy and Python for a block; without a seed, with a number that rank 0 draws."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 - scripts draw from it
    of_numpy = mtrand.get_bit_generator()
    before = adoption.seeding
    adoption.seeding = _new_seeds(adoption) if seed is None else Seeds(seed, is_given=True)
    try:
        seed_process(adoption.seeding.seed)
        yield
    finally:
        adoption.seeding = before
        torch.set_rng_state(states[0])
        mtrand.set_bit_generator(of_numpy)  # the script may have chosen another
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


def notice_seed(adoption: Adoption) -> None:
    """Prints, once, the seed of a run if neither the user nor the script sets one."""
    seeds = adoption.seeding
    if isinstance(seeds, Seeds) and not seeds.is_given and not seeds.is_set:
        adoption.notice(f"the script sets no seed; this run uses {seeds.seed} (--seed {seeds.seed} repeats it)")


def patches(adoption: Adoption) -> list[Patch]:
    """Patches that keep the script's seeds equal on all ranks.

    | place | called by the script |
    |---|---|
    | `torch.manual_seed`, `torch.set_rng_state`, `torch.cuda.manual_seed(_all)` | as with rank 0's argument |
    | `random.seed`, `random.setstate`, `numpy.random.seed`, `numpy.random.set_state` | as with rank 0's argument |
    | `torch.seed`, `torch.cuda.seed(_all)`, `random.seed()`, `numpy.random.seed()` | seeded with a derived number |
    | `random.Random()`, `numpy.random.default_rng()` | seeded with a derived number |

    Calls from libraries are left alone: they are the same on every rank, as are their arguments. Inside a chunk of a
    wrapped forward an unseeded `default_rng()` or `Random()` draws its seed from `random`, which each chunk seeds.

    A chunk's seed is a function of torch's generator and of the forwards since that was set. Code that saves and
    restores the state (above all activation checkpointing, which repeats a forward) must get the same seeds again, so a
    saved state carries the number of forwards.
    """
    cuda = torch.cuda
    save, generator, construct = torch.get_rng_state, np.random.default_rng, random.Random.__init__

    @functools.wraps(save)
    def get_rng_state() -> torch.Tensor:
        state = save()
        state.num_forwards = adoption.num_since_reseed  # type: ignore[attr-defined]  # tensors take attributes
        return state

    @functools.wraps(generator)
    def default_rng(seed: Any = None) -> np.random.Generator:
        return generator(_stand_in(adoption) if seed is None else seed)

    @functools.wraps(construct)
    def init(self: random.Random, x: Any = None) -> None:
        construct(self, _stand_in(adoption) if x is None else x)

    return [
        Patch(torch, "get_rng_state", get_rng_state, aliases=("torch.random",)),
        _torch_seed(adoption, torch, "manual_seed", "torch.random"),
        _torch_seed(adoption, torch, "set_rng_state", "torch.random"),
        _torch_seed(adoption, cuda, "manual_seed", "torch.cuda.random"),
        _torch_seed(adoption, cuda, "manual_seed_all", "torch.cuda.random"),
        _drawn_seed(adoption, torch, "seed", torch.manual_seed, "torch.random"),
        _drawn_seed(adoption, cuda, "seed", cuda.manual_seed, "torch.cuda.random"),
        _drawn_seed(adoption, cuda, "seed_all", cuda.manual_seed_all, "torch.cuda.random"),
        _host_seed(adoption, random, "seed", 64),
        _host_seed(adoption, random, "setstate", 64),
        _host_seed(adoption, np.random, "seed", 32, "numpy.random.mtrand"),
        _host_seed(adoption, np.random, "set_state", 32, "numpy.random.mtrand"),
        Patch(np.random, "default_rng", default_rng, aliases=("numpy.random._generator",)),
        Patch(random.Random, "__init__", init),
    ]


def _new_seeds(adoption: Adoption) -> Seeds:
    """A seed that rank 0 draws; of 32 bits, short enough to type."""
    return Seeds(adoption.share("a seed for the run", int.from_bytes(os.urandom(4))), is_given=False)


def _seeds(adoption: Adoption) -> Seeds:
    """The run's seeds; new ones outside of `seeded`."""
    if not isinstance(adoption.seeding, Seeds):
        adoption.seeding = _new_seeds(adoption)
    return adoption.seeding


def _by_script(adoption: Adoption, depth: int = 2) -> bool:
    """Whether the script called the function that calls this, at a point where all ranks pass."""
    return adoption.may_meet() and origin(sys._getframe(depth))[0] is Caller.SCRIPT


def _torch_seed(adoption: Adoption, owner: Any, name: str, alias: str) -> Patch:
    """A function of torch that sets a generator to a seed or a state."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not adoption.may_meet():
            return original(*args, **kwargs)
        caller = origin(sys._getframe(1))[0]
        if caller is Caller.SCRIPT:
            args, kwargs = adoption.share(f"a call of {name}", (args, kwargs))
        if caller is Caller.SCRIPT or (name == "manual_seed" and caller is Caller.LIBRARY):
            _seeds(adoption).is_set = True  # a library's helper that seeds everything, too
        result = original(*args, **kwargs)
        state = next(iter((*args, *kwargs.values())), None) if name == "set_rng_state" else None
        adoption.num_since_reseed = getattr(state, "num_forwards", 0)
        return result

    return Patch(owner, name, replacement, aliases=(alias,))


def _drawn_seed(adoption: Adoption, owner: Any, name: str, seed: Callable[[int], Any], alias: str) -> Patch:
    """A function of torch that seeds with a number of its own."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not _by_script(adoption):
            return original(*args, **kwargs)
        number = _seeds(adoption).derived()
        _seeds(adoption).is_set = True
        seed(number)
        adoption.num_since_reseed = 0
        return number if owner is torch else None

    return Patch(owner, name, replacement, aliases=(alias,))


def _host_seed(adoption: Adoption, owner: Any, name: str, num_bits: int, *aliases: str) -> Patch:
    """A function of Python or NumPy that sets a generator to a seed or a state; without one, to a derived number."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if not _by_script(adoption):
            return original(*args, **kwargs)
        given = args[0] if args else next((kwargs[key] for key in ("a", "seed", "state") if key in kwargs), None)
        if given is None:
            return original(_seeds(adoption).derived() % 2**num_bits)
        args, kwargs = adoption.share(f"a call of {name}", (args, kwargs))
        return original(*args, **kwargs)

    return Patch(owner, name, replacement, aliases=aliases)


def _stand_in(adoption: Adoption) -> int | None:
    """A seed for a generator that the script makes without one; None for libraries and in child processes."""
    if origin(sys._getframe(2))[0] is not Caller.SCRIPT:
        return None
    if adoption.may_meet():
        return _seeds(adoption).derived()
    return random.getrandbits(64) if adoption.in_chunk else None
