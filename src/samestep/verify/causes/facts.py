"""The facts that one worker records while a program runs, and the module that is being called."""

import json
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from samestep.data.nested import leaves
from samestep.verify.wrapping import Wrap, unwrapped


class Calls:
    """The modules that are being called, the outermost first, and their names."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()

    def wrap(self, seen: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]) -> Wrap:
        """Keeps the stack; `seen` is called with each outermost call of a module that has parameters."""

        def call(inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.stack and next(module.parameters(), None) is not None:
                self.roots.add(module)
                seen(module, args, kwargs)
            self.stack.append(module)
            try:
                return inner(module, *args, **kwargs)
            finally:
                self.stack.pop()

        return Wrap(nn.Module, "__call__", call)

    def name(self) -> str:
        """The name of the module that is being called, in the outermost one; its class if it has none."""
        if not self.stack:
            return ""
        root, module = self.stack[0], self.stack[-1]
        if root not in self._names:
            self._names[root] = {id(part): name for name, part in unwrapped(root).named_modules()}
        return self._names[root].get(id(module)) or type(module).__name__


class Facts:
    """The facts since the last call of `take`.

    Attributes:
        calls: the modules that are being called.
        in_dataset: whether a dataset is making samples.
        at_step: called after every step, to look at what shows then, and may be gone when the program ends.
    """

    def __init__(self) -> None:
        self.calls = Calls()
        self.in_dataset = False
        self.at_step: list[Callable[[], None]] = []
        self._facts: list[dict[str, Any]] = []
        self._counts: dict[str, int] = {}
        self._known: set[str] = set()

    def add(self, name: str, **fields: Any) -> None:
        """Records a fact."""
        self._facts.append({"name": name, **fields})

    def add_once(self, name: str, **fields: Any) -> None:
        """Records a fact, unless an equal one was recorded before."""
        text = json.dumps([name, fields], sort_keys=True)
        if text not in self._known:
            self._known.add(text)
            self.add(name, **fields)

    def count(self, name: str, **fields: Any) -> None:
        """Counts an occurrence; a step's equal ones become one fact, with their number as "times"."""
        text = json.dumps({"name": name, **fields}, sort_keys=True)
        self._counts[text] = self._counts.get(text, 0) + 1

    def has_counted(self, name: str) -> bool:
        """Whether an occurrence without further fields was counted since the last step."""
        return json.dumps({"name": name}) in self._counts

    def take(self, *, after_step: bool) -> list[dict[str, Any]]:
        """The facts since the last call; `after_step`: whether that was before a step that has just been taken."""
        for look in self.at_step if after_step else ():
            look()
        new = [*self._facts, *({**json.loads(text), "times": times} for text, times in self._counts.items())]
        self._facts, self._counts = [], {}
        return new


def first_rows(value: Any) -> int:
    """The length of dim 0 of the first tensor in a nested value; 0 if there is none."""
    return next((leaf.shape[0] for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.ndim), 0)
