"""Settings of optimizers and schedulers: what a resumed run takes from its program instead of the checkpoint."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# What a scheduler changes by itself: not a setting, but part of its state.
PROGRESS = frozenset(("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "verbose"))


@dataclass(frozen=True)
class Settings:
    """The plain values (numbers, strings, None, and tuples, lists and dicts of them) of optimizers and scheduler."""

    optimizers: list[tuple[str, list[dict[str, Any]]]]  # the class of each, and the values of its parameter groups
    scheduler: dict[str, Any] | None  # class and values, its inner schedulers' included

    def as_json(self) -> dict[str, Any]:
        """For the contract: {"optimizer": {"class": "SGD", "lr": 0.1, …}, "scheduler": …}."""
        fields = {}
        for number, (name, groups) in enumerate(self.optimizers):
            entry: dict[str, Any] = {"class": name}
            for index, group in enumerate(groups):
                entry.update(group if len(groups) == 1 else {f"group_{index}": group})
            fields[str(number)] = entry
        optimizer = fields["0"] if len(fields) == 1 else fields
        return {"optimizer": optimizer, "scheduler": self.scheduler}


def settings_of(optimizers: Sequence[Optimizer], scheduler: LRScheduler | None) -> Settings:
    """The settings as they are now: called when the step is made, before a schedule has moved them."""
    of_optimizers = [
        (type(optimizer).__name__, [dict(_plain(group)) for group in optimizer.param_groups])
        for optimizer in optimizers
    ]
    return Settings(of_optimizers, None if scheduler is None else _of_scheduler(scheduler))


def apply_new_settings(
    optimizers: Sequence[Optimizer], scheduler: LRScheduler | None, old: Settings, new: Settings
) -> None:
    """Changes optimizers and a scheduler whose state was loaded to the settings that they are made with now."""
    for optimizer, (_, before), (_, now) in zip(optimizers, old.optimizers, new.optimizers, strict=True):
        for group, was, is_now in zip(optimizer.param_groups, before, now, strict=False):  # some were added in training
            for key in _changed(was, is_now):
                _put(group, key, was[key], is_now[key])
    if scheduler is not None and old.scheduler is not None and new.scheduler is not None:
        _change_scheduler(scheduler, old.scheduler, new.scheduler)


def _of_scheduler(scheduler: Any) -> dict[str, Any]:
    # Copied, since a scheduler goes on changing its lists in place.
    values = {key: copy.copy(value) for key, value in _plain(vars(scheduler)) if key not in PROGRESS}
    parts = {str(number): _of_scheduler(part) for number, part in enumerate(vars(scheduler).get("_schedulers", ()))}
    return {"class": type(scheduler).__name__, **values, **({"schedulers": parts} if parts else {})}


def _change_scheduler(scheduler: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in _changed(before, now):
        if key not in ("class", "schedulers"):
            setattr(scheduler, key, copy.copy(now[key]))
    parts = zip(before.get("schedulers", {}).values(), now.get("schedulers", {}).values(), strict=True)
    for part, (was, is_now) in zip(vars(scheduler).get("_schedulers", ()), parts, strict=True):
        _change_scheduler(part, was, is_now)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The entries that both have and that differ."""
    return [key for key, value in now.items() if key in before and before[key] != value]


def _put(group: dict[str, Any], key: str, before: Any, now: Any) -> None:
    if key == "lr" and before and float(group[key]) != before:
        now = float(group[key]) * (now / before)  # in proportion, since a schedule has moved it
    if isinstance(group[key], Tensor):
        group[key].fill_(now)
    else:
        group[key] = now


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries that are plain values; a tensor of one element counts as a number."""
    # Tensors of one element: learning rates of capturable optimizers are such.
    for key, value in values.items():
        taken = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if key not in ("params", "param_names") and _is_plain(taken):
            yield key, taken


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
