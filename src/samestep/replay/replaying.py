"""Replaying: one step of a recorded run, taken again on one device."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.comm.environment import Environment, read_environment
from samestep.errors import DataError, UsageError
from samestep.replay.program import program_of
from samestep.replay.rerun import Compared, Order, Rerun
from samestep.replay.saving import Saver, check_folder
from samestep.replay.views import Check, Replay, Tier
from samestep.train.checkpoint.resume import find_state
from samestep.train.checkpoint.storage import newest_checkpoint
from samestep.train.contract_diff import differences
from samestep.train.determinism import own_device
from samestep.train.paths import CHECKPOINT_FOLDER, CONTRACT_FILE, holds_run, recorded
from samestep.verify.ledger import Difference, Ledger, cause, read_ledger

# How far apart losses and gradient norms may be, relative to their size, where other kernels rounded otherwise: 2^-24
# (float32) or 2^-9 (16 bits) a number, in sums of thousands of terms, carried on over some hundred steps.
TOLERANCE = 1e-3
TOLERANCE_16_BITS = 3e-2
_TURNS = ("start", "resume", "stop", "end")
EXACT_FIELDS = ("num_samples", "ids", "skipped")


def replay(
    run: str | Path,
    step: int,
    *,
    device: str | None = None,
    microbatch: int | None = None,
    module: str | None = None,
    debug: bool = False,
    save: str | Path | None = None,
    program: Callable[[], object] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Replay:
    """Takes one step of a recorded run again on one device, and shows what happened in it.

    The run's own program is run, from the newest good checkpoint at or before the step, and each step on the way is
    held to the ledger: tier `bitwise` where nothing has changed on which the bits depend, else `allclose`. Nothing is
    written to the run's folder.
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
    ledger = _ledger(folder, notes)
    _check_step(folder, step, ledger, notes)
    saver = None
    if save is not None:
        check_folder(Path(save), folder)
        saver = Saver(Path(save).resolve())
    own = None if program is not None else program_of(record, folder)  # before anything else is read
    found = newest_checkpoint(folder / CHECKPOINT_FOLDER, before=step, tell=notes.append)
    start = None if found is None else found.path.resolve()
    del found
    before = record if start is None else _contract_of(start, notes)
    chosen = _device(device, record)
    rerun = Rerun(
        Order(
            run=folder.resolve(),
            record=record,
            ledger=ledger,
            step=step,
            checkpoint=start,
            device=chosen,
            num_threads=_num_threads(chosen, record),
            any_trainer=own is None or own.is_recipe,
            microbatch=microbatch,
            module=module,
            debug=debug,
            saver=saver,
        )
    )
    beginning = "the beginning of the run" if start is None else start.name
    tell(f"replaying {folder} from {beginning} to step {step} on {chosen}")
    view = rerun.run(program if program is not None else program_of(record, folder).run)
    assert rerun.trainer is not None, "a step was taken"
    changes = differences(before, rerun.trainer._contract)
    if debug and not rerun.was_debugged:
        notes.append("the debugger was not opened: the module's forward was not called")
    if rerun.first is not None and start is None and rerun.first != 0:
        notes.append(f"the first step that the program took is {rerun.first}")
    other = _other_model(chosen, record)
    if other is not None:
        notes.append(other)
    tier: Tier = "allclose" if other is not None or any(change.breaks for change in changes) else "bitwise"
    check = _check(rerun, tier, record)
    if view.error is not None and ledger is not None and step in ledger.steps:
        notes.append(f"the recorded run did not raise in step {step}")
    return Replay(
        run=str(folder),
        device=str(chosen),
        start=None if start is None else start.name,
        view=view,
        check=check,
        changes=changes,
        notes=notes,
        saved=None if save is None else str(save),
    )


def _ledger(folder: Path, notes: list[str]) -> Ledger | None:
    """The run's ledger; None if it is lost."""
    try:
        ledger = read_ledger(folder)
    except DataError as error:
        notes.append(f"nothing can be compared: {error}")
        return None
    if ledger.problems:
        notes.append(f"the ledger is not compared where it is damaged: {'; '.join(ledger.problems[:3])}")
    for repeat in ledger.repeats_that_differ[:3]:
        notes.append(f"the recorded run took step {repeat.step} twice, with another {repeat.field} the second time")
    return ledger


def _check_step(folder: Path, step: int, ledger: Ledger | None, notes: list[str]) -> None:
    """Raises a `UsageError` for a step that the run has not; one that broke off may have taken more than it wrote."""
    if step < 0:
        raise UsageError(f"got --step {step}; steps are counted from 0")
    if ledger is None:
        return
    last = max(ledger.steps, default=-1)
    turns = [event["event"] for event in ledger.events if event["event"] in _TURNS]
    if step <= last:
        return
    there = f"steps 0 to {last}" if last >= 0 else "no step yet"
    if turns and turns[-1] in ("stop", "end"):
        raise UsageError(f"got --step {step}; {folder} has {there}")
    notes.append(f"the ledger has {there}: the run broke off, and of what followed there is nothing to compare")


def _contract_of(checkpoint: Path, notes: list[str]) -> dict[str, Any]:
    """The contract that a checkpoint was written under."""
    state = find_state(checkpoint, None, notes.append)
    assert state is not None, "it was good a moment ago"
    contract: dict[str, Any] = state.rest["contract"]
    return contract


def _device(asked: str | None, record: Mapping[str, Any]) -> torch.device:
    """The device that was asked for, else one of the recorded kind if there is one."""
    if asked is not None:
        return own_device(asked, Environment())
    if record.get("device_kind") == "cpu":
        return torch.device("cpu")
    return own_device(None, Environment())


def _num_threads(device: torch.device, record: Mapping[str, Any]) -> int:
    """Threads of a CPU: as recorded, since they decide the bits; where other bits are sure, as many as torch takes."""
    recorded_threads = record.get("num_threads")
    if record.get("device_kind") == device.type and isinstance(recorded_threads, int) and recorded_threads > 0:
        return recorded_threads
    return max(1, torch.get_num_threads())


def _other_model(device: torch.device, record: Mapping[str, Any]) -> str | None:
    """A sentence, where the run was made on another model of accelerator, whose kernels may round otherwise."""
    devices = record.get("devices")
    if device.type != "cuda" or record.get("device_kind") != "cuda" or not isinstance(devices, list) or not devices:
        return None
    name = torch.cuda.get_device_name(device)
    if any(name in str(entry) for entry in devices):
        return None
    return f"the run was made on {devices[0]}, and this is {name}: other bits are to be expected"


def _check(rerun: Rerun, tier: Tier, record: Mapping[str, Any]) -> Check:
    """How the steps compare with the ledger, at the tier that can be asked of them."""
    tolerance = TOLERANCE if record.get("precision", "32-true") == "32-true" else TOLERANCE_16_BITS
    compared = rerun.compared
    bad = next((one for one in compared if _differs(one, tier, tolerance)), None)
    reason = None
    if bad is not None:
        agreed = [one for one in compared if one.step < bad.step]
        proven = max((one.step for one in agreed if one.has_digest and not one.fields), default=None)
        if proven is None and agreed == [] and rerun.first == bad.step:
            proven = bad.step - 1  # it began with the recorded state, or with the program's own beginning
        reason = cause(Difference(bad.step, bad.fields, len(agreed), proven, rerun.knows_samples))
    return Check(
        tier=tier,
        first=0 if rerun.first is None else rerun.first,
        compared=len(compared),
        digests=sum(one.has_digest for one in compared),
        differs=None if bad is None else bad.step,
        fields=() if bad is None else bad.fields,
        relative=max((one.relative for one in compared), default=0.0),
        same_bits=not any(one.fields for one in compared),
        reason=reason,
    )


def _differs(one: Compared, tier: Tier, tolerance: float) -> bool:
    """Whether a step is not what was recorded, by a tier."""
    if tier == "bitwise":
        return bool(one.fields)
    return one.relative > tolerance or any(change.field in EXACT_FIELDS for change in one.fields)
