"""The verdict: do runs of a program on several device counts agree, and if not, where do they part and why?

run the program twice on the first devices and once on each of the others
compare each with the first, step by step
they agree?      report the tier, and what was compared
they do not?     name the first step, quantity and module that differ
                 suspect the causes that the recordings point to
                 run again with all suspects neutralised: the runs must agree now
                 give one suspect after another its effect back: those without which the runs agree are ruled out
                 the others are confirmed: with them neutralised the runs agree, with any one left they do not
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from samestep.errors import WorkerError
from samestep.verify.causes.evidence import Cause, Evidence
from samestep.verify.causes.frameworks import advice_on
from samestep.verify.causes.table import CAUSES, PAGES
from samestep.verify.compare import TIERS, Difference, Tier, Tolerance, first_difference, reached
from samestep.verify.place import Place, first_place
from samestep.verify.recording import Recording
from samestep.verify.runner import ProgramRunner, RunSpec
from samestep.verify.sanity_checks import Compared, count_compared, idle_parameters, refusals

COUNTS = ("loss_factor", "mean_of_means", "metrics")
MAX_IDLE = 6

Pair = tuple[RunSpec, RunSpec]


@dataclass(frozen=True)
class Named:
    """A cause of the table with the evidence for it."""

    key: str
    title: str
    evidence: str
    advice: str
    page: str  # of the documentation, within a checkout


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison; the object that `--json` prints."""

    program: str  # its name in messages
    family: str  # "api", "adopted" or "ddp"
    devices: tuple[str, ...]
    required: Tier
    reached: Tier | None  # the highest tier at which all runs agree
    compared: Compared
    refusals: tuple[str, ...] = ()  # reasons why agreement would prove nothing
    difference: Difference | None = None  # the first that the required tier does not allow
    place: Place | None = None
    causes: tuple[Named, ...] = ()  # those that were confirmed
    suspects: tuple[Named, ...] = ()  # the others, if not all of the difference could be explained
    unexplained: Difference | None = None  # the first difference with all confirmed causes neutralised
    notes: tuple[str, ...] = ()
    num_runs: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the runs agree as required, and that proves something."""
        return self.difference is None and not self.refusals


@dataclass
class _Inquiry:
    """The results so far for one program. `report` is called with what happens next; `base` are confirmed causes."""

    runner: ProgramRunner
    steps: int
    required: Tier
    report: Callable[[str], None]
    base: tuple[Cause, ...] = ()
    named: list[Named] = field(default_factory=list)
    suspects: list[Named] = field(default_factory=list)
    unexplained: Difference | None = None
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
        ours, theirs = (self.runner.record(spec) if spec.neutral else self.run(spec) for spec in pair)
        for recording in (ours, theirs):
            if recording.failure is not None:
                text = f"the counterfactual run failed: {recording.failure}"
                return Difference(recording.num_steps, "steps", "", text, (ours.label, theirs.label))
        tier = tier or self.required
        found = first_difference(ours, theirs, tier, self.tolerance(pair[0]))
        if found is not None and tier == "allclose" and found.quantity in ("loss", "gradient", "state", "buffer"):
            self._measure(pair[0].devices)
            found = first_difference(ours, theirs, tier, self.tolerance(pair[0]))
        return found

    def tolerance(self, spec: RunSpec) -> Tolerance:
        """How far a run may be from this one by rounding."""
        again = None if spec.neutral else self.runner.known(RunSpec(spec.devices, self.steps, attempt=1))
        return Tolerance(self.runner.record(spec), self._response, again)

    def _measure(self, devices: str) -> None:
        """Measures how rounding grows, once."""
        if self._response is None:
            self.report(f"measuring on {devices} how rounding grows")
            nudged = self.runner.record(RunSpec(devices, self.steps, nudge=True))
            if nudged.failure is None:
                self._response = (self.run(RunSpec(devices, self.steps)), nudged)

    def explain(self, pair: Pair, evidence: Evidence) -> None:
        """Confirms causes until the two runs agree with all of them neutralised, or no suspect is left."""
        while (difference := self.compare(current := self._without(pair, (), self.steps))) is not None:
            suspects = self._suspects(evidence, current)
            confirmed = self._confirm(pair, list(suspects), min(self.steps, difference.step + 1))
            if not confirmed:
                self.unexplained = self.unexplained or difference
                self.suspects += [named for named in suspects.values() if named not in self.suspects]
                return
            self.named += [suspects[cause] for cause in confirmed]
            self.base += tuple(confirmed)

    def _suspects(self, evidence: Evidence, current: Pair) -> dict[Cause, Named]:
        """The causes that something points to; those of rounding alone only if nothing else is left."""
        only_rounding = self.required == "bitwise" and self.compare(current, "allclose") is None
        found = {}
        for cause in CAUSES:
            if cause not in self.base and (only_rounding or not cause.bits_only):
                sign = cause.suspect(evidence)
                if sign is not None:
                    found[cause] = Named(cause.key, cause.title, sign, advice_on(cause, evidence), PAGES[cause.key])
        return found

    def _confirm(self, pair: Pair, suspects: list[Cause], steps: int) -> list[Cause]:
        """The suspects that are needed, and together suffice, to make the two runs agree for some steps."""
        if not suspects:
            return []
        self.report(f"running without the effect of {', '.join(cause.key for cause in suspects)}")
        if self.compare(self._without(pair, suspects, steps)) is not None:
            return []
        needed = suspects
        for cause in reversed(suspects):
            rest = [other for other in needed if other is not cause]
            if not rest:
                break
            self.report(f"giving {cause.key} its effect back")
            if self.compare(self._without(pair, rest, steps)) is None:
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
    inquiry = _Inquiry(runner, steps, required or "bitwise", report)
    first = RunSpec(devices[0], steps)
    reference = inquiry.run(first)
    if required is None and reference.family == "ddp":
        inquiry.required = "allclose"
    if reference.num_steps == 0:  # in other runs there would be none either
        devices, others = devices[:1], []
    else:
        others = [replace(first, attempt=1), *(RunSpec(spec, steps) for spec in devices[1:])]
    pairs = [(first, other) for other in others]
    recordings = (reference, *(inquiry.run(other) for other in others))
    evidence = Evidence(recordings)
    differing = [(pair, found) for pair in pairs if (found := inquiry.compare(pair)) is not None]
    verdict = Verdict(
        program=runner.program.label,
        family=reference.family,
        devices=tuple(devices),
        required=inquiry.required,
        reached=_reached(inquiry, pairs, evidence),
        compared=count_compared(recordings),
        refusals=tuple(refusals(recordings)),
        notes=tuple(_notes(inquiry, recordings)) if others else (),
    )
    if differing and verdict.compared.steps > 0:
        differing.sort(key=lambda item: (item[1].rank, item[0][1].attempt == 0))
        pair, difference = differing[0]
        place = _place(inquiry, pair, difference)
        for other, _ in differing:
            inquiry.explain(other, evidence)
        verdict = replace(
            verdict,
            difference=difference,
            place=place,
            causes=tuple(inquiry.named),
            suspects=tuple(inquiry.suspects),
            unexplained=inquiry.unexplained,
        )
        if inquiry.unexplained is not None and verdict.reached == "count-exact":
            verdict = replace(verdict, reached="sample-exact")  # a difference without a cause may be a denominator
    return replace(verdict, num_runs=runner.num_runs)


def _reached(inquiry: _Inquiry, pairs: Sequence[Pair], evidence: Evidence) -> Tier | None:
    """The highest tier at which all runs agree; None if there is none, or nothing to compare."""
    counts = not any(cause.suspect(evidence) for cause in CAUSES if cause.key in COUNTS)
    tiers = [
        reached(inquiry.run(ours), inquiry.run(theirs), inquiry.tolerance(ours), counts=counts)
        for ours, theirs in pairs
    ]
    return None if None in tiers else max(tiers, key=lambda tier: TIERS.index(tier or "bitwise"), default=None)


def _place(inquiry: _Inquiry, pair: Pair, difference: Difference) -> Place | None:
    """The first module that differs in the step in which runs part."""
    if difference.quantity in ("samples", "inputs", "start", "steps", "metric", "lr"):
        return None
    inquiry.report(f"recording every module in step {difference.step}")
    specs = (replace(spec, steps=difference.step + 1, detail=difference.step) for spec in pair)
    ours, theirs = map(inquiry.runner.record, specs)
    if ours.failure is not None or theirs.failure is not None:
        return None
    return first_place(ours, theirs, exact=inquiry.required == "bitwise")


def _notes(inquiry: _Inquiry, recordings: Sequence[Recording]) -> list[str]:
    """Further sentences for the user."""
    notes = []
    first, again = recordings[:2]
    if inquiry.required != "bitwise" and first_difference(first, again, "bitwise") is not None:
        notes.append(
            f"two runs on {first.devices} are equal only up to rounding: an operation adds in an order of chance"
        )
    idle = idle_parameters(first)
    if idle and len(idle) < sum(len(line["names"]) for line in first.lines("parameters")):
        notes.append(f"of {len(idle)} parameters the gradient is zero in all steps: {', '.join(idle[:MAX_IDLE])}")
    if any(line["reason"] == "program" for line in first.lines("end")):
        notes.append(f"the program ended by itself after {first.num_steps} steps")
    return notes
