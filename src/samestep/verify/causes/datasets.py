"""Causes in the making of samples, and in random generators of the program's own.

Augmentation draws from a worker's stream, streams differ between devices, and a generator that the program made itself
is seeded neither by sample nor by microbatch.
"""

import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Subset
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from samestep.callsite import script_frames
from samestep.comm.environment import read_environment
from samestep.core.seeds import derive_seed
from samestep.data.checksums import checksum
from samestep.data.fetch import SeededSamples
from samestep.data.randomness import GLOBAL, Generators, seed_each
from samestep.data.streams import StreamReader
from samestep.engine.side_effects import Watch, reachable
from samestep.patch import Patch, applied
from samestep.run.run import Run
from samestep.text import listed
from samestep.verify.causes import samples as map_style
from samestep.verify.causes.evidence import Cause, Evidence, Facts, by_step
from samestep.verify.wraps import Wrap, around_roots, by_script, wrapped

KINDS = ("torch", "numpy", "random", "own")
"""The generators that a dataset may draw from: the global ones, and those that it holds itself."""
SAMPLE_SEED = 0xDA7A
READ_AT_ONCE = 12
"""Samples of a stream; each device gets its share of them: 1, 2, 3, 4, 6 and 12 devices share them equally."""
MAX_SEARCHES = 8


def fact_wraps(facts: Facts) -> list[Wrap]:
    """Records which generators datasets draw from, in worker processes too, the samples of streams, and generators."""
    # Shared with the worker processes of DataLoaders, which are forks.
    drawn = mmap.mmap(-1, len(KINDS) * 8)
    watches: dict[int, tuple[Any, Watch]] = {}
    own = _OwnGenerators()

    def fetch(inner: Callable[..., Any], self: Any, *args: Any) -> Any:
        dataset = getattr(self, "dataset", self)
        if isinstance(dataset, SeededSamples) and dataset is not self:
            return inner(self, *args)  # its own method is wrapped
        if id(dataset) not in watches:
            watches[id(dataset)] = dataset, Watch(reachable([dataset, getattr(self, "collate_fn", None)]))
        watch = watches[id(dataset)][1]
        before = watch.states()
        facts.in_dataset = True
        try:
            return inner(self, *args)
        finally:
            facts.in_dataset = False
            _count_moves(drawn, before, watch.states(), seeded=dataset is self)

    def take(inner: Callable[..., Any], reader: StreamReader, count: int) -> list[Any]:
        samples: list[Any] = inner(reader, count)
        facts.add("stream", samples=len(samples), print=checksum(samples))
        return samples

    def observe_generators() -> None:
        counts = struct.unpack(f"{len(KINDS)}q", drawn[:])
        moved = [kind for kind, count in zip(KINDS, counts, strict=True) if count]
        if moved:
            facts.add_once("dataset_draws", generators=moved)
        own.search()
        if own.found:
            facts.add("own_generators", kinds=[type(one).__name__ for one in own.found], states=own.states())

    facts.at_step.append(observe_generators)
    return [
        Wrap(_MapDatasetFetcher, "fetch", fetch),
        Wrap(SeededSamples, "__getitems__", fetch),
        Wrap(StreamReader, "take", take),
        around_roots(own.search),
    ]


def _count_moves(drawn: mmap.mmap, before: list[Any], after: list[Any], seeded: bool) -> None:
    """Counts the generators that a fetch has moved; if it seeded the global ones, those are not counted."""
    for index, (then, now) in enumerate(zip(before, after, strict=True)):
        # All but the global ones, which come first, are of the dataset's own.
        kind = min(index, len(KINDS) - 1)
        if (seeded and kind < len(KINDS) - 1) or checksum(now) == checksum(then):
            continue
        (count,) = struct.unpack_from("q", drawn, kind * 8)
        struct.pack_into("q", drawn, kind * 8, count + 1)


class _OwnGenerators:
    """The generators that the script made and holds: in its variables, its model, what its functions refer to."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._num_searches = 0

    def search(self, root: nn.Module | None = None) -> None:
        """Looks for them from the script's frames, until some are found, at most `MAX_SEARCHES` times."""
        if self.found or self._num_searches >= MAX_SEARCHES:
            return
        self._num_searches += 1
        places: list[Any] = [] if root is None else [*root.modules()]
        for frame in script_frames(sys._getframe(1)):
            places += [*frame.f_locals.values(), *frame.f_globals.values()]
        self.found = [generator for generator in reachable(places) if not any(generator is known for known in GLOBAL)]

    def states(self) -> list[int]:
        """A checksum of each one's state."""
        # The first three states belong to the global generators.
        return [checksum(state) for state in Watch(self.found).states()[3:]]

    def seed(self, seed: int) -> None:
        """Seeds each with a number of its own."""
        seed_each(self.found, seed)


class _SeededDataset:
    """A dataset before whose every sample generators are seeded by the sample's place in the dataset at the bottom."""

    def __init__(self, dataset: Any, seed: Callable[[int], None]) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, index: Any) -> Any:
        dataset: Any = self._dataset
        place = index
        while isinstance(dataset, Subset):
            dataset, place = dataset.dataset, dataset.indices[place]
        self._seed(int(place))
        return self._dataset[index]


def _seeded_fetches(make_seed: Callable[[Any], Callable[[int], None]]) -> Wrap:
    """Seeds generators before every sample that a torch DataLoader fetches, here or in its workers."""
    seeds: dict[int, tuple[Any, Callable[[int], None]]] = {}

    def fetch(inner: Callable[..., Any], self: Any, index: Any) -> Any:
        dataset = self.dataset
        if isinstance(dataset, SeededSamples):
            return inner(self, index)
        if id(dataset) not in seeds:
            seeds[id(dataset)] = dataset, make_seed(dataset)
        self.dataset = _SeededDataset(dataset, seeds[id(dataset)][1])
        try:
            return inner(self, index)
        finally:
            self.dataset = dataset

    return Wrap(_MapDatasetFetcher, "fetch", fetch)


def _suspect_augmentation(evidence: Evidence) -> str | None:
    if not evidence.is_ddp or not evidence.shared:
        return None
    found = {kind for _, _, fact in evidence.facts("dataset_draws") for kind in fact["generators"]} - {"own"}
    if not found:
        return None
    return f"the dataset drew from the global generator of {listed(sorted(found))} while it made samples"


def _with_seeded_samples() -> AbstractContextManager[None]:
    """The global generators are seeded by sample, and are after a fetch what they were before."""
    generators = Generators(torch.device("cpu"))

    def fetch(inner: Callable[..., Any], self: Any, index: Any) -> Any:
        with generators.preserved():
            return inner(self, index)

    seeding = _seeded_fetches(lambda _: lambda place: generators.seed(derive_seed(SAMPLE_SEED, place)))
    return wrapped(seeding, Wrap(_MapDatasetFetcher, "fetch", fetch))


def _suspect_stream(evidence: Evidence) -> str | None:
    if map_style.reads_stream(evidence):
        return map_style.suspect_unshared(evidence, streamed=True) or map_style.suspect_order(evidence, streamed=True)
    seen: dict[int, dict[tuple[int, int], list[str]]] = {}
    for run in evidence.firsts:
        for step, ranks in by_step(run, "stream", lambda fact: (fact["samples"], fact["print"])).items():
            for rank, entries in enumerate(ranks):
                for entry in entries:
                    where = f"rank {rank} of {run.world_size}"
                    seen.setdefault(step, {}).setdefault(entry, []).append(where)
    for step, readers in sorted(seen.items()):
        if len(readers) > 1:
            (one, *_), (other, *_) = list(readers.values())[:2]
            return (
                f"for step {step + 1} the iterable dataset gave {one} other samples than {other}; every rank is to "
                "read the same stream, of which samestep keeps its microbatches"
            )
    return None


def _with_one_stream() -> AbstractContextManager[None]:
    """Datasets are read as if by a single process.

    With `samestep.Run` every rank gets the samples that rank 0 read; of a torch DataLoader each gets its share of them.
    """
    place = read_environment()

    def init(inner: Callable[..., None], self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        # As of datasets' streams.
        places = (getattr(value, "__dict__", {}) for value in vars(dataset).values())
        for names in [vars(dataset), *(names for names in places if {"rank", "world_size"} <= names.keys())]:
            for name, value in names.items():
                is_count = any(word in name for word in ("world", "replicas", "num_ranks"))
                if isinstance(value, int) and (is_count or "rank" in name):
                    names[name] = int(is_count)
        with _single_process():
            inner(self, dataset, *args, **kwargs)
        if isinstance(self, _IterableDatasetFetcher):
            self.dataset_iter = share(self.dataset_iter)

    def share(samples: Iterator[Any]) -> Iterator[Any]:
        while True:
            with _single_process():
                read = list(islice(samples, READ_AT_ONCE))
            if len(read) < READ_AT_ONCE:
                return
            yield from read[place.rank :: place.world_size]

    def take(inner: Callable[..., Any], self: StreamReader, count: int) -> list[Any]:
        with _single_process():
            samples: list[Any] = inner(self, count)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            box = [samples]
            dist.broadcast_object_list(box, src=0)
            samples = box[0]
        return samples

    inits = [Wrap(kind, "__init__", init) for kind in (StreamReader, _IterableDatasetFetcher)]
    return wrapped(*inits, Wrap(StreamReader, "take", take))


@contextmanager
def _single_process() -> Iterator[None]:
    """A context in which the environment, torch.distributed and the run name one rank of one."""
    hidden = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    os.environ.update({name: "0" if name == "RANK" else "1" for name in hidden})
    places = [Patch(Run, "rank", property(lambda _: 0)), Patch(Run, "world_size", property(lambda _: 1))]
    if dist.is_available():
        places += [Patch(dist, "get_rank", lambda *_: 0), Patch(dist, "get_world_size", lambda *_: 1)]
    try:
        with applied(places):
            yield
    finally:
        os.environ.update(hidden)


def _suspect_own(evidence: Evidence) -> str | None:
    if any("own" in fact["generators"] for _, _, fact in evidence.facts("dataset_draws")):
        return "the dataset drew from a generator that it holds itself, while it made samples"
    states: dict[int, dict[int, set[tuple[str, int]]]] = {}  # by step and number of the generator
    for run in evidence.runs:
        for rank in range(run.world_size):
            for fact in run.facts("own_generators", rank):
                for index, seen in enumerate(zip(fact["kinds"], fact["states"], strict=True)):
                    states.setdefault(fact["step"], {}).setdefault(index, set()).add(seen)
    for step, generators in sorted(states.items()):
        kinds = {kind for differing in generators.values() if len(differing) > 1 for kind, _ in differing}
        if kinds:
            return (
                f"{listed(sorted(kinds))} made by the program stood elsewhere on one device than on another, or in one "
                f"run than in its repetition, after step {step + 1}"
            )
    return None


def _with_seeded_own() -> AbstractContextManager[None]:
    """The program's own generators are seeded by sample, with the global ones, before the first forward, and when made.

    Those that a dataset holds are seeded by sample.
    """
    own = _OwnGenerators()
    is_seeded = False

    def make_seed(dataset: Any) -> Callable[[int], None]:
        generators = reachable([dataset])
        return lambda place: seed_each(generators, SAMPLE_SEED, place)

    def default_rng(inner: Callable[..., Any], seed: Any = None) -> Any:
        return inner(0 if seed is None and by_script() else seed)

    def seed_globals(inner: Callable[..., None], self: Generators, seed: int) -> None:
        inner(self, seed)
        own.search()
        own.seed(seed)

    def before(root: nn.Module) -> None:
        nonlocal is_seeded
        own.search(root)
        if not is_seeded:
            own.seed(0)
        is_seeded = True

    return wrapped(
        _seeded_fetches(make_seed),
        Wrap(np.random, "default_rng", default_rng, ("numpy.random._generator",)),
        Wrap(Generators, "seed", seed_globals),
        around_roots(before),
    )


AUGMENTATION = Cause(
    "augmentation",
    "the dataset draws from each worker's own stream of random numbers",
    "Seed the generators in __getitem__ from the epoch and the sample's index; the loader of samestep.Run does so.",
    _suspect_augmentation,
    _with_seeded_samples,
)
STREAM = Cause(
    "stream",
    "an iterable dataset gives each device other samples than its share of one stream",
    "Let __iter__ give the same samples on every device: leave the rank out of it, and draw from global generators; "
    "samestep takes each device's part itself.",
    _suspect_stream,
    _with_one_stream,
)
OWN_GENERATORS = Cause(
    "own_generator",
    "the program draws from a generator of its own",
    "Draw from the global generators (torch, numpy.random, random), which are seeded by sample and by microbatch, or "
    "seed your generator in __getitem__ from the sample's index.",
    _suspect_own,
    _with_seeded_own,
)
