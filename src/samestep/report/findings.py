"""Findings: what the ledger of one run proves, and what two ledgers side by side prove."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from samestep.replay.difference_tables import field_name, ledger_value
from samestep.text import counted
from samestep.train.contract_diff import Change
from samestep.verify.ledger import FINAL_DIGEST, Difference, Extent, Ledger, cause, compare, extent


@dataclass(frozen=True)
class Finding:
    """A sentence on a run, and whether a promise holds, fails, or neither."""

    verdict: Literal["holds", "fails", "note"]
    text: str


def ledger_findings(ledger: Ledger) -> tuple[Finding, ...]:
    """The findings on one run."""
    steps = ledger.steps
    if not steps:
        reasons = [Finding("fails", f"{problem}.") for problem in ledger.problems]
        return (Finding("note", "The ledger holds no step yet, so nothing is proven."), *reasons)
    found = [_completeness(ledger), *_repeats(ledger), *_order(ledger)]
    digests = [step for step, entry in steps.items() if entry.get("digest")]
    if digests:
        last = max(digests)
        times = "once" if len(digests) == 1 else f"{len(digests):,} times"
        text = f"A checksum of the state was taken {times}; after step {last:,} it is {steps[last]['digest']}."
        found.append(Finding("note", text))
    skipped = sum(bool(entry.get("skipped")) for entry in steps.values())
    if skipped:
        text = f"{counted(skipped, 'step')} changed nothing: a loss or gradient was not finite."
        found.append(Finding("note", text))
    if ledger.problems:
        text = f"{counted(len(ledger.problems), 'line')} of the ledger cannot be trusted: {ledger.problems[0]}."
        found.append(Finding("fails", text))
    if ledger.torn:
        found.append(Finding("note", "The last line of the ledger is unfinished: the run is under way, or was killed."))
    return tuple(found)


@dataclass(frozen=True)
class Comparison:
    """A run beside the first one: the changes of the contract, and the two ledgers step by step."""

    first: str
    other: str
    changes: tuple[Change, ...]
    extent: Extent
    difference: Difference | None  # the first step that differs
    lengths: tuple[int, int]  # steps of each

    @property
    def num_equal(self) -> int:
        """Steps in both ledgers that are equal, up to the first that differs."""
        return self.extent.common if self.difference is None else self.difference.agreed

    @property
    def finding(self) -> Finding:
        """The comparison as a sentence; different bits are a failure only under equal contracts."""
        if not self.extent.common:
            return Finding("note", "No step is in both ledgers, so there is nothing to compare.")
        if self.difference is None:
            return Finding("holds", self._equal())
        breaking = ", ".join(change.field for change in self.changes if change.breaks)
        if not breaking:
            return Finding("fails", _different(self.difference, self.num_equal))
        text = f"The contracts differ ({breaking}), so no equal bits were promised."
        return Finding("note", f"{_different(self.difference, self.num_equal)} {text}")

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        difference = None if self.difference is None else asdict(self.difference)
        ledger = {"num_equal": self.num_equal, "extent": asdict(self.extent), "difference": difference}
        changes = [{"field": c.field, "before": c.before, "after": c.after, "breaks": c.breaks} for c in self.changes]
        return {
            "first": self.first,
            "other": self.other,
            "contract": changes,
            "ledger": {**asdict(self.finding), **ledger},
        }

    def _equal(self) -> str:
        steps = "the 1 step" if self.extent.common == 1 else f"all {self.extent.common:,} steps"
        if self.lengths[0] != self.lengths[1]:
            steps += f" that both have ({self.lengths[0]:,} and {self.lengths[1]:,} steps)"
        digests = self.extent.digests
        state = f"; after {counted(digests, 'step')} the state, by a checksum" if digests else ""
        final = " Both ended in the same state, by its digest." if self.extent.final else ""
        compared = f"sample ids, loss, gradient norm, learning rate{state}"
        return f"Same bits for {steps}. Compared in each: {compared}.{final}"


def compare_runs(
    first: str, first_ledger: Ledger, other: str, other_ledger: Ledger, changes: Sequence[Change]
) -> Comparison:
    """Compares two runs by name and ledger; their numbers of devices may differ."""
    lengths = (len(first_ledger.steps), len(other_ledger.steps))
    span = extent(first_ledger, other_ledger)
    return Comparison(first, other, tuple(changes), span, compare(first_ledger, other_ledger), lengths)


def _different(difference: Difference, num_equal: int) -> str:
    first = difference.fields[0]
    since = f"after {counted(num_equal, 'equal step')}" if num_equal else "from the first step on"
    is_final = first.field == FINAL_DIGEST
    step = "the final state" if is_final else f"step {difference.step:,}, {field_name(first.field)}"
    return f"Different bits {since}: {step} {ledger_value(first.a)} and {ledger_value(first.b)}. {cause(difference)}."


def _repeats(ledger: Ledger) -> list[Finding]:
    """Whether steps that were done again gave the same bits."""
    if not ledger.repeats_that_differ:
        if not ledger.num_repeated:
            return []
        steps = "1 step was" if ledger.num_repeated == 1 else f"{ledger.num_repeated:,} steps were"
        return [Finding("holds", f"{steps} done again after a resume, with the same bits each time.")]
    first = ledger.repeats_that_differ[0]
    values = f"{field_name(first.field)} {ledger_value(first.before)} at first, {ledger_value(first.after)} later"
    others = len({repeat.step for repeat in ledger.repeats_that_differ}) - 1
    more = f"; so did {counted(others, 'other step')}" if others else ""
    return [Finding("fails", f"Step {first.step:,} was done again and gave other bits: {values}{more}.")]


def _completeness(ledger: Ledger) -> Finding:
    steps = ledger.steps
    missing = max(steps) + 1 - len(steps)
    if not missing:
        recorded = "1 step is" if len(steps) == 1 else f"{len(steps):,} steps are"
        return Finding("holds", f"{recorded} recorded, none is missing.")
    first = next(step for step in range(max(steps) + 1) if step not in steps)
    lacking = f"{counted(missing, 'step')} {'is' if missing == 1 else 'are'} missing, the first is step {first:,}"
    return Finding("fails", f"{counted(len(steps), 'step')} recorded; {lacking}.")


def _order(ledger: Ledger) -> list[Finding]:
    """Whether the batches of each epoch follow one another."""
    epochs: dict[int, list[tuple[int, int, int]]] = {}
    for step, entry in sorted(ledger.steps.items()):
        epoch, position, size = (entry.get(name) for name in ("epoch", "position", "num_samples"))
        if isinstance(epoch, int) and isinstance(position, int) and isinstance(size, int):
            epochs.setdefault(epoch, []).append((position, size, step))
    if not epochs:
        return []
    for epoch, batches in epochs.items():
        if batches[0][0] and len(epochs) > 1 and epoch == min(epochs):
            continue  # the ledger begins in the middle of it
        for (position, size, _), (following, _, step) in pairwise([(0, 0, -1), *batches]):
            if following != position + size:
                fault = "left out" if following > position + size else "used twice"
                text = f"In epoch {epoch + 1} samples were {fault} before step {step:,}: {position + size:,} of the "
                return [Finding("fails", f"{text}epoch were used, and the batch begins at {following:,}.")]
    total = sum(size for batches in epochs.values() for _, size, _ in batches)
    span = "the epoch" if len(epochs) == 1 else f"each of the {len(epochs):,} epochs"
    text = f"In {span} the batches follow one another, none left out, none twice: {total:,} samples."
    return [Finding("holds", text)]
