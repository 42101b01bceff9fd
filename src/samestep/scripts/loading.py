"""Loading: how the ranks load the batches of a script's DataLoader, by the kind of loader, and share them.

Every rank iterates over the script's loader. Of a loader with W worker processes, worker w runs on rank w % D, and its
batches are broadcast; a stream is loaded by rank 0, and its batches are broadcast; without workers every rank loads all
batches, as torch does. Batches, their order, and all generators after each batch are those of one process. A loader
that is iterated where ranks cannot meet (on another thread, in a wrapped forward) is left alone.
"""

import io
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import _ResumeIteration
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from samestep.callsite import script_line
from samestep.comm.exceptions import blamed, packed, portable, unpacked
from samestep.data.fetch import SeededSamples
from samestep.engine.side_effects import Watch, reachable
from samestep.errors import DeterminismError
from samestep.patch import Patch
from samestep.scripts.held_values import HeldValues, Place
from samestep.scripts.shared_script import SharedScript
from samestep.scripts.simulated.cuda import TAG

LARGE_BYTES = 2**19  # pieces from this size on travel alone, without a copy on the way
ALIGNMENT = 64
HEAD_WORDS = 2
WASTE = 4  # a tensor of which more than this is left over in its storage travels without the rest

_plain = torch._C.DisableTorchFunction  # modes of torch functions need not see the packing


@dataclass(frozen=True)
class Packed:
    """A packed value."""

    flat: Tensor  # [n] uint8: table of the pieces, the pickled rest, and the small pieces
    large: tuple[Tensor, ...] = ()  # the other pieces, each [n] uint8; where they were packed, the value's own memory


class _Pickler(pickle.Pickler):
    """Pickles all but the memory of plain tensors and arrays, which goes to `keep`."""

    # That memory is sent as it lies: once a storage, so that views of one storage stay such. Each piece arrives in
    # memory of its own, at the same address modulo 64, so that kernels which depend on strides or alignment behave on
    # every rank as on one.

    def __init__(self, file: io.BytesIO, keep: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=keep)
        self._storages: dict[tuple[int, int], Any] = {}  # arrays by address and size: pickle writes an object once

    def reducer_override(self, obj: Any) -> Any:
        """Reduces a plain tensor to the bytes of its storage and its place in them."""
        if type(obj) is np.ndarray and not obj.flags.forc:
            raise pickle.PicklingError("a strided array would arrive contiguous, and sums of it round differently")
        if not isinstance(obj, Tensor):
            return NotImplemented
        if obj.device.type != "cpu":
            raise pickle.PicklingError(f"a tensor on {obj.device} stays where it is")
        if obj.grad_fn is not None:
            raise pickle.PicklingError("a tensor's gradients flow where it was computed")
        if not _is_plain(obj):
            return NotImplemented
        with _plain():
            layout = obj.dtype, tuple(obj.shape), obj.stride()
            if obj.untyped_storage().nbytes() > max(WASTE * obj.nbytes, ALIGNMENT):
                return _spread, (obj.contiguous().clone(), *layout)
            storage = obj.untyped_storage()
            key = storage.data_ptr(), storage.nbytes()
            if key not in self._storages:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
                self._storages[key] = whole.numpy()
            return _tensor, (self._storages[key], obj.storage_offset(), *layout)


def _tensor(data: Any, offset: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The tensor at an offset of a storage's bytes."""
    with _plain():
        storage = torch.from_numpy(data).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)


def _spread(dense: Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides, whose elements travelled without the holes between them."""
    with _plain():
        return torch.empty_strided(shape, strides, dtype=dtype).copy_(dense)


def pack(value: Any) -> Packed:
    """Packs a value; raises if a part of it does not pickle, or would arrive in another layout."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, buffers.append).dump(value)
    arrays = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    pieces = [(array.nbytes, array.ctypes.data % ALIGNMENT) for array in arrays]
    table, body = pickle.dumps(pieces), file.getvalue()
    head = np.array([len(table), len(body)], dtype=np.int64).tobytes()
    small = [array.tobytes() for array in arrays if array.nbytes < LARGE_BYTES]
    with _plain():
        flat = torch.frombuffer(bytearray(b"".join([head, table, body, *small])), dtype=torch.uint8)
        # torch warns of memory that must not be written
        large = [array if array.flags.writeable else array.copy() for array in arrays if array.nbytes >= LARGE_BYTES]
        return Packed(flat, tuple(map(torch.from_numpy, large)))


class ArrivingValue:
    """A value that is arriving: its flat part is there, its large pieces have yet to be received."""

    def __init__(self, flat: Tensor) -> None:
        with _plain():
            data = flat.numpy()
            sizes = data[: HEAD_WORDS * 8].view(np.int64).tolist()
            borders = np.cumsum([HEAD_WORDS * 8, *sizes]).tolist()
            pieces: list[tuple[int, int]] = pickle.loads(data[borders[0] : borders[1]].tobytes())
            self._body = data[borders[1] : borders[2]].tobytes()
            # torch's allocator aligns memory to 64 bytes
            self._memories = [torch.empty(shift + size, dtype=torch.uint8)[shift:] for size, shift in pieces]
            offset = borders[2]
            for memory in self._memories:
                if memory.numel() < LARGE_BYTES:
                    memory.copy_(flat[offset : offset + memory.numel()])
                    offset += memory.numel()

    def rooms(self) -> list[Tensor]:
        """Memory for the large pieces, each [n] uint8."""
        return [memory for memory in self._memories if memory.numel() >= LARGE_BYTES]

    def value(self) -> Any:
        """The value, once its large pieces are there; call it once."""
        with _plain():
            buffers = [memory.numpy() for memory in self._memories]
        return pickle.loads(self._body, buffers=buffers)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is all in its memory: no gradient, no subclass, no attributes, dense.

    A tensor may be marked as being on the host; one without a mark is there too.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.requires_grad:
        return False
    with _plain():
        odd = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__.keys() - {TAG}
        return not odd and tensor.data_ptr() % tensor.element_size() == 0


class Kind(IntEnum):
    """The result of an attempt."""

    NOTHING = 0
    VALUE = 1
    ERROR = 2
    END = 3
    REPEAT = 4  # its value does not pickle: each rank has to make it


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt to load."""

    kind: Kind
    value: Any = None  # the result to return, or the exception to raise
    extra: Any = None  # sent along
    packed: Packed | None = None  # value and extra, on the rank that made the attempt


def attempt(action: Callable[[], Any], extra: Callable[[], Any]) -> Outcome:
    """Runs a function that returns a value, raises or ends by StopIteration; `extra()` is packed with the outcome."""
    try:
        value = action()
    except StopIteration:
        return packed_outcome(Kind.END, None, extra())
    except (Exception, SystemExit) as error:
        return packed_outcome(Kind.ERROR, portable(error), extra())
    return packed_outcome(Kind.VALUE, value, extra())


def packed_outcome(kind: Kind, value: Any, extra: Any = None) -> Outcome:
    """An outcome ready to be sent; `REPEAT` if its value cannot be."""
    try:
        return Outcome(kind, value, extra, pack((packed(value) if kind is Kind.ERROR else value, extra)))
    except Exception:
        return Outcome(Kind.REPEAT, value, extra, pack((None, extra)))


def broadcast(script: SharedScript, what: str, outcome: Outcome | None, source: int) -> Outcome:
    """Gives every rank the outcome of rank `source`; it is None on other ranks."""
    ours = None if outcome is None else outcome.packed
    kind = Kind.NOTHING if outcome is None else outcome.kind
    flat = torch.empty(0, dtype=torch.uint8, device="cpu") if ours is None else ours.flat
    rows, flats = script.gather(what, [kind], flat)
    control = script.communicator.control
    if outcome is not None and ours is not None:
        for piece in ours.large:
            control.broadcast(piece, source)
        return outcome
    arriving = ArrivingValue(flats[source])
    for room in arriving.rooms():
        control.broadcast(room, source)
    kind = Kind(rows[source][0])
    value, extra = arriving.value()
    return Outcome(kind, unpacked(value) if kind is Kind.ERROR else value, extra)


def raise_error(script: SharedScript, error: BaseException, source: int) -> NoReturn:
    """Raises the error of rank `source` on this rank too, there with a note of the rank."""
    if script.rank == source:
        raise error
    raise blamed(error, source, f"rank {source} met it while it loaded a batch for all ranks")


def check_place(script: SharedScript) -> None:
    """Raises a `DeterminismError` if not all ranks are sure to ask for the next batch here."""
    if not script.may_meet():
        raise DeterminismError(
            "an iterator that the script made of a DataLoader is asked for a batch on another thread, in another "
            "process or inside a wrapped forward, where the ranks cannot share it; call iter(loader) there too"
        )


class Rank0Iterator:
    """An iterator over batches that rank 0 loads."""

    # With each batch go the states of the generators that the loader moved, and the values that its objects changed:
    # from there on the script draws and reads, on every rank. A batch that does not pickle is found out at the first
    # one, which no rank has seen yet: then the others set their generators back to those of the start, and run the
    # loader too.

    def __init__(
        self, loader: DataLoader[Any], script: SharedScript, start: Callable[[DataLoader[Any]], Iterator[Any]]
    ) -> None:
        self._loader = loader
        self._script = script
        self._watch = Watch(reachable([loader.generator, *_parts(loader)]))
        self._held = HeldValues(_parts(loader))
        self._before = self._watch.states()
        self._start = start
        self._is_on_all_ranks = False
        self._num_given = 0
        self._inner: Iterator[Any] | None = None
        self._run_on_rank0("the start of a loader", self._begin)

    def __iter__(self) -> "Rank0Iterator":
        return self

    def __len__(self) -> int:
        """As of torch's iterator: the number of batches that its sampler gives."""
        return len(self._loader._index_sampler)

    def __next__(self) -> Any:
        if self._is_on_all_ranks:
            return self._next()
        check_place(self._script)
        outcome = self._run_on_rank0("a batch from rank 0", self._next)
        if outcome.kind is Kind.END:
            raise StopIteration
        batch = outcome.value if outcome.kind is Kind.VALUE else self._load_on_all_ranks(outcome)
        self._num_given += 1
        if self._script.rank > 0 and self._loader.pin_memory and torch.accelerator.is_available():
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
        if self._script.rank == 0:
            before, held = self._watch.states(), self._held.read()

            def moved() -> tuple[Any, dict[Place, Any]]:
                changed = {place: value for place, value in self._held.read().items() if held.get(place, _END) != value}
                return self._watch.states() if self._watch.have_moved(before) else None, changed

            with self._script.on_this_rank():
                outcome = attempt(action, moved)
        outcome = broadcast(self._script, what, outcome, 0)
        if outcome.kind is Kind.ERROR:
            self._set_state(outcome)
            raise_error(self._script, outcome.value, 0)
        if outcome.kind is not Kind.REPEAT:
            self._set_state(outcome)
        return outcome

    def _set_state(self, outcome: Outcome) -> None:
        if self._script.rank > 0:
            states, changed = outcome.extra
            self._held.write(changed)
            if states is not None:
                self._watch.put_states(states)

    def _load_on_all_ranks(self, outcome: Outcome) -> Any:
        """The first batch, which does not pickle: the other ranks run the loader too, from the same generators."""
        if self._num_given:
            raise DeterminismError(
                "rank 0 loaded a batch that cannot be sent to the other ranks, after others that could; return "
                "tensors, arrays or other values that pickle from the dataset and collate_fn"
            )
        self._is_on_all_ranks = True
        if self._script.rank == 0:
            return outcome.value
        now = self._watch.states()
        self._watch.put_states(self._before)
        with self._script.on_this_rank():
            self._begin()
            self._watch.put_states(now)
            return self._next()


def _parts(loader: DataLoader[Any]) -> list[Any]:
    """The objects of a loader whose code runs in this process."""
    own = [] if loader.num_workers else [loader.dataset, loader.collate_fn]
    return [*own, loader.sampler, loader.batch_sampler]


_END = object()


class SplitWorkersIterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator with worker processes, most of which run on other ranks."""

    # The worker of each batch, its seed and the time when indices are drawn are torch's own. A worker of another rank
    # and its queue are objects that do nothing.

    def __init__(self, loader: DataLoader[Any], script: SharedScript, is_known_sampler: bool) -> None:
        self._script = script
        self._is_known_sampler = is_known_sampler
        self._acknowledged: deque[Any] = deque()
        super().__init__(_SplitLoader(loader, script, self._acknowledged))

    def _next_index(self) -> Any:
        if self._is_known_sampler:
            return super()._next_index()  # type: ignore[no-untyped-call]  # torch does not annotate it
        index = next(self._sampler_iter, _END)
        found = self._script.share("the indices of a batch", [] if index is _END else [index])
        if not found:
            raise StopIteration
        return found[0]

    def _get_data(self) -> Any:
        if self._acknowledged:
            return self._acknowledged.popleft(), None
        return super()._get_data()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def _next_data(self) -> Any:
        check_place(self._script)
        number = self._rcvd_idx
        if number >= self._send_idx:
            if not self._persistent_workers:
                self._shutdown_workers()
            raise StopIteration
        worker = self._task_info[number][0]
        source = worker % self._script.world_size
        is_ours = source == self._script.rank
        made = self._made(number) if is_ours else None
        outcome = broadcast(self._script, "a batch from a data worker", made, source)
        if outcome.kind is Kind.ERROR:
            raise_error(self._script, outcome.value, source)
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
            raise_error(self._script, error, source)
        if self._pin_memory and source != self._script.rank:
            return pin_memory(data, self._pin_memory_device)
        return data


class _SplitLoader:
    """A loader as its iterator sees it, with a multiprocessing context that starts this rank's workers only."""

    def __init__(self, loader: DataLoader[Any], script: SharedScript, acknowledged: deque[Any]) -> None:
        self._loader = loader
        self.multiprocessing_context = _Context(
            loader.multiprocessing_context or torch.multiprocessing, script, acknowledged
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Context:
    """A multiprocessing context: the first queue is common to all workers, then each has a queue and a process."""

    def __init__(self, context: Any, script: SharedScript, acknowledged: deque[Any]) -> None:
        self._context = context
        self._script = script
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
        return worker % self._script.world_size == self._script.rank


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


_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, list, tuple, range)

_original_iterator = DataLoader._get_iterator


def patches(script: SharedScript) -> list[Patch]:
    """The patch of `DataLoader.__iter__`."""
    original = DataLoader.__iter__

    def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterates over the batches of a loader, the same on all ranks."""
        if script.world_size == 1:
            return by_rows(loader, original(loader))
        if is_distributed(loader):
            return original(loader)
        if not script.may_meet():
            return loader._get_iterator() if isinstance(loader._iterator, SplitWorkersIterator) else original(loader)
        line = script_line() or "a DataLoader"

        def say(text: str) -> None:
            script.notice(f"{line}: {text}")

        if reason := why_rank0(loader):
            say(f"batches loaded by rank 0: {reason}")
            return Rank0Iterator(loader, script, original)
        if loader.num_workers > 0:
            return _split_workers(script, loader, say, original)
        say(f"every rank loads all batches; with num_workers=2 or more, {script.world_size} ranks share the work out")
        return by_rows(loader, original(loader))

    return [Patch(DataLoader, "__iter__", iterate)]


def _split_workers(script: SharedScript, loader: DataLoader[Any], say: Any, original: Any) -> Iterator[Any]:
    """Iterates with workers split over the ranks; persistent ones of an earlier epoch go on."""
    if loader._iterator is not None and not isinstance(loader._iterator, SplitWorkersIterator):
        return original(loader)  # type: ignore[no-any-return]
    if loader._iterator is not None and loader.persistent_workers:
        loader._iterator._reset(loader)
        return loader._iterator
    say(f"{loader.num_workers} data workers split over {script.world_size} ranks")
    iterator = SplitWorkersIterator(loader, script, is_known_sampler(loader))
    if loader.persistent_workers:
        loader._iterator = iterator
    return iterator


def is_distributed(loader: DataLoader[Any]) -> bool:
    """Whether a loader gives each rank batches of its own: by a distributed sampler, or for a run of samestep."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 for sampler in samplers):
        return True
    return isinstance(loader.dataset, SeededSamples)


def why_rank0(loader: DataLoader[Any]) -> str:
    """Why only rank 0 can load; empty if others can."""
    if isinstance(loader.dataset, IterableDataset | IterDataPipe | MapDataPipe):
        return "the dataset is a stream"
    if loader.num_workers > 0 and not loader.in_order:
        return "in_order=False makes their order a matter of chance"
    if loader.num_workers > 0 and type(loader)._get_iterator is not _original_iterator:
        return "the loader has an iterator of its own"
    return ""


def is_known_sampler(loader: DataLoader[Any]) -> bool:
    """Whether the sampler is one of torch's own or a list: the same indices on all ranks, whenever they are drawn."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in _SAMPLERS


class RowFetcher:
    """Takes the rows of a TensorDataset by one index, instead of sample by sample: torch's fetcher, and its values."""

    # torch/utils/data/_utils/fetch.py. Shapes and strides are those of `default_collate` over the samples, too.

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def fetch(self, indices: list[int]) -> list[Tensor]:
        return [tensor[indices] for tensor in self._tensors]


def by_rows(loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """Makes torch's iterator take rows, if that gives the same batches."""
    dataset = loader.dataset
    plain = type(dataset) is TensorDataset and loader.collate_fn is default_collate and loader.batch_sampler is not None
    tensors = dataset.tensors if plain and isinstance(dataset, TensorDataset) else ()
    plain = plain and all(type(tensor) is Tensor and not tensor.requires_grad for tensor in tensors)
    if plain and type(iterator) is _SingleProcessDataLoaderIter:
        iterator._dataset_fetcher = RowFetcher(tensors)
    return iterator
