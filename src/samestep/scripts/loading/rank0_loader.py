"""A loader that only rank 0 runs, since its data is a stream; batches are broadcast to all ranks.

So are the states of generators that the loader moved: on every rank the script draws on from there.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from samestep.engine.side_effects import Watch
from samestep.errors import DeterminismError
from samestep.scripts.adoption import Adoption
from samestep.scripts.loading.broadcast import Kind, Outcome, attempt, broadcast, check_place, raise_error


class Rank0Iterator:
    """An iterator over batches that rank 0 loads."""

    def __init__(
        self, loader: DataLoader[Any], adoption: Adoption, start: Callable[[DataLoader[Any]], Iterator[Any]]
    ) -> None:
        self._loader = loader
        self._adoption = adoption
        self._watch = Watch(_own_generators(loader))
        self._before = self._watch.states()
        self._start = start
        self._is_on_all_ranks = False
        self._num_given = 0
        self._inner: Iterator[Any] | None = None
        self._run_on_rank0("the start of a loader", self._begin)

    def __iter__(self) -> "Rank0Iterator":
        """Itself."""
        return self

    def __len__(self) -> int:
        """As of torch's iterator: the number of batches that its sampler gives."""
        return len(self._loader._index_sampler)

    def __next__(self) -> Any:
        """The next batch."""
        if self._is_on_all_ranks:
            return self._next()
        check_place(self._adoption)
        outcome = self._run_on_rank0("a batch from rank 0", self._next)
        if outcome.kind is Kind.END:
            raise StopIteration
        batch = outcome.value if outcome.kind is Kind.VALUE else self._load_on_all_ranks(outcome)
        self._num_given += 1
        if self._adoption.rank > 0 and self._loader.pin_memory and torch.accelerator.is_available():
            return pin_memory(batch)
        return batch

    def _next(self) -> Any:
        assert self._inner is not None, "rank 0 runs the loader"
        return next(self._inner)

    def _begin(self) -> None:
        self._inner = self._start(self._loader)

    def _run_on_rank0(self, what: str, action: Callable[[], Any]) -> Outcome:
        """Runs an action on rank 0; all ranks get its outcome, and the generators as it left them."""
        outcome = None
        if self._adoption.rank == 0:
            kept = self._watch.keep()
            with self._adoption.on_this_rank():
                outcome = attempt(action, lambda: self._watch.states() if self._watch.has_moved(kept) else None)
        outcome = broadcast(self._adoption, what, outcome, 0)
        if outcome.kind is Kind.ERROR:
            self._set_generators(outcome)
            raise_error(self._adoption, outcome.value, 0)
        if outcome.kind is not Kind.REPEAT:
            self._set_generators(outcome)
        return outcome

    def _set_generators(self, outcome: Outcome) -> None:
        if outcome.extra is not None and self._adoption.rank > 0:
            self._watch.put_states(outcome.extra)

    def _load_on_all_ranks(self, outcome: Outcome) -> Any:
        """The first batch, which does not pickle: the other ranks run the loader too, from the same generators."""
        if self._num_given:
            raise DeterminismError(
                "rank 0 loaded a batch that cannot be sent to the other ranks, after others that could; return "
                "tensors, arrays or other values that pickle from the dataset and collate_fn"
            )
        self._is_on_all_ranks = True
        if self._adoption.rank == 0:
            return outcome.value
        now = self._watch.states()
        self._watch.put_states(self._before)
        with self._adoption.on_this_rank():
            self._begin()
            self._watch.put_states(now)
            return self._next()


def _own_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The script's own generators of a loader and its samplers."""
    holders = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    generators = [getattr(holder, "generator", None) for holder in holders]
    found = {id(generator): generator for generator in generators if isinstance(generator, torch.Generator)}
    return [generator for generator in found.values() if generator is not torch.default_generator]
