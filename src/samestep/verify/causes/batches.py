"""Causes in the choice of samples: how many make a step, in which order they come, and whether each is taken once."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from samestep.comm.environment import read_environment
from samestep.verify.causes.cause import Cause
from samestep.verify.causes.evidence import Evidence, by_step, local_samples, on_devices
from samestep.verify.causes.notes import Notes, Wrap, by_script, wrapped
from samestep.verify.recording import Recording

GLOBAL_BATCH = 24
"""The batch of a counterfactual: 1, 2, 3, 4, 6, 8, 12 and 24 devices share it equally."""
SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)


def listen(notes: Notes) -> list[Wrap]:
    """What samplers give, against the length of their dataset."""

    def make(inner: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
        def iterate(self: Any) -> Iterator[int]:
            replicas = getattr(self, "num_replicas", 1)
            given = getattr(self, "total_size", len(self))
            shuffles = isinstance(self, RandomSampler) or bool(getattr(self, "shuffle", False))
            samples = len(getattr(self, "dataset", None) or self.data_source)
            kind = type(self).__name__
            notes.tell_once("sampler", type=kind, samples=samples, given=given, replicas=replicas, shuffles=shuffles)
            return inner(self)

        return iterate

    return [Wrap(kind, "__iter__", make) for kind in SAMPLERS]


def _suspect_global_batch(evidence: Evidence) -> str | None:
    if not evidence.is_ddp:
        return None
    totals = []
    for run in evidence.firsts:
        backwards = by_step(run, "backward", lambda fact: int(fact["times"]))
        even = [step for step, ranks in backwards.items() if len({tuple(rank) for rank in ranks}) == 1]
        samples = local_samples(run)
        totals.append((run, {step: sum(samples[step]) for step in even if step in samples}))
    for step in sorted(totals[0][1]) if totals else []:
        seen = [(run, counts[step]) for run, counts in totals if counts.get(step)]
        if len({count for _, count in seen}) > 1:
            parts = ", ".join(f"{count} on {on_devices(run)}" for run, count in seen)
            return f"step {step} was made of this many samples in all: {parts}"
    return None


@contextmanager
def _with_one_global_batch() -> Iterator[None]:
    """Every DataLoader hands out the device's part of a global batch of `GLOBAL_BATCH` samples."""
    share = max(1, GLOBAL_BATCH // read_environment().world_size)

    def make(inner: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
            own = batch_size is not None and kwargs.get("batch_sampler") is None and len(args) < 3
            inner(self, dataset, share if own else batch_size, *args, **kwargs)

        return init

    with wrapped(Wrap(DataLoader, "__init__", make)):
        yield


def _suspect_order(evidence: Evidence) -> str | None:
    if not evidence.is_ddp or len(evidence.firsts) < 2:
        return None
    first, *others = evidence.firsts
    for other in others:
        for step in range(min(first.num_steps, other.num_steps)):
            if _differ(first, other, step):
                kinds = [_sampler_of(run) for run in (first, other)]
                by = f" ({kinds[0]} against {kinds[1]})" if kinds[0] != kinds[1] else ""
                return f"step {step} took other samples on {on_devices(other)} than on {on_devices(first)}{by}"
        shuffling = [(_shuffling_samplers(run), run) for run in (first, other)]
        if shuffling[0][0] != shuffling[1][0]:  # where steps have another number of samples too, they do not show it
            parts = [f"{' and '.join(sorted(names)) or 'nothing'} on {on_devices(run)}" for names, run in shuffling]
            return f"samples are shuffled by {', by '.join(parts)}"
    return None


def _shuffling_samplers(run: Recording) -> set[str]:
    """The samplers that a run iterated and that shuffle."""
    return {str(fact["type"]) for fact in run.facts("sampler", 0) if fact["shuffles"]}


def _differ(first: Recording, other: Recording, step: int) -> bool:
    """Whether two runs took as many samples in a step, but others: by their ids and by their content."""
    verdicts = []
    for field in ("ids", "rows"):
        taken = [[run.steps[rank][step].get(field) for rank in range(run.world_size)] for run in (first, other)]
        if all(part is not None for parts in taken for part in parts):
            sets = [Counter(entry for part in parts for entry in part or ()) for parts in taken]
            if sets[0].total() != sets[1].total():
                return False
            verdicts.append(sets[0] != sets[1])
    return bool(verdicts) and all(verdicts)


def _sampler_of(run: Recording) -> str:
    """The first sampler that a run iterated."""
    return next((str(fact["type"]) for fact in run.facts("sampler", 0)), "no sampler of torch's")


@contextmanager
def _in_one_order() -> Iterator[None]:
    """Nothing is shuffled: samplers count up, and permutations that the script draws are none."""

    def random_order(_: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
        def iterate(self: RandomSampler) -> Iterator[int]:
            length = len(self.data_source)
            return iter([position % length for position in range(self.num_samples)])

        return iterate

    def distributed_order(inner: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
        def iterate(self: Any) -> Iterator[int]:
            shuffle, self.shuffle = self.shuffle, False
            try:
                return inner(self)
            finally:
                self.shuffle = shuffle

        return iterate

    def counting(count: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def make(inner: Callable[..., Any]) -> Callable[..., Any]:
            def permutation(length: Any, *args: Any, **kwargs: Any) -> Any:
                return count(length) if by_script() else inner(length, *args, **kwargs)

            return permutation

        return make

    def nothing(inner: Callable[..., Any]) -> Callable[..., Any]:
        def shuffle(*args: Any, **kwargs: Any) -> None:
            if not by_script():
                inner(*args, **kwargs)

        return shuffle

    with wrapped(
        Wrap(RandomSampler, "__iter__", random_order),
        Wrap(DistributedSampler, "__iter__", distributed_order),
        Wrap(torch, "randperm", counting(torch.arange)),
        Wrap(
            np.random,
            "permutation",
            counting(lambda given: np.arange(given) if np.ndim(given) == 0 else np.array(given)),
        ),
        Wrap(np.random, "shuffle", nothing),
        Wrap(random, "shuffle", nothing),
    ):
        yield


def _suspect_sampler(evidence: Evidence) -> str | None:
    for run, _, fact in evidence.facts("sampler"):
        extra = fact["given"] - fact["samples"]
        if extra and fact["replicas"] > 1:
            what = f"{extra} of them twice" if extra > 0 else f"{-extra} samples never"
            return (
                f"{fact['type']} gave {fact['given']} samples an epoch on {on_devices(run)}, of a dataset of "
                f"{fact['samples']}: {what}"
            )
    return None


@contextmanager
def _with_divisible_datasets() -> Iterator[None]:
    """Samplers leave out the last samples of a dataset, so many that any small number of devices divides the rest."""

    def cut(inner: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
        def iterate(self: Any) -> Iterator[int]:
            indices = list(inner(self))
            return iter(indices[: divisible(len(indices))])

        return iterate

    def cut_distributed(_: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
        def iterate(self: Any) -> Iterator[int]:
            length = len(self.dataset)
            indices = list(range(length))
            if self.shuffle:
                indices = torch.randperm(
                    length, generator=torch.Generator().manual_seed(self.seed + self.epoch)
                ).tolist()
            return iter(indices[: divisible(length)][self.rank :: self.num_replicas])

        return iterate

    with wrapped(
        Wrap(SequentialSampler, "__iter__", cut),
        Wrap(RandomSampler, "__iter__", cut),
        Wrap(DistributedSampler, "__iter__", cut_distributed),
    ):
        yield


def divisible(length: int) -> int:
    """The largest number up to a length that small numbers of devices divide."""
    factor = next((factor for factor in (840, 120, 24) if length >= 4 * factor), 12)
    return length - length % factor if length >= factor else length


def _suspect_unshared(evidence: Evidence) -> str | None:
    if not evidence.is_ddp:
        return None
    for run in evidence.shared:
        for step in range(run.num_steps):
            rows = [run.steps[rank][step].get("rows") for rank in range(run.world_size)]
            if rows[0] and all(row == rows[0] for row in rows):
                return f"in step {step} all {on_devices(run)} took the same {len(rows[0])} samples"
    return None


@contextmanager
def _with_shares() -> Iterator[None]:
    """A DataLoader without a sampler of its own takes this device's share of the dataset, in the dataset's order."""
    place = read_environment()

    def make(inner: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
            given = any(kwargs.get(name) is not None for name in ("sampler", "batch_sampler")) or len(args) > 1
            if not given and not isinstance(dataset, IterableDataset):
                kwargs = {name: value for name, value in kwargs.items() if name != "shuffle"}
                args = ()
                kwargs["sampler"] = list(range(place.rank, divisible(len(dataset)), place.world_size))
            inner(self, dataset, batch_size, *args, **kwargs)

        return init

    with wrapped(Wrap(DataLoader, "__init__", make)):
        yield


GLOBAL_BATCH_CAUSE = Cause(
    "global_batch",
    "the number of samples in a step depends on the number of devices",
    "Give each device batch_size // world_size samples, of a batch that the numbers of devices divide, or use "
    "samestep.Run, whose global_batch_size is that of all devices together.",
    _suspect_global_batch,
    _with_one_global_batch,
)
ORDER = Cause(
    "order",
    "the order of the samples depends on the number of devices",
    "Use the same sampler on one device as on many: DistributedSampler(dataset, seed=…) with set_epoch(epoch) on all.",
    _suspect_order,
    _in_one_order,
)
SAMPLER = Cause(
    "sampler",
    "the sampler pads or drops samples to make the shares equal",
    "Make the dataset's length a multiple of the number of devices, or use samestep.Run, whose loader takes each "
    "sample once an epoch.",
    _suspect_sampler,
    _with_divisible_datasets,
)
UNSHARED = Cause(
    "unshared",
    "every device trains on the same samples",
    "Give the DataLoader a sampler that takes each device's share: sampler=DistributedSampler(dataset).",
    _suspect_unshared,
    _with_shares,
)
