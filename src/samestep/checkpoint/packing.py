"""Packing: a nested state as JSON and tensors by name, without pickle, that comes back with its types and values.

A plain dict whose keys are plain strings is a JSON object; None, bool, str, list, int and finite floats are themselves.
Any other value is an object with one key that begins with "$": {"$tuple": […]}, {"$dict": [[key, value], …]},
{"$tensor": name, …}. A dict of the user's with such a key is written as "$dict", so nothing is ambiguous.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.comm.buckets import dense_strides, fills_memory, packed_strides
from samestep.data.checksums import lacks_bytes
from samestep.engine.sharded_state import LocalShard, Sharding
from samestep.errors import CheckpointError, SamestepError, UsageError
from samestep.files import MAX_LEVELS, is_nested_beyond

METADATA = "__metadata__"  # the one name that a safetensors file keeps for itself
DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
}
"""The dtypes that every reader of safetensors knows."""
MAX_NESTING = MAX_LEVELS // 2
"""Levels of lists and objects within each other that a state may have as JSON; a file around it may have twice that."""
UNREADABLE = "the packed state cannot be read: its facts and tensors do not fit together"
# By which a dtype that files do not know is stored bit for bit.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_INT_BITS = 4096  # below the number of digits that Python reads from a text
_READABLE = 200  # characters of an error's text
# Counter: in MultiStepLR; OrderedDict: `state_dict` of a module. The rest of torch's own state is JSON.
_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered_dict", Counter: "$counter"}
_DICT_OF: dict[str, Callable[[], Any]] = {tag: kind for kind, tag in _DICTS.items()}


@dataclass(frozen=True)
class PackedState:
    """A nested state in two parts.

    Attributes:
        tensors: by name, such as "optimizer.0.state.3.exp_avg"; on their devices, sharing the state's memory: copy them
            before the next step. A local shard of a tensor stays one.
        facts: JSON (dicts, lists, str, int, finite float, bool, None), with {"$tensor": name, …} for a tensor.
    """

    tensors: dict[str, Any]
    facts: Any


def pack(value: Any, prefix: str) -> PackedState:
    """Takes a nested state apart.

    It may hold, nested in any way: tensors, NumPy arrays and scalars of numbers, None, bool, int, float, str; dict,
    OrderedDict, Counter, list, tuple. Of a tensor, dtype, shape and the strides of dense memory are kept; device, graph
    and shared memory are not. A local shard has the facts of the whole tensor.
    """
    packer = _Packer()
    # Of a state that contains itself, or is too deep for Python's stack; the check below is for what readers can take.
    with suppress(RecursionError):
        facts = packer.pack(value, prefix)
        if not is_nested_beyond(facts, MAX_NESTING):
            return PackedState(packer.tensors, facts)
    raise UsageError(
        f"{prefix or 'the state'} is nested too deeply for a checkpoint, or contains itself; needed: at most"
        f" {MAX_NESTING} levels of JSON's lists and objects within each other"
    )


def extra_states(model: nn.Module) -> dict[str, Any]:
    """The extra states of modules that have one, by the modules' names."""
    none = nn.Module.get_extra_state
    return {p: m.get_extra_state() for p, m in model.named_modules() if type(m).get_extra_state is not none}


def unpack(facts: Any, tensors: Mapping[str, Any]) -> Any:
    """The state that was packed; its tensors are copies in host memory, or the given local shards."""
    with as_bad_checkpoint(UNREADABLE, CheckpointError):
        return _unpack(facts, tensors)


def check_packed(facts: Any, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Raises a `CheckpointError` unless facts and tensors unpack to a state that packs to the same facts."""
    # Whatever is not in this version's form, a type in the place of another or strides that leave gaps, packs to other
    # facts than those that it was unpacked from: no rule is needed for each of them.
    with as_bad_checkpoint(UNREADABLE, CheckpointError):
        if json.dumps(_Packer().pack(_unpack(facts, tensors), prefix)) == json.dumps(facts):
            return
    raise CheckpointError("the packed state is not in the form in which this version packs it")


@contextmanager
def as_bad_checkpoint(what: str, passing: type[SamestepError] = SamestepError) -> Iterator[None]:
    """Turns errors, other than of the type `passing` and of too little memory, into a `CheckpointError` with `what`."""
    try:
        yield
    except (passing, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:_READABLE]}"
        if isinstance(error, (AttributeError, LookupError, TypeError)):  # Python's words for content of another form
            text = "something in it is missing, or of another kind"
        raise CheckpointError(f"{what} ({text})") from error


class _Packer:
    """Packs one state, and collects its tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}

    def pack(self, value: Any, path: str) -> Any:
        """The JSON of a value at the place `path` of the state."""
        # Its type itself: an object of a subclass would come back as one of the class.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if isinstance(value, Tensor | LocalShard):
            return self._tensor(value, path)
        if kind is np.ndarray or isinstance(value, np.generic):
            tag = "$array" if kind is np.ndarray else "$scalar"
            return {tag: self._tensor(_array_as_tensor(value, path), path)}
        if kind is float:
            return value if isfinite(value) else {"$float": repr(value)}
        if kind is str and _is_text(value):
            return value
        if kind is int and value.bit_length() <= _MAX_INT_BITS:
            return value
        if kind is list or kind is tuple:
            entries = [self.pack(entry, _below(path, index)) for index, entry in enumerate(value)]
            return entries if kind is list else {"$tuple": entries}
        if kind is dict and all(type(key) is str and _is_text(key) and not key.startswith("$") for key in value):
            return {key: self.pack(entry, _below(path, key)) for key, entry in value.items()}
        if kind in _DICTS:
            packed = {_DICTS[kind]: [[self._key(k, path), self.pack(v, _below(path, k))] for k, v in value.items()]}
            # Of nn.Module.state_dict: the versions of modules.
            if "_metadata" in getattr(value, "__dict__", ()):
                packed["metadata"] = self.pack(value._metadata, _below(path, "_metadata"))
            return packed
        raise _refused(value, path)

    def _key(self, key: Any, path: str) -> Any:
        """The JSON of a dict's key, which must be equal to its copy: a tensor is not."""
        if isinstance(key, Tensor | np.generic):
            raise _refused(key, f"{path or 'the state'} (as a key)")
        return self.pack(key, f"{path or 'the state'} (as a key)")

    def _tensor(self, value: Tensor | LocalShard, path: str) -> dict[str, Any]:
        held = value.local if isinstance(value, LocalShard) else value
        if type(held) not in (Tensor, nn.Parameter) or lacks_bytes(held):
            raise _refused(held, path)
        entry: dict[str, Any] = {}
        if held.dtype not in DTYPES:
            entry["dtype"] = str(held.dtype).removeprefix("torch.")
        # Only strides of dense memory are recorded: a view with gaps or overlaps comes back packed, in memory of its
        # own.
        if packed_strides(held.shape) != held.stride() == dense_strides(held):
            entry["stride"] = list(held.stride())
        plain = _as_stored(held.detach().resolve_conj().resolve_neg())
        stored: Tensor | LocalShard = plain
        if isinstance(value, LocalShard):
            sharding = value.sharding
            if plain.ndim > held.ndim:  # complex numbers as pairs
                sharding = Sharding(torch.Size([*value.shape, 2]), tuple(2 * cut for cut in sharding.cuts))
            stored = LocalShard(plain, sharding)
        return {"$tensor": self._store(stored, path), **entry}

    def _store(self, tensor: Tensor | LocalShard, path: str) -> str:
        """Stores a tensor under the name of its place, or a free one like it."""
        # A key may have a dot in it: two places may have one path.
        stem = path.encode("utf-8", "backslashreplace").decode() or "value"
        name, number = stem, 2
        while name in self.tensors or name == METADATA:
            name = f"{stem}#{number}"
            number += 1
        self.tensors[name] = tensor
        return name


def _unpack(facts: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(facts, list):
        return [_unpack(entry, tensors) for entry in facts]
    if not isinstance(facts, dict):
        return facts
    tag = next(iter(facts), "")
    if not tag.startswith("$"):
        return {key: _unpack(entry, tensors) for key, entry in facts.items()}
    content = facts[tag]
    if tag == "$tuple":
        return tuple(_unpack(entry, tensors) for entry in content)
    if tag == "$float":
        return float(content)
    if tag in ("$array", "$scalar"):
        array = _unpack(content, tensors).numpy()
        return array if tag == "$array" else array[()]
    if tag == "$tensor":
        stored = tensors[content]
        if isinstance(stored, LocalShard):
            return LocalShard(_restored(stored.local, facts.get("dtype"), None), stored.sharding)
        return _restored(stored, facts.get("dtype"), facts.get("stride"))
    if tag not in _DICT_OF:
        raise CheckpointError(f"the packed state holds {tag!r}, which a newer samestep wrote: upgrade")
    table = _DICT_OF[tag]()
    for key, entry in content:
        table[_unpack(key, tensors)] = _unpack(entry, tensors)
    if "metadata" in facts:
        table._metadata = _unpack(facts["metadata"], tensors)
    return table


def _as_stored(tensor: Tensor) -> Tensor:
    """A view with one of `DTYPES`: complex numbers as pairs, the rest as integers."""
    if tensor.dtype in DTYPES:
        return tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(_INTEGERS[tensor.itemsize])


def _restored(stored: Tensor, dtype_name: str | None, stride: list[int] | None) -> Tensor:
    """A copy in host memory of its own, with the recorded dtype and strides."""
    dtype = stored.dtype if dtype_name is None else vars(torch).get(dtype_name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype_name} is no dtype")
    shape = stored.shape[:-1] if dtype.is_complex and not stored.is_complex() else stored.shape
    strides = packed_strides(shape) if stride is None else stride
    if not fills_memory(shape, strides):
        raise ValueError(f"strides {stride} leave gaps")
    made = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    memory = _as_stored(made)
    if memory.dtype != stored.dtype:
        raise TypeError(f"{dtype_name} is not kept as {stored.dtype}")
    memory.copy_(stored.detach())
    return made


def _array_as_tensor(value: Any, path: str) -> Tensor:
    """A copy of a NumPy array or scalar as a tensor, of a dtype that both libraries have."""
    with suppress(TypeError, ValueError):
        return torch.from_numpy(np.array(value, order="C"))
    raise UsageError(
        f"the state holds NumPy data of dtype {value.dtype} at {path or 'its top'}, which a checkpoint cannot hold;"
        " needed: bool, integer, floating or complex numbers in the machine's byte order; keep texts as lists"
    )


def _refused(value: Any, path: str) -> UsageError:
    kind, place = type(value), path or "its top"
    name = kind.__name__ if kind.__module__ in ("builtins", "torch") else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Tensor):
        what = "meta" if value.is_meta else "quantized" if value.is_quantized else str(value.layout)
        return UsageError(
            f"the state holds a {name} ({what}) at {place}, which a checkpoint cannot hold; needed: a plain dense"
            " tensor: change it with .to_dense(), .dequantize() or .as_subclass(torch.Tensor)"
        )
    if kind is str or kind is int:
        return UsageError(f"the state holds a {name} at {place} that JSON cannot hold: half a character, or too large")
    return UsageError(
        f"the state holds a {name} at {place}, which a checkpoint cannot hold; needed: tensors, NumPy arrays of"
        " numbers, numbers, strings and None in dicts, lists and tuples: have its state_dict() return those (a sorted"
        " list for a set, a list for a deque), or leave it out"
    )


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_text(value: str) -> bool:
    """Whether JSON keeps a string as it is: lone surrogates can fuse into pairs."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
