"""The verdict: do runs of a program on several device counts agree, and if not, where do they part and why?

run the program twice on the first devices and once on each of the others
compare each with the first, step by step
they agree?      report the tier, and what was compared
they do not?     name the first step, quantity and module that differ
                 suspect the causes that the recordings point to
                 run again with all suspects neutralised: the runs must agree now
                 give one suspect after another its effect back: those without which the runs agree are ruled out
                 the others are confirmed: with them neutralised the runs agree, with any one left they do not
                 they agree but for rounding? then that is a cause, and the others are confirmed up to it
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from samestep.errors import WorkerError
from samestep.text import listed
from samestep.verify.causes.datasets import OWN_GENERATORS
from samestep.verify.causes.evidence import Cause, Evidence
from samestep.verify.causes.frameworks import advice_on
from samestep.verify.causes.machine import HASH_ORDER, UNSEEDED
from samestep.verify.causes.rounding import ROUNDING
from samestep.verify.causes.table import CAUSES
from samestep.verify.comparison import (
    ORDER,
    TIERS,
    Difference,
    DivergencePlace,
    Tier,
    Tolerance,
    first_difference,
    first_place,
    paired_metrics,
    parts_of_ranks,
    reached,
)
from samestep.verify.program_runner import ProgramRunner, RunSpec
from samestep.verify.recording import Recording
from samestep.verify.surroundings import files_left, numbers_apart

COUNTS = ("loss_factor", "mean_of_means", "metrics")
MAX_IDLE = 6
NOISE = (UNSEEDED.key, OWN_GENERATORS.key)
"""The causes by which two runs on the same devices differ by more than rounding."""
BEFORE_NUDGE = (1, ORDER.index("loss"))

Pair = tuple[RunSpec, RunSpec]


@dataclass(frozen=True)
class ComparedCounts:
    """Counts of what was compared, in the reference, over the steps that all runs took."""

    steps: int
    parameters: int
    nonzero_gradients: int  # over all steps
    gradients: int
    samples: int | None  # None if that was not seen
    microbatches: int | None  # of all steps, or chunks; None if there are none
    metrics: int  # numbers that the program reduced over its ranks itself


def count_compared(recordings: Sequence[Recording]) -> ComparedCounts:
    """The counts of some runs, the reference first."""
    reference = recordings[0]
    steps = min(recording.num_steps for recording in recordings)
    lines = reference.steps[0][:steps] if reference.steps else ()
    norms = [norm for line in lines for group in line["gradients"] for norm in group["norm"] if norm is not None]
    # In a program of one process, or of samestep, each rank knows all of them.
    ranks = reference.steps if reference.family == "ddp" else reference.steps[:1]
    counts = [line["num_samples"] for rank in ranks for line in rank[:steps]]
    return ComparedCounts(
        steps=steps,
        parameters=sum(len(line["names"]) for line in reference.lines("parameters")),
        nonzero_gradients=sum(norm != 0 for norm in norms),
        gradients=len(norms),
        samples=None if None in counts else sum(counts),
        microbatches=sum(len(line["microbatches"]) for rank in reference.steps for line in rank[:steps]) or None,
        metrics=sum(len(line["after"]) for line in reference.lines("metric")),
    )


def idle_parameters(recording: Recording) -> list[str]:
    """The parameters whose gradients are there and zero in all steps: of those agreement proves nothing."""
    is_idle: dict[tuple[int, int], bool] = {}
    for line in recording.steps[0] if recording.steps else ():
        for group in line["gradients"]:
            for index, norm in enumerate(group["norm"]):
                if norm is not None:
                    key = (group["optimizer"], index)
                    is_idle[key] = is_idle.get(key, True) and norm == 0
    return [recording.parameters(key[0])["names"][key[1]] for key, idle in sorted(is_idle.items()) if idle]


def refusals(recordings: Sequence[Recording]) -> Iterator[str]:
    """The reasons why agreement would prove nothing, as sentences."""
    if any(recording.num_steps == 0 for recording in recordings):
        yield "no optimizer took a step; only steps of torch.optim optimizers and of samestep.Run are seen"
        return
    yield from _not_learning(recordings[0])
    for recording in recordings:
        if recording.world_size > 1:
            yield from _not_shared(recording)


def _not_learning(recording: Recording) -> Iterator[str]:
    """Signs of a model that learns nothing."""
    lines = recording.steps[0][: recording.num_steps]
    norms = [norm for line in lines for group in line["gradients"] for norm in group["norm"]]
    sizes = ((step, norm) for step, line in enumerate(lines) for group in line["states"] for norm in group["norm"])
    poisoned = next((step for step, norm in sizes if not math.isfinite(norm)), None)
    losses = [sum(line["loss"]) for line in lines if line["loss"]]
    if not any(norms):
        yield "all gradients are zero: a model that learns nothing is the same on any devices"
    elif poisoned is not None:
        yield f"from step {poisoned + 1} on parameters are not finite: NaN is the same on any devices"
    elif len(losses) > 2 and len(set(losses)) == 1:
        yield f"the loss is {losses[0]:.9g} in all {len(losses)} steps: nothing is learned, or not from the data"
    starts = {line["optimizer"]: line["bits"] for line in recording.lines("parameters")}
    last = {group["optimizer"]: group["bits"] for line in lines for group in line["states"]}
    if any(norms) and all(starts.get(number) == bits for number, bits in last.items()):
        yield "no parameter changed in any step: the learning rate is zero, or the optimizer holds other parameters"


def _not_shared(recording: Recording) -> Iterator[str]:
    """Signs that every rank did all of the work."""
    name, steps = recording.label, range(recording.num_steps)
    if recording.family == "ddp":
        if parts_of_ranks(recording) or any(line["divided"] for line in recording.lines("parameters")):
            return  # the model is shared out
        ids = [[rank[step]["ids"] for rank in recording.steps] for step in steps]
        if all(all(taken) and len({tuple(sorted(one)) for one in taken}) == 1 for taken in ids):
            yield f"on {name} every rank trained on the same samples: nothing is shared out"
        return
    counts = [Counter(tuple(one) for rank in recording.steps for one in rank[step]["microbatches"]) for step in steps]
    for step, ran in enumerate(counts):
        if ran and max(ran.values()) > 1:
            (_, microbatch), count = ran.most_common(1)[0]
            yield f"on {name} microbatch {microbatch} of step {step + 1} was computed {count} times"
            return
    if not any(counts):
        yield f"on {name} no work was shared out: one device computed everything (--wrap names what to share out)"


@dataclass(frozen=True)
class NamedCause:
    """A cause of the table with the evidence for it."""

    key: str
    title: str
    evidence: str
    advice: str


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison; the object that `--json` prints."""

    program: str  # its name in messages
    family: str  # "api", "single-process" or "ddp"
    devices: tuple[str, ...]
    required: Tier
    reached: Tier | None  # the highest tier at which all runs agree
    compared: ComparedCounts
    refusals: tuple[str, ...] = ()  # reasons why agreement would prove nothing
    difference: Difference | None = None  # the first that the required tier does not allow
    place: DivergencePlace | None = None
    causes: tuple[NamedCause, ...] = ()  # those that were confirmed
    suspects: tuple[NamedCause, ...] = ()  # the others, if not all of the difference could be explained
    unexplained: Difference | None = None  # the first difference with all causes and suspects neutralised
    unexplained_place: DivergencePlace | None = None  # its place, if it is not the first difference's
    seen: tuple[str, ...] = ()  # what the two runs hold beside their tensors, if a difference is not explained
    notes: tuple[str, ...] = ()
    num_runs: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the runs agree as required, and that proves something."""
        return self.difference is None and not self.refusals


@dataclass
class _Investigation:
    """The results so far for one program. `report` is called with what happens next; `base` are confirmed causes.

    A run is made once and kept by its `RunSpec` (`ProgramRunner.record`), so comparisons may ask for it again.
    """

    runner: ProgramRunner
    steps: int
    required: Tier
    report: Callable[[str], None]
    base: tuple[Cause, ...] = ()
    named: list[NamedCause] = field(default_factory=list)
    suspects: list[NamedCause] = field(default_factory=list)
    unexplained: Difference | None = None
    unexplained_place: DivergencePlace | None = None
    clocks: frozenset[int] = frozenset()  # the reduced numbers that are not compared
    _response: tuple[Recording, Recording] | None = None

    def run(self, spec: RunSpec) -> Recording:
        """A recording of the program as it is."""
        if self.runner.known(spec) is None:
            self.report(f"running on {spec.devices}{' again' if spec.attempt else ''}")
        recording = self.runner.record(spec)
        if recording.failure is not None:
            raise WorkerError(f"{self.runner.program.label} failed on {spec.devices}: {recording.failure}")
        return recording

    def compare(self, pair: Pair, tier: Tier | None = None) -> Difference | None:
        """The first difference between two runs that a tier does not allow, by default the tier that is asked for.

        A run that fails under a counterfactual differs. If the tier allows rounding, the first time that more than the
        simple bound is seen, it is measured how rounding grows in this program.
        """
        # The program as it is must not fail. Without the effect of some cause it may, and then that is a difference.
        ours, theirs = (self.runner.record(spec) if spec.neutral else self.run(spec) for spec in pair)
        for recording in (ours, theirs):
            if recording.failure is not None:
                text = f"the counterfactual run failed: {recording.failure}"
                return Difference(recording.num_steps + 1, "steps", "", text, (ours.label, theirs.label))
        # The measurement takes two more runs, so that it is made only once something is out of the simple bound.
        tier = tier or self.required
        found = first_difference(ours, theirs, tier, self.tolerance(pair))
        if found is not None and tier == "allclose" and found.quantity in ("loss", "gradient", "state", "buffer"):
            self._measure(pair[0].devices)
            found = first_difference(ours, theirs, tier, self.tolerance(pair))
        return found

    def tolerance(self, pair: Pair) -> Tolerance:
        """How far two runs may be apart by rounding."""
        ours, theirs = map(self.runner.record, pair)
        allowed = Tolerance(ours, self._response, self.clocks)
        start = first_difference(ours, theirs, "bitwise", allowed) if ours.devices == theirs.devices else None
        return allowed if start is None else replace(allowed, since=start.step)

    def _measure(self, devices: str) -> None:
        """Measures how rounding grows, once; with all seeded if it is not the same twice, to measure rounding alone."""
        if self._response is None:
            self.report(f"measuring on {devices} how rounding grows")
            calm, again = RunSpec(devices, self.steps), RunSpec(devices, self.steps, attempt=1)
            if first_difference(self.run(calm), self.run(again), "bitwise") is not None:
                calm = replace(calm, neutral=NOISE)
            pair = self.runner.record(calm), self.runner.record(replace(calm, nudge=True))
            start = first_difference(*pair, "allclose")
            if all(run.failure is None for run in pair) and (start is None or start.rank > BEFORE_NUDGE):
                self._response = pair

    def find_clocks(self, pair: Pair) -> None:
        """Finds the reduced numbers that differ in a second run on the same devices, with all seeded too."""
        # A second time with all seeded: a number that differs only because the program draws otherwise is no clock.
        for neutral in ((), NOISE):
            ours, theirs = (self.runner.record(replace(spec, neutral=neutral)) for spec in pair)
            found = {index for index, one, two in paired_metrics(ours, theirs) if one["after"] != two["after"]}
            if ours.failure is None and theirs.failure is None:
                self.clocks = frozenset(found)
            if not found:
                return

    def place(self, pair: Pair, difference: Difference) -> DivergencePlace | None:
        """The first module that differs in the step in which runs part."""
        if difference.quantity in ("samples", "inputs", "start", "steps", "metric", "lr"):
            return None
        self.report(f"recording every module in step {difference.step}")
        specs = (replace(spec, steps=difference.step, detail=difference.step - 1) for spec in pair)
        ours, theirs = map(self.runner.record, specs)
        if ours.failure is not None or theirs.failure is not None:
            return None
        return first_place(ours, theirs, exact=self.required == "bitwise")

    def explain(self, pair: Pair, evidence: Evidence) -> None:
        """Confirms causes until the two runs agree with all of them neutralised, or no suspect is left."""
        # A round for each first difference that is left without the causes that are confirmed. Its suspects lose their
        # effect; what differs still has further ones, until the runs agree or nothing new is suspected.
        tier = self.required
        while (left := self.compare(current := self._without(pair, (), self.steps), tier)) is not None:
            # No further than this difference: what differs later may have other causes, which the next round finds.
            steps, shown, suspects, gone = min(self.steps, left.step), evidence, dict[Cause, NamedCause](), ""
            while left is not None and (fresh := self._suspects(shown, suspects)):
                suspects.update({cause: replace(one, evidence=one.evidence + gone) for cause, one in fresh.items()})
                names = ", ".join(cause.key for cause in suspects)
                self.report(f"running without the effect of {names}")
                left = self.compare(current := self._without(pair, list(suspects), steps), tier)
                shown, gone = Evidence(tuple(map(self.runner.record, current))), f" (without the effect of {names})"
            if left is not None and tier == "bitwise" and (rounding := self._rounding(evidence, current)) is not None:
                # No antidote gives bits, so the other causes are those by which runs differ by more than rounding.
                if rounding not in self.named:  # as of another pair of runs
                    self.named.append(rounding)
                tier = "allclose"
                continue
            if left is not None:
                if self.unexplained is None:
                    self.unexplained = left
                    self.unexplained_place = self.place(current, left) if current[0].neutral else None
                self.suspects += [named for named in suspects.values() if named not in self.suspects]
                return
            confirmed = self._needed(pair, [cause for cause in CAUSES if cause in suspects], steps, tier)
            self.named += [suspects[cause] for cause in confirmed]
            self.base += tuple(confirmed)

    def _suspects(self, evidence: Evidence, known: Container[Cause]) -> dict[Cause, NamedCause]:
        """The further causes that something points to and that have an antidote."""
        if any(run.failure for run in evidence.runs):
            return {}
        found = {}
        for cause in CAUSES:
            if cause.neutralise is not None and cause not in self.base and cause not in known:
                sign = cause.suspect(evidence)
                if sign is not None:
                    found[cause] = NamedCause(cause.key, cause.title, sign, advice_on(cause, evidence))
        return found

    def _rounding(self, evidence: Evidence, pair: Pair) -> NamedCause | None:
        """Rounding as a cause, if runs on other devices agree but for it, and have a sign of it."""
        sign = ROUNDING.suspect(evidence)
        if sign is None or pair[0].devices == pair[1].devices or self.compare(pair, "allclose") is not None:
            return None
        return NamedCause(ROUNDING.key, ROUNDING.title, sign, advice_on(ROUNDING, evidence))

    def _needed(self, pair: Pair, suspects: list[Cause], steps: int, tier: Tier) -> list[Cause]:
        """Of suspects without which the two runs agree for some steps those that are needed for it."""
        # From the end of the table: a later cause often follows from an earlier one, and is not to be named for it.
        needed = suspects
        for cause in reversed(suspects):
            rest = [other for other in needed if other is not cause]
            if not rest:
                break
            self.report(f"giving {cause.key} its effect back")
            if self.compare(self._without(pair, rest, steps), tier) is None:
                needed = rest
        return needed

    def _without(self, pair: Pair, causes: Sequence[Cause], steps: int) -> Pair:
        """Two runs without the effect of the confirmed causes and of some others."""
        keys = tuple(cause.key for cause in CAUSES if cause in self.base or cause in causes)
        first, second = (replace(spec, neutral=keys, steps=steps) for spec in pair)
        return first, second


def reach_verdict(
    runner: ProgramRunner,
    devices: Sequence[str],
    steps: int,
    required: Tier | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Runs a program on several device counts and finds out whether, and why not, the runs agree."""
    investigation = _Investigation(runner, steps, required or "bitwise", report)
    first = RunSpec(devices[0], steps)
    reference = investigation.run(first)
    if required is None and reference.family == "ddp":
        investigation.required = "allclose"
    if reference.num_steps == 0:  # in other runs there would be none either
        devices, others = devices[:1], []
    else:
        others = [replace(first, attempt=1), *(RunSpec(spec, steps) for spec in devices[1:])]
    pairs = [(first, other) for other in others]
    recordings = (reference, *(investigation.run(other) for other in others))
    evidence = Evidence(recordings)
    if others:
        investigation.find_clocks(pairs[0])
    differing = [(pair, found) for pair in pairs if (found := investigation.compare(pair)) is not None]
    ranks_alone = reference.family == "ddp" and not reference.is_logical and "PYTHONHASHSEED" not in os.environ
    if others and not differing and ranks_alone:
        investigation.report("running with a hash seed of each rank's own")
        pairs.append((first, replace(others[-1], own_hash_seeds=True)))
        differing = [(pairs[-1], found)] if (found := investigation.compare(pairs[-1])) is not None else []
    verdict = Verdict(
        program=runner.program.label,
        family=reference.family,
        devices=tuple(devices),
        required=investigation.required,
        reached=_reached(investigation, pairs, evidence),
        compared=count_compared(recordings),
        refusals=(*refusals(recordings), *(investigation.tolerance(pairs[0]).lost() if pairs else ())),
        notes=tuple(_notes(investigation, pairs[0], recordings)) if others else (),
    )
    if differing and verdict.compared.steps > 0:
        # The earliest one; of equal ones that between two runs on the same devices, which no exchange can explain.
        differing.sort(key=lambda item: (item[1].rank, item[0][1].attempt == 0))
        pair, difference = differing[0]
        place = investigation.place(pair, difference)
        if pair[1].own_hash_seeds:
            sign = f"the runs agree with one hash seed for all; with one of each rank's own {pair[1].devices} differs"
            investigation.named.append(NamedCause(HASH_ORDER.key, HASH_ORDER.title, sign, HASH_ORDER.advice))
            differing = []
        ours, theirs = map(runner.record, pair)
        seen = list(files_left((ours, theirs)))
        if seen:  # runs that begin where others ended point to any cause, and confirm it by chance
            investigation.unexplained, differing = difference, []
        for other, _ in differing:
            investigation.explain(other, evidence)
        if investigation.unexplained is not None:
            seen += numbers_apart(ours, theirs, difference.step)
            if place is not None and place.line and place.direction == "forward" and reference.family == "ddp":
                seen.append(
                    f"samples of the same content have other outputs there: what {place.line} computes uses the other "
                    "samples of a device's batch, or state of the device's own"
                )
        verdict = replace(
            verdict,
            difference=difference,
            place=place,
            causes=tuple(investigation.named),
            suspects=tuple(investigation.suspects),
            unexplained=investigation.unexplained,
            unexplained_place=investigation.unexplained_place,
            seen=tuple(seen),
        )
        if investigation.unexplained is not None and verdict.reached == "count-exact":
            # A difference without a cause may be a denominator.
            verdict = replace(verdict, reached="sample-exact")
    return replace(verdict, num_runs=runner.num_runs)


def _reached(investigation: _Investigation, pairs: Sequence[Pair], evidence: Evidence) -> Tier | None:
    """The highest tier at which all runs agree; None if there is none, or nothing to compare."""
    counts = not any(cause.suspect(evidence) for cause in CAUSES if cause.key in COUNTS)
    tiers = [
        reached(investigation.run(pair[0]), investigation.run(pair[1]), investigation.tolerance(pair), counts=counts)
        for pair in pairs
    ]
    return None if None in tiers else max(tiers, key=lambda tier: TIERS.index(tier or "bitwise"), default=None)


def _notes(investigation: _Investigation, repeat: Pair, recordings: Sequence[Recording]) -> list[str]:
    """Further sentences for the user."""
    notes = []
    first, again = recordings[:2]
    if investigation.runner.program.simulated:
        notes.append("processes on the CPU stand in for GPUs: kernels and their rounding are the CPU's")
    if parts := parts_of_ranks(first):
        count = sum(len(line["names"]) for line in first.lines("parameters"))
        notes.append(
            f"{len(parts)} of {count} parameters begin with other values on other ranks, each a part of the model: "
            f"{listed(parts, MAX_IDLE)}; if they are to be copies, begin them alike"
        )
    allowed = investigation.tolerance(repeat)
    if allowed.since and first_difference(first, again, investigation.required, allowed) is None:
        notes.append(
            f"two runs on {first.devices} are equal only up to rounding: an operation adds in an order of chance"
        )
    ended = any(line["reason"] == "program" for line in first.lines("end"))
    counts = {run.label: sum(1 for _ in run.lines("metric")) for run in recordings}
    num_compared = min(sum(1 for _ in paired_metrics(first, run)) for run in recordings) - len(investigation.clocks)
    if max(counts.values()) > num_compared:
        seen = ", ".join(f"{count} on {label}" for label, count in counts.items())
        clocks = f"; {len(investigation.clocks)} differ on {first.devices} from run to run, as clocks do"
        note = f"of the numbers that the program reduces itself {num_compared} are compared: there are {seen}"
        notes.append(note + clocks * bool(investigation.clocks))
    elif not num_compared and first.family == "ddp" and not ended:
        notes.append(f"no metric was compared: in {first.num_steps} steps the program reduced none; try more --steps")
    idle = idle_parameters(first)
    if idle and len(idle) < sum(len(line["names"]) for line in first.lines("parameters")):
        notes.append(f"of {len(idle)} parameters the gradient is zero in all steps: {', '.join(idle[:MAX_IDLE])}")
    if ended:
        notes.append(f"the program ended by itself after {first.num_steps} steps")
    return notes
