"""Numbers as words: durations, sizes, rates and metrics, as the terminal and the page show them."""

import math
from collections.abc import Mapping
from typing import Any

from samestep.report.story import RunStory
from samestep.text import one_line


def number(value: float | None, digits: int = 4) -> str:
    """`0.3741`, `1,234`, `1e-05`; a dash for nothing."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "NaN")
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}" if 1e-4 <= abs(value) < 1000 else f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    """`0.8 s`, `12 min 3 s`, `2 d 4 h`; a dash for nothing."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    return " ".join(f"{count} {unit}" for count, unit in [part for part in parts if part[0]][:2])


def size(num_bytes: float, digits: int = 0) -> str:
    """`412.3 MiB`; with so many digits, if told."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{digits}g} {unit}" if digits else f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 1024:.0f} KiB"


def rate(per_second: float | None) -> str:
    """`9,275 samples/s`; a dash for nothing."""
    if per_second is None:
        return "-"
    return f"{per_second:,.0f} samples/s" if per_second >= 100 else f"{number(per_second, 3)} samples/s"


def value_text(value: Any) -> str:
    """A value of a contract: lists and mappings as `a, b` and `a=1`, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={value_text(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(value_text, value)) or "-"
    return one_line(value)


def headline_metric(run: RunStory) -> tuple[str, float] | None:
    """The metric that is shown where there is room for one: the first that is not the loss, else that."""
    tags = sorted(run.eval_tags, key=lambda tag: tag == "loss/eval")
    if not tags:
        return None
    last = run.curves[tags[0]].last
    return None if last is None else (tags[0].removesuffix("/eval"), last)


def train_loss(run: RunStory) -> float | None:
    """The last training loss: of the last epoch, if one is done, else of the last step."""
    for tag in ("loss/train_epoch", "loss/train"):
        curve = run.curves.get(tag)
        if curve is not None and len(curve):
            return curve.last
    return None


def epoch_rows(run: RunStory) -> tuple[list[str], list[list[str]]]:
    """The table of epochs: its titles and its rows."""
    records = run.epochs
    tags = list(dict.fromkeys(tag for record in records.values() for tag in record))
    metrics = [tag for tag in tags if tag.endswith("/eval")]
    own = [tag for tag in tags if tag not in ("step", "loss/train_epoch", "samples_per_second", *metrics)]
    titles = [
        "epoch",
        "steps",
        "train loss",
        *(tag.removesuffix("/eval") + " (eval)" for tag in metrics),
        *own,
        "samples/s",
    ]
    rows = []
    for epoch, record in records.items():
        cells = [f"{epoch:,}", f"{int(record['step']):,}", number(record.get("loss/train_epoch"))]
        cells += [number(record.get(tag)) for tag in (*metrics, *own)]
        rows.append([*cells, number(record.get("samples_per_second"))])
    return titles, rows


def flat(contract: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a contract, nested ones joined by dots."""
    fields: dict[str, Any] = {}
    for key, value in contract.items():
        if isinstance(value, Mapping) and value:
            fields.update(flat(value, f"{prefix}{key}."))
        else:
            fields[f"{prefix}{key}"] = value
    return fields
