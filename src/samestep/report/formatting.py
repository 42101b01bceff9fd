"""Numbers and values as text: durations, sizes, rates and contract fields, for terminal and page."""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from samestep.text import one_line


def number(value: float | None, digits: int = 4) -> str:
    """`0.3741`, `1,234`, `1e-05`; a dash for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "NaN")
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".") if 1e-4 <= abs(value) < 1000 else f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    """`0.8 s`, `12 min 3 s`, `2 d 4 h`; a dash for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    return " ".join(f"{count} {unit}" for count, unit in [part for part in parts if part[0]][:2])


def size(num_bytes: float) -> str:
    """`412.3 MiB`."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 1024:.0f} KiB"


def value_text(value: Any) -> str:
    """A value of a contract: lists and mappings as `a, b` and `a=1`, a dash for nothing."""
    if value is None or value in ({}, []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={value_text(item)}" for key, item in value.items())
    return ", ".join(map(value_text, value)) if isinstance(value, list) else one_line(value)


def command_text(command: Any) -> str:
    """A recorded command as it is typed; empty if there is none."""
    return one_line(shlex.join(map(str, command))) if isinstance(command, list) else ""


def optimizer_text(optimizer: Any, lr: Any = None) -> str:
    """`sgd, lr 0.05` of a recipe's name; `SGD, lr 0.05, momentum 0.9` of the settings that a trainer records."""
    if not isinstance(optimizer, Mapping):
        return f"{one_line(optimizer)}, lr {value_text(lr)}"
    if "class" not in optimizer:
        return " and ".join(map(optimizer_text, optimizer.values()))
    groups = [group for group in optimizer.values() if isinstance(group, Mapping)] or [optimizer]
    words = [one_line(optimizer["class"])]
    for name in ("lr", "momentum", "weight_decay"):
        given = [group[name] for group in groups if group.get(name)]
        values = dict.fromkeys(f"{each:.6g}" if isinstance(each, float) else value_text(each) for each in given)
        words += [f"{name.replace('_', ' ')} {' and '.join(values)}"] if values else []
    return ", ".join(words)
