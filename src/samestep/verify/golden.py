"""Golden files: the steps of a verified program and what their bits depend on, kept to be compared with later runs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestep.devices.inventory import discover
from samestep.devices.portable import NEEDED
from samestep.errors import RunFolderError, UsageError
from samestep.files import check_regular, load_json, reason, replacing
from samestep.verify.program_runner import ProgramRunner, RunSpec
from samestep.verify.recording import Recording

CANNOT_COMPARE = 4  # the exit code; 1 stands for a difference
KERNELS = ("torch", "platform", "cuda", "cudnn", "cublas")
ABSENT = "(nothing)"


class GoldenResult(NamedTuple):
    """The result of a comparison with a golden file."""

    exit_code: int  # 0 equal, or written; 1 different; `CANNOT_COMPARE`
    text: str  # a sentence


def check_golden(
    path: Path,
    kept: Mapping[str, Any] | None,
    runner: ProgramRunner,
    words: Sequence[str],
    num_threads: int,
    steps: int,
) -> GoldenResult:
    """Compares the first of the verified runs, which all agree, with a golden file, or without `kept` writes it."""
    devices = next(iter(runner.selections))
    first, again = (golden_of(runner, RunSpec(devices, steps, n), words, num_threads) for n in (0, 1))
    if first != again:
        return GoldenResult(
            1, f"two runs on {devices} are equal only up to rounding: no file can hold the bits of both"
        )
    return write_golden(path, first) if kept is None else compare_golden(path, kept, first)


def golden_of(runner: ProgramRunner, spec: RunSpec, words: Sequence[str], num_threads: int) -> dict[str, Any]:
    """The content of a golden file: `contract` decides the bits, `program` is what is tested, `steps` are compared."""
    from samestep.checkpoint.contract import versions  # with torch, which the workers import meanwhile

    run, selection, script = runner.record(spec), runner.selections[spec.devices], runner.program.single_process or {}
    num_logical = runner.program.logical_devices or script.get("num_microbatches")
    portable, found = next(run.lines("end"))["portable"], versions()
    if portable is None:
        cpu = f"{discover(accelerators=False).cpu.name}, kernels for {found['cpu_capability']}"
    else:
        cpu = f"any x86-64 with {' and '.join(NEEDED)} (--portable: {portable})"
    contract = {
        # A program that deals with its ranks itself has the same bits only on as many devices.
        "devices": run.devices if run.family == "ddp" and num_logical is None else selection.kind,
        "cpu": cpu,
        **({} if selection.kind == "cpu" else {"gpu": selection.devices[0].name}),
        "num_threads": num_threads,
        **({} if num_logical is None else {"logical_devices": num_logical}),
        "steps": spec.steps,
        **{name: found[name] for name in KERNELS if name in found},
    }
    ranks = run.steps if run.family == "ddp" else run.steps[:1]  # the others hold the same
    return {
        "contract": contract,
        "program": {
            "program": " ".join(words),
            **({"seed": script["seed"]} if script else {}),
            **{name: found[name] for name in ("samestep", "python", "numpy")},
        },
        "steps": [_step(run, step, [rank[step] for rank in ranks]) for step in range(run.num_steps)],
    }


def _step(run: Recording, step: int, lines: list[Mapping[str, Any]]) -> dict[str, Any]:
    """A step: its loss (one a rank, if each has its own) to the last bit, and checksums of its samples and state."""
    losses = [float(sum(line["loss"])) for line in lines if line["loss"]]
    samples = run.samples(step)
    state = [
        [[group[key] for key in ("optimizer", "lr", "bits", "moments") if key in group] for group in groups]
        for line in lines
        for groups in (line["gradients"], line["states"], [line["buffers"]])
    ]
    return {
        "loss": losses[0] if len(losses) == 1 else losses,
        "samples": None if samples is None else _checksum(sorted(samples.items())),
        "state": _checksum(state),
    }


def _checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def write_golden(path: Path, golden: Mapping[str, Any]) -> GoldenResult:
    """Writes a golden file, a step a line; raises a `UsageError` if it cannot be written."""
    head = {name: value for name, value in golden.items() if name != "steps"}
    steps = ",\n".join(f"    {json.dumps(step)}" for step in golden["steps"])
    text = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    try:
        with replacing(path.resolve()) as temporary:  # on a full disk the file before stays
            temporary.write_text(f'{text},\n  "steps": [\n{steps}\n  ]\n}}\n', encoding="utf-8")
    except RunFolderError as error:
        why = reason(error.__cause__ if isinstance(error.__cause__, OSError) else error)
        raise UsageError(f"{path} cannot be written: {why}; choose another file by --golden") from error
    return GoldenResult(0, f"{path} is written: {len(golden['steps'])} steps")


def read_golden(path: Path) -> dict[str, Any]:
    """The content of a golden file; raises a `UsageError` if it is none."""
    remedy = "write it by samestep verify --golden FILE --write …"
    check_regular(path)
    try:
        found: dict[str, Any] = load_json(path.read_bytes())
        good = set(found) == {"contract", "program", "steps"} and all(isinstance(each, dict) for each in found["steps"])
        if not good or not isinstance(found["contract"], dict) or not isinstance(found["program"], dict):
            raise ValueError("it holds no contract, program and steps")
    except FileNotFoundError:
        raise UsageError(f"there is no golden file {path}; {remedy}") from None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is no golden file: {reason(error)}; {remedy}") from error
    return found


def compare_golden(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> GoldenResult:
    """Compares a program's steps now with a golden file's, if both have one contract."""
    if changed := _changed(before["contract"], now["contract"]):
        cpu = "; --portable, also when FILE is written, makes it hold on every x86-64 CPU"
        hint = cpu if "cpu" in _names(before["contract"], now["contract"]) else ""
        return GoldenResult(
            CANNOT_COMPARE,
            f"{path} was written with other settings, and cannot be compared: {changed}{hint}; --write writes it anew",
        )
    counts = len(before["steps"]), len(now["steps"])
    pairs = enumerate(zip(before["steps"], now["steps"], strict=False))
    step, names = next(((n, names) for n, pair in pairs if (names := _names(*pair))), (min(counts), []))
    if names:
        old, new = (each["steps"][step].get(names[0], ABSENT) for each in (before, now))
        what = f"the {names[0]} is {old} there, {new} here"
    elif counts[0] == counts[1]:
        return GoldenResult(0, f"equal to {path}: {counts[0]} steps")
    else:
        what = f"there are {counts[0]} steps there, {counts[1]} here"
    changed = _changed(before["program"], now["program"])
    return GoldenResult(
        1, f"differs from {path}, step {step + 1}: {what}" + (f" (also other: {changed})" if changed else "")
    )


def _names(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The fields that differ."""
    return [name for name in {**before, **now} if repr(before.get(name, ABSENT)) != repr(now.get(name, ABSENT))]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The fields that differ, in words."""
    return ", ".join(f"{n} was {before.get(n, ABSENT)}, is {now.get(n, ABSENT)}" for n in _names(before, now))
