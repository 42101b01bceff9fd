"""Causes in the choice of samples: how many make a step, in which order they come, and whether each is taken once."""

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.comm.environment import read_environment
from samestep.verify.causes.evidence import Cause, Evidence, Facts, by_step, forwards, on_devices
from samestep.verify.recording import Recording
from samestep.verify.wraps import Wrap, by_script, wrapped

SHUFFLING = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
GLOBAL_BATCH = 24
"""The batch of a counterfactual: 1, 2, 3, 4, 6, 8, 12 and 24 devices share it equally."""


def fact_wraps(facts: Facts) -> list[Wrap]:
    """Records how many indices samplers give, against the length of their dataset, and which datasets have none."""

    def iterate(inner: Callable[..., Iterator[int]], sampler: Any) -> Iterator[int]:
        facts.add_once(
            "sampler",
            type=type(sampler).__name__,
            samples=_length(sampler),
            given=getattr(sampler, "total_size", len(sampler)),
            replicas=getattr(sampler, "num_replicas", 1),
            shuffles=isinstance(sampler, SHUFFLING) or bool(getattr(sampler, "shuffle", False)),
        )
        return inner(sampler)

    def begin(inner: Callable[..., None], batches: Any, loader: Any) -> None:
        if isinstance(loader.dataset, IterableDataset):
            facts.add_once("iterable", of=type(loader.dataset).__name__)
        elif isinstance(loader.sampler, SHUFFLING) and type(loader.batch_sampler) is BatchSampler:  # as no shard has it
            facts.add_once("draws_alone", by=type(loader.sampler).__name__, samples=_length(loader.sampler))
        inner(batches, loader)

    kinds = (SequentialSampler, *SHUFFLING, DistributedSampler)
    return [Wrap(_BaseDataLoaderIter, "__init__", begin), *(Wrap(kind, "__iter__", iterate) for kind in kinds)]


def _length(sampler: Any) -> int:
    """The number of samples that a sampler of torch's chooses from."""
    names = ("dataset", "data_source", "weights", "indices")
    return len(next(getattr(sampler, name) for name in names if hasattr(sampler, name)))


def _suspect_global_batch(evidence: Evidence) -> str | None:
    if not evidence.is_ddp:
        return None
    counts: dict[tuple[int, int], list[tuple[Recording, int]]] = {}  # with skipped updates' samples come together
    for run in evidence.firsts:
        samples = _local_samples(run)
        for step, ranks in by_step(run, "backward", lambda fact: int(fact["times"])).items():
            count = sum(samples.get(step, ()))
            skipped = sum(int(fact["times"]) for fact in run.facts("skipped", 0) if fact["step"] == step)
            # All ranks took part alike, and none left a batch out.
            if count and len({tuple(rank) for rank in ranks}) == len(set(forwards(run).get(step, [0]))) == 1:
                counts.setdefault((step, skipped), []).append((run, count))
    for (step, _), seen in sorted(counts.items()):
        if len({count for _, count in seen}) > 1:
            parts = ", ".join(f"{count} on {on_devices(run)}" for run, count in seen)
            return f"step {step + 1} was made of this many samples in all: {parts}"
    return None


def _local_samples(run: Recording) -> dict[int, list[int]]:
    """The samples of each rank in each step: by its DataLoaders, or else by the inputs of its model."""
    inputs = by_step(run, "forward", lambda fact: int(fact["rows"]) * int(fact["times"]))
    found = {}
    for step in range(run.num_steps):
        counts = [int(rank[step]["num_samples"] or 0) for rank in run.steps]
        found[step] = counts if all(counts) else [sum(rank) for rank in inputs.get(step, [])]
    return found


def _with_one_global_batch() -> AbstractContextManager[None]:
    """Every DataLoader gives the device's part of a global batch of `GLOBAL_BATCH` samples."""
    share = max(1, GLOBAL_BATCH // read_environment().world_size)

    def init(inner: Any, self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        own = batch_size is not None and kwargs.get("batch_sampler") is None and len(args) < 3
        batch = GLOBAL_BATCH if own and _is_split_later() else share
        inner(self, dataset, batch if own else batch_size, *args, **kwargs)

    return wrapped(Wrap(DataLoader, "__init__", init))


def _is_split_later() -> bool:
    """Whether an Accelerator splits each batch of a DataLoader over the devices: `split_batches=True`."""
    accelerate: Any = sys.modules.get("accelerate.accelerator")
    if accelerate is None:
        return False
    makers = (thing for thing in gc.get_objects() if issubclass(type(thing), accelerate.Accelerator))
    return any(maker.split_batches for maker in makers)


def reads_stream(evidence: Evidence) -> bool:
    """Whether a program that deals with its ranks itself trains on an iterable dataset, where no sampler chooses."""
    first = evidence.firsts[0]
    ids = first.steps[0][0].get("ids") if first.num_steps else None
    return evidence.is_ddp and ids is None and any(first.facts("iterable", 0))


def suspect_order(evidence: Evidence, *, streamed: bool = False) -> str | None:
    """The first step that took other samples on other devices, in a script of ranks; `streamed`: one with a stream."""
    if not evidence.is_ddp or reads_stream(evidence) != streamed:
        return None
    first, *others = evidence.firsts
    for other in others:
        for step in range(min(first.num_steps, other.num_steps)):
            if _differ(first, other, step):
                kinds = [_sampler_of(run) for run in (first, other)]
                by = f" ({kinds[0]} against {kinds[1]})" if kinds[0] != kinds[1] else ""
                return f"step {step + 1} took other samples on {on_devices(other)} than on {on_devices(first)}{by}"
        shuffling = [
            {str(fact["type"]) for fact in run.facts("sampler", 0) if fact["shuffles"]} for run in (first, other)
        ]
        count = _parted(first, other)
        # Steps differ in their number of samples too, and do not show it one by one.
        if count:
            return f"the first {count} samples on {on_devices(other)} are others than on {on_devices(first)}"
        if shuffling[0] != shuffling[1]:
            pairs = zip(shuffling, (first, other), strict=True)
            parts = [f"{' and '.join(sorted(names)) or 'nothing'} on {on_devices(run)}" for names, run in pairs]
            return f"samples are shuffled by {', by '.join(parts)}"
    return None


def _differ(first: Recording, other: Recording, step: int) -> bool:
    """Whether two runs took as many samples in a step, but others: by their ids and by their content."""
    verdicts = []
    for field in ("ids", "rows"):
        taken = [[rank[step].get(field) for rank in run.steps] for run in (first, other)]
        if all(part is not None for parts in taken for part in parts):
            sets = [Counter(entry for part in parts for entry in part or ()) for parts in taken]
            if sets[0].total() != sets[1].total():
                return False
            verdicts.append(sets[0] != sets[1])
    return bool(verdicts) and all(verdicts)


def _parted(first: Recording, other: Recording) -> int:
    """The smallest number of samples after which two runs have taken others, at the end of a step; 0 if none."""
    taken = [dict(_taken(run)) for run in (first, other)]
    return next((count for count in sorted(taken[0].keys() & taken[1].keys()) if taken[0][count] != taken[1][count]), 0)


def _taken(run: Recording) -> Iterator[tuple[int, Counter[int]]]:
    """After each step how many samples a run has taken in all, and how often each; none once ids are not known."""
    total: Counter[int] = Counter()
    for step in range(run.num_steps):
        new = run.samples(step)
        if new is None:
            return
        total = total + new
        yield total.total(), total


def _sampler_of(run: Recording) -> str:
    """The type of the first sampler that a run iterated."""
    return next((str(fact["type"]) for fact in run.facts("sampler", 0)), "no sampler of torch's")


def _in_one_order() -> AbstractContextManager[None]:
    """Nothing is shuffled: samplers count up, and permutations that the script draws are the identity."""

    def random_order(_: Any, sampler: Any) -> Iterator[int]:
        entries = getattr(sampler, "indices", range(_length(sampler)))
        return iter([entries[position % len(entries)] for position in range(len(sampler))])

    def distributed_order(inner: Callable[..., Iterator[int]], sampler: Any) -> Iterator[int]:
        shuffle, sampler.shuffle = sampler.shuffle, False
        try:
            return inner(sampler)
        finally:
            sampler.shuffle = shuffle

    def randperm(inner: Any, n: int, *args: Any, **kwargs: Any) -> Any:
        return torch.arange(n) if by_script() else inner(n, *args, **kwargs)

    def permutation(inner: Any, x: Any) -> Any:
        if not by_script():
            return inner(x)
        return np.arange(x) if np.ndim(x) == 0 else np.array(x)

    def shuffle(inner: Any, *args: Any, **kwargs: Any) -> None:
        if not by_script():
            inner(*args, **kwargs)

    return wrapped(
        *(Wrap(kind, "__iter__", random_order) for kind in SHUFFLING),
        Wrap(DistributedSampler, "__iter__", distributed_order),
        Wrap(torch, "randperm", randperm),
        Wrap(np.random, "permutation", permutation),
        Wrap(np.random, "shuffle", shuffle),
        Wrap(random, "shuffle", shuffle),
    )


def _suspect_sampler(evidence: Evidence) -> str | None:
    for run, _, fact in evidence.facts("sampler"):
        extra = fact["given"] - fact["samples"]
        if extra and fact["replicas"] > 1:
            what = f"{extra} of them twice" if extra > 0 else f"{-extra} samples never"
            return (
                f"{fact['type']} gave {fact['given']} samples an epoch on {on_devices(run)}, of a dataset of "
                f"{fact['samples']}: {what}"
            )
    for run in evidence.shared if evidence.is_ddp else ():
        lengths = {int(fact["samples"]) for fact in run.facts("sampler", 0)}
        before = 0
        for step, (count, taken) in enumerate(_taken(run)):
            length = len(taken)
            # The whole dataset, and some of it again.
            if before < length < count and length in lengths:
                return (
                    f"in step {step + 1} on {on_devices(run)} the epoch of {length} samples ended, and "
                    f"{count - length} of them were taken twice"
                )
            before = count
    return None


def _with_divisible_datasets() -> AbstractContextManager[None]:
    """Samplers leave out the last samples of a dataset, so many that any small number of devices divides the rest.

    Of batches the last is left out if it is smaller: it would be filled up with samples that were taken before.
    """

    def cut(inner: Callable[..., Iterator[int]], sampler: Any) -> Iterator[int]:
        indices = list(inner(sampler))
        return iter(indices[: divisible(len(indices))])

    def cut_distributed(inner: Callable[..., Iterator[int]], sampler: Any) -> Iterator[int]:
        length = len(sampler.dataset)
        alone = {"rank": 0, "num_replicas": 1, "num_samples": length, "total_size": length}
        own = {name: getattr(sampler, name) for name in alone}
        # The order stays the sampler's, or another antidote's.
        vars(sampler).update(alone)
        try:
            indices = list(inner(sampler))
        finally:
            vars(sampler).update(own)
        return iter(indices[: divisible(length)][sampler.rank :: sampler.num_replicas])

    def whole(inner: Callable[..., Iterator[list[int]]], batches: Any) -> Iterator[list[int]]:
        size = 0
        for batch in inner(batches):
            size = size or len(batch)
            if len(batch) == size:
                yield batch

    return wrapped(
        Wrap(BatchSampler, "__iter__", whole),
        *(Wrap(kind, "__iter__", cut) for kind in (SequentialSampler, *SHUFFLING)),
        Wrap(DistributedSampler, "__iter__", cut_distributed),
    )


def divisible(length: int) -> int:
    """The largest number up to a length that small numbers of devices divide."""
    # 840 is divided by 1 to 8, 120 by all of these but 7, 24 by all but 5 and 7, 12 also not by 8. At most a quarter of
    # the samples is left out, but for short datasets.
    factor = next((factor for factor in (840, 120, 24) if length >= 4 * factor), 12)
    return length - length % factor if length >= factor else length


def suspect_unshared(evidence: Evidence, *, streamed: bool = False) -> str | None:
    """Where all devices choose from, or took, the same samples, in a script of ranks; `streamed`: one with a stream."""
    if not evidence.is_ddp or reads_stream(evidence) != streamed:
        return None
    alone = [(fact["by"], fact["samples"]) for fact in evidence.firsts[0].facts("draws_alone", 0)]
    for run, rank, fact in evidence.facts("draws_alone"):
        if rank and (fact["by"], fact["samples"]) in alone:
            return f"a {fact['by']} drew from all {fact['samples']} samples on each of {on_devices(run)}"
    for run in evidence.shared:
        for step in range(run.num_steps):
            rows = [rank[step].get("rows") for rank in run.steps]
            if rows[0] and all(row == rows[0] for row in rows):
                return f"in step {step + 1} all {on_devices(run)} took the same {len(rows[0])} samples"
    return None


class _Share:
    """This device's share of what a sampler gives."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._place = sampler, read_environment()

    def __iter__(self) -> Iterator[int]:
        indices = list(self._sampler)
        return iter(indices[: divisible(len(indices))][self._place.rank :: self._place.world_size])

    def __len__(self) -> int:
        return len(range(self._place.rank, divisible(len(self._sampler)), self._place.world_size))


def _with_shares() -> AbstractContextManager[None]:
    """A DataLoader takes this device's share of what its sampler of torch's gives; without one, of the dataset."""

    def init(inner: Any, self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(("shuffle", "sampler", "batch_sampler"), args, strict=False)), **kwargs}
        sampler = given.get("sampler")
        is_own = given.get("batch_sampler") is None and (sampler is None or isinstance(sampler, SHUFFLING))
        if is_own and not isinstance(dataset, IterableDataset) and len(args) < 4:
            sampler = _Share(range(len(dataset)) if sampler is None else sampler)
            args, kwargs = (), {**given, "shuffle": False, "sampler": sampler}
        inner(self, dataset, batch_size, *args, **kwargs)

    return wrapped(Wrap(DataLoader, "__init__", init))


GLOBAL_BATCH_CAUSE = Cause(
    "global_batch",
    "the number of samples in a step depends on the number of devices",
    "Give each device batch_size // world_size samples, of a batch that the numbers of devices divide, or use "
    "samestep.Run, whose global_batch_size counts the samples of all devices together.",
    _suspect_global_batch,
    _with_one_global_batch,
)
ORDER = Cause(
    "order",
    "the order of the samples depends on the number of devices",
    "Use the same sampler on one device as on many: DistributedSampler(dataset, seed=…) with set_epoch(epoch) on all.",
    suspect_order,
    _in_one_order,
)
SAMPLER = Cause(
    "sampler",
    "the sampler pads or drops samples to make the shares equal",
    "Give both the DistributedSampler and the DataLoader drop_last=True, or make the dataset's length a multiple of "
    "the number of devices. An evaluation, which needs all samples, has sampler=range(rank, len(dataset), world_size).",
    _suspect_sampler,
    _with_divisible_datasets,
)
UNSHARED = Cause(
    "unshared",
    "every device trains on the same samples",
    "Give the DataLoader a sampler that takes each device's share: sampler=DistributedSampler(dataset).",
    suspect_unshared,
    _with_shares,
)
