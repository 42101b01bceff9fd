"""The image of a split module: in the driver what the workers have of it, in a worker its copy.

The module and what its code refers to are pickled, and again when something of it is no longer as it was. Its tensors
travel apart: they are rebuilt on storages of the worker's, whose bytes the driver sends before each forward where they
may have changed.

Two questions are asked before each forward. `has_changed`: is the module, or anything that its code refers to, another
one? Then all of it is pickled again (`content`). `stale`: which storages may have other bytes? What these give is noted
as sent; if sending fails, `Driver.forget` drops the image, and the module gets a new one.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.data.checksums import quick_sums, version_of
from samestep.scripts.simulated.cuda import TAG
from samestep.scripts.split_forward.compare import HOOKS
from samestep.scripts.workers.pickling import VOLATILE, ModulePickler, Unpickler, pickled, put_in_place
from samestep.scripts.workers.records import Change, Records

# Tensors of up to so many bytes are sent each time, which is faster than to look whether they have changed.
SMALL_BYTES = 2**16
CHECKED = 3
CHECKED_EVERY = 10


class Form(NamedTuple):
    """A tensor without its bytes."""

    kind: str  # "parameter", "buffer" or "tensor"
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int  # its number
    requires_grad: bool
    mark: int | None  # the simulated device


class Content(NamedTuple):
    """A module as it is sent."""

    data: bytes
    forms: list[Form]
    sizes: list[tuple[int, bool]]  # bytes of each storage, and whether it is in host memory


class Image:
    """What the workers have of a module; all is read under `DisableTorchFunction`."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number = number
        self._device = device  # the driver's
        self.records = Records()
        self.classes: list[type] = []  # the script's classes that were sent
        self.storages: list[torch.UntypedStorage] = []
        self.num_sent = 0
        self._is_volatile = False
        self._tensors: list[Tensor] = []
        self._forms: list[Form] = []
        self._versions: list[int] = []
        self._always: set[int] = set()  # storages whose bytes are sent each time
        self._sums: dict[int, int] = {}  # of the bytes of the others, as they were sent
        self._root: tuple[Any, ...] = ()

    def has_changed(self, module: nn.Module, is_root: bool) -> bool:
        """Whether the module, or anything that its code refers to, is no longer what the workers have."""
        if (
            not self.num_sent
            or _root_of(module, is_root) != self._root
            or next(self.records.changes(), None) is not None
        ):
            return True
        # An assignment to `.data` gives a tensor other memory, perhaps of another shape: the object stays the same.
        return any(
            (*form[2:5], form.requires_grad, id(self.storages[form.storage])) != _place(tensor)
            for tensor, form in zip(self._tensors, self._forms, strict=True)
        )

    def content(self, module: nn.Module, is_root: bool) -> Content:
        """The module, pickled anew; a root's own hooks stay in the driver."""
        data, pickler = pickled(module, is_root, self._device)
        self.num_sent += 1
        self.records, self._tensors, self.classes = pickler.records, pickler.tensors, pickler.classes
        self._is_volatile = bool(pickler.found & VOLATILE)
        self._root = _root_of(module, is_root)
        numbers: dict[int, int] = {}
        self.storages, self._forms = [], []
        for tensor in self._tensors:
            storage = tensor.untyped_storage()
            number = numbers.setdefault(id(storage), len(self.storages))
            if number == len(self.storages):
                self.storages.append(storage)
            self._forms.append(_form(tensor, number))
        # What trains changes before each forward.
        buffers = {id(buffer.untyped_storage()) for buffer in module.buffers()}
        self._always = {form.storage for form in self._forms if form.requires_grad}
        self._always |= {
            number
            for number, storage in enumerate(self.storages)
            if id(storage) in buffers or storage.nbytes() <= SMALL_BYTES
        }
        self._versions = [version_of(tensor) for tensor in self._tensors]
        self._sums = self._sums_now()
        return Content(data, self._forms, [(each.nbytes(), each.device.type == "cpu") for each in self.storages])

    def stale(self, everything: bool) -> list[int]:
        """The storages whose bytes the workers may not have; they are taken to be sent."""
        self._versions = [version_of(tensor) for tensor in self._tensors]
        # By their bytes: a write by `.data`, or by NumPy to memory that a tensor shares, moves no version.
        before, self._sums = self._sums, self._sums_now()
        changed = {number for number, value in self._sums.items() if value != before.get(number)}
        return list(range(len(self.storages))) if everything else sorted(self._always | changed)

    def _sums_now(self) -> dict[int, int]:
        """A checksum of each storage that is not sent each time: one reading of large frozen weights."""
        found: dict[int, int] = {}
        large = [number for number in range(len(self.storages)) if number not in self._always]
        for device in {self.storages[number].device for number in large}:
            numbers = [number for number in large if self.storages[number].device == device]
            sums = quick_sums([[bytes_of(self.storages[number])] for number in numbers], device)
            found |= dict(zip(numbers, sums.tolist(), strict=True))
        return found

    def is_suspect(self, is_new: bool) -> bool:
        """Whether the workers' results are to be compared now, beside at the usual intervals."""
        # Not each time: a module whose code refers to a counter, say, is sent before every forward.
        is_tried = is_new and (self.num_sent <= CHECKED or self.num_sent % CHECKED_EVERY == 0)
        return is_tried or self._is_volatile or self.records.are_called()

    def written(self) -> Iterator[Change]:
        """What a chunk has changed of all that its code refers to."""
        for tensor, form, before in zip(self._tensors, self._forms, self._versions, strict=True):
            # Parameters have a check of their own, `Replicas.check_unwritten`.
            if not form.requires_grad and version_of(tensor) != before:
                yield f"a tensor of shape {list(form.shape)}", None
        yield from self.records.changes()


class Copy:
    """A module in a worker."""

    def __init__(
        self,
        content: Content,
        storages: list[torch.UntypedStorage],
        device: torch.device,
        mark: Callable[[Tensor, int], Tensor],
    ) -> None:
        self._storages = storages
        tensors = [self._tensor(form) for form in content.forms]
        for tensor, form in zip(tensors, content.forms, strict=True):
            if form.mark is not None:
                mark(tensor, form.mark)
        unpickler = Unpickler(content.data, [*tensors, device])
        self.module: nn.Module
        self.module, placed, modules = unpickler.load()
        # The same unpickler, whose memo has the classes that the module's part has made.
        self.classes: list[type] = unpickler.load()
        put_in_place(placed, modules)
        # Pickled once more, to nowhere: that notes what the worker's own objects hold, to which `put_back` returns.
        noting = ModulePickler(_Nowhere(), self.module, is_root=False)
        noting.dump(self.module)
        self.records = noting.records

    def put_back(self) -> None:
        """Undoes what a chunk has changed; the driver tells what cannot be undone."""
        for _, put_back in self.records.changes():
            if put_back is not None:
                put_back()

    def _tensor(self, form: Form) -> Tensor:
        storage = self._storages[form.storage]
        tensor = torch.empty(0, dtype=form.dtype, device=storage.device)
        # Tensors that share memory in the driver do so here: a write to one of them shows in the others, as there.
        tensor.set_(storage, form.offset, form.shape, form.stride)
        if form.kind == "parameter":
            return nn.Parameter(tensor, form.requires_grad)
        return nn.Buffer(tensor) if form.kind == "buffer" else tensor.requires_grad_(form.requires_grad)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes  # a large array's data is a `PickleBuffer`


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a tensor of whole words, or else of bytes, which shares its memory."""
    dtype = torch.uint8 if storage.nbytes() % torch.int64.itemsize else torch.int64
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


class _Same:
    """An object that equals itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        # Of tuples `==` would ask the values themselves: an array has no truth value, and equal objects may be two.
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _root_of(module: nn.Module, is_root: bool) -> tuple[Any, ...]:
    """The class and the attributes of a module, but for hooks that stay in the driver; without a reference to it."""
    kept = HOOKS if is_root else ()
    return (type(module), *((key, _Same(value)) for key, value in vars(module).items() if key not in kept))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    storage = id(tensor.untyped_storage())  # one object as long as the storage lives
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.requires_grad, storage


def _form(tensor: Tensor, storage: int) -> Form:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer" if isinstance(tensor, nn.Buffer) else "tensor"
    place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return Form(kind, tensor.dtype, *place, storage, tensor.requires_grad, getattr(tensor, TAG, None))
