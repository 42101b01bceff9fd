"""Worker processes of a loader, split over the ranks; each batch is made once and broadcast.

Worker w runs on rank w % D. In every other respect the iterator is torch's own: the worker of each batch, its seed, the
time when indices are drawn. On the other ranks a worker and its queue are replaced by objects that do nothing.
"""

import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import _ResumeIteration
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from samestep.errors import DeterminismError
from samestep.scripts.adoption import Adoption
from samestep.scripts.loading.broadcast import Kind, Outcome, broadcast, check_place, packed_outcome, raise_error
from samestep.train.exceptions import portable

_END = object()


class SplitWorkersIterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator with worker processes, most of which run on other ranks."""

    def __init__(self, loader: DataLoader[Any], adoption: Adoption, is_known_sampler: bool) -> None:
        self._adoption = adoption
        self._is_known_sampler = is_known_sampler
        self._acknowledged: deque[Any] = deque()
        super().__init__(_SplitLoader(loader, adoption, self._acknowledged))

    def _next_index(self) -> Any:
        if self._is_known_sampler:
            return super()._next_index()  # type: ignore[no-untyped-call]  # torch does not annotate it
        index = next(self._sampler_iter, _END)
        found = self._adoption.share("the indices of a batch", [] if index is _END else [index])
        if not found:
            raise StopIteration
        return found[0]

    def _get_data(self) -> Any:
        if self._acknowledged:
            return self._acknowledged.popleft(), None
        return super()._get_data()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def _next_data(self) -> Any:
        check_place(self._adoption)
        number = self._rcvd_idx
        if number >= self._send_idx:
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        worker = self._task_info[number][0]
        source = worker % self._adoption.world_size
        is_ours = source == self._adoption.rank
        made = self._made(number) if is_ours else None
        outcome = broadcast(self._adoption, "a batch from a data worker", made, source)
        if outcome.kind is Kind.ERROR:
            raise_error(self._adoption, outcome.value, source)
        if outcome.kind is Kind.REPEAT:
            raise DeterminismError(
                "a data worker made a batch that cannot be sent to the other ranks; return tensors, arrays or other "
                "values that pickle from the dataset and collate_fn, or use num_workers=0"
            )
        self._rcvd_idx += 1
        self._tasks_outstanding -= not is_ours
        self._task_info.pop(number)
        return self._delivered(outcome.value, worker, source)

    def _made(self, number: int) -> Outcome:
        """Waits for the batch with that number, which a worker of this rank makes."""
        try:
            while len(self._task_info[number]) == 1:
                index, data = self._get_data()
                self._tasks_outstanding -= 1
                self._task_info[index] += (data,)
        except Exception as error:
            return packed_outcome(Kind.ERROR, portable(error))
        return packed_outcome(Kind.VALUE, self._task_info[number][1])

    def _delivered(self, data: Any, worker: int, source: int) -> Any:
        """Requests another batch; returns this one, or raises the error of its worker, on all ranks."""
        try:
            data = self._process_data(data, worker)  # type: ignore[no-untyped-call]  # torch does not annotate it
        except Exception as error:
            raise_error(self._adoption, error, source)
        if self._pin_memory and source != self._adoption.rank:
            return pin_memory(data, self._pin_memory_device)
        return data


class _SplitLoader:
    """A loader as its iterator sees it, with a multiprocessing context that starts this rank's workers only."""

    def __init__(self, loader: DataLoader[Any], adoption: Adoption, acknowledged: deque[Any]) -> None:
        self._loader = loader
        self.multiprocessing_context = _Context(
            loader.multiprocessing_context or torch.multiprocessing, adoption, acknowledged
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Context:
    """A multiprocessing context: the first queue is common to all workers, then each has a queue and a process."""

    def __init__(self, context: Any, adoption: Adoption, acknowledged: deque[Any]) -> None:
        self._context = context
        self._adoption = adoption
        self._acknowledged = acknowledged
        self._num_queues = 0
        self._num_processes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> Any:
        """The queue of results, then those of indices, by worker."""
        self._num_queues += 1
        if self._num_queues == 1 or self._is_ours(self._num_queues - 2):
            return self._context.Queue()
        return _absent_queue(self._acknowledged)

    def Process(self, *args: Any, **kwargs: Any) -> Any:
        """The processes, by worker."""
        self._num_processes += 1
        if self._is_ours(self._num_processes - 1):
            return self._context.Process(*args, **kwargs)
        return _absent_process()

    def _is_ours(self, worker: int) -> bool:
        return worker % self._adoption.world_size == self._adoption.rank


def _absent_queue(acknowledged: deque[Any]) -> SimpleNamespace:
    """The queue of a worker on another rank: only acknowledges a new epoch."""

    def put(item: Any) -> None:
        if isinstance(item, _ResumeIteration):
            acknowledged.append(item)

    return SimpleNamespace(put=put, cancel_join_thread=lambda: None, close=lambda: None)


def _absent_process() -> SimpleNamespace:
    """A worker on another rank; alive until it is joined."""
    alive = [True]
    return SimpleNamespace(
        daemon=False,
        pid=os.getpid(),  # not a child process, so torch does not watch it
        start=lambda: None,
        join=lambda timeout=None: alive.clear(),
        is_alive=lambda: bool(alive),
        terminate=lambda: None,
    )
