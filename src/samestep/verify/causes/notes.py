"""The notes: what one worker jots down while a program runs, and how places of torch are listened at."""

import functools
import inspect
import json
import os
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from samestep.data.nested import leaves
from samestep.engine.site import is_script_file
from samestep.scripts.patch import Patch, applied

_HERE = os.path.dirname(__file__) + os.sep
WRAPPERS = (DataParallel, DistributedDataParallel)


@dataclass(frozen=True)
class Wrap:
    """One place that is listened at or changed: `owner.name` becomes `make(owner.name)`.

    Attributes:
        owner: a module or class.
        name: the attribute.
        make: from what is there, what stands in for it.
        aliases: modules, by name, that hold the same object under the same name.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    aliases: tuple[str, ...] = ()


def composed(wraps: Iterable[Wrap], *, in_compiled: bool = True) -> list[Patch]:
    """Patches for the wraps; of several at one place the later ones enclose the earlier."""
    found: dict[tuple[int, str], Patch] = {}
    for wrap in wraps:
        before = found.get((id(wrap.owner), wrap.name))
        inner = getattr(wrap.owner, wrap.name) if before is None else before.replacement
        aliases = () if before is None else before.aliases
        made = wrap.make(inner) if in_compiled else _outside_compiled(inner, wrap.make(inner))
        made = functools.update_wrapper(made, inner) if inspect.isfunction(inner) else made
        found[id(wrap.owner), wrap.name] = Patch(wrap.owner, wrap.name, made, (*aliases, *wrap.aliases))
    return list(found.values())


def _outside_compiled(inner: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for a function where torch.compile is not tracing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) if torch.compiler.is_compiling() else made(*args, **kwargs)

    return call


def by_script() -> bool:
    """Whether the user's code called the function that calls this, past what is wrapped around it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame is not None and is_script_file(frame.f_code.co_filename)


@contextmanager
def wrapped(*wraps: Wrap) -> Iterator[None]:
    """The time in which the wraps are in place."""
    with applied(composed(wraps)):
        yield


def around_roots(before: Callable[[nn.Module], Any], after: Callable[[nn.Module, Any], None]) -> Wrap:
    """Calls something around every call of a module that no other module's call encloses."""
    depth = 0

    def make(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if torch.compiler.is_compiling():
                return inner(self, *args, **kwargs)
            outermost = depth == 0
            depth += 1
            try:
                token = before(self) if outermost else None
                try:
                    return inner(self, *args, **kwargs)
                finally:
                    if outermost:
                        after(self, token)
            finally:
                depth -= 1

        return call

    return Wrap(nn.Module, "__call__", make)


class Calls:
    """Which module is being called, and what it is called in the model."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()

    def wrap(self, seen: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]) -> Wrap:
        """Keeps the stack; `seen` is called with each outermost call of a module that has parameters."""

        def make(inner: Callable[..., Any]) -> Callable[..., Any]:
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if not self.stack and next(module.parameters(), None) is not None:
                    self.roots.add(module)
                    seen(module, args, kwargs)
                self.stack.append(module)
                try:
                    return inner(module, *args, **kwargs)
                finally:
                    self.stack.pop()

            return call

        return Wrap(nn.Module, "__call__", make)

    def name(self) -> str:
        """The name of the module that is being called, in the outermost one; its class where it has none."""
        if not self.stack:
            return ""
        module = self.stack[-1]
        return self.names_of(self.stack[0]).get(id(module)) or type(module).__name__

    def names_of(self, root: nn.Module) -> dict[int, str]:
        """The names of a model's modules by `id`, without what a wrapper puts before them."""
        if root not in self._names:
            self._names[root] = {id(module): name for name, module in unwrapped(root).named_modules()}
        return self._names[root]


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and the like."""
    while isinstance(module, WRAPPERS):
        module = module.module
    return module


class Notes:
    """What a worker has noticed since it was last asked.

    Args:
        rank: of this worker.
        world_size: number of workers.

    Attributes:
        calls: which module is being called.
        in_dataset: whether a dataset is being asked for samples.
        at_step: called after every step, to look at what only shows then.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.calls = Calls()
        self.in_dataset = False
        self.at_step: list[Callable[[], None]] = []
        self._facts: list[dict[str, Any]] = []
        self._counts: dict[str, int] = {}
        self._known: set[str] = set()

    def tell(self, name: str, **fields: Any) -> None:
        """Notes a fact."""
        self._facts.append({"name": name, **fields})

    def tell_once(self, name: str, **fields: Any) -> None:
        """Notes a fact, unless the same has been noted before."""
        text = json.dumps([name, fields], sort_keys=True)
        if text not in self._known:
            self._known.add(text)
            self.tell(name, **fields)

    def count(self, name: str, **fields: Any) -> None:
        """Counts an occurrence; a step's equal ones become one fact, with their number as "times"."""
        text = json.dumps({"name": name, **fields}, sort_keys=True)
        self._counts[text] = self._counts.get(text, 0) + 1

    def take(self) -> list[dict[str, Any]]:
        """What is new since the last call."""
        for look in self.at_step:
            look()
        new = [*self._facts, *({**json.loads(text), "times": times} for text, times in self._counts.items())]
        self._facts, self._counts = [], {}
        return new


def num_rows(value: Any) -> int:
    """The first dim of the first tensor in a nested value; 0 if there is none."""
    return next((leaf.shape[0] for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.ndim), 0)


def fingerprint(data: bytes) -> str:
    """Eight hex digits of some bytes."""
    return f"{zlib.crc32(data):08x}"


def tensor_fingerprint(tensor: Tensor) -> str:
    """Eight hex digits of a tensor's values."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return fingerprint(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else "empty"
