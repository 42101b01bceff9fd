"""Replays one step of a recorded run on one device, by its own program from a checkpoint.

The program runs in this process, unchanged, and makes its own `Run` and `Trainer`. These ask the current rerun
(`run.replay_protocol`) for the device, the options of the step and the checkpoint to begin with: a `ProgramRerun`
answers, and watches the steps as an observer. It takes the first trainer that fits the run for the one that made it,
and leaves the program by `Finished` when that has come far enough; whatever the program does after that is not run.

A run's folder may be of unknown origin. Before a program that it names is run, `announce` says which, and refuses what
this user did not make; `limited` bounds the memory of a model. Nothing is written to the folder.
"""

import importlib
import math
import os
import shlex
import sys
from abc import abstractmethod
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.checkpoint.contract_diff import differences
from samestep.checkpoint.digest import as_hex, state_checksum
from samestep.checkpoint.resume import find_state
from samestep.checkpoint.run_folder import CHECKPOINT_FOLDER, CONTRACT_FILE, holds_run, is_signed, recorded
from samestep.checkpoint.storage import Snapshot, newest_checkpoint
from samestep.checkpoint.verified_files import read_manifest
from samestep.checks import check_number
from samestep.comm.environment import MAX_THREADS, Environment, read_environment
from samestep.data.batch import Batch
from samestep.engine.config import StepOptions
from samestep.engine.observer import StepObserver, observed_by
from samestep.engine.portable_kernels import make_portable
from samestep.engine.rank_device import own_device
from samestep.engine.result import StepResult
from samestep.engine.step import TrainStep
from samestep.errors import DataError, NonFiniteError, RunFolderError, SamestepError, UsageError, WorkerError
from samestep.files import MAX_SMALL_BYTES
from samestep.launcher.job import Job, run_program
from samestep.patch import exits_raised
from samestep.recipes.catalog import MODULES
from samestep.replay.observed_step import ObservedStep, describe_error
from samestep.replay.views import Check, Replay, StepView, Tier
from samestep.run.replay_protocol import Rerun, rerunning
from samestep.run.trainer import Trainer
from samestep.runs.ledger import (
    FieldDifference,
    Ledger,
    LedgerDifference,
    cause,
    differing_fields,
    learning_rates,
    ledger_entry,
    number,
    read_ledger,
)
from samestep.runs.recorder import file_sha256, is_own
from samestep.text import one_line


@dataclass(frozen=True)
class ReplayedProgram:
    """The job that made a run, and its working folder; None if that is unknown or gone."""

    job: Job
    folder: Path | None
    file: Path | None = None  # of its script or module

    @property
    def is_recipe(self) -> bool:
        """Whether it is a recipe of samestep's own, called by its function."""
        return self.job.kind == "function"

    def run(self) -> None:
        """Runs it with its own arguments in its own folder, and restores the state of the interpreter."""
        argv, path, main, folder = sys.argv, sys.path[:], sys.modules["__main__"], os.getcwd()
        known = {*sys.modules}
        try:
            if self.folder is not None:
                os.chdir(self.folder)
            if self.is_recipe:
                sys.argv = [self.job.target.partition(":")[0], *self.job.argv]
            run_program(self.job, {})
        finally:
            sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main
            os.chdir(folder)
            # Its own modules begin anew with the next program; packages' modules cannot be loaded twice.
            for name in sys.modules.keys() - known:
                if is_own(sys.modules[name]):
                    del sys.modules[name]


def announce(
    program: ReplayedProgram, record: Mapping[str, Any], run: Path, trust: bool, tell: Callable[[str], None]
) -> None:
    """Says what runs; without trust a `UsageError` unless this user ran it, or it is a recipe that reads no file."""
    sha256, made = program.file and file_sha256(program.file), record.get("script_sha256")
    places = [place.resolve() for place in (program.file, program.folder) if place is not None]
    words, why = program.job.argv, ""
    what = f"the recipe {shlex.join([program.job.target.partition(':')[0], *words])}"
    if not program.is_recipe:
        what = f"{shlex.join(map(str, record['command']))}: {program.file}, SHA-256 {sha256}"
        if sha256 is None or sha256 != made:
            why = f"is not the script that made the run, of SHA-256 {made}"
        elif program.folder is None or any(place.is_relative_to(run.resolve()) for place in places):
            why = f"came with the folder of the run, or {record.get('working_folder')}, where it was run, is gone"
    tell(f"running {(what := one_line(what))}")
    if not is_signed(record) and (not program.is_recipe or _reads_data(words)):
        why = f"is what {run} names, which you did not make on this machine, or which has changed since"
    if why and not trust:
        raise UsageError(f"{what} {why}; if you know what it does, run it with --trust (trust=True)")


@contextmanager
def limited(record: Mapping[str, Any], trust: bool, checkpoint: Path | None) -> Iterator[None]:
    """Within it a model with more parameters than its checkpoint is refused, unless this user made the run."""
    files = {} if checkpoint is None else read_manifest(checkpoint).files
    left = sum(file.size for name, file in files.items() if name.startswith("model")) or MAX_SMALL_BYTES

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal left
        left -= getattr(parameter, "nbytes", 0)
        if left < 0 and not trust and not is_signed(record):  # it has no values yet
            raise UsageError("the model is larger than its checkpoint; if you know better, give --trust (trust=True)")

    handle = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _file_of(module: str, folder: Path) -> Path | None:
    """The file that `python -m MODULE` runs in a folder, found without importing anything."""
    importlib.invalidate_caches()
    parts, places = module.split("."), [str(folder), *sys.path]
    for place, part in enumerate([*parts, "__main__"], 1):
        # By its last part alone: of a dotted name Python would look for the package among the imported ones.
        if (spec := PathFinder.find_spec(part, places)) is None:
            return None
        if spec.submodule_search_locations is None:
            return Path(spec.origin) if place >= len(parts) and spec.origin is not None else None
        places = [*spec.submodule_search_locations]
    return None


def _reads_data(words: Sequence[str]) -> bool:
    """Whether the arguments of a recipe name data, which is a file perhaps."""
    return any(word.partition("=")[0] == "--data" for word in words)


def program_of(record: Mapping[str, Any], run: Path) -> ReplayedProgram:
    """The program in a run's record: a recipe, or a command such as ["python", "train.py", "--lr", "1"]."""
    words = record.get("command")
    if isinstance(words, list) and words[:2] == ["python", "-m"] and len(words) > 2 and words[2] in MODULES:
        # By its function and, unless it reads data there, in this folder: `python -m` would import what lies in the
        # run's, which may be a stranger's.
        own = tuple(map(str, words[3:]))
        place = _working_folder(record) if _reads_data(own) else None
        return ReplayedProgram(Job("function", f"{words[2]}:main", own), place)
    return command_of(record, run)


def _working_folder(record: Mapping[str, Any]) -> Path | None:
    """Where a run's program was started, if that is known and still there."""
    folder = record.get("working_folder")
    return Path(folder) if isinstance(folder, str) and Path(folder).is_dir() else None


def command_of(record: Mapping[str, Any], run: Path) -> ReplayedProgram:
    """The script or module in a run's record."""
    folder, command = _working_folder(record), record.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if words[:2] == ["python", "-m"] and len(words) > 2:
        return ReplayedProgram(Job("module", words[2], tuple(words[3:])), folder, _file_of(words[2], folder or Path()))
    if words[:1] != ["python"] or len(words) < 2 or words[1].startswith("-"):
        said = f"its command was {' '.join(words)}" if words else "it recorded no command"
        raise UsageError(
            f"{run} does not say which program made it: {said}. A replay needs a run of samestep train, or of a script "
            "with samestep.Trainer(…, run_dir=…) that was started as python SCRIPT or samestep run SCRIPT"
        )
    script = (folder or Path()) / words[1]
    if not script.is_file():
        where = record.get("working_folder") if folder is not None else Path.cwd()
        raise UsageError(
            f"the script that made {run} is not there any more: {words[1]} in {where}; put it back, or replay from the "
            "folder that holds it"
        )
    return ReplayedProgram(Job("script", str(script), tuple(words[2:])), folder, script)


class Finished(BaseException):
    """Ends the program; no `Exception`, so that a program that catches its own failures does not catch it."""


@dataclass(frozen=True)
class ComparedStep:
    """A step beside its line in the ledger."""

    step: int
    fields: tuple[FieldDifference, ...]  # that differ in a bit
    relative: float  # the larger relative difference of loss and gradient norm
    has_digest: bool  # whether checksums of the state were compared


@dataclass(eq=False)
class ProgramRerun(StepObserver, Rerun):
    """Decides for the program's Run and Trainer, and compares the trainer's steps."""

    run_folder: Path
    record: Mapping[str, Any]  # the run's run.json
    ledger: Ledger | None
    step: int  # the last one to take
    start: Path | None  # a checkpoint; None for the beginning of the run
    device: torch.device
    num_threads: int
    any_trainer: bool  # whether the program's first Trainer made the run, wherever it writes to
    trainer: Trainer | None = field(default=None, init=False)  # the one that made the run, when it has begun to fit
    first: int | None = field(default=None, init=False)  # the first step that was taken
    compared: list[ComparedStep] = field(default_factory=list, init=False)
    _folders: dict[int, Path | None] = field(default_factory=dict, init=False)
    _is_ours: bool = field(default=False, init=False)
    _batch: Any = field(default=None, init=False)
    _rates: list[float] = field(default_factory=list, init=False)
    _taken: int = field(default=0, init=False)

    @abstractmethod
    def has_reached(self) -> bool:
        """Whether the program has come as far as it was to."""

    @abstractmethod
    def begins(self, step: TrainStep) -> None:
        """A step of the run begins."""

    @abstractmethod
    def ends(self, step: TrainStep, result: StepResult) -> None:
        """A step of the run has ended, whose numbers are finite."""

    def run(self, program: Callable[[], object], *others: StepObserver) -> None:
        """Runs the program, with other observers, until it has come as far as it was to."""
        try:
            # `os._exit` within the program would end this process too, before anything is reported.
            with rerunning(self), observed_by(self, *others), exits_raised():
                program()
        except Finished:
            pass
        except (SamestepError, BdbQuit):
            raise
        except SystemExit as stop:
            if isinstance(stop.code, int) and stop.code > 128:  # by a signal
                raise
            if not self.has_reached():
                raise UsageError(self._why_not_reached(f"ended with the exit code {stop.code}")) from stop
        except Exception as error:
            raise WorkerError(f"{self._why_not_reached('failed')}\n{describe_error(error)}") from error
        if not self.has_reached():
            raise UsageError(self._why_not_reached("ended"))

    def _why_not_reached(self, what: str) -> str:
        if self.trainer is None:
            others = [folder for folder in self._folders.values() if folder is not None]
            other = f"; a Trainer of it has the run in {others[0]}: name that folder" if others else ""
            return (
                f"the program of {self.run_folder} {what} before a Trainer of its own began to fit; a replay needs the "
                f"samestep.Trainer with run_dir=… that made the run, in this very process{other}"
            )
        return (
            f"the program of {self.run_folder} {what} before step {self.step}, after {self.trainer.step.num_steps} "
            "steps; it must train as far as it did when it was recorded"
        )

    def change_options(self, trainer: Trainer, run_dir: str | Path | None, options: StepOptions) -> StepOptions:
        """The step's options on one device."""
        self._folders[id(trainer)] = None if run_dir is None else Path(run_dir).resolve()
        if getattr(options.get("strategy"), "param_dtype", None) is None:  # other strategies have the same bits
            return {**options, "strategy": "replicate", "audit": None}
        return {**options, "audit": None}

    def checkpoint(self, trainer: Trainer) -> Path | None:
        """The checkpoint to start with, for the trainer that made the run; None for others."""
        if self.trainer is not None or not self._made_the_run(trainer):
            return None
        self.trainer = trainer
        return self.start

    def _made_the_run(self, trainer: Trainer) -> bool:
        """Whether a trainer made the run: by its folder, else (a new folder at each start) by the form of its model."""
        folder = self._folders[id(trainer)]
        if self.any_trainer or folder == self.run_folder:
            return True
        is_new = folder is not None and not holds_run(folder)
        return is_new and trainer._contract.get("model") == self.record.get("model")

    def on_step(self, step: TrainStep, batch: Any) -> None:
        """Remembers what the step's line in the ledger needs."""
        self._is_ours = self.trainer is not None and step is self.trainer.step
        if not self._is_ours:
            return
        self._batch, self._rates, self._taken = batch, learning_rates(step.optimizers), step.num_steps + 1
        self.begins(step)
        self.first = self._taken if self.first is None else self.first

    def on_update(self, step: TrainStep, result: StepResult) -> None:
        """Compares the step with the ledger."""
        if not self._is_ours:
            return
        try:
            result.check()  # on GPUs the step itself does not wait for its loss
        except NonFiniteError as error:
            self.on_failure(error)
            raise
        self.ends(step, result)

    def compare(self, step: TrainStep, result: StepResult, strict: bool = False) -> None:
        """Compares a step that has ended with its line, if there is one."""
        recorded = None if self.ledger is None else self.ledger.steps.get(result.step)
        if recorded is None:
            return
        has_digest = recorded.get("digest") is not None
        digest = as_hex(int(state_checksum(step))) if has_digest else None
        batch = self._batch if isinstance(self._batch, Batch) else None
        entry = ledger_entry(result, batch, self._rates, 1, digest)
        relative = max(_relative(recorded.get(name), entry[name]) for name in ("loss", "grad_norm"))
        self.compared.append(
            ComparedStep(result.step, differing_fields(recorded, entry, strict=strict), relative, has_digest)
        )


@dataclass(eq=False)
class StepReplay(ProgramRerun):
    """Observes one step in full, and ends the program after it."""

    observed: ObservedStep
    view: StepView | None = field(default=None, init=False)

    def show(self, program: Callable[[], object]) -> StepView:
        """Runs the program until the step is done."""
        try:
            self.run(program, self.observed)
        finally:
            self.observed.close()
        assert self.view is not None, "the step is done"
        return self.view

    def has_reached(self) -> bool:
        return self.view is not None

    def checkpoint(self, trainer: Trainer) -> Path | None:
        """Checks, too, that the run has the microbatch and the module that were asked for."""
        start = super().checkpoint(trainer)
        if trainer is self.trainer:
            microbatch, num_microbatches = self.observed.microbatch, trainer.run.contract.num_microbatches
            if microbatch is not None:
                check_number("--microbatch", microbatch, 0, num_microbatches - 1)
            self.observed.check_module(trainer.model)
        return start

    def at_boundary(self, trainer: Trainer, capture: Callable[[], Snapshot]) -> None:
        pass

    def at_load(self, place: Path) -> Path | None:
        return place

    def at_save(self, place: Path, capture: Callable[[], Snapshot]) -> Path | None:
        return None

    def begins(self, step: TrainStep) -> None:
        """Observes the step in full, if it is the one that was asked for."""
        if self._taken >= self.step:
            self.observed.begin(step)

    def ends(self, step: TrainStep, result: StepResult) -> None:
        """Compares the step; after the one that was asked for, the program ends."""
        if self._taken >= self.step:
            self.view = self.observed.end(result, None)
        self.compare(step, result)
        if self.view is not None:
            raise Finished

    def on_failure(self, error: BaseException) -> None:
        """Ends the program if the step that was asked for raised; names an earlier step that is not finite."""
        if not self._is_ours or not isinstance(error, Exception):
            return
        if self._taken < self.step:
            if isinstance(error, NonFiniteError):
                raise NonFiniteError(
                    f"on the way to step {self.step}: {error}. To look at it: --step {self._taken}"
                ) from error
            return
        if not isinstance(error, (UsageError, RunFolderError, BdbQuit)):
            self.view = self.observed.end(None, error)
            raise Finished from error


def _relative(recorded: Any, now: Any) -> float:
    """The difference of two numbers of the ledger relative to the larger; inf if only one is finite."""
    one, other = number(recorded), number(now)
    if one is None or other is None or recorded == now:
        return 0.0
    if not math.isfinite(one) or not math.isfinite(other):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


# The relative difference of losses and gradient norms that other kernels may make: 2^-24 (float32) or 2^-9 (16 bits) a
# number, in sums of thousands of terms, carried on over some hundred steps.
TOLERANCE = 1e-3
TOLERANCE_16_BITS = 3e-2
EXACT_FIELDS = ("num_samples", "ids", "skipped")


def compute_as_recorded(record: Mapping[str, Any]) -> None:
    """Makes this process's CPU kernels portable if a run's were; before anything is computed."""
    if record.get("portable") is not None and record.get("device_kind") == "cpu":
        make_portable("cpu")


def replay(
    run: str | Path,
    step: int,
    *,
    device: str | None = None,
    microbatch: int | None = None,
    module: str | None = None,
    trust: bool = False,
    program: Callable[[], object] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Replay:
    """Takes one step of a recorded run again on one device, and returns a view of it and a comparison with the ledger.

    The run's own program (or `program`, in a notebook) is run from the newest good checkpoint before the step.
    One that this user did not run on this machine, or that has changed since, needs `trust`. Each step on the way is
    compared with the ledger: tier `bitwise` if nothing has changed on which the bits depend, else `allclose`. Nothing
    is written to the run's folder.
    """
    folder = Path(run)
    if folder.is_dir() and not holds_run(folder):
        raise UsageError(
            f"{folder} holds no run: there is no {CONTRACT_FILE} in it. A replay needs the folder of samestep train, "
            "or of samestep.Trainer(…, run_dir=…); existing scripts and loops of your own record no settings to repeat"
        )
    record = recorded(folder)
    launcher = read_environment().launcher
    if launcher != "none":
        raise UsageError(f"a replay runs on one device, in one process; this one was started by {launcher}")
    notes: list[str] = []
    ledger = _read_ledger(folder, notes)
    _check_step(folder, step, ledger, notes)
    if device is None and record.get("device_kind") == "cpu":
        device = "cpu"
    if str(device) == "cpu":
        compute_as_recorded(record)
    own = None
    if program is None:
        own = program_of(record, folder)
        announce(own, record, folder, trust, tell)
        program = own.run
    found = newest_checkpoint(folder / CHECKPOINT_FOLDER, before=step - 1, tell=notes.append)
    start = None if found is None else found.path.resolve()
    del found  # the program reads it again
    # Of the checkpoint, if there is one: a contract may have changed at a resume since the run began.
    before = record if start is None else _contract_of(start, notes)
    chosen = own_device(device, Environment())
    rerun = StepReplay(
        run_folder=folder.resolve(),
        record=record,
        ledger=ledger,
        step=step,
        start=start,
        device=chosen,
        num_threads=num_threads_of(chosen, record),
        any_trainer=own is None or own.is_recipe,
        observed=ObservedStep(microbatch, module),
    )
    beginning = "the beginning of the run" if start is None else start.name
    tell(f"replaying {folder} from {beginning} to step {step} on {chosen}")
    with limited(record, trust or own is None, start):
        view = rerun.show(program)
    assert rerun.trainer is not None, "a step was taken"
    changes = differences(before, rerun.trainer._contract)
    if start is None and rerun.first != 1:
        notes.append(f"the first step that the program took is {rerun.first}")
    if view.error is not None and ledger is not None and step in ledger.steps:
        notes.append(f"the recorded run did not raise in step {step}")
    return Replay(
        run=str(folder),
        device=str(chosen),
        start=None if start is None else start.name,
        view=view,
        check=_check(rerun, "allclose" if any(change.breaks for change in changes) else "bitwise"),
        changes=changes,
        notes=notes,
    )


def _read_ledger(folder: Path, notes: list[str]) -> Ledger | None:
    """The run's ledger; None, with a note, if it is lost."""
    try:
        ledger = read_ledger(folder)
    except DataError as error:
        notes.append(f"nothing can be compared: {error}")
        return None
    if ledger.problems:
        notes.append(f"damaged lines of the ledger are not compared: {'; '.join(ledger.problems[:3])}")
    for repeat in ledger.repeats_that_differ[:3]:
        notes.append(f"the recorded run took step {repeat.step} twice, with another {repeat.field} the second time")
    return ledger


def _check_step(folder: Path, step: int, ledger: Ledger | None, notes: list[str]) -> None:
    """Raises a `UsageError` unless the run has the step; a run that was killed may have taken more than it wrote."""
    check_number("--step", step, 1)
    last = step if ledger is None else max(ledger.steps, default=0)
    if ledger is None or step <= last:
        return
    known = f"steps 1 to {last}" if last else "no step yet"
    turns = [event["event"] for event in ledger.events if event["event"] in ("start", "resume", "stop", "end")]
    if turns and turns[-1] in ("stop", "end"):
        raise UsageError(f"got --step {step}; {folder} has {known}")
    notes.append(f"the ledger has {known}: the run was killed, and later steps cannot be compared")


def _contract_of(checkpoint: Path, notes: list[str]) -> dict[str, Any]:
    """The contract that a checkpoint was written under."""
    state = find_state(checkpoint, None, notes.append)
    assert state is not None, "it was good a moment ago"
    contract: dict[str, Any] = state.rest["contract"]
    return contract


def num_threads_of(device: torch.device, record: Mapping[str, Any]) -> int:
    """The recorded number of CPU threads, since it decides the bits; on another kind of device torch's default."""
    found = record.get("num_threads")
    is_usable = record.get("device_kind") == device.type and isinstance(found, int) and 0 < found <= MAX_THREADS
    return int(str(found)) if is_usable else max(1, torch.get_num_threads())


def _check(rerun: StepReplay, tier: Tier) -> Check:
    """The comparison of the steps with the ledger, by a tier."""
    compared = rerun.compared
    tolerance = TOLERANCE if rerun.record.get("precision", "32-true") == "32-true" else TOLERANCE_16_BITS

    def differs(one: ComparedStep) -> bool:
        if tier == "bitwise":
            return bool(one.fields)
        return one.relative > tolerance or any(change.field in EXACT_FIELDS for change in one.fields)

    bad = next(filter(differs, compared), None)
    reason = None
    if bad is not None:
        agreed = [one for one in compared if one.step < bad.step]
        proven = max((one.step for one in agreed if one.has_digest and not one.fields), default=None)
        if not agreed and rerun.first == bad.step:
            proven = bad.step - 1  # the replay began with the recorded state
        knows_samples = rerun.view is not None and rerun.view.samples is not None
        reason = cause(LedgerDifference(bad.step, bad.fields, len(agreed), proven, knows_samples))
    return Check(
        tier=tier,
        first=rerun.first or 1,
        compared=len(compared),
        digests=sum(one.has_digest for one in compared),
        differs=None if bad is None else bad.step,
        fields=() if bad is None else bad.fields,
        relative=max((one.relative for one in compared), default=0.0),
        same_bits=not any(one.fields for one in compared),
        reason=reason,
    )
