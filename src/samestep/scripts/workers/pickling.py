"""Pickles of a module: the script's own code by value, and what that code refers to.

What cloudpickle takes along of a function is the globals that it names; here too the script's modules by the
attributes that any code sent names, the functions that the script has put into libraries, and caches.

One pass over all objects does three things: it writes them, numbers the tensors, and notes in `Records` what can change
(`ModulePickler`). The code that it meets names attributes of modules, whose values may be code again, so `pickled`
repeats the pass until no name is new. A worker's answers go the other way by numbers of the classes that it was sent
(`_AnswerPickler`): its copies of them must not reach the script.
"""

import builtins
import copyreg
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module  # which holds the hooks on all modules

from samestep.callsite import is_own_file, is_script_file
from samestep.comm.exceptions import packed, unpacked
from samestep.data.nested import attributes_of, empty, fill, made_tuple
from samestep.errors import UsageError
from samestep.scripts.simulated.devices import COMPILED
from samestep.scripts.split_forward.compare import HOOKS
from samestep.scripts.workers.records import CachedFunction, Records, is_noted, loaded, named, was_cleared

ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.Size, CodeType})
LOOKS_UP_ANY = frozenset({"globals", "vars", "eval", "exec"})  # code that calls these may use any global
VOLATILE = frozenset(
    {
        *(
            "id",
            "hash",
            "getpid",
            "get_ident",
            "current_thread",
            "urandom",
            "uuid1",
            "uuid4",
            "token_bytes",
            "randbits",
        ),
        *("time", "time_ns", "perf_counter", "monotonic", "now", "today"),
        *("open", "Path", "stat", "exists", "listdir", "read_text", "read_bytes"),
    }
)
"""What code may see other values by in a worker: forwards of it are compared each time."""
PLAIN = (int, float, str, bool)
# Each pass finds names at one more remove from the module; what a worker then lacks shows when bits are compared.
MOST_PASSES = 8
OWN_DEVICE = -1  # stands for a process's own device, which comes last of its numbered objects


class Unsent:
    """Stands in a worker for an object that cannot be sent."""

    _what: str

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            f"a forward that several devices compute uses {self._what}, which cannot be sent to a worker: use it "
            "outside of the module, pass the forward what it needs of it, or give --devices cpu:1"
        )

    def __getattr__(self, name: str) -> Any:
        # pickle, copy and inspect ask any object for such names.
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __call__ = __setattr__ = __delattr__ = __iter__ = __next__ = __reversed__ = __len__ = __bool__ = _refuse
    __enter__ = __exit__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = _refuse
    __float__ = __int__ = __index__ = __round__ = __neg__ = __pos__ = __abs__ = __invert__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse

    def __reduce__(self) -> Any:
        return Unsent, (self._what,)


class ModulePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a module, and notes what it meets: tensors, which travel apart, and all that can change."""

    def __init__(
        self,
        file: Any,
        root: nn.Module,
        is_root: bool,
        names: frozenset[str] = frozenset(),
        device: torch.device | None = None,
    ) -> None:
        super().__init__(file, protocol=5)
        self.records = Records()
        self.tensors: list[Tensor] = []
        self.classes: list[type] = []  # sent by value
        self.found: set[str] = set()  # names that the code looks up
        self.libraries: dict[str, ModuleType] = {}  # that it refers to
        self._root, self._is_root = root, is_root
        self._device = device  # this process's
        self._names = names  # the attributes of the script's modules that are sent
        self._numbers: dict[int, int] = {}
        self._met: dict[int, Any] = {}  # kept, since ids are of living objects

    def persistent_id(self, entry: Any) -> int | None:
        kind = type(entry)
        if kind in ATOMS:
            return None
        if kind is torch.device:
            return OWN_DEVICE if entry == self._device else None
        if kind in (Tensor, nn.Parameter, nn.Buffer):
            number = self._numbers.setdefault(id(entry), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(entry)
            return number
        if id(entry) not in self._met:
            self._met[id(entry)] = entry
            if isinstance(entry, WeakKeyDictionary | WeakValueDictionary):
                self.records.note_weak(entry)
            elif is_noted(entry):
                self.records.note(entry, entry is self._root)
        return None

    def reducer_override(self, entry: Any) -> Any:
        kind = type(entry)
        # By name: the class is in torch._dynamo, which may not be imported.
        if kind.__name__ == "OptimizedModule":
            return _compiled, (entry._orig_mod, vars(entry).get(COMPILED, {}))
        if kind is FunctionType:
            if COMPILED in vars(entry):
                return _compiled, (vars(entry)["_torchdynamo_orig_callable"], vars(entry)[COMPILED])
            return self._function(entry)
        if isinstance(entry, type):
            if _is_by_value(entry):
                self.classes.append(entry)
                self.records.note_class(entry)
            return super().reducer_override(entry)
        if kind is ModuleType and is_script_module(entry):
            names = (name for name in self._names if not name.startswith("__"))
            return ModuleType, (entry.__name__,), dict(self.records.note_names(vars(entry), names))
        if kind is CachedFunction and _is_by_value(entry.__wrapped__):
            self.records.caches[entry] = entry.cache_info()
            return _cached, (_generation(entry), entry.__wrapped__, entry.cache_parameters())
        # Weak references do not pickle.
        if kind in (WeakKeyDictionary, WeakValueDictionary):
            return kind, (dict(entry),)
        if isinstance(entry, torch._C.Generator):  # seeded for each chunk; the tensor of its state would come too late
            return torch._C.Generator, (vars(torch._C.Generator)["device"].__get__(entry),)
        if isinstance(entry, nn.Module):
            if COMPILED in getattr(entry._compiled_call_impl, "__dict__", {}):
                return self._compiled_in_place(entry)
            state = {key: value for key, value in vars(entry).items() if key != "_compiled_call_impl"}
            if entry is self._root and self._is_root:  # its hooks see the whole batch, in the driver
                state.update((name, OrderedDict()) for name in HOOKS)
            if "parametrizations" in entry._modules or (entry is self._root and not _has_own_state(kind)):
                return _empty, (kind,), state  # parametrized modules refuse to be pickled
        if (made := _container(entry)) is not None:
            return made
        reduce = self.dispatch_table.get(kind)
        try:
            return reduce(entry) if reduce is not None else entry.__reduce_ex__(5)
        except Exception:  # a lock, a file, a generator; or whatever a method of the script's raises
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            return Unsent, (f"a {name}",)

    def _compiled_in_place(self, module: nn.Module) -> Any:
        # Compiled in place (`module.compile()`): sent as the plain module, and compiled there by the same options.
        compiled, module._compiled_call_impl = module._compiled_call_impl, None
        try:
            reduced = self.reducer_override(module)
        finally:
            module._compiled_call_impl = compiled
        make, args, *state = reduced
        return (make, args, (state[0], vars(compiled)[COMPILED]), None, None, _compile) if state else reduced

    def _function(self, function: FunctionType) -> Any:
        reduced = super().reducer_override(function)
        if not _is_by_value(function):
            return reduced
        names = named(function.__code__)
        self.found |= names
        looks_up_any = bool(names & LOOKS_UP_ANY)
        used = self.records.note_function(function, function.__globals__ if looks_up_any else loaded(function.__code__))
        for name, value in used:
            if type(value) is ModuleType and not is_script_module(value):
                self.libraries[value.__name__] = value
            elif not name.startswith("__"):
                reduced[2][1]["__globals__"][name] = value
        return reduced


def pickled(module: nn.Module, is_root: bool, device: torch.device) -> tuple[bytes, ModulePickler]:
    """A module with all that its code refers to, for `Unpickler`, and the pickler with what it has noted."""
    for name, own in list(sys.modules.items()):
        # Each time: the script may have imported more. `__main__` goes by value in any case.
        if name != "__main__" and type(own) is ModuleType and own.__name__ == name and is_script_module(own):
            cloudpickle.register_pickle_by_value(own)
    names, libraries = frozenset[str](), dict[str, ModuleType]()
    for _ in range(MOST_PASSES):  # what is sent names more that is to be sent
        file = io.BytesIO()
        pickler = ModulePickler(file, module, is_root, names, device)
        hooks = [(torch_module.__name__, name, each) for name, each in vars(torch_module).items() if "_global_" in name]
        placed = [*_library_values(libraries.values(), names, pickler.records), *_in_libraries(module), *hooks]
        pickler.dump((module, placed, _own_modules(names)))
        pickler.dump(pickler.classes)
        if pickler.found <= names and pickler.libraries.keys() <= libraries.keys():
            break
        names, libraries = names | pickler.found, {**libraries, **pickler.libraries}
    # Of a library's class too a method may be replaced at any time.
    for kind in _library_classes(module):
        pickler.records.note_names(vars(kind), {"forward", *pickler.found})
    return file.getvalue(), pickler


class Unpickler(pickle.Unpickler):
    """Reads what `ModulePickler` or `pickled_answer` has written, with these tensors or classes by their numbers."""

    def __init__(self, data: bytes, numbered: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._numbered = numbered

    def persistent_load(self, number: Any) -> Any:
        return self._numbered[number]


class _AnswerPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Classes that the driver has sent are named by their numbers: its own are meant."""

    def __init__(self, file: Any, classes: Sequence[type]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = {each: number for number, each in enumerate(classes)}

    def persistent_id(self, entry: Any) -> int | None:
        return self._numbers.get(entry) if isinstance(entry, type) else None

    def reducer_override(self, entry: Any) -> Any:
        return super().reducer_override(entry) if (made := _container(entry)) is None else made


def _container(entry: Any) -> Any:
    """How a tuple, list or dict of a class of its own is made again: by no method of that, which may check entries."""
    kind = type(entry)
    if not isinstance(entry, tuple | list | dict) or _has_own_state(kind) or vars(copyreg)["_slotnames"](kind):
        return None
    attributes = attributes_of(entry)
    if isinstance(entry, tuple):
        return made_tuple, (kind, tuple(entry), attributes)
    content = list(entry) if isinstance(entry, list) else dict(dict.items(entry))
    return empty, (kind,), (attributes, content), None, None, fill


def pickled_answer(value: Any, classes: Sequence[type]) -> bytes:
    """A value with instances of the script's classes, for `Unpickler` with the driver's classes."""
    file = io.BytesIO()
    _AnswerPickler(file, classes).dump(value)
    return file.getvalue()


def packed_error(error: BaseException, classes: Sequence[type]) -> tuple[bytes, bytes]:
    """An error for `unpacked_error`, and by its class if that is the script's, which has no name elsewhere."""
    own = b""
    if type(error) in classes or _is_by_value(type(error)):  # the latter of an argument
        with suppress(Exception):  # an attribute that does not pickle
            own = pickled_answer((type(error), error.args, vars(error), str(error)), classes)
    return packed(error), own


def unpacked_error(sent: tuple[bytes, bytes], classes: Sequence[type]) -> BaseException:
    """A worker's error, of the driver's class, if that makes the same text of it."""
    error = unpacked(sent[0])
    with suppress(Exception):  # a method of the script's may raise anything
        kind, args, attributes, text = Unpickler(sent[1], classes).load()
        made: BaseException = kind.__new__(kind, *args)  # `__init__` may take other arguments than it keeps
        made.args, made.__cause__ = args, error.__cause__
        vars(made).update(attributes)
        if str(made) == text:
            return made
    return error


def raise_again(error: BaseException) -> NoReturn:
    """Raises what a chunk has raised: from here, or the launcher would take it for an error of the driver's own."""
    raise error


def put_in_place(placed: Iterable[tuple[Any, str, Any]], modules: dict[str, ModuleType]) -> None:
    """Gives libraries what the script has given them, and the script's modules their names."""
    # By their names, for code that looks a module up there, or imports it within a function.
    sys.modules.update(modules)
    for owner, name, value in placed:
        if isinstance(owner, str):
            __import__(owner)
            owner = sys.modules[owner]
        setattr(owner, name, value)


_at_start: dict[str, dict[str, Any]] = {}


def note_libraries() -> None:
    """Notes what the modules of libraries hold before the script runs."""
    _at_start.update((name, dict(vars(each))) for name, each in list(sys.modules.items()) if type(each) is ModuleType)


def is_script_module(module: ModuleType) -> bool:
    """Whether a module is the script, or lies beside it."""
    path = getattr(module, "__file__", None)
    return module.__name__ == "__main__" or (isinstance(path, str) and is_script_file(path) and not is_own_file(path))


def _is_by_value(entry: Any) -> bool:
    return not cloudpickle.cloudpickle._should_pickle_by_reference(entry)


def _is_of_script(value: Any) -> bool:
    """Whether a value is a function that one of the script's modules defines."""
    if type(value) is not FunctionType or not is_script_file(value.__code__.co_filename):
        return False
    module = sys.modules.get(value.__module__ or "")
    return module is not None and is_script_module(module)


def _has_own_state(kind: type) -> bool:
    methods = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
    return any(name in vars(each) for each in kind.__mro__ if each not in (nn.Module, object) for name in methods)


def _own_modules(names: frozenset[str]) -> dict[str, ModuleType]:
    """The script's modules that its code may look up by name."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if type(module) is ModuleType and module.__name__ == name
        if names & {name, *name.split(".")} and is_script_module(module)
    }


def _library_values(
    libraries: Iterable[ModuleType], names: frozenset[str], records: Records
) -> Iterator[tuple[str, str, Any]]:
    """What the script may have put into libraries' modules, and its code may look up there."""
    waiting, seen = [builtins, *libraries], set[str]()
    while waiting:
        module = waiting.pop()
        if module.__name__ in seen:
            continue
        seen.add(module.__name__)
        at_start = _at_start.get(module.__name__, {})
        for name, value in records.note_names(vars(module), {name for name in names if not name.startswith("__")}):
            if type(value) is FunctionType and is_own_file(value.__code__.co_filename):
                continue  # a patch of ours, which a worker has too
            # Of names that have come since, plain values alone: others are mostly of a library that was imported late.
            if at_start.get(name, value) is not value or (name not in at_start and type(value) in PLAIN):
                yield module.__name__, name, value
            elif type(value) is ModuleType and not is_script_module(value):
                waiting.append(value)


def _in_libraries(root: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """The functions of the script's in modules of libraries, and in the classes of the module and its children."""
    for name, module in list(sys.modules.items()):
        if type(module) is ModuleType and not is_script_module(module):
            for key, value in list(vars(module).items()):
                if _is_of_script(value):
                    yield name, key, value
    for kind in _library_classes(root):
        for key, value in list(vars(kind).items()):
            if _is_of_script(value):
                yield kind, key, value


def _library_classes(root: nn.Module) -> set[type]:
    """The classes of a module and its children, with their bases, that are not the script's."""
    kinds = {kind for child in root.modules() for kind in type(child).__mro__ if kind is not object}
    homes = {kind: sys.modules.get(kind.__module__) for kind in kinds}
    return {kind for kind, home in homes.items() if home is not None and not is_script_module(home)}


def _compiled(target: Any, options: dict[str, Any]) -> Any:
    return torch.compile(target, **options)


def _compile(module: nn.Module, content: tuple[dict[str, Any], dict[str, Any]]) -> None:
    state, options = content
    module.__setstate__(state)
    module.compile(**options)


def _empty(kind: type) -> Any:
    return kind.__new__(kind)  # type: ignore[call-overload]


_generations: dict[int, tuple[int, Any]] = {}
_caches: dict[tuple[int, int], tuple[Any, list[Any]]] = {}


def _generation(cached: Any) -> tuple[int, int]:
    """The number of a cached function, and how many times its cache was seen to be cleared."""
    count, before = _generations.get(id(cached), (0, cached.cache_info()))
    _generations[id(cached)] = count + was_cleared(cached, before), cached.cache_info()
    return id(cached), _generations[id(cached)][0]


def _cached(key: tuple[int, int], function: Any, parameters: dict[str, Any]) -> Any:
    """The cached function of that number: what it holds outlives a change of what the function refers to."""
    if key not in _caches:
        target: list[Any] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            return target[0](*args, **kwargs)

        _caches[key] = lru_cache(**parameters)(wraps(function)(call)), target
    cached, target = _caches[key]
    # The cache stays, and calls the function as it is now.
    target[:] = [function]
    return cached
