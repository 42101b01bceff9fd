"""The cause in generators that the program makes and holds itself: they are seeded neither by sample nor microbatch."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from samestep.core.seeds import derive_seed
from samestep.data.randomness import Generators
from samestep.engine.side_effects import Watch, reachable
from samestep.engine.site import is_script_file
from samestep.verify.causes.cause import Cause
from samestep.verify.causes.evidence import Evidence, by_step, listed
from samestep.verify.causes.notes import Notes, Wrap, around_roots, by_script, fingerprint, wrapped
from samestep.verify.causes.samples import SAMPLE_SEED, seeded_fetches

MOST_SEARCHES = 8


def listen(notes: Notes) -> list[Wrap]:
    """Where the generators stand, after each step, that the script made."""
    own = _OwnGenerators()
    notes.at_step.append(lambda: _tell_own(notes, own))
    return [around_roots(own.search, lambda root, token: None)]


class _OwnGenerators:
    """The generators that the script made and holds: in its variables, its model, what its functions refer to."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._num_searches = 0

    def search(self, root: nn.Module | None = None) -> None:
        """Looks for them from the script's frames; no longer once something is there, or was not there often."""
        if self.found or self._num_searches >= MOST_SEARCHES:
            return
        self._num_searches += 1
        places: list[Any] = [] if root is None else [*root.modules()]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if is_script_file(frame.f_code.co_filename):
                places += [*frame.f_locals.values(), *frame.f_globals.values()]
            frame = frame.f_back
        shared = (torch.default_generator, np.random.mtrand._rand, random._inst)
        found, _ = reachable(places)
        self.found = [generator for generator in found if not any(generator is known for known in shared)]

    def states(self) -> list[str]:
        """A fingerprint of each one's state."""
        return [fingerprint(repr(state).encode()) for state in Watch(self.found).states()[3:]]

    def seed(self, seed: int) -> None:
        """Seeds each with a number of its own."""
        for index, generator in enumerate(self.found):
            seed_generator(generator, derive_seed(seed, index))


def seed_generator(generator: Any, seed: int) -> None:
    """Seeds a generator of NumPy's, Python's or torch's."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


def _tell_own(notes: Notes, own: _OwnGenerators) -> None:
    own.search()
    if own.found:
        notes.tell("own_generators", kinds=[type(one).__name__ for one in own.found], states=own.states())


@contextmanager
def _with_seeded_datasets() -> Iterator[None]:
    """The generators that a dataset holds are seeded by sample."""

    def make_seed(dataset: Any) -> Callable[[int], None]:
        generators, _ = reachable([dataset])

        def seed(place: int) -> None:
            for index, generator in enumerate(generators):
                seed_generator(generator, derive_seed(SAMPLE_SEED, place, index))

        return seed

    with wrapped(seeded_fetches(make_seed)):
        yield


def _suspect_own(evidence: Evidence) -> str | None:
    runs = [*evidence.firsts, *(run for pair in evidence.repeats for run in pair)]
    states: dict[int, dict[int, list[tuple[Any, ...]]]] = {}
    kinds: list[str] = []
    for run in runs:
        for step, ranks in by_step(run, "own_generators", lambda fact: (fact["kinds"], fact["states"])).items():
            for entries in ranks:
                for names, prints in entries:
                    for index, (kind, state) in enumerate(zip(names, prints, strict=True)):
                        states.setdefault(step, {}).setdefault(index, []).append((kind, state))
    if any("own" in fact["generators"] for _, _, fact in evidence.facts("dataset_draws")):
        return "the dataset drew from a generator that it holds itself, while it made samples"
    for step in sorted(states):
        kinds += [seen[0][0] for seen in states[step].values() if len(set(seen)) > 1]
        if kinds:
            return (
                f"{listed(sorted(set(kinds)))} made by the program stood elsewhere on one device than on another, or "
                f"in one run than in its repetition, after step {step}"
            )
    return None


@contextmanager
def _with_seeded_own() -> Iterator[None]:
    """The program's own generators are seeded whenever the global ones are, before each forward, and when made."""
    own = _OwnGenerators()
    number = [0]

    def default_rng(inner: Callable[..., Any]) -> Callable[..., Any]:
        def make(seed: Any = None) -> Any:
            return inner(0 if seed is None and by_script() else seed)

        return make

    def seed(inner: Callable[..., None]) -> Callable[..., None]:
        def call(self: Generators, seed: int) -> None:
            inner(self, seed)
            own.search()
            own.seed(seed)

        return call

    def before(root: nn.Module) -> None:
        own.search(root)
        if not number[0]:
            own.seed(0)
        number[0] += 1

    with (
        _with_seeded_datasets(),
        wrapped(
            Wrap(np.random, "default_rng", default_rng, ("numpy.random._generator",)),
            Wrap(Generators, "seed", seed),
            around_roots(before, lambda root, token: None),
        ),
    ):
        yield


OWN_GENERATORS = Cause(
    "own_generator",
    "the program draws from a generator of its own",
    "Draw from the global generators (torch, numpy.random, random), which are seeded by sample and by microbatch, or "
    "seed "
    "your generator in __getitem__ from the sample's index.",
    _suspect_own,
    _with_seeded_own,
)
