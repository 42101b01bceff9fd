"""Causes in the making of samples: augmentation by a worker's stream, and streams that differ between devices."""

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Subset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from samestep.core.seeds import derive_seed
from samestep.data.batch import checksum
from samestep.data.fetch import SeededSamples, StreamReader
from samestep.data.randomness import Generators
from samestep.engine.side_effects import Watch, reachable
from samestep.scripts.patch import Patch, applied
from samestep.verify.causes.cause import Cause
from samestep.verify.causes.evidence import Evidence, by_step, listed
from samestep.verify.causes.notes import Notes, Wrap, wrapped

KINDS = ("torch", "numpy", "random", "own")
"""The generators that a dataset may draw from: the global ones, and those that it holds itself."""
SAMPLE_SEED = 0xDA7A


def listen(notes: Notes) -> list[Wrap]:
    """Which generators datasets draw from, in worker processes too; and what iterable datasets give."""
    drawn = mmap.mmap(-1, len(KINDS) * 8)  # shared with the worker processes of DataLoaders, which are forks
    watches: dict[int, tuple[Any, Watch]] = {}

    def make_fetch(inner: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(self: Any, *args: Any) -> Any:
            dataset = getattr(self, "dataset", self)
            if isinstance(dataset, SeededSamples) and dataset is not self:
                return inner(self, *args)  # its own method is listened at
            if id(dataset) not in watches:
                watches[id(dataset)] = dataset, Watch(reachable([dataset, getattr(self, "collate_fn", None)])[0])
            watch = watches[id(dataset)][1]
            before = watch.states()
            notes.in_dataset = True
            try:
                return inner(self, *args)
            finally:
                notes.in_dataset = False
                _count_moves(drawn, before, watch.states(), seeded=dataset is self)

        return fetch

    def make_take(inner: Callable[..., Any]) -> Callable[..., Any]:
        def take(self: StreamReader, count: int) -> list[Any]:
            samples: list[Any] = inner(self, count)
            notes.tell("stream", samples=len(samples), print=checksum(samples))
            return samples

        return take

    def tell() -> None:
        counts = struct.unpack(f"{len(KINDS)}q", drawn[:])
        found = [kind for kind, count in zip(KINDS, counts, strict=True) if count]
        if found:
            notes.tell_once("dataset_draws", generators=found)

    notes.at_step.append(tell)
    return [
        Wrap(_MapDatasetFetcher, "fetch", make_fetch),
        Wrap(SeededSamples, "__getitems__", make_fetch),
        Wrap(StreamReader, "take", make_take),
    ]


def _count_moves(drawn: mmap.mmap, before: list[Any], after: list[Any], seeded: bool) -> None:
    """Counts the generators that a fetch has moved; the global ones are moved by seeding them, where that is done."""
    for index, (then, now) in enumerate(zip(before, after, strict=True)):
        kind = min(index, len(KINDS) - 1)
        if (seeded and index < len(KINDS) - 1) or repr(then) == repr(now):
            continue
        (count,) = struct.unpack_from("q", drawn, kind * 8)
        struct.pack_into("q", drawn, kind * 8, count + 1)


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


def seeded_fetches(make_seed: Callable[[Any], Callable[[int], None]]) -> Wrap:
    """Seeds generators before every sample that a torch DataLoader fetches, here or in its workers."""
    seeds: dict[int, tuple[Any, Callable[[int], None]]] = {}

    def make(inner: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(self: Any, index: Any) -> Any:
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

        return fetch

    return Wrap(_MapDatasetFetcher, "fetch", make)


@contextmanager
def _with_seeded_samples() -> Iterator[None]:
    """The global generators are seeded by sample, and are after a fetch what they were before."""
    generators = Generators(torch.device("cpu"))

    def make_seed(_: Any) -> Callable[[int], None]:
        return lambda place: generators.seed(derive_seed(SAMPLE_SEED, place))

    def preserve(inner: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(self: Any, index: Any) -> Any:
            with generators.preserved():
                return inner(self, index)

        return fetch

    with wrapped(seeded_fetches(make_seed), Wrap(_MapDatasetFetcher, "fetch", preserve)):
        yield


def _suspect_augmentation(evidence: Evidence) -> str | None:
    if not evidence.is_ddp or not evidence.shared:
        return None
    found = {kind for _, _, fact in evidence.facts("dataset_draws") for kind in fact["generators"]} - {"own"}
    if not found:
        return None
    return f"the dataset drew from the global generator of {listed(sorted(found))} while it made samples"


def _suspect_stream(evidence: Evidence) -> str | None:
    seen: dict[int, dict[int, list[str]]] = {}
    for run in evidence.firsts:
        for step, ranks in by_step(run, "stream", lambda fact: (fact["samples"], fact["print"])).items():
            for rank, entries in enumerate(ranks):
                for entry in entries:
                    where = f"rank {rank} of {run.world_size}"
                    seen.setdefault(step, {}).setdefault(hash(entry), []).append(where)
    for step in sorted(seen):
        if len(seen[step]) > 1:
            parts = list(seen[step].values())
            return (
                f"for step {step} the iterable dataset gave {parts[0][0]} other samples than {parts[1][0]}; every rank "
                "is to read the same stream, of which samestep keeps its microbatches"
            )
    return None


@contextmanager
def _with_one_stream() -> Iterator[None]:
    """Datasets are read as if alone, and every rank gets what rank 0 read."""

    def alone(inner: Callable[..., None]) -> Callable[..., None]:
        def init(self: StreamReader, dataset: Any, *args: Any, **kwargs: Any) -> None:
            for name, value in list(vars(dataset).items()):
                if isinstance(value, int) and ("rank" in name or "world" in name or "replicas" in name):
                    setattr(dataset, name, 0 if "rank" in name else 1)
            inner(self, dataset, *args, **kwargs)

        return init

    def together(inner: Callable[..., Any]) -> Callable[..., Any]:
        def take(self: StreamReader, count: int) -> list[Any]:
            with _unaware_of_ranks():
                samples: list[Any] = inner(self, count)
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                box = [samples]
                dist.broadcast_object_list(box, src=0)
                samples = box[0]
            return samples

        return take

    with wrapped(Wrap(StreamReader, "__init__", alone), Wrap(StreamReader, "take", together)):
        yield


@contextmanager
def _unaware_of_ranks() -> Iterator[None]:
    """The time in which a process that asks for its rank hears that it is alone."""
    hidden = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    os.environ.update({name: "0" if name == "RANK" else "1" for name in hidden})
    places = [Patch(dist, "get_rank", lambda *_: 0), Patch(dist, "get_world_size", lambda *_: 1)]
    try:
        with applied(places if dist.is_available() else []):
            yield
    finally:
        os.environ.update(hidden)


AUGMENTATION = Cause(
    "augmentation",
    "the dataset draws from each worker's own stream of random numbers",
    "Seed the generators in __getitem__ from the epoch and the sample's index; the loader of samestep.Run does so.",
    _suspect_augmentation,
    _with_seeded_samples,
)
STREAM = Cause(
    "stream",
    "an iterable dataset gives each device other samples",
    "Let __iter__ give the same samples on every device: leave the rank out of it, and draw from global generators; "
    "samestep takes each device's part itself.",
    _suspect_stream,
    _with_one_stream,
)
