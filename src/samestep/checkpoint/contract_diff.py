"""The differences of two contracts: the changed fields, and the effect of those that decide the bits.

Fields are named by their keys joined by dots, `versions.torch`; a name in one of the two tables stands for all below
it. A field that is in neither is reported if both sides have it and differ, and never breaks: versions of samestep,
Python, NumPy and the GPUs' driver, and the fields that a program adds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from samestep.errors import ContractError

BREAKING: Final[Mapping[str, str]] = {
    "model": "what is trained",
    "loss_code": "what is minimised",
    "data": "what is trained on",
    "options": "the model and the data",
    "global_batch_size": "which samples make a step",
    "num_microbatches": "how sums are split, and what BatchNorm and dropout see",
    "seed": "the order of the samples, first weights, dropout and augmentation",
    "shuffle": "the order of the samples",
    "drop_last": "whether a last, shorter batch is a step",
    "num_samples": "what is trained on",
    "data_loader": "which samples make a step",
    "steps": "the models, the losses and the updates",
    "optimizer": "the update",
    "lr": "the update",
    "momentum": "the update",
    "weight_decay": "the update",
    "scheduler": "the learning rate",
    "max_grad_norm": "the update",
    "state": "what else is trained along",
    "precision": "the rounding",
    "param_dtype": "the rounding",
    "compile": "which kernels run, and how they round",
    "device_kind": "the kernels",
    "gpu": "the kernels, and how they split their sums",
    "num_threads": "how kernels split their sums",
    "portable": "whether kernels are alike on all CPUs (--portable, --no-portable, SAMESTEP_PORTABLE)",
    "flags": "which kernels run, and how they round",
    "versions.torch": "the kernels",
    "versions.cpu_capability": "the kernels",
    "versions.platform": "the kernels",
    "versions.cuda": "the kernels",
    "versions.cudnn": "the kernels",
    "versions.cublas": "the kernels",
}
UNMENTIONED: Final = frozenset(
    (
        *("devices", "shares", "world_size", "spares", "num_workers", "command", "epochs", "run_dir", "run", "name"),
        *("job", "working_folder", "min_devices", "max_restarts", "hang_seconds", "grace_seconds", "keep"),
        *("digest_every", "checkpoint_every", "script_sha256", "code", "packages", "earlier_starts", "signature"),
    )
)
ABSENT: Final = "(not recorded)"


@dataclass(frozen=True)
class ContractChange:
    """A field that differs between two contracts."""

    field: str  # its keys, joined by dots
    before: Any  # or `ABSENT`
    after: Any
    breaks: bool  # whether the bits depend on it


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ContractChange]:
    """The fields that differ between two contracts: those that break the bits first, each kind in the table's order.

    A field that only one side has breaks if it is in the table and both were written by one version of samestep, since
    newer versions may record more; if the table does not have it, it is left out.
    """
    old, new = dict(flat(before)), dict(flat(after))
    same_writer = old.get("versions.samestep") == new.get("versions.samestep")
    changes = []
    for name in dict.fromkeys((*old, *new)):
        known, one, other = _entry(name), old.get(name, ABSENT), new.get(name, ABSENT)
        alone = (name in old) != (name in new)
        if _unmentioned(name) or _same(one, other) or (alone and (known is None or one is None or other is None)):
            continue
        changes.append(ContractChange(name, one, other, known is not None and (same_writer or not alone)))
    order = {entry: number for number, entry in enumerate(BREAKING)}
    return sorted(changes, key=lambda c: (not c.breaks, order.get(_entry(c.field) or "", len(order)), c.field))


def explain(changes: Sequence[ContractChange]) -> str:
    """The changes, a line a field: "  seed: 0 before, 1 now (decides the order of the samples, …)"; "" for none."""
    parts = (
        ("these decide the bits:", [change for change in changes if change.breaks]),
        ("these should not:", [change for change in changes if not change.breaks]),
    )
    return "\n".join(line for title, some in parts if some for line in (title, *map(_line, some)))


def check_contract_kept(changes: Sequence[ContractChange], allow_change: bool) -> None:
    """Raises a `ContractError` that lists all changes, if one decides the bits and that is not allowed."""
    if any(change.breaks for change in changes) and not allow_change:
        raise ContractError(
            f"the run to resume was made with other settings:\n{explain(changes)}\n"
            "go back to its values, or go on with other, equally valid numbers by allow_contract_change=True"
        )


def decides(field: str) -> str | None:
    """The effect of a field that decides the bits; None for any other."""
    entry = _entry(field)
    return None if entry is None else BREAKING[entry]


def _line(change: ContractChange) -> str:
    reason = f" (decides {decides(change.field)})" if change.breaks else ""
    return f"  {change.field}: {shown(change.before)} before, {shown(change.after)} now{reason}"


def shown(value: Any) -> str:
    """A value of a contract for display: no quotation marks around words, "none" for None."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else repr(value)


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with their names; lists are leaves."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from flat(item, f"{name}.")
        else:
            yield name, item


def _parents(name: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _entry(name: str) -> str | None:
    """The entry of the table that a field falls under."""
    return next((parent for parent in _parents(name) if parent in BREAKING), None)


def _unmentioned(name: str) -> bool:
    return any(parent in UNMENTIONED for parent in _parents(name))


def _same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are the same; true is not 1, NaN is NaN, and a tuple is a list."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other) or (one != one and other != other)
