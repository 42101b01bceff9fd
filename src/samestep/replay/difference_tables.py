"""Tables of what two records of a run differ in: fields of a step, and fields of the contract. Needs no torch."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from samestep.text import make_table
from samestep.train.contract_diff import Change, decides, shown
from samestep.verify.ledger import FieldDifference, number

if TYPE_CHECKING:
    from rich.table import Table

MAX_ULPS = 2**24  # beyond, the number of floats between two values is no help
_NAMES = {
    "num_samples": "samples",
    "ids": "sample ids",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "world_size": "devices",
    "digest": "state",
}


def fields_table(fields: Iterable[FieldDifference], a: str, b: str) -> "Table":
    """The fields in which a step differs, with the titles of both records."""
    table = make_table("", a, b, "apart")
    for change in fields:
        near = "" if change.ulps is None or change.ulps > MAX_ULPS else f"{change.ulps:,} ulp, "
        apart = "" if change.relative is None else f"{near}{change.relative:.2g} of it"
        values = (escape(ledger_value(change.a)), escape(ledger_value(change.b)))
        table.add_row(field_name(change.field), *values, apart)
    return table


def changes_table(changes: Iterable[Change], a: str, b: str) -> "Table":
    """The fields in which contracts differ, and what each of them decides."""
    table = make_table("contract", a, b, "decides")
    for change in changes:
        values = (escape(shown(change.before)), escape(shown(change.after)))
        table.add_row(escape(change.field), *values, decides(change.field) if change.breaks else "no bits, as a rule")
    return table


def field_name(field: str) -> str:
    """The display name of a field of the ledger."""
    return _NAMES.get(field, field)


def ledger_value(value: Any, short: bool = False) -> str:
    """A value of the ledger for people: numbers in decimal digits, all of them or six."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(ledger_value(item, short) for item in value)
    known = number(value)
    if known is None:
        return value if isinstance(value, str) else json.dumps(value)
    return f"{known:.6g}" if short else repr(known)
