"""Replays one step of a recorded run on one device."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.comm.environment import Environment, read_environment
from samestep.errors import DataError, UsageError
from samestep.replay.observed_step import ObservedStep
from samestep.replay.rerun import Compared, ProgramRerun, announce, program_of
from samestep.replay.saving import Saver, check_folder
from samestep.replay.views import Check, Replay, Tier
from samestep.train.checkpoint.resume import find_state
from samestep.train.checkpoint.storage import newest_checkpoint
from samestep.train.contract_diff import differences
from samestep.train.determinism import own_device
from samestep.train.paths import CHECKPOINT_FOLDER, CONTRACT_FILE, holds_run, recorded
from samestep.verify.ledger import Difference, Ledger, cause, read_ledger

# The relative difference of losses and gradient norms that other kernels may make: 2^-24 (float32) or 2^-9 (16 bits) a
# number, in sums of thousands of terms, carried on over some hundred steps.
TOLERANCE = 1e-3
TOLERANCE_16_BITS = 3e-2
EXACT_FIELDS = ("num_samples", "ids", "skipped")


def replay(
    run: str | Path,
    step: int,
    *,
    device: str | None = None,
    microbatch: int | None = None,
    module: str | None = None,
    save: str | Path | None = None,
    trust: bool = False,
    program: Callable[[], object] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Replay:
    """Takes one step of a recorded run again on one device, and returns a view of it and a comparison with the ledger.

    The run's own program (or `program`, in a notebook) is run from the newest good checkpoint at or before the step.
    A script that came with the folder, or is not the one that the run recorded, needs `trust`. Each step on the way is
    compared with the ledger: tier `bitwise` if nothing has changed on which the bits depend, else `allclose`. Nothing
    is written to the run's folder.
    """
    folder = Path(run)
    if folder.is_dir() and not holds_run(folder):
        raise UsageError(
            f"{folder} holds no run: there is no {CONTRACT_FILE} in it. A replay needs the folder of samestep train, "
            "or of samestep.Trainer(…, run_dir=…); adopted scripts and loops of your own record neither contract nor "
            "ledger"
        )
    record = recorded(folder)
    launcher = read_environment().launcher
    if launcher != "none":
        raise UsageError(f"a replay runs on one device, in one process; this one was started by {launcher}")
    notes: list[str] = []
    ledger = _read_ledger(folder, notes)
    _check_step(folder, step, ledger, notes)
    if save is not None:
        check_folder(Path(save), folder)
    own = None
    if program is None:
        own = program_of(record, folder)
        if not own.is_recipe:
            announce(own, record, folder, trust, tell)
        program = own.run
    found = newest_checkpoint(folder / CHECKPOINT_FOLDER, before=step, tell=notes.append)
    start = None if found is None else found.path.resolve()
    del found  # the program reads it again
    before = record if start is None else _contract_of(start, notes)
    if device is None and record.get("device_kind") == "cpu":
        device = "cpu"
    chosen = own_device(device, Environment())
    rerun = ProgramRerun(
        run_folder=folder.resolve(),
        record=record,
        ledger=ledger,
        step=step,
        start=start,
        device=chosen,
        num_threads=_num_threads(chosen, record),
        any_trainer=own is None or own.is_recipe,
        observed=ObservedStep(microbatch, module, None if save is None else Saver(Path(save).resolve())),
    )
    beginning = "the beginning of the run" if start is None else start.name
    tell(f"replaying {folder} from {beginning} to step {step} on {chosen}")
    view = rerun.run(program)
    assert rerun.trainer is not None, "a step was taken"
    changes = differences(before, rerun.trainer._contract)
    if start is None and rerun.first:
        notes.append(f"the first step that the program took is {rerun.first}")
    other = _other_model(chosen, record)
    notes += [] if other is None else [other]
    if view.error is not None and ledger is not None and step in ledger.steps:
        notes.append(f"the recorded run did not raise in step {step}")
    return Replay(
        run=str(folder),
        device=str(chosen),
        start=None if start is None else start.name,
        view=view,
        check=_check(rerun, "allclose" if other or any(change.breaks for change in changes) else "bitwise"),
        changes=changes,
        notes=notes,
        saved=None if save is None else str(save),
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
    if step < 0:
        raise UsageError(f"got --step {step}; steps are counted from 0")
    last = step if ledger is None else max(ledger.steps, default=-1)
    if ledger is None or step <= last:
        return
    known = f"steps 0 to {last}" if last >= 0 else "no step yet"
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


def _num_threads(device: torch.device, record: Mapping[str, Any]) -> int:
    """The recorded number of CPU threads, since it decides the bits; on another kind of device torch's default."""
    found = record.get("num_threads")
    is_usable = record.get("device_kind") == device.type and isinstance(found, int) and found > 0
    return int(str(found)) if is_usable else max(1, torch.get_num_threads())


def _other_model(device: torch.device, record: Mapping[str, Any]) -> str | None:
    """A note if the run was made on another model of GPU, whose kernels may round otherwise."""
    devices = record.get("devices")
    if device.type != "cuda" or record.get("device_kind") != "cuda" or not isinstance(devices, list) or not devices:
        return None
    name = torch.cuda.get_device_name(device)
    if any(name in str(entry) for entry in devices):
        return None
    return f"the run was made on {devices[0]}, and this is {name}: other bits are to be expected"


def _check(rerun: ProgramRerun, tier: Tier) -> Check:
    """The comparison of the steps with the ledger, by a tier."""
    compared = rerun.compared
    tolerance = TOLERANCE if rerun.record.get("precision", "32-true") == "32-true" else TOLERANCE_16_BITS

    def differs(one: Compared) -> bool:
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
        reason = cause(Difference(bad.step, bad.fields, len(agreed), proven, knows_samples))
    return Check(
        tier=tier,
        first=rerun.first or 0,
        compared=len(compared),
        digests=sum(one.has_digest for one in compared),
        differs=None if bad is None else bad.step,
        fields=() if bad is None else bad.fields,
        relative=max((one.relative for one in compared), default=0.0),
        same_bits=not any(one.fields for one in compared),
        reason=reason,
    )
