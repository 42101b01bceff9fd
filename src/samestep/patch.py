"""Patches of torch, Python and other libraries, put in and taken out together.

`single_process.patched` applies these modules' patches, in this order, for the reasons that it gives; nothing else is
patched:

| module | patches |
|---|---|
| `simulated/` (without GPUs) | torch.cuda, torch.accelerator, autocast, autograd, generators, loaders, files, threads |
| `simulated/devices` (with GPUs) | counts and indices of torch.cuda and torch.accelerator; DTensor's generator |
| `data_parallel` | nn.DataParallel, nn.parallel.{data_parallel, replicate, parallel_apply} |
| `backward` | torch.autograd.backward |
| `seeding` | seeds and states of the generators of torch, NumPy and Python |
| `output` | the line that a warning names |
| `single_process` | torch.distributed: the own process group is hidden; os.environ: who asks for ranks; torch.save |
| `auto_wrap` | nn.Module.__call__, Optimizer.__init__ |

`late_dynamo` is applied with them, so that all see the same torch._dynamo, whenever it is imported.
`multi_process` and `logical` patch multiprocessing and torch.distributed, for scripts that deal with ranks themselves,
and `logical` counts torch's errors of memory; `multi_process` looks at the programs that any script starts. The
launcher patches the queues of multiprocessing in its workers, so that no batch is lost in silence. Replays, audits and
runs of `verify` patch os._exit, by `exits_raised`; a script that is recorded tells what made it before it leaves so.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

DYNAMO = "torch._dynamo"
"""800 modules, which torch imports at the first optimizer: before the fork, instead of in every worker."""

_ABSENT = object()
_ACTIVE: dict[int, tuple[Any, str, Any]] = {}  # patched attributes, and what they were before, in the order of patches


@dataclass(frozen=True)
class Patch:
    """One patched attribute: `owner.name` becomes `replacement`."""

    owner: Any  # a module or class
    name: str
    replacement: Any
    # Names of modules that hold the same object under the same name; those that are not imported are left alone.
    aliases: tuple[str, ...] = ()


@contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """Applies the patches for a block, and undoes them in reverse order."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for patch in patches:
            for owner in (patch.owner, *(sys.modules[name] for name in patch.aliases if name in sys.modules)):
                before = vars(owner).get(patch.name, _ABSENT)
                setattr(owner, patch.name, patch.replacement)
                undo.append((owner, patch.name, before))
                _ACTIVE[id(undo[-1])] = undo[-1]
        yield
    finally:
        for each in reversed(undo):
            del _ACTIVE[id(each)]
            _put(*each)


@contextmanager
def exits_raised() -> Iterator[None]:
    """Makes an exception of `os._exit`, which would end this process with the program's code, and no result."""
    own, leave = os.getpid(), os._exit

    def raise_exit(code: int) -> NoReturn:
        if os.getpid() != own:  # a child that the program forked
            leave(code)
        if threading.current_thread() is not threading.main_thread():  # an exception would end the thread alone
            leave(code or 1)
        raise SystemExit(code)

    with applied([Patch(os, "_exit", raise_exit)]):
        yield


def _put(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@contextmanager
def _set_aside() -> Iterator[None]:
    """Takes all patches out for a block, but for finders of modules, and torch's function modes."""
    import torch  # children of a script that need no torch import this module

    patched = [(owner, name, before) for owner, name, before in _ACTIVE.values() if owner is not sys]
    now = []
    for owner, name, before in reversed(patched):
        now.append((owner, name, vars(owner).get(name, _ABSENT)))
        _put(owner, name, before)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        for each in reversed(now):
            _put(*each)


PatchesOf = Callable[[ModuleType], list[Patch]]


class ImportWatch(MetaPathFinder):
    """A finder that patches some modules right after their import; its patches end when `sys.meta_path` is restored."""

    def __init__(self, table: Mapping[str, PatchesOf]) -> None:
        self._table = dict(table)
        self._patched = ExitStack()
        weakref.finalize(self, _end, self._table, self._patched)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module of the table, as the other finders give it; None for any other module."""
        spec = _found_by_others(self, name, path, target) if name in self._table else None
        if spec is not None and spec.loader is not None:
            _patch_after_import(spec.loader, name, self._table, self._patched)
        return spec


def _found_by_others(self: Any, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """The spec of a module that the other finders give."""
    specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
    return next((spec for spec in specs if spec is not None), None)


def _patch_after_import(loader: Any, name: str, table: dict[str, PatchesOf], patched: ExitStack) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if module.__name__ == name and name in table:  # a spec may also be found and never used
            vars(loader).pop("exec_module", None)
            patched.enter_context(applied(table.pop(name)(module)))

    loader.exec_module = exec_module


def _end(table: dict[str, PatchesOf], patched: ExitStack) -> None:
    table.clear()
    patched.close()


class _DynamoFinder(MetaPathFinder):
    """A finder under which torch._dynamo is imported without patches: it keeps functions, and checks their signatures.

    Most scripts that use it have it before they are patched.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of torch._dynamo, as the other finders give it; None for any other module."""
        spec = _found_by_others(self, name, path, target) if name == DYNAMO else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with _set_aside():
                    execute(module)

            loader.exec_module = exec_module
        return spec


def late_dynamo() -> list[Patch]:
    """The patch for scripts that import torch._dynamo later than others."""
    return [] if DYNAMO in sys.modules else [Patch(sys, "meta_path", [_DynamoFinder(), *sys.meta_path])]


def late_patches(table: Mapping[str, PatchesOf]) -> list[Patch]:
    """Patches by the name of a module: at once if it is imported, else when the script imports it."""
    ready = [
        patch for name, patches_of in table.items() if name in sys.modules for patch in patches_of(sys.modules[name])
    ]
    waiting = {name: patches_of for name, patches_of in table.items() if name not in sys.modules}
    return [*ready, Patch(sys, "meta_path", [ImportWatch(waiting), *sys.meta_path])]
