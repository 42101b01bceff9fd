"""The table: every place of torch, Python and other libraries that adoption changes, put in and taken out as one."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One changed place: `owner.name` becomes `replacement`.

    Attributes:
        owner: a module or class.
        name: the attribute.
        replacement: what it becomes.
        aliases: modules, by name, that hold the same object under the same name: `torch.nn.parallel.data_parallel` is
            also in `torch.nn.parallel.data_parallel.data_parallel`. Those that are not imported are left alone.
    """

    owner: Any
    name: str
    replacement: Any
    aliases: tuple[str, ...] = ()


@contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """Puts the patches in, and takes them out in reverse order, whatever the block does."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for patch in patches:
            for owner in (patch.owner, *(sys.modules[name] for name in patch.aliases if name in sys.modules)):
                before = vars(owner).get(patch.name, _ABSENT)
                setattr(owner, patch.name, patch.replacement)
                undo.append((owner, patch.name, before))
        yield
    finally:
        for owner, name, before in reversed(undo):
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
