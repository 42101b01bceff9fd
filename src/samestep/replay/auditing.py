"""Audits a recorded run: takes drawn segments between its checkpoints again, and compares all that they left.

Good checkpoints cut a run into segments (`segments_of`). A drawn one is taken again from the checkpoint before it, each
step compared with its line of the ledger, and the state after its last step with the next checkpoint (`SegmentRerun`).
So every checkpoint is compared by one segment and trusted by the next: if all segments hold, the run follows from its
seed. Files are compared with each other by `_faults`. What the folder claims and no segment computes is listed
(`not_audited`); with a fault, or with such a claim, an audit does not hold.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, uint8

from samestep.checkpoint.contract_diff import UNMENTIONED, differences, explain, flat
from samestep.checkpoint.digest import state_digest
from samestep.checkpoint.export import model_weights
from samestep.checkpoint.local_shards import gathered
from samestep.checkpoint.packing import METADATA
from samestep.checkpoint.resume import check_best, named_checkpoint, read_state
from samestep.checkpoint.run_folder import ATTESTATION_FILE, AUDITED_NAMES, WEIGHTS_FILE, holds_run
from samestep.checkpoint.state import rest_of
from samestep.checkpoint.storage import (
    BEST_FILE,
    LATEST_FILE,
    Snapshot,
    checkpoint_name,
    list_checkpoints,
    strange_entries,
    verify_checkpoint,
)
from samestep.checkpoint.verified_files import header_of
from samestep.checks import check_number
from samestep.comm.environment import read_environment
from samestep.data.checksums import flattened
from samestep.engine.rank_device import own_device
from samestep.engine.result import StepResult
from samestep.engine.step import TrainStep
from samestep.errors import CheckpointError, ContractError, DataError, UsageError
from samestep.files import json_bytes, load_json, read_small, reason
from samestep.replay.replaying import (
    Finished,
    ProgramRerun,
    announce,
    compute_as_recorded,
    limited,
    num_threads_of,
    program_of,
)
from samestep.run.trainer import Trainer
from samestep.runs.attestation import checkpoints_of, record_of, statement
from samestep.runs.ledger import Ledger, field_name, gaps, ledger_value, read_ledger
from samestep.runs.recorder import file_sha256, starts_of
from samestep.text import counted

SEGMENTS = 3
MAX_HEADER_BYTES = 64 << 20  # of a file of safetensors
TIMES = (".seconds", ".samples_per_second")  # numbers of a checkpoint's records; the rest of it is compared
OF_LOOP = ("command", "working_folder", "script_sha256", "code", "packages", "signature")
PROGRAM = ".run.rest.program"  # in a checkpoint of a loop of the user's own
CONTRACT = "contract"  # in the same place, compared field by field


@dataclass(frozen=True)
class Segment:
    """The steps from one checkpoint to the next, or from the seed, or to the end of the ledger."""

    number: int  # from 1
    first: int
    last: int
    start: str | None  # the checkpoint before its first step; None for the seed
    target: str | None  # the one after its last; None if there is none


@dataclass(frozen=True)
class AuditedSegment:
    """A segment that was taken again."""

    number: int  # from 1
    first: int
    last: int
    seconds: float
    digests: int  # checksums of the state that were compared
    difference: str | None  # the first one, as a sentence


@dataclass(frozen=True)
class Audit:
    """The result of an audit: faults of the files as a whole, and the segments that were taken again."""

    run: str
    seed: int
    num_segments: int
    num_steps: int
    segments: Sequence[AuditedSegment]
    faults: Sequence[str]
    notes: Sequence[str]
    not_audited: Sequence[str]  # what the run claims, and none of its segments computes again, as sentences
    not_compared: Sequence[str]  # other entries of its folder

    @property
    def holds(self) -> bool:
        """Whether all that was compared is the same, to the bit, and no more is claimed."""
        return not self.faults and not self.not_audited and not any(each.difference for each in self.segments)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def audit(
    run: str | Path,
    segments: int = SEGMENTS,
    *,
    seed: int | None = None,
    trust: bool = False,
    program: Callable[[], object] | None = None,
    tell: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    take: Callable[[Sequence[Segment]], Iterable[AuditedSegment]] | None = None,
) -> Audit:
    """Checks all hashes of a run's folder, takes drawn segments again on one device, and compares them to the bit.

    Nothing is written to the folder. `segments` is their number, 0 for all; they are drawn by `seed`, a random one by
    default. The run's own program, or `program`, is run once a segment; see `replay` for `trust`. `progress` gets
    the steps done and those to do; `take` takes the segments of some numbers again elsewhere.

    Raises:
        UsageError: nothing can be audited, or by no program; the message says what must be recorded.
        ContractError: the program has another contract than the run.
    """
    check_number("segments", segments, 0)
    folder, notes = Path(run), list[str]()
    record, ledger, places = record_of(folder), _ledger_of(folder), list_checkpoints(checkpoints_of(folder))
    if take is None:
        compute_as_recorded(record)
    bad = {path: fault for _, path in places if (fault := verify_checkpoint(path)) is not None}
    places = [(step, path) for step, path in places if path not in bad]
    faults = [*bad.values(), *attestation_faults(folder, notes), *_faults(folder, record, ledger, places)]
    # From good checkpoints alone: a damaged one is a fault already, and the segments on both sides of it become one.
    plan = segments_of(folder, ledger, places, notes.append)
    seed = secrets.randbits(32) if seed is None else seed
    # Without trust `audit_segments` refuses other code, but for recipes, whose code goes with samestep's version.
    notes += check_code(record, folder, trust) if trust else []
    drawn = Random(seed).sample(plan, min(segments or len(plan), len(plan)))
    if take is None:
        take = partial(audit_segments, folder, trust=trust, program=program, tell=tell, progress=progress)
    done = list(take(sorted(drawn, key=lambda segment: segment.first)))
    left_out = [*_not_audited(folder, ledger, plan)]
    others = sorted({*os.listdir(folder)} - {*AUDITED_NAMES}) if holds_run(folder) else []
    num_steps = plan[-1].last - plan[0].first + 1
    return Audit(str(folder), seed, len(plan), num_steps, done, faults, notes, left_out, others)


def _ledger_of(folder: Path) -> Ledger:
    if not holds_run(folder):  # a loop of the user's own has none
        return Ledger({}, ())
    try:
        return read_ledger(folder)
    except DataError as error:
        raise UsageError(f"{folder} cannot be audited: {error}") from error


def segments_of(
    folder: Path, ledger: Ledger, places: Sequence[tuple[int, Path]], tell: Callable[[str], None]
) -> list[Segment]:
    """The segments of a run between its good checkpoints, in order; a `UsageError` if there is none."""
    last = max(ledger.steps, default=0)
    begin = ledger.events[0] if ledger.events else {}
    names: dict[int, str | None] = {step: path.name for step, path in places}
    if begin.get("event") != "resume":
        names[0] = None  # not by a checkpoint of step 0, which nothing leads to
    steps = sorted(names)
    if steps and last > steps[-1]:
        steps, names[last] = [*steps, last], None
    pairs = enumerate(pairwise(steps), 1)
    found = [Segment(number, one + 1, two, names[one], names[two]) for number, (one, two) in pairs]
    if found and places[:1] and places[0][0] == 0 and not holds_run(folder):  # saved before the loop's first step
        found = [Segment(0, 1, 0, None, places[0][1].name), *found]
    if not found:
        raise UsageError(
            f"{folder} cannot be audited: it has no step after its beginning or a checkpoint. A run that is to be "
            "audited keeps its checkpoints, by Trainer(…, checkpoint_steps=100, keep=1000)"
        )
    if len(found) == 1:
        tell(
            "one segment is all of it: there are no checkpoints between. For several, the next run writes and keeps "
            "more of them, by Trainer(…, checkpoint_steps=100, keep=1000)"
        )
    return found


def _not_audited(folder: Path, ledger: Ledger, plan: Sequence[Segment]) -> Iterator[str]:
    """What a folder claims and its segments do not compute again."""
    if plan[0].start is not None:
        yield f"steps 1 to {plan[0].first - 1}: no segment of this folder leads to {plan[0].start}"
    if plan[-1].target is None and (folder / WEIGHTS_FILE).exists():
        yield f"{WEIGHTS_FILE}: there is no checkpoint after step {plan[-1].last}"
    for change in [each for each in ledger.events if each["event"] == "contract_change"]:
        yield f"the steps with the settings that were changed after step {change['step']}"
    home = checkpoints_of(folder)
    if home.is_dir():
        yield from (f"{home.name}/{name}, which no run writes" for name in strange_entries(home, holds_run(folder)))


def attestation_faults(folder: Path, notes: list[str]) -> Iterator[str]:
    """How a folder differs from its attestation; a note if it has none."""
    if not (folder / ATTESTATION_FILE).exists():
        notes.append(
            "there is no attestation: whether the files are as their author left them is not known (samestep attest)"
        )
        return
    try:
        value, data = statement(folder), read_small(folder / ATTESTATION_FILE)
        found = differing(load_json(data), value, "")
        if found is None and data != json_bytes(value):
            found = "it is not what samestep attest writes"
    except (OSError, ValueError) as error:
        found = reason(error)
    if found is not None:
        yield f"{ATTESTATION_FILE} does not fit the folder: {found}"


def _faults(
    folder: Path, record: Mapping[str, Any], ledger: Ledger, places: Sequence[tuple[int, Path]]
) -> Iterator[str]:
    """What is wrong with the files, without taking a step."""
    yield from ledger.problems
    yield from gaps(folder) if holds_run(folder) else ()
    for repeat in ledger.repeats_that_differ:
        yield f"the ledger has step {repeat.step} twice, with another {field_name(repeat.field)} the second time"
    if ledger.torn and ledger.events and ledger.events[-1]["event"] == "end":
        yield "the ledger ends with half a line, after its end"
    digests = [(each["step"], each.get("digest")) for each in ledger.events if each["event"] == "end"]
    if len(dict(digests)) < len({*digests}):
        yield "the ledger has two digests of the end after one step"
    ends = [each["step"] for each in ledger.events if each["event"] in ("stop", "end")]
    last, reached = max(ledger.steps, default=0), max([*ends, *(step for step, _ in places)], default=0)
    if ledger.steps and reached > last:
        yield f"the ledger ends after step {last}, and the run came to step {reached}"
    if not places:
        return
    newest = read_state(places[-1][1])
    for change in differences(record, newest.rest[CONTRACT]):
        if change.breaks:
            yield f"run.json and {newest.name} have another {change.field}: {change.before} and {change.after}"
    if unknown := _only_in(record, newest.rest[CONTRACT]):
        yield f"run.json has {unknown}, and {newest.name} has not"
    home = checkpoints_of(folder)
    try:
        if (home / LATEST_FILE).exists() and (latest := named_checkpoint(home / LATEST_FILE).name) != newest.name:
            yield f"{LATEST_FILE} names {latest}, and the newest checkpoint is {newest.name}"
        if (home / BEST_FILE).exists():
            check_best(home)
    except CheckpointError as error:
        yield str(error)
    if places[-1][0] < last:  # a run may end inside an epoch, see `_not_audited`
        return
    names, _ = model_weights(places[-1][1], newest.snapshot, "model")
    try:
        data = read_small(folder / WEIGHTS_FILE, MAX_HEADER_BYTES + sum(each.nbytes for each in names.values()))
        held, metadata = load(data), header_of(data).get(METADATA)
    except FileNotFoundError:
        return
    except (OSError, ValueError, SafetensorError) as error:
        yield f"{WEIGHTS_FILE} cannot be read: {reason(error)}"
        return
    if metadata != {"format": "pt"}:
        yield f"{WEIGHTS_FILE} has metadata that no run writes: {metadata}"
    if (found := differing(held, names, "")) is not None:
        yield f"{WEIGHTS_FILE} and {newest.name} have another {found.partition(': ')[0]}"


def audit_segments(
    folder: Path,
    segments: Sequence[Segment],
    trust: bool = False,
    program: Callable[[], object] | None = None,
    tell: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[AuditedSegment]:
    """Takes segments of a run again in this process, one of the ranks if it was started as one."""
    record, ledger, own = record_of(folder), _ledger_of(folder), None
    compute_as_recorded(record)
    if program is None:
        own = program_of(record, folder)
        announce(own, record, folder, trust, tell)
        if not own.is_recipe:
            check_code(record, folder, trust)
        program = own.run
    environment = read_environment()
    device = own_device("cpu" if record.get("device_kind") == "cpu" else None, environment)
    total, before = sum(each.last - each.first + 1 for each in segments), 0
    for segment in segments:
        tell(f"segment {segment.number}: steps {segment.first} to {segment.last} on {device}")
        began = time.perf_counter()
        rerun = SegmentRerun(
            run_folder=folder.resolve(),
            record=record,
            ledger=ledger,
            step=segment.last,
            start=_place(folder, segment.start),
            device=device,
            num_threads=num_threads_of(device, record),
            any_trainer=own is None or own.is_recipe,
            segment=segment,
            step_done=partial(_count, progress, before, total),
        )
        with limited(record, trust or own is None, _place(folder, segment.start or segment.target)):
            rerun.run(program)
        before += segment.last - segment.first + 1
        seconds, digests = time.perf_counter() - began, sum(one.has_digest for one in rerun.compared)
        yield AuditedSegment(segment.number, segment.first, segment.last, seconds, digests, rerun.difference)


def check_code(record: Mapping[str, Any], run: Path, trust: bool) -> list[str]:
    """Raises a `UsageError` for code that is not as at each start of a run; with trust returns sentences on it."""
    changed, starts = [], starts_of(record)
    for number, start in enumerate(starts, 1):
        code = start["code"] if isinstance(start.get("code"), dict) else {}
        files = code.get("files")
        for name, sha256 in files.items() if isinstance(files, dict) else ():
            if file_sha256(Path(str(code.get("folder")), name)) != sha256:
                which = f" in its start {number} of {len(starts)}" if len(starts) > 1 else ""
                changed.append(f"{name} is not the file that made it{which}")
                break
    if changed and not trust:
        raise UsageError(f"{run} cannot be audited: {changed[0]}; put it back, or audit it as it is now with --trust")
    return changed


def audit_as_rank(**options: Any) -> list[dict[str, Any]]:
    """Takes segments again as one of several ranks."""
    segments = [Segment(*each) for each in options.pop("segments")]
    return [asdict(each) for each in audit_segments(Path(options.pop("folder")), segments, **options)]


def _count(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _place(folder: Path, name: str | None) -> Path | None:
    return None if name is None else checkpoints_of(folder.resolve()) / name


@dataclass(eq=False)
class SegmentRerun(ProgramRerun):
    """Compares each step of a segment with the ledger, and the state after the last one with the next checkpoint."""

    segment: Segment
    step_done: Callable[[int], None]
    difference: str | None = field(default=None, init=False)
    _is_done: bool = field(default=False, init=False)
    _is_loop: bool = field(default=False, init=False)  # of the user's own, which has loaded or saved
    _ends: dict[int, Any] = field(default_factory=dict, init=False)  # digests that are not found yet

    def __post_init__(self) -> None:
        events = () if self.ledger is None else self.ledger.events
        ends = [each for each in events if each["event"] == "end" and self.segment.first <= each["step"] <= self.step]
        self._ends = {each["step"]: each.get("digest") for each in ends}

    def has_reached(self) -> bool:
        if self._is_loop and not self._is_done:
            self.difference, self._is_done = f"no checkpoint was saved after step {self.step}", True
        # At the end of training a program may end before a state is found that is the recorded one.
        return self._is_done or (self.difference is not None and self._taken == self.step)

    def begins(self, step: TrainStep) -> None:
        """Compares the contracts; ends the program before the step that follows the segment."""
        for end in [end for end in self._ends if end <= step.num_steps and self.difference is None]:
            self._end(f"the digest after step {end}: {self._ends[end]}, and it is another now")
        if self._taken > self.step:
            self._end(self.difference)
        if self.first is None:
            assert self.trainer is not None, "its step begins"
            before = self.record if self.start is None else read_state(self.start).rest[CONTRACT]
            if breaking := [change for change in differences(before, self.trainer._contract) if change.breaks]:
                raise ContractError(
                    f"{self.run_folder} cannot be audited here from step {self.segment.first} on, which was made with "
                    f"other settings:\n{explain(breaking)}\ngo back to its values, or audit it where they hold"
                )
            if self._taken != self.segment.first:
                self._end(f"the first step that the program took is {self._taken}, not {self.segment.first}")

    def ends(self, step: TrainStep, result: StepResult) -> None:
        """Compares the step with its line."""
        assert self.ledger is not None, "an audit has one"
        if self._taken not in self.ledger.steps:
            self._end(f"step {self._taken} has no line in the ledger")
        self.compare(step, result, strict=True)
        self.step_done(len(self.compared))
        if fields := self.compared[-1].fields:
            shown = (f"{field_name(one.field)} {ledger_value(one.a)}, now {ledger_value(one.b)}" for one in fields)
            self._end(f"step {self._taken}: {', '.join(shown)}")
        if self._taken == self.step and self.segment.target is None and not self._ends:
            self._end(None)

    def at_boundary(self, trainer: Trainer, capture: Callable[[], Snapshot]) -> None:
        """Compares the last state with the recorded one, of before or after the end of an epoch."""
        if trainer is not self.trainer or trainer.step.num_steps not in (self.step, *self._ends):
            return
        state, target, found, is_same_place = capture(), self._target(), None, True
        if (end := self._ends.get(state.step)) is not None:
            now = state_digest(trainer.step)
            if end == now:
                del self._ends[state.step]
            else:
                found = f"the final digest: {end}, now {now}"
        if state.step != self.step:
            return
        state = replace(state, files=gathered(state.files, trainer.step.communicator))
        if target is not None:
            found = first_difference(target, state) or found
            batches = (rest_of(each)["epoch"]["num_batches"] for each in (target, state))
            is_same_place = next(batches) == next(batches)
        if found is None:
            self._end(None)
        # Not the end yet: the recorded state may be from the other side of an epoch's end, with its record, which is
        # the next boundary. A difference at the same side is the one to name.
        if self.difference is None or is_same_place:
            self.difference = f"after step {self.step}: {found}"

    def at_load(self, place: Path) -> Path | None:
        """The first checkpoint of the segment, for a loop of the user's own."""
        if self.run_folder not in (place.resolve(), place.resolve().parent):
            return place
        self._is_loop = True
        return self.start

    def at_save(self, place: Path, capture: Callable[[], Snapshot]) -> Path | None:
        """Compares the state that a loop of the user's own saves with the recorded one, and writes nothing."""
        if place.resolve() != self.run_folder:
            return None
        if self.start is not None and not self._is_loop:
            raise UsageError(
                f"{self.run_folder} cannot be audited from step {self.segment.first} on: its program does not go on "
                "from a checkpoint; have it call run.load_checkpoint(folder, …) before its loop"
            )
        state, self._is_loop = capture(), True
        if state.step == self.step:
            target = self._target()
            found = None if target is None else first_difference(target, state)
            self._end(None if found is None else f"after step {self.step}: {found}")
        if state.step > self.step:
            self._end(f"no checkpoint was saved after step {self.step}")
        return place / checkpoint_name(state.step)

    def _target(self) -> Snapshot | None:
        place = _place(self.run_folder, self.segment.target)
        return None if place is None else read_state(place).snapshot

    def _end(self, difference: str | None) -> None:
        self.difference, self._is_done = difference, True
        raise Finished


def first_difference(recorded: Snapshot, now: Snapshot) -> str | None:
    """The first tensor or fact in which two states differ, times aside; None if there is none."""
    for file in dict.fromkeys((*recorded.files, *now.files)):
        one, other = recorded.files.get(file, {}), now.files.get(file, {})
        for name in dict.fromkeys((*one, *other)):
            if name not in one or name not in other or not _same(one[name], other[name].cpu()):
                return f"{name} of {file}"
    return differing(recorded.facts, now.facts, "")


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool((flattened(one).view(uint8) == flattened(other).view(uint8)).all()) if one.numel() else True


def differing(one: Any, other: Any, path: str) -> str | None:
    """The path to the first difference of two values of JSON, or with tensors, with both; None if there is none."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return None if _same(one, other) else path[1:]
    if path == PROGRAM:
        return next((f"{path[1:]}.{name}" for name in one or () if name not in OF_LOOP), None)
    if isinstance(one, dict) and isinstance(other, dict):
        if path == f".run.rest.{CONTRACT}":
            for change in [change for change in differences(one, other) if change.breaks]:
                return f"{CONTRACT}, {change.field}: {change.before}, now {change.after}"
            return f"{CONTRACT}: {unknown}" if (unknown := _only_in(one, other)) else None
        pairs = [(one.get(name), other.get(name), f"{path}.{name}") for name in dict.fromkeys((*one, *other))]
        pairs = [pair for pair in pairs if not (pair[2].endswith(TIMES) and {*map(type, pair[:2])} <= {int, float})]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = [(*pair, f"{path}.{number}") for number, pair in enumerate(zip(one, other, strict=True))]
    else:
        # By `repr`: a NaN is then equal to itself, and 1 neither to 1.0 nor to True.
        return None if repr(one) == repr(other) else f"{path[1:]}: {one}, now {other}"
    return next((found for pair in pairs if (found := differing(*pair)) is not None), None)


def _only_in(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A field that one contract alone has; None if there is none."""
    names = dict(flat(recorded)).keys() - dict(flat(now)).keys()
    return min((name for name in names if name.partition(".")[0] not in UNMENTIONED), default=None)


def probability(audited: int, num_segments: int) -> str:
    """With what probability a run with one forged segment would have been found."""
    found = f"{audited} of {counted(num_segments, 'segment')}"
    return f"{found}: one forged segment would have been found with a probability of {audited / num_segments:.0%}"
