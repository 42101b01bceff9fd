"""Imports: changed places in libraries that the script has not imported yet, changed when it does."""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from samestep.scripts.patch import Patch, applied

PatchesOf = Callable[[ModuleType], list[Patch]]


class Watch(MetaPathFinder):
    """Stands before Python's finders and patches some modules right after they have run.

    Its patches are taken out when it goes, which is when `sys.meta_path` is put back.

    Args:
        table: by the name of a module, what gives its patches.
    """

    def __init__(self, table: Mapping[str, PatchesOf]) -> None:
        self._table = dict(table)
        self._patched = ExitStack()
        weakref.finalize(self, _end, self._table, self._patched)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module of the table, as the other finders give it; None for any other module."""
        if name not in self._table:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _watch(spec.loader, name, self._table, self._patched)
        return spec


def _watch(loader: Any, name: str, table: dict[str, PatchesOf], patched: ExitStack) -> None:
    """Lets a loader patch a module right after it has run it; a spec may also be found and never used."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if module.__name__ == name and name in table:
            vars(loader).pop("exec_module", None)
            patched.enter_context(applied(table.pop(name)(module)))

    loader.exec_module = exec_module


def _end(table: dict[str, PatchesOf], patched: ExitStack) -> None:
    table.clear()
    patched.close()


def late_patches(table: Mapping[str, PatchesOf]) -> list[Patch]:
    """Patches of modules: at once of those that are imported, of the others when they are.

    Args:
        table: by the name of a module, what gives its patches.
    """
    ready = [
        patch for name, patches_of in table.items() if name in sys.modules for patch in patches_of(sys.modules[name])
    ]
    waiting = {name: patches_of for name, patches_of in table.items() if name not in sys.modules}
    return [*ready, Patch(sys, "meta_path", [Watch(waiting), *sys.meta_path])]
