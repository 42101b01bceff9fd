"""Loaders of many kinds, their batches, and the generators after each."""

import hashlib
import os
import pickle
import random
import threading
import time
from collections import OrderedDict, namedtuple
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from samestep.patch import Patch, applied
from samestep.scripts import loading, output
from samestep.scripts.shared_script import SharedScript

Pair = namedtuple("Pair", "image label")


@dataclass
class Sample:
    """A batch that is no tensor."""

    values: torch.Tensor
    names: list


class Computed(Dataset):
    """Samples that are computed, and changed by a function; the folder's file `fetched` lists those fetched."""

    def __init__(self, folder, size=22, form="tuple", change=None, **attributes):
        self.path = os.path.join(folder, "fetched")
        self.size, self.form, self.change = size, form, change
        vars(self).update(attributes)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        with open(self.path, "a") as file:
            file.write(f"{index}\n")
        image = torch.full((3, 4), float(index)) / 7
        if self.change is not None:
            image = self.change(self, image, index)
        if self.form == "dict":
            return {"image": image, "label": index, "array": np.arange(3, dtype=np.int16) * index, "name": f"n{index}"}
        return Pair(image, index) if self.form == "named" else (image, index)


def augment(dataset, image, index):
    return image + torch.rand(1) + np.random.rand() + random.random()


def fail(dataset, image, index):
    if index == 13:
        raise ValueError("a broken image")
    return image


def widen(dataset, image, index):
    return torch.full((3, 200, 200), index, dtype=torch.float32)  # travels in pieces


def delay(dataset, image, index):
    time.sleep(2 * (index == 5))
    return image


class LocalError(Exception):
    """Pickle cannot make it again: it is made of two arguments and keeps one."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class LockedError(Exception):
    """Cannot be sent at all: it holds a lock."""

    def __init__(self):
        super().__init__("here")
        self.lock = threading.Lock()


class Stream(IterableDataset):
    """A stream with an own share for each worker, which draws random numbers and counts."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "fetched")
        self.num_epochs, self.given, self.own = 0, [], np.random.default_rng(3)
        self.counts = SimpleNamespace(even=0, by_kind={})
        self.inner, self.data = [self.counts], torch.zeros(100_000)

    def __iter__(self):
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        self.num_epochs += 1
        for index in range(first, 11, stride):
            self.given.append(index)
            self.counts.even += index % 2 == 0
            self.counts.by_kind[index % 3] = self.own.random()
            with open(self.path, "a") as file:
                file.write(f"{index}\n")
            yield index + random.random() + torch.rand(2)


class Unpicklable(IterableDataset):
    """A stream of functions."""

    def __iter__(self):
        for index in range(4):
            yield partial(lambda shift, x: x + shift, index + random.random())


class EvenFirst(Sampler):
    """A sampler of the script's own, which draws as it goes and counts its passes."""

    def __init__(self, size):
        self.size = size
        self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        for index in [*range(0, self.size, 2), *range(1, self.size, 2)]:
            yield (index + int(torch.randint(3, ()))) % self.size

    def __len__(self):
        return self.size


class Chancy(EvenFirst):
    """A sampler that differs between processes."""

    def __iter__(self):
        order = list(range(self.size))
        random.Random(time.time_ns() + os.getpid()).shuffle(order)
        return iter(order)


def shifted(samples):
    """Collates into two views of one tensor, and an object."""
    rows = torch.stack([image for image, _ in samples]).flatten(1)
    return rows[:, 1:], rows[:, :-1], Sample(rows.t(), [str(label) for _, label in samples])


def of_all_kinds(samples):
    """Collates into tensors and arrays of many layouts, and values of many kinds."""
    base = torch.arange(120.0).view(8, 15) + samples[0][1]
    views = base.t(), base[1:, 2:], base[:, ::3], base[3:6], base[:2].expand(2, -1), base.view(4, 5, 6).permute(2, 0, 1)
    kinds = base > 3, base.bfloat16()[1:], base.to(torch.uint16), torch.complex(base, base)[:, 1:], torch.empty(3, 0, 2)
    array = np.arange(120).reshape(4, 5, 6)
    arrays = [each for kind in ("i2", "f8", "?", "c8") for each in (array.astype(kind), array.astype(kind).T)]
    others = (
        Pair(Sample(base, ["x"]), OrderedDict(a=None, b=[1, "two", 3.0, b"four"])),
        np.float32(2),
        np.array(["text"]),
    )
    return [*views, *kinds], [*arrays, array[1:3], array[:0]], others, torch.nn.Parameter(base), ValueError("wrong")


def as_function(samples):
    """Collates into a function, which does not pickle."""
    return lambda _: [label for _, label in samples]


def reseed(worker):
    """A worker_init_fn: reseeds NumPy from torch's seed."""
    np.random.seed(torch.initial_seed() % 2**32 + worker)


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def cases(folder):
    """Loaders by name."""
    made = partial(Computed, folder)
    three = {"batch_size": 3, "shuffle": True}
    two = {**three, "num_workers": 2}
    return {
        "dealt": lambda: DataLoader(made(), **two),
        "dealt, own generator": lambda: DataLoader(made(), **two, generator=generator()),
        "dealt, augmented": lambda: DataLoader(made(change=augment), **two, worker_init_fn=reseed),
        "dealt, persistent": lambda: DataLoader(
            made(change=augment), 3, num_workers=3, persistent_workers=True, prefetch_factor=1
        ),
        "dealt, own sampler": lambda: DataLoader(made(change=augment), 3, num_workers=1, sampler=EvenFirst(22)),
        "dealt, large": lambda: DataLoader(made(10, change=widen), **two, timeout=60),
        "dealt, replaced": lambda: DataLoader(
            made(), 3, num_workers=2, sampler=RandomSampler(range(22), replacement=True, generator=generator())
        ),
        "dealt, views, last dropped": lambda: DataLoader(made(), 4, num_workers=2, drop_last=True, collate_fn=shifted),
        "dealt, all kinds": lambda: DataLoader(made(), 4, num_workers=2, collate_fn=of_all_kinds),
        "dealt, named, no batches": lambda: DataLoader(
            made(form="named"), batch_size=None, shuffle=True, num_workers=2
        ),
        "dealt, dict, list of batches": lambda: DataLoader(
            made(form="dict"), batch_sampler=[[1, 2], [7], [3, 4, 5], [0]], num_workers=2
        ),
        "stream": lambda: DataLoader(Stream(folder), 3),
        "stream, workers": lambda: DataLoader(Stream(folder), 3, num_workers=2, generator=generator()),
        "stream, pipe": lambda: DataLoader(
            IterableWrapper(list(range(11))).shuffle().sharding_filter(), 3, shuffle=True, generator=generator()
        ),
        "stream, unpicklable": lambda: DataLoader(Unpicklable(), batch_size=None),
        "together": lambda: DataLoader(made(), **three),
        "together, augmented": lambda: DataLoader(made(change=augment), **three),
        "together, memory": lambda: DataLoader(TensorDataset(torch.arange(22.0)), **three),
        "together, unpicklable": lambda: DataLoader(made(), **three, collate_fn=as_function),
        "together, own sampler": lambda: DataLoader(made(), 3, sampler=EvenFirst(22)),
        "chancy": lambda: DataLoader(made(), 3, num_workers=2, sampler=Chancy(22)),
    }


BREAKERS = {
    "": [],
    "all workers are everywhere": [Patch(loading._Context, "_is_ours", lambda context, worker: True)],
    "state is not handed over": [Patch(loading.Rank0Iterator, "_set_state", lambda *_: None)],
}


def plain(program, *args):
    """The result of a program in this process, with torch's own iterators."""
    return program(None, *args)


class SharedLoaders:
    """Splits a program's loaders over the ranks for a block; does nothing without a communicator."""

    def __init__(self, communicator, breaker=""):
        self.script = None if communicator is None else SharedScript(communicator)
        self._breaker = breaker
        self._stack = ExitStack()

    def __enter__(self):
        if self.script is not None:
            self._stack.enter_context(output.script_streams(self.script))
            hidden = Patch(torch.distributed, "is_initialized", lambda: False)  # as it is from single-process scripts
            self._stack.enter_context(applied([hidden, *loading.patches(self.script), *BREAKERS[self._breaker]]))
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        return self

    def __exit__(self, *problem):
        self._stack.close()

    @property
    def notices(self):
        return sorted(notice.split(": ", 1)[1] for notice in self.script._noticed)


def form(value):
    """A value's content and memory layout, comparable."""
    if isinstance(value, torch.Tensor):
        layout = (str(value.dtype), tuple(value.shape), value.stride(), value.data_ptr() % 64, value.requires_grad)
        return (*layout, value.tolist() if value.numel() < 10000 else hashlib.sha256(value.numpy()).hexdigest())
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.strides, value.tolist()
    if isinstance(value, dict):
        return {key: form(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [form(entry) for entry in value]
    if isinstance(value, Sample):
        return form(value.values), value.names
    return value(1) if callable(value) else repr(value) if isinstance(value, Exception) else value


def states(loader=None):
    """A digest of all generators that the script can see."""
    seen = [torch.get_rng_state().numpy().tobytes(), np.random.get_state(), random.getstate()]
    if getattr(loader, "generator", None) is not None:
        seen.append(loader.generator.get_state().numpy().tobytes())
    return hashlib.sha256(
        pickle.dumps([repr(entry) if isinstance(entry, tuple) else entry for entry in seen])
    ).hexdigest()


def held(dataset):
    """What a stream has counted so far, and what its generator draws next."""
    if type(dataset) is not Stream:
        return None
    counts = dataset.inner[0]
    assert counts is dataset.counts
    return dataset.num_epochs, [*dataset.given], counts.even, dict(counts.by_kind), str(dataset.own.bit_generator.state)


def two_epochs(communicator, name, folder, breaker=""):
    """Every batch and generator of an epoch that is left early and of a whole one; the notices; children left."""
    seen, children = [], len(psutil.Process().children())
    with SharedLoaders(communicator, breaker) as shared:
        loader = cases(folder)[name]()
        for last in (1, 10**6):
            for number, batch in enumerate(loader):
                seen.append((form(batch), states(loader), held(loader.dataset)))
                torch.rand(1), random.random()
                if number == last:
                    break
            seen.append(states(loader))
        seen.append(getattr(loader.sampler, "num_passes", None))
        del loader
        return seen, len(psutil.Process().children()) - children, shared.notices if communicator else None


def nested(communicator, folder):
    """Two loaders zipped, one nested in itself, and some iterators side by side."""
    with SharedLoaders(communicator):
        first = DataLoader(Computed(folder, 10), batch_size=2, shuffle=True)
        second = DataLoader(Computed(folder, 10, change=augment), batch_size=3, shuffle=True, num_workers=2)
        seen = [(form(one), form(two), states()) for one, two in zip(first, second, strict=False)]
        seen += [(form(one), form(two), states()) for one in first for two in first]
        ahead, behind = iter(second), iter(second)
        seen += [form(next(ahead)), form(next(ahead)), form(next(behind)), states(), len(ahead), len(second)]
        seen += [form(next(iter(first))) for _ in range(3)]
        return seen


def broken(communicator, folder):
    """The error that the script meets, and the batches before and after it."""
    with SharedLoaders(communicator):
        loader = DataLoader(Computed(folder, change=fail), batch_size=4, num_workers=2)
        return _until_end(iter(loader))


def broken_stream(communicator, num_workers, kind):
    """The same of a stream."""
    made = {"KeyError": KeyError("gone"), "LocalError": LocalError("this", "that"), "LockedError": LockedError()}
    with SharedLoaders(communicator):
        return _until_end(iter(DataLoader(BrokenStream(made[kind]), batch_size=None, num_workers=num_workers)))


class BrokenStream(IterableDataset):
    """A stream that breaks."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        yield 1
        random.random()
        raise self.error


def _until_end(iterator):
    seen = []
    while True:
        try:
            seen.append((form(next(iterator)), states()))
        except StopIteration:
            return [*seen, states()]
        except Exception as error:
            cause = type(error.__cause__).__name__, getattr(error.__cause__, "ranks", None)
            seen.append((type(error).__name__, str(error).splitlines()[0], cause))


def timed_out(communicator, folder):
    """A worker process that takes longer than it may."""
    seen = []
    with SharedLoaders(communicator):
        try:
            for batch in DataLoader(Computed(folder, change=delay), batch_size=4, num_workers=2, timeout=1):
                seen.append(form(batch))
        except RuntimeError as error:
            seen.append("timed out" in str(error))
    return seen


def elsewhere(communicator, folder):
    """A loader iterated in a chunk, and an iterator that is taken there."""
    with SharedLoaders(communicator) as shared:
        loader = DataLoader(Computed(folder), batch_size=4)
        iterator = iter(DataLoader(Computed(folder), batch_size=4, num_workers=1))
        with shared.script.chunk(0):
            inside = [form(batch) for batch in loader]
            try:
                next(iterator)
            except Exception as error:
                return inside, type(error).__name__, str(error)
        return None


def kept_apart(communicator, folder):
    """Each rank's share by a distributed sampler, which is the script's own way."""
    with SharedLoaders(communicator):
        sampler = torch.utils.data.DistributedSampler(
            range(22), num_replicas=communicator.world_size, rank=communicator.rank, shuffle=False
        )
        return [batch[1].tolist() for batch in DataLoader(Computed(folder), batch_size=4, sampler=sampler)]


def abandoned(communicator, folder, breaker=""):
    """Children while an iterator is held, and after it is gone, by break, by an exception and by `del`."""
    with SharedLoaders(communicator, breaker):
        counts, before = [], len(psutil.Process().children())
        loader = DataLoader(Computed(folder), batch_size=4, num_workers=4)
        iterator = iter(loader)
        next(iterator)
        counts.append(len(psutil.Process().children()) - before)
        del iterator
        counts.append(len(psutil.Process().children()) - before)
        try:
            for _ in loader:
                raise LookupError
        except LookupError:
            counts.append(len(psutil.Process().children()) - before)
        return counts
