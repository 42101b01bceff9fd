"""Solo: a loader that only rank 0 runs, since only one process can see what it gives; batches are handed to all.

So are the states of the generators, wherever the loader moved them: on every rank the script draws on from there.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from samestep.engine.drawing import Watch
from samestep.errors import DeterminismError
from samestep.scripts.adoption import Adoption
from samestep.scripts.loading.broadcast import Kind, Outcome, alone, attempt, check_place, hand_over, raise_error


class SoloIterator:
    """An iterator over the batches that rank 0 loads.

    Args:
        loader: any.
        adoption: of this process.
        start: makes torch's iterator over the loader.
    """

    def __init__(
        self, loader: DataLoader[Any], adoption: Adoption, start: Callable[[DataLoader[Any]], Iterator[Any]]
    ) -> None:
        self._loader = loader
        self._adoption = adoption
        self._watch = Watch(_own_generators(loader))
        self._before = self._watch.states()
        self._start = start
        self._is_together = False
        self._num_given = 0
        self._inner: Iterator[Any] | None = None
        self._handed("the start of a loader", self._begin)

    def __iter__(self) -> "SoloIterator":
        """Itself."""
        return self

    def __len__(self) -> int:
        """As of torch's iterator: the number of batches that its sampler gives."""
        return len(self._loader._index_sampler)

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: there is none.
            DeterminismError: a later batch than the first cannot be sent.
        """
        if self._is_together:
            return self._next()
        check_place(self._adoption)
        outcome = self._handed("a batch from rank 0", self._next)
        if outcome.kind is Kind.END:
            raise StopIteration
        batch = outcome.value if outcome.kind is Kind.VALUE else self._together(outcome)
        self._num_given += 1
        if self._adoption.rank > 0 and self._loader.pin_memory and torch.accelerator.is_available():
            return pin_memory(batch)
        return batch

    def _next(self) -> Any:
        assert self._inner is not None, "rank 0 runs the loader"
        return next(self._inner)

    def _begin(self) -> None:
        self._inner = self._start(self._loader)

    def _handed(self, what: str, action: Callable[[], Any]) -> Outcome:
        """Rank 0 does something; all ranks get the outcome, and the generators as it left them."""
        outcome = None
        if self._adoption.rank == 0:
            kept = self._watch.keep()
            with alone(self._adoption):
                outcome = attempt(action, lambda: self._watch.states() if self._watch.has_moved(kept) else None)
        outcome = hand_over(self._adoption, what, outcome, 0)
        if outcome.kind is Kind.ERROR:
            self._draw_on(outcome)
            raise_error(self._adoption, outcome.value, 0)
        if outcome.kind is not Kind.TOGETHER:
            self._draw_on(outcome)
        return outcome

    def _draw_on(self, outcome: Outcome) -> None:
        if outcome.extra is not None and self._adoption.rank > 0:
            self._watch.put_states(outcome.extra)

    def _together(self, outcome: Outcome) -> Any:
        """The first batch, which does not pickle: the others run the loader too, as rank 0 did."""
        if self._num_given:
            raise DeterminismError(
                "rank 0 loaded a batch that cannot be sent to the other ranks, after others that could; return "
                "tensors, arrays or other values that pickle from the dataset and collate_fn"
            )
        self._is_together = True
        if self._adoption.rank == 0:
            return outcome.value
        now = self._watch.states()
        self._watch.put_states(self._before)
        with alone(self._adoption):
            self._begin()
            self._watch.put_states(now)
            return self._next()


def _own_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that the script gave to a loader and its samplers."""
    holders = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    generators = [getattr(holder, "generator", None) for holder in holders]
    found = {id(generator): generator for generator in generators if isinstance(generator, torch.Generator)}
    return [generator for generator in found.values() if generator is not torch.default_generator]
