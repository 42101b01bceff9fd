"""Packing: a nested state as named tensors and JSON, without pickle, that comes back with its exact types and values.

A plain dict whose keys are plain strings is a JSON object; None, bool, str, list and ordinary numbers are themselves.
All else is an object with one key that begins with "$": {"$tuple": […]}, {"$dict": [[key, value], …]},
{"$tensor": name, …}. A dict of the user's with such a key is written as "$dict", so nothing is ambiguous.
"""

import base64
import json
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.comm.pieces import Piece, Spread
from samestep.errors import CheckpointError, SamestepError, UsageError
from samestep.train.reading import MAX_NESTING, is_nested_beyond
from samestep.train.tensorfile import DTYPE_NAMES, METADATA

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORIES: dict[str, Callable[[], Any]] = {f.__name__: f for f in (bool, int, float, complex, str, bytes)}
_FACTORIES |= {f.__name__: f for f in (list, tuple, dict, set, OrderedDict, Counter, deque)}
_ARRAY_KINDS = "biufcSUMmV"
UNREADABLE = "the packed state cannot be read: its facts and tensors do not fit together"
_READABLE = 200  # characters of an error's text


@dataclass(frozen=True)
class Packed:
    """A nested state in two parts.

    Attributes:
        tensors: by name, such as "optimizer.0.state.3.exp_avg"; on their devices and sharing the state's memory, so
            they change as it does: copy them before the next step. A piece of a spread tensor stays one.
        facts: JSON (dicts, lists, str, int, finite float, bool, None); a tensor's place holds {"$tensor": name, …}.
    """

    tensors: dict[str, Any]
    facts: Any


def pack(value: Any, prefix: str) -> Packed:
    """Takes a nested state apart.

    It may hold, nested in any way: tensors and parameters, NumPy arrays and scalars, None, bool, int, float, complex,
    str, bytes, torch.Size, torch.dtype, torch.device; dict, OrderedDict, Counter, defaultdict (of a built-in type),
    list, tuple, set, frozenset, deque. Of a tensor, dtype, shape, the strides of dense memory and `requires_grad` are
    kept, device and graph are not; one that occurs twice, as the same memory seen the same way, is stored once. A
    `Piece` of a tensor that is spread over the ranks has the facts of the whole.

    Args:
        value: the state.
        prefix: what the tensors' names begin with, and what errors call the state.

    Raises:
        UsageError: something else is in it; the message tells where and of what type. Or it is nested too deeply.
    """
    packer = _Packer({})
    with suppress(RecursionError):
        facts = packer.pack(value, prefix)
        if not is_nested_beyond(facts, MAX_NESTING):
            return Packed(packer.tensors, facts)
    raise UsageError(
        f"{prefix or 'the state'} is nested too deeply for a checkpoint; needed: at most {MAX_NESTING} levels of JSON's"
        " lists and objects within each other"
    )


def unpack(facts: Any, tensors: Mapping[str, Any]) -> Any:
    """The state that was packed; its tensors are new ones in host memory, whatever becomes of those given.

    In the place of a tensor of which a piece is given is a piece. Facts of unknown origin do no harm.

    Raises:
        CheckpointError: facts and tensors do not fit together, or a newer version wrote them.
    """
    with as_bad_checkpoint(UNREADABLE, CheckpointError):
        return _Unpacker(tensors).unpack(facts)


def check_packed(facts: Any, tensors: Mapping[str, Tensor]) -> None:
    """Checks that facts and tensors are what `pack` gives, by packing once more what they unpack to.

    Raises:
        CheckpointError: they are not.
    """
    unpacker = _Unpacker(tensors)
    with as_bad_checkpoint(UNREADABLE, CheckpointError):
        value = unpacker.unpack(facts)
        is_same = json.dumps(_Packer(unpacker.names()).pack(value, "")) == json.dumps(facts)
    if not is_same:
        raise CheckpointError("the packed state is not in the form in which this version packs it")


@contextmanager
def as_bad_checkpoint(what: str, passing: type[SamestepError] = SamestepError) -> Iterator[None]:
    """Turns the errors of code that meets malformed content, whatever they are, into one of the checkpoint.

    Args:
        what: a sentence, for the message.
        passing: errors that are raised as they are, as is a want of memory.

    Raises:
        CheckpointError: something else was raised.
    """
    try:
        yield
    except (passing, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:_READABLE]}"
        raise CheckpointError(f"{what} ({text})") from error


class _Packer:
    """What one packing gathers: the tensors by name, and which memory has a name already."""

    def __init__(self, names: Mapping[object, str]) -> None:
        self.tensors: dict[str, Any] = {}
        self._names = dict(names)
        self._open: set[int] = set()

    def pack(self, value: Any, path: str) -> Any:
        """The JSON of a value; `path` is its place in the state."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind is Piece:
            return self._piece(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        if isinstance(value, np.generic):
            return {"$scalar": [_array_kind(value.dtype, (), path), value.tobytes().hex()]}
        if kind in _CONTAINERS:
            if id(value) in self._open:
                raise UsageError(f"{path or 'the state'} contains itself; needed: a state without cycles")
            self._open.add(id(value))
            packed = self._container(value, kind, path)
            self._open.remove(id(value))
            return packed
        if (kind is str and _is_text(value)) or (kind is int and value.bit_length() < 64):
            return value
        if kind is float and abs(value) < float("inf"):
            return value
        if kind in _ATOMS:
            tag, encode, _ = _ATOMS[kind]
            return {tag: encode(value)}
        raise _unknown(value, path)

    def _container(self, value: Any, kind: type, path: str) -> Any:
        if kind is dict:
            if all(type(key) is str and _is_text(key) and not key.startswith("$") for key in value):
                return {key: self.pack(entry, _below(path, key)) for key, entry in value.items()}
            return {"$dict": self._pairs(value, path)}
        if kind is list:
            return self._entries(value, path)
        if kind is set or kind is frozenset:
            return {_CONTAINERS[kind]: sorted((self._key(entry, path) for entry in value), key=json.dumps)}
        if kind is deque:
            return {"$deque": self._entries(value, path), "maxlen": value.maxlen}
        if kind is OrderedDict and "_metadata" in vars(value):  # nn.Module.state_dict: the versions of modules
            metadata = self.pack(vars(value)["_metadata"], _below(path, "_metadata"))
            return {"$ordered_dict": self._pairs(value, path), "metadata": metadata}
        if kind is defaultdict:
            return {"$default_dict": self._pairs(value, path), "factory": _factory_name(value, path)}
        entries = self._entries(value, path) if kind is tuple else self._pairs(value, path)
        return {_CONTAINERS[kind]: entries}

    def _entries(self, value: Iterable[Any], path: str) -> list[Any]:
        return [self.pack(entry, _below(path, index)) for index, entry in enumerate(value)]

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[list[Any]]:
        return [[self._key(key, path), self.pack(entry, _below(path, key))] for key, entry in value.items()]

    def _key(self, key: Any, path: str) -> Any:
        """A key of a dict or an element of a set: a value that is equal to its copy, which no tensor is."""
        if isinstance(key, Tensor):
            raise _unknown(key, f"{path or 'the state'} (as a key)")
        return self.pack(key, f"{path or 'the state'} (as a key)")

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        plain = type(value) is Tensor or type(value) is nn.Parameter
        if not plain or value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise _unknown(value, path)
        memory = _identity(value)
        if memory not in self._names:
            name = self._free_name(path)
            self.tensors[name] = _as_stored(value.detach().resolve_conj().resolve_neg())
            self._names[memory] = name
        entry: dict[str, Any] = {"$tensor": self._names[memory]}
        if value.dtype not in DTYPE_NAMES:
            entry["dtype"] = _dtype_name(value.dtype)
        if value.stride() != _row_major(value.shape) and is_dense(value):
            entry["stride"] = list(value.stride())
        if type(value) is nn.Parameter:
            entry["parameter"] = True
        if value.requires_grad:
            entry["requires_grad"] = True
        return entry

    def _piece(self, value: Piece, path: str) -> dict[str, Any]:
        entry = self._tensor(value.local, path)
        stored = self.tensors[entry["$tensor"]]
        if isinstance(stored, Tensor):
            spread = value.spread
            if stored.ndim > value.local.ndim:  # complex numbers as pairs
                spread = Spread(torch.Size([*spread.shape, 2]), tuple(2 * cut for cut in spread.cuts), spread.blocks)
            self.tensors[entry["$tensor"]] = Piece(stored, spread)
        return entry

    def _array(self, value: np.ndarray[Any, Any], path: str) -> dict[str, Any]:
        kind = _array_kind(value.dtype, value.shape, path)
        name = self._names.get(_identity_of_array(value)) or self._free_name(path)
        self.tensors[name] = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), np.uint8))
        entry = {"$array": name, "dtype": kind, "shape": list(value.shape)}
        if value.flags.f_contiguous and not value.flags.c_contiguous:
            entry["order"] = "F"
        return entry

    def _free_name(self, path: str) -> str:
        stem = path.encode("utf-8", "backslashreplace").decode() or "value"
        name, number = stem, 2
        while name in self.tensors or name == METADATA:
            name = f"{stem}#{number}"
            number += 1
        return name


class _Unpacker:
    """What one unpacking remembers: the memory and the tensors that it made, by name."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._memory: dict[str, Tensor] = {}
        self._made: dict[tuple[str, bool, bool], Tensor] = {}
        self._arrays: list[tuple[np.ndarray[Any, Any], str]] = []

    def names(self) -> dict[object, str]:
        """The names of what was made, for packing it again."""
        of_arrays = {_identity_of_array(array): name for array, name in self._arrays}
        return of_arrays | {_identity(tensor): name for (name, *_), tensor in self._made.items()}

    def unpack(self, facts: Any) -> Any:
        """The value of a piece of JSON."""
        if isinstance(facts, list):
            return [self.unpack(entry) for entry in facts]
        if not isinstance(facts, dict):
            return facts
        tag = next(iter(facts), "")
        if not tag.startswith("$"):
            return {key: self.unpack(entry) for key, entry in facts.items()}
        content = facts[tag]
        if tag == "$tensor":
            return self._tensor(facts)
        if tag == "$array":
            data = self._tensors[content].detach().cpu().numpy().tobytes()
            array = _array(data, facts["dtype"], facts["shape"]).copy(order=facts.get("order", "C"))
            self._arrays.append((array, content))
            return array
        if tag == "$scalar":
            kind, digits = content
            return _array(bytes.fromhex(digits), kind, ())[()]
        if tag in _DECODERS:
            return _DECODERS[tag](content)
        return self._container(tag, content, facts)

    def _container(self, tag: str, content: Any, facts: dict[str, Any]) -> Any:
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.unpack(entry) for entry in content)
        if tag == "$deque":
            return deque((self.unpack(entry) for entry in content), facts["maxlen"])
        if tag not in _TABLES:
            raise CheckpointError(
                f"the packed state holds {tag!r}, which this version does not know; a newer samestep wrote it: upgrade"
            )
        pairs = ((self.unpack(key), self.unpack(entry)) for key, entry in content)
        if tag == "$default_dict":
            factory = facts["factory"]
            return defaultdict(None if factory is None else _FACTORIES[factory], pairs)
        table = _TABLES[tag]()
        for key, entry in pairs:
            table[key] = entry
        if "metadata" in facts:
            table._metadata = self.unpack(facts["metadata"])
        return table

    def _tensor(self, facts: dict[str, Any]) -> Any:
        stored = self._tensors[facts["$tensor"]]
        if isinstance(stored, Piece):
            return Piece(_restored(stored.local, facts.get("dtype"), None), stored.spread)
        name, parameter, requires_grad = (
            facts["$tensor"],
            facts.get("parameter", False),
            facts.get("requires_grad", False),
        )
        if name not in self._memory:
            self._memory[name] = _restored(stored, facts.get("dtype"), facts.get("stride"))
        key = (name, parameter, requires_grad)
        if key not in self._made:
            memory = self._memory[name].detach()
            made = nn.Parameter(memory, requires_grad) if parameter else memory.requires_grad_(requires_grad)
            self._made[key] = made
        return self._made[key]


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps or overlaps, in whatever order of dims."""
    return _fills(tensor.shape, tensor.stride())


def _fills(shape: torch.Size, strides: Sequence[int]) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected and shape.numel():
            return False
        expected *= size
    return True


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _identity(value: Tensor) -> object:
    """Equal for two tensors that are the same memory seen the same way; they are alive together."""
    if value.numel() == 0:
        return id(value)
    place = (value.device, value.untyped_storage().data_ptr(), value.storage_offset(), value.is_conj(), value.is_neg())
    return (*place, value.dtype, value.shape, value.stride())


def _as_stored(tensor: Tensor) -> Tensor:
    """A view of a dtype that every reader of safetensors knows: complex numbers as pairs, the rest as integers."""
    if tensor.dtype in DTYPE_NAMES:
        return tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(_INTEGERS[tensor.itemsize])


def _restored(stored: Tensor, dtype_name: str | None, stride: list[int] | None) -> Tensor:
    """A copy in host memory of its own, with the dtype and strides that were."""
    dtype = stored.dtype if dtype_name is None else _dtype(dtype_name)
    shape = stored.shape[:-1] if dtype.is_complex and not stored.is_complex() else stored.shape
    if stride is None:
        made = torch.empty(shape, dtype=dtype, device="cpu")
    elif _fills(shape, stride):
        made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    else:
        raise ValueError(f"strides {stride} leave gaps")
    memory = _as_stored(made)
    if memory.dtype != stored.dtype:
        raise TypeError(f"{dtype_name} is not kept as {stored.dtype}")
    memory.copy_(stored.detach())
    return made


def _array_kind(dtype: np.dtype[Any], shape: Sequence[int], path: str) -> str:
    """NumPy's own short name of a dtype, such as "<f8"; by a size of 0 bytes NumPy would divide those of an array."""
    if dtype.kind not in _ARRAY_KINDS or np.dtype(dtype.str) != dtype or (shape and not dtype.itemsize):
        raise UsageError(
            f"the state holds NumPy data of dtype {dtype} at {path or 'its top'}, which a checkpoint cannot hold;"
            " needed: numbers, strings, dates or plain bytes"
        )
    return dtype.str


def _array(data: bytes, kind: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """An array of these bytes, of a dtype in which they are no pointers."""
    dtype = np.dtype(kind)
    is_truth = dtype.kind != "b" or not data.translate(None, b"\0\1")
    if _array_kind(dtype, shape, "") != kind or not is_truth:
        raise ValueError(f"these bytes are no {kind}")
    return np.ndarray(shape, dtype, bytearray(data))


def _identity_of_array(value: np.ndarray[Any, Any]) -> object:
    """Equal for the same object only: of arrays each is stored."""
    return "array", id(value)


def _factory_name(value: defaultdict[Any, Any], path: str) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise UsageError(
            f"the state holds a defaultdict of {factory!r} at {path or 'its top'}, and code cannot be kept in a"
            " checkpoint; needed: a defaultdict of a built-in type such as int or list, or a plain dict"
        )
    return name


def _unknown(value: Any, path: str) -> UsageError:
    kind = type(value)
    name = kind.__name__ if kind.__module__ in ("builtins", "torch") else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Tensor):
        what = "meta" if value.is_meta else "quantized" if value.is_quantized else str(value.layout)
        return UsageError(
            f"the state holds a {name} ({what}) at {path or 'its top'}, which a checkpoint cannot hold; needed: a plain"
            " dense tensor: change it with .to_dense(), .dequantize() or .as_subclass(torch.Tensor)"
        )
    return UsageError(
        f"the state holds a {name} at {path or 'its top'}, which a checkpoint cannot hold; needed: tensors, NumPy"
        " arrays, numbers, strings, bytes and None in dicts, lists, tuples and sets: have its state_dict() return"
        " those, or leave it out"
    )


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_text(value: str) -> bool:
    """Whether JSON gives a string back as it was: lone surrogates can fuse into pairs."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _surrogates_to_hex(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").hex()


def _surrogates_from_hex(digits: str) -> str:
    return bytes.fromhex(digits).decode("utf-8", "surrogatepass")


def _bits(*numbers: float) -> str:
    return struct.pack(f">{len(numbers)}d", *numbers).hex()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype


_ATOMS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    str: ("$str", _surrogates_to_hex, _surrogates_from_hex),
    bytes: ("$bytes", lambda v: base64.b64encode(v).decode(), lambda s: base64.b64decode(s, validate=True)),
    int: ("$int", hex, lambda s: int(s, 16)),
    float: ("$float", _bits, lambda s: struct.unpack(">d", bytes.fromhex(s))[0]),
    complex: ("$complex", lambda v: _bits(v.real, v.imag), lambda s: complex(*struct.unpack(">2d", bytes.fromhex(s)))),
    torch.Size: ("$size", list, torch.Size),
    torch.dtype: ("$dtype", _dtype_name, _dtype),
    torch.device: ("$device", str, torch.device),
}
_DECODERS = {tag: decode for tag, _, decode in _ATOMS.values()}
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_TABLES: dict[str, Callable[[], Any]] = {
    "$dict": dict,
    "$ordered_dict": OrderedDict,
    "$counter": Counter,
    "$default_dict": defaultdict,
}
_CONTAINERS: dict[type, str] = {
    dict: "$dict",
    OrderedDict: "$ordered_dict",
    Counter: "$counter",
    defaultdict: "$default_dict",
    list: "",
    tuple: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
    deque: "$deque",
}
