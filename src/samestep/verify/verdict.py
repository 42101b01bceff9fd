"""The verdict: do runs of a program on several device counts agree, and if not, where do they part and why?

run the program twice on the first devices and once on each of the others
compare each with the first, step by step
they agree?      say at which tier, and what was compared
they do not?     name the first step, quantity and module that differ
                 suspect the causes that what was recorded points to
                 run again with all suspects neutralised: the runs must agree now
                 give one suspect after another its effect back: those without which the runs agree are innocent
                 the others are confirmed: with them neutralised the runs agree, with any one left they do not
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from samestep.errors import WorkerError
from samestep.verify.causes.cause import Cause
from samestep.verify.causes.evidence import Evidence
from samestep.verify.causes.table import CAUSES
from samestep.verify.compare import TIERS, Difference, Tier, first_difference, label, reached
from samestep.verify.place import Place, first_place
from samestep.verify.recording import Recording
from samestep.verify.runner import ProgramRunner, Question
from samestep.verify.sanity_checks import Compared, idle_parameters, refusals, what_was_compared
from samestep.verify.tolerance import Tolerance

COUNTS = ("mean_of_means", "metrics")
MAX_ROUNDS = 8
MAX_IDLE = 6


@dataclass(frozen=True)
class Named:
    """A cause that was confirmed.

    Attributes:
        key: its name in the table.
        title: what it is.
        evidence: what pointed to it, with names and numbers.
        advice: what mends it.
    """

    key: str
    title: str
    evidence: str
    advice: str


@dataclass(frozen=True)
class Verdict:
    """What came of it.

    Attributes:
        program: what the user called it.
        family: "api", "adopted" or "ddp".
        devices: the device counts that were compared.
        required: the tier that was asked for.
        reached: the highest tier at which all runs agree; None if there is none.
        compared: what was compared.
        refusals: why agreement would prove nothing; empty where it does.
        difference: the first that the tier does not allow.
        place: the first module that differs.
        causes: those that were confirmed.
        suspects: those that something points to, where not all of the difference could be explained.
        unexplained: what still differs with all confirmed causes neutralised.
        notes: what else the user should know.
        num_runs: how many runs it took.
    """

    program: str
    family: str
    devices: tuple[str, ...]
    required: Tier
    reached: Tier | None
    compared: Compared
    refusals: tuple[str, ...] = ()
    difference: Difference | None = None
    place: Place | None = None
    causes: tuple[Named, ...] = ()
    suspects: tuple[Named, ...] = ()
    unexplained: Difference | None = None
    notes: tuple[str, ...] = ()
    num_runs: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the runs agree as required, and that proves something."""
        return self.difference is None and not self.refusals


@dataclass
class Inquiry:
    """What is known so far of one program.

    Attributes:
        runner: where it is run.
        steps: optimizer steps to compare.
        required: the tier that is asked for.
        tell: told what happens next.
    """

    runner: ProgramRunner
    steps: int
    required: Tier
    tell: Callable[[str], None]
    base: tuple[str, ...] = ()
    named: list[Named] = field(default_factory=list)
    suspects: list[Named] = field(default_factory=list)
    unexplained: Difference | None = None
    _response: tuple[Recording, Recording] | None = None

    def run(self, question: Question) -> Recording:
        """A recording of the program as it is."""
        if self.runner.known(question) is None and not question.neutral:
            self.tell(f"running on {question.devices}{' again' if question.attempt else ''}")
        recording = self.runner.record(question)
        if recording.failure is not None:
            raise WorkerError(f"{self.runner.program.label} failed on {question.devices}: {recording.failure}")
        return recording

    def compare(self, pair: tuple[Question, Question], tier: Tier | None = None) -> Difference | None:
        """The first difference between two runs that a tier does not allow, by default the tier that is asked for.

        Where that tier allows rounding, the first time that more than the simple bound is seen, it is measured how
        rounding grows in this program.
        """
        ours, theirs = (self.run(question) for question in pair)
        tier = tier or self.required
        found = first_difference(ours, theirs, tier, self.tolerance(ours))
        if found is not None and tier == "allclose" and found.quantity in ("loss", "gradient", "state", "buffer"):
            self.measure(pair[0].devices)
            found = first_difference(ours, theirs, tier, self.tolerance(ours))
        return found

    def tolerance(self, plain: Recording) -> Tolerance:
        """How far apart a run may be from this one by rounding."""
        again = None if plain.neutral else self.runner.known(Question(plain.devices, self.steps, attempt=1))
        return Tolerance(plain, self._response, again)

    def measure(self, devices: str) -> None:
        """Measures how rounding grows, once."""
        if self._response is None:
            calm, nudged = Question(devices, self.steps), Question(devices, self.steps, nudge=True)
            self.tell(f"measuring on {devices} how rounding grows")
            recording = self.runner.record(nudged)
            if recording.failure is None:
                self._response = (self.run(calm), recording)

    def evidence(self, pairs: Sequence[tuple[Question, Question]]) -> Evidence:
        """What the runs in which nothing was changed noticed."""
        questions = dict.fromkeys(question for pair in pairs for question in pair)
        return Evidence.from_records([self.run(replace(question, neutral=())) for question in questions])

    def explain(self, pair: tuple[Question, Question], evidence: Evidence) -> None:
        """Confirms causes until the two runs agree with all of them neutralised, or no suspect is left."""
        for _ in range(MAX_ROUNDS):
            current = self._neutral(pair, self.base, self.steps)
            difference = self._compare_neutral(current)
            if difference is None:
                return
            suspects = self._suspects(evidence, current)
            confirmed = self._confirm(pair, suspects, min(self.steps, difference.step + 1))
            if not confirmed:
                self.unexplained = self.unexplained or difference
                known = {named.key for named in self.suspects}
                self.suspects += [named for _, named in suspects if named.key not in known]
                return
            self.named += [named for cause, named in suspects if cause in confirmed]
            self.base += tuple(cause.key for cause in confirmed)
        self.unexplained = self._compare_neutral(self._neutral(pair, self.base, self.steps))

    def _suspects(self, evidence: Evidence, current: tuple[Question, Question]) -> list[tuple[Cause, Named]]:
        """The causes that something points to; those of rounding alone only where nothing else is left."""
        only_rounding = self.required == "bitwise" and self._compare_neutral(current, "allclose") is None
        found = []
        for cause in CAUSES:
            if cause.key in self.base or (cause.bits_only and not only_rounding):
                continue
            sign = cause.suspect(evidence)
            if sign is not None:
                found.append((cause, Named(cause.key, cause.title, sign, cause.advice)))
        return found

    def _confirm(self, pair: tuple[Question, Question], suspects: list[tuple[Cause, Named]], steps: int) -> list[Cause]:
        """Those of the suspects that are needed, and together suffice, to make the two runs agree for some steps."""
        needed = [cause for cause, _ in suspects]
        if not needed:
            return []
        self.tell(f"running without the effect of {_listed([cause.key for cause in needed])}")
        if not self._agree(pair, needed, steps):
            return []
        for cause in reversed(list(needed)):
            if len(needed) == 1:
                break
            rest = [other for other in needed if other is not cause]
            self.tell(f"giving {cause.key} its effect back")
            if self._agree(pair, rest, steps):
                needed = rest
        return needed

    def _agree(self, pair: tuple[Question, Question], causes: Sequence[Cause], steps: int) -> bool:
        """Whether two runs agree for some steps when causes are neutralised."""
        keys = self.base + tuple(cause.key for cause in causes)
        return self._compare_neutral(self._neutral(pair, keys, steps)) is None

    def _neutral(self, pair: tuple[Question, Question], keys: Sequence[str], steps: int) -> tuple[Question, Question]:
        ordered = tuple(cause.key for cause in CAUSES if cause.key in keys)
        first, second = (replace(question, neutral=ordered, steps=steps) for question in pair)
        return first, second

    def _compare_neutral(self, pair: tuple[Question, Question], tier: Tier | None = None) -> Difference | None:
        """As `compare`, where a run that fails under a counterfactual differs."""
        recordings = [self.runner.record(question) for question in pair]
        failed = next((recording for recording in recordings if recording.failure is not None), None)
        if failed is not None:
            runs = (label(recordings[0]), label(recordings[1]))
            return Difference(failed.num_steps, "steps", "", f"the counterfactual run failed: {failed.failure}", runs)
        return self.compare(pair, tier)


def reach_verdict(
    runner: ProgramRunner,
    devices: Sequence[str],
    steps: int,
    required: Tier | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Runs a program on several device counts and finds out whether, and why not, the runs agree."""
    inquiry = Inquiry(runner, steps, required or "bitwise", tell)
    first = Question(devices[0], steps)
    reference = inquiry.run(first)
    if required is None and reference.family == "ddp":
        inquiry.required = "allclose"
    if reference.num_steps == 0:  # other runs would find as little
        return _nothing_seen(inquiry, first.devices, reference)
    others = [replace(first, attempt=1), *(Question(spec, steps) for spec in devices[1:])]
    pairs = [(first, other) for other in others]
    recordings = [reference, *(inquiry.run(other) for other in others)]
    differing = [(pair, found) for pair in pairs if (found := inquiry.compare(pair)) is not None]
    evidence = inquiry.evidence(pairs)
    verdict = Verdict(
        program=runner.program.label,
        family=reference.family,
        devices=tuple(devices),
        required=inquiry.required,
        reached=_reached(inquiry, pairs, evidence),
        compared=what_was_compared(recordings),
        refusals=tuple(refusals(recordings)),
        notes=tuple(_notes(inquiry, recordings)),
    )
    if differing and verdict.compared.steps > 0:
        differing.sort(key=lambda item: (item[1].rank, item[0][1].attempt == 0))
        pair, difference = differing[0]
        verdict = replace(verdict, difference=difference, place=_place(inquiry, pair, difference))
        for other, _ in differing:
            inquiry.explain(other, evidence)
        verdict = replace(
            verdict,
            causes=tuple(inquiry.named),
            suspects=tuple(inquiry.suspects),
            unexplained=inquiry.unexplained,
        )
        if inquiry.unexplained is not None and verdict.reached == "count-exact":
            verdict = replace(verdict, reached="sample-exact")  # what is not explained may be a wrong denominator
    return replace(verdict, num_runs=runner.num_runs)


def _nothing_seen(inquiry: Inquiry, devices: str, reference: Recording) -> Verdict:
    """The verdict on a program that takes no step."""
    return Verdict(
        program=inquiry.runner.program.label,
        family=reference.family,
        devices=(devices,),
        required=inquiry.required,
        reached=None,
        compared=what_was_compared([reference]),
        refusals=tuple(refusals([reference])),
        num_runs=inquiry.runner.num_runs,
    )


def _reached(inquiry: Inquiry, pairs: Sequence[tuple[Question, Question]], evidence: Evidence) -> Tier | None:
    """The highest tier at which all runs agree."""
    counts = not any(cause.suspect(evidence) for cause in CAUSES if cause.key in COUNTS)
    lowest = 0
    for ours, theirs in pairs:
        recordings = inquiry.run(ours), inquiry.run(theirs)
        tier = reached(*recordings, inquiry.tolerance(recordings[0]), counts=counts)
        if tier is None:
            return None
        lowest = max(lowest, TIERS.index(tier))
    return TIERS[lowest]


def _place(inquiry: Inquiry, pair: tuple[Question, Question], difference: Difference) -> Place | None:
    """The first module that differs in the step in which runs part."""
    if difference.quantity in ("samples", "inputs", "start", "steps", "metric", "lr"):
        return None
    questions = [replace(question, steps=difference.step + 1, detail=difference.step) for question in pair]
    inquiry.tell(f"recording every module in step {difference.step}")
    ours, theirs = (inquiry.runner.record(question) for question in questions)
    if ours.failure is not None or theirs.failure is not None:
        return None
    return first_place(ours, theirs, exact=inquiry.required == "bitwise")


def _notes(inquiry: Inquiry, recordings: Sequence[Recording]) -> list[str]:
    """What the user should know beside the verdict."""
    notes = []
    first, again = recordings[:2]
    if inquiry.required != "bitwise" and first_difference(first, again, "bitwise") is not None:
        notes.append(
            f"two runs on {first.devices} are equal only up to rounding: an operation adds in an order of chance"
        )
    still = idle_parameters(first)
    if still and len(still) < sum(len(line["names"]) for line in first.lines("parameters")):
        notes.append(f"of {len(still)} parameters the gradient is zero in all steps: {_listed(still[:MAX_IDLE])}")
    if any(line["reason"] == "program" for line in first.lines("end")):
        notes.append(f"the program ended by itself after {first.num_steps} steps")
    return notes


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys)
