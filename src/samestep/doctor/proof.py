"""`samestep doctor --prove`: runs the rows of the proof, each in processes of its own, and writes a file to send in.

The trainings on one device are the reference: all other rows must end in their bits. A row is a child process with a
time limit, which starts the workers: whatever happens in it, the others go on. Nothing here imports torch.

`make_rows` names a program (`proof_programs`), its devices and its judge. `_run_row` starts a child with the row on its
stdin, pickled; the child writes what the program returned (`facts.json`), and the judge here makes a result of it.
`known` has the trainings on one device: the first row of each sets it, and a row that finds none there has nothing to
be compared with, and fails.
"""

import json
import math
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import IO, Any

from samestep.devices.inventory import Inventory, discover
from samestep.devices.selection import Selection, select
from samestep.doctor.check_table import Machine, Result, bad, check_node, from_objects, good
from samestep.doctor.local import GRACE_SECONDS, check_ranks
from samestep.errors import SamestepError, UsageError
from samestep.extras import is_installed
from samestep.files import write_json, writing
from samestep.launcher.job import TRAINING, Job, Policy
from samestep.launcher.supervisor import supervise
from samestep.runs.ledger import Ledger, cause, compare, extent
from samestep.text import counted
from samestep.version import __version__

COLLECTIVES = "collectives"  # the one program that `local` has
STARVED, KILLED = "starved", "killed"
# If NCCL's first allocation fits, a kernel that is loaded then may not.
NO_MEMORY = "out of memory: NCCL finds none on the GPU of rank ", "CUDA error: out of memory"
LOGICAL = "logical devices"  # a script's ranks, not a row's
MODELS, PRECISIONS, OPTIMIZERS = ("lenet", "gpt"), ("32-true", "bf16-mixed", "16-mixed"), ("sgd", "adamw")
TRAININGS = [f"{model} {precision} {name}" for model in MODELS for precision in PRECISIONS for name in OPTIMIZERS]
PLACED = ("lenet 32-true sgd", "gpt bf16-mixed adamw")  # for rows about the placement of the state
LATE = "gpt 32-true adamw"  # fused on GPUs, where the device itself leaves out a non-finite update
CHECKED = "gpt 32-true sgd"  # where the host checks before each update
ATTENTION = "attention bf16-mixed adamw"  # by torch's fused kernels
LARGE = "large bf16-mixed sgd"  # by several of cuDNN's and cuBLAS' kernels
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
NUM_MICROBATCHES, EPOCHS = 8, 3
COUNTS = (2, 3, 8)  # numbers of devices with a row of their own, beside one and all
MOST_GRADIENTS = 4.5  # beside the parameters: the sums of the levels of the tree, and those that are sent
ROW_SECONDS, MATRIX_SECONDS = 120.0, 240.0
SHARED = "two processes on one GPU"  # through host memory: NCCL wants one a device
NEEDS_GPU, NEEDS_TWO = "needs a CUDA device", "needs two devices or more"
NEEDS_GPUS = "needs two CUDA devices or more"
NEEDS_TRITON = "needs CUDA devices, Triton and a C compiler"

BITS, MATRIX = "the same bits", "models and precisions"

Facts = Mapping[str, Any]
Known = dict[str, Ledger]
"""The reference of each training."""


class UnprovenError(SamestepError):
    """A row is not as it should be; the message says what was expected, and what came."""


@dataclass(frozen=True)
class Row:
    """One line of the table; `judge` returns its text and its figures, or raises an `UnprovenError`."""

    area: str
    name: str
    program: str
    selection: Selection | None  # None if it is left out
    judge: Callable[[Any, Known], tuple[str, Mapping[str, float]]]
    missing: str  # why it is left out
    options: Mapping[str, Any]
    seconds: float
    survives: bool  # whether the run outlives the death of a worker
    hang_seconds: float = 0.0  # after which a worker that shows no life is ended; 0 for never
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """The devices of a proof, and the ones among them that rows have."""

    chosen: Selection
    inventory: Inventory

    @property
    def count(self) -> int:
        return self.chosen.count

    @property
    def is_gpu(self) -> bool:
        return self.chosen.kind == "cuda"

    @cached_property
    def alone(self) -> Selection:
        return self.first(1)

    @cached_property
    def shared(self) -> Selection | None:
        """Two processes on the first GPU; None if a process cannot be given that alone."""
        can_share = self.is_gpu and (bool(self.alone.environment) or len(self.inventory.devices) == 1)
        return replace(self.alone, devices=self.alone.devices * 2) if can_share else None

    @property
    def several(self) -> Selection | None:
        return self.chosen if self.count > 1 else self.shared

    def first(self, count: int) -> Selection:
        return _first(self.chosen, self.inventory, count)

    def row(
        self,
        area: str,
        what: str,
        program: str,
        where: Selection | None,
        judge: Any,
        options: Mapping[str, Any],
        missing: str = NEEDS_TWO,
        seconds: float = ROW_SECONDS,
        survives: bool = False,
    ) -> Row:
        """A row, named after its subject and its devices."""
        place = "" if where is None else f" on {SHARED if where is self.shared else _named(where)}"
        options = {"num_microbatches": max(NUM_MICROBATCHES, self.count), **options}
        return Row(area, f"{what}{place}", program, where, judge, missing, options, seconds, survives)

    def matrix(self, where: Selection | None, what: str = MATRIX, judge: Any = None, **more: Any) -> Row:
        """The row of all trainings."""
        options = {"names": TRAININGS, "epochs": EPOCHS, **more}
        return self.row(BITS, what, "trainings", where, judge or judge_bits, options, NEEDS_GPU, MATRIX_SECONDS)

    def on_gpus(
        self, what: str, program: str, judge: Any, where: Selection | None, survives: bool = False, **options: Any
    ) -> Row:
        """A row that needs a CUDA device."""
        where = where if self.is_gpu else None
        area = {"memory": "memory", STARVED: "failures"}.get(program, "streams and waits")
        missing = NEEDS_GPUS if program == STARVED else NEEDS_GPU
        seconds = MATRIX_SECONDS if program == "streams" else ROW_SECONDS  # it takes a stack at each launch
        return self.row(area, what, program, where, judge, options, missing, seconds, survives)


def make_rows(chosen: Selection, inventory: Inventory, quick: bool, timeout_seconds: float) -> list[Row]:
    """All rows for some devices, those that show most first: time may run out; `quick` leaves out the collectives."""
    at = Places(chosen, inventory)
    asked = {"timeout_seconds": timeout_seconds}
    both = [at.several] if at.several is at.shared or not at.is_gpu else [at.several, at.shared]
    collectives = [at.row("collectives", "collectives", COLLECTIVES, one, judge_collectives, asked) for one in both]
    if quick:
        collectives = [replace(row, selection=None, missing="--quick") for row in collectives]
    watched: dict[str, Any] = {"names": [LATE, PLACED[0]], "epochs": EPOCHS}
    both_checks: dict[str, Any] = {"names": [LATE, CHECKED]}
    sanitized, waiting = ("stream sanitizer", "streams", judge_streams), ("host waits", "host_waits", judge_waits)
    measured = "memory beside the parameters", "memory", judge_memory
    killed, once = {"name": LATE, "epochs": EPOCHS}, partial(judge_bits, is_first=True)
    rows = [
        *collectives[:1],
        at.matrix(at.alone, f"{MATRIX}, each twice,", once, repeats=2),
        *([at.matrix(chosen)] if at.count > 1 else []),
        at.row("failures", "a killed rank", KILLED, at.several, judge_killed, killed, survives=True),
        at.on_gpus("sums on the GPU and on the host", "operations", judge_operations, at.alone),
        *_logical_rows(at),
        at.on_gpus("out of memory in NCCL", STARVED, judge_starved, chosen if at.count > 1 else None),
        at.on_gpus(*sanitized, chosen, **watched),
        *([at.matrix(at.first(3))] if at.count > 3 else []),
        *_kernel_rows(at),
        *_other_rows(at, killed),
        at.on_gpus(*measured, chosen),
        at.on_gpus(*waiting, chosen, **both_checks),
        *collectives[1:],
        at.matrix(at.shared, MATRIX if at.shared else f"{MATRIX} on {SHARED}"),
        *(at.matrix(at.first(size)) for size in COUNTS if size < at.count),
        *([at.on_gpus("host waits of a run that heals", *waiting[1:], chosen, True, **both_checks)] * (at.count > 1)),
        at.on_gpus(*sanitized, at.alone, **watched),
        at.on_gpus(*measured, at.alone),
        at.on_gpus(*waiting, at.alone, **both_checks),
    ]
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row.name, row)  # one device and all may be the same
    return list(found.values())


def has_compiler() -> bool:
    """Whether there is a C compiler where Triton looks for it."""
    return bool(os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc"))


def _kernel_rows(at: Places) -> list[Row]:
    """What a flag or a size decides: on one device each training twice, then on all."""
    triton = at.is_gpu and is_installed("triton") and has_compiler()
    uneven = {"num_microbatches": max(NUM_MICROBATCHES, at.count) + 1}
    rows = []
    for what, name, more, is_there in (
        ("attention", ATTENTION, {}, True),
        ("large kernels", LARGE, {}, True),
        ("microbatches that devices do not divide", LATE, uneven, True),
        ("torch.compile", LATE, {"compile": True}, triton),
        ("torch.compile with CUDA graphs", LATE, {"graphs": True}, triton),
    ):
        for where, repeats in ((at.alone, 2), (at.chosen, 1)):
            judge = partial(judge_bits, is_first=repeats == 2, key=f"{what}: ")
            options = {"names": [name], "epochs": 1, "repeats": repeats, **more}
            rows.append(at.row(BITS, what, "trainings", where if is_there else None, judge, options, NEEDS_TRITON))
    return rows


def _logical_rows(at: Places) -> list[Row]:
    """Ranks of scripts as logical devices: by DistributedDataParallel, and by FSDP2 in numbers of no power of 2."""
    scripts = (max(NUM_MICROBATCHES, at.count), "ddp", 2), (3, "fsdp2", 1), (6, "fsdp2", 1)
    rows = []
    for ranks, kind, repeats in scripts:
        where, options = at.first(min(at.count, ranks)), {"kind": kind, "num_ranks": ranks, "repeats": repeats}
        what = f"{LOGICAL}, {ranks} by {kind},"
        rows.append(at.row(BITS, what, LOGICAL, where, judge_logical, options, seconds=MATRIX_SECONDS))
    return rows


def _other_rows(at: Places, trained: Mapping[str, Any]) -> list[Row]:
    """Other failures, the sharded state, another allocator; `trained` is a training whose last rank fails."""
    stopped, resumed = {**trained, "by": "SIGSTOP"}, {**trained, "by": None}
    placed: dict[str, Any] = {"names": PLACED, "epochs": EPOCHS}
    segments = at.on_gpus("expandable segments", "trainings", judge_bits, at.chosen, **placed)
    judge = partial(judge_killed, heals=False)
    rows = [
        at.row("failures", "a stopped rank", KILLED, at.several, judge_killed, stopped, survives=True),
        at.row("failures", "a resume on one device", KILLED, at.several, judge, resumed, survives=True),
        at.row(BITS, "sharded (FSDP2)", "trainings", at.chosen, judge_bits, {**placed, "strategy": "sharded"}),
    ]
    return [replace(rows[0], hang_seconds=30.0), *rows[1:], replace(segments, area=BITS, variables=SEGMENTS)]


def _first(chosen: Selection, inventory: Inventory, count: int) -> Selection:
    """The first devices of a selection."""
    if count == chosen.count:
        return chosen
    numbers = ",".join(str(device.index) for device in chosen.devices[:count])
    return select(f"cpu:{count}" if chosen.kind == "cpu" else f"{chosen.kind}:{numbers}", inventory)


def _named(where: Selection) -> str:
    """Such as "3 CPU workers" or "1 GPU"."""
    nouns = {"cpu": "CPU worker", "cuda": "GPU"}
    return counted(where.count, nouns.get(where.kind, f"{where.kind} device"))


def judge_collectives(facts: Sequence[Facts], known: Known) -> tuple[str, Mapping[str, float]]:
    """Every collective on every transport, each to the bit."""
    results = from_objects(facts)
    wrong = [result for result in results if result.state == "bad"]
    if wrong:
        texts = "; ".join(f"{result.name}: {result.found} ({result.advice})" for result in wrong)
        raise UnprovenError(f"expected every collective to be right to the bit, got {texts}")
    figures = {f"{each.name}, {key}": value for each in results for key, value in each.numbers.items()}
    checked = [each.name for each in results if ": " in each.name and each.state == "good"]
    transports = dict.fromkeys(name.partition(":")[0] for name in checked)
    return f"{len(checked)} right to the bit, by {', '.join(transports)}", figures


def as_ledger(training: Facts) -> Ledger:
    """A training as a ledger."""
    steps = {entry["step"]: entry for entry in training["steps"]}
    return Ledger(steps, [{"event": "end", "step": len(steps), "digest": training["digest"]}])


def expect(holds: object, expected: str, found: object) -> None:
    """Raises an `UnprovenError` unless what is expected has been found."""
    if not holds:
        raise UnprovenError(f"expected {expected}, got {found}")


def judge_bits(facts: Facts, known: Known, is_first: bool = False, key: str = "") -> tuple[str, Mapping[str, float]]:
    """Trainings by name, each some times, against the reference; the first row sets it."""
    ends: dict[str, str] = {}
    for name, runs in facts.items():
        for ledger in map(as_ledger, runs):
            _check_sound(name, ledger)
            if is_first:
                known.setdefault(key + name, ledger)
            _check_equal(name, known.get(key + name), ledger)
        ends[name] = runs[0]["digest"]
    # Trainings differ in model, precision or optimizer: equal ends would show a state that none of them moved.
    expect(len(set(ends.values())) == len(ends), "another end of each training", f"{ends}: they did not train")
    steps = len(next(iter(facts.values()))[0]["steps"])
    same = "every time the same bits" if is_first else "the bits of one device"
    return f"{counted(len(ends), 'training')} of {counted(steps, 'step')}: {same}", {}


def _check_sound(name: str, ledger: Ledger) -> None:
    """Finite losses, and a state that moved: equal bits of a broken training prove nothing."""
    losses = {step: float.fromhex(entry["loss"]) for step, entry in ledger.steps.items()}
    if bad := [step for step, loss in losses.items() if not math.isfinite(loss)]:
        raise UnprovenError(f"{name}: expected finite losses, got {losses[bad[0]]} in step {bad[0]}")
    if len({entry["digest"] for entry in ledger.steps.values()}) < 2:
        raise UnprovenError(f"{name}: expected the state to move, got the same after every step")


def _check_equal(name: str, reference: Ledger | None, ledger: Ledger) -> None:
    if reference is None:
        raise UnprovenError(f"{name}: expected the bits of one device, got none to compare with: its row failed")
    difference, far = compare(reference, ledger), extent(reference, ledger)
    if difference is not None:
        first = difference.fields[0]
        raise UnprovenError(
            f"{name}: expected {first.field} {first.a} in step {difference.step}, got {first.b}; {cause(difference)}"
        )
    if far.only_a or far.only_b:
        raise UnprovenError(f"{name}: expected {len(reference.steps)} steps, got {len(ledger.steps)}")


def judge_killed(facts: Facts, known: Known, heals: bool = True) -> tuple[str, Mapping[str, float]]:
    """A run with one rank killed, with the events of the launcher; or one that was resumed."""
    events = facts["events"]
    seconds = [event["seconds"] for event in events if event["event"] == "heal"]
    expect(len(seconds) == heals, "a rank to die and the others to go on", events)
    reference = known.get(LATE)
    if reference is None:
        raise UnprovenError("expected the digest of one device, got none to compare with: its row failed")
    expected, got = reference.events[-1]["digest"], facts["digest"]
    expect(expected == got, f"the undisturbed digest {expected}", f"{got} after {events}")
    how = f"the others went on after {seconds[0]:.2g} s, and" if heals else "it"
    return f"{how} ended in the undisturbed bits", {"heal_seconds": seconds[0]} if heals else {}


def judge_starved(facts: Facts, known: Known) -> tuple[str, Mapping[str, float]]:
    """The failure of a run with one GPU full when NCCL connected."""
    expect("failure" in facts, "the failure of the run", facts)
    finds_none = any(text in facts["failure"] for text in NO_MEMORY)
    expect(finds_none, "the error of NCCL's that it finds no memory", _reason(facts["failure"]))
    return f"named when the ranks connect, and all end, after {facts['seconds']:.2g} s", {"seconds": facts["seconds"]}


def judge_streams(facts: Facts, known: Known) -> tuple[str, Mapping[str, float]]:
    """Trainings under the sanitizer, which must have found the race that was planted."""
    expect(facts["planted"], "the sanitizer to find a planted race", "nothing: it sees no streams here")
    judge_bits(facts["trainings"], known)
    return "no race in the exchange, where a planted one is found; the same bits", {}


def judge_logical(facts: Facts, known: Known) -> tuple[str, Mapping[str, float]]:
    """The digests of a script on one device and on all, twice each."""
    expect(len(set(facts.values())) == 1, "the same weights every time", facts)
    return f"a script with attention: the same bits on {', '.join(facts)}", {}


def judge_operations(facts: Facts, known: Known) -> tuple[str, Mapping[str, float]]:
    """Folds of logical ranks: on the host where they share a GPU, else on theirs."""
    expect(not facts["differ"], "the host's bits on the GPU", f"others of {', '.join(facts['differ'])}")
    return f"{facts['count']} folds: the same bits", {}


def judge_memory(facts: Facts, known: Known) -> tuple[str, Mapping[str, float]]:
    """Peaks in gradients."""
    if facts["allocated"] > MOST_GRADIENTS:
        raise UnprovenError(f"expected at most {MOST_GRADIENTS:g} gradients in memory, got {facts['allocated']:.2f}")
    text = f"at most {facts['allocated']:.2f} gradients allocated, {facts['reserved']:.2f} reserved"
    return text, {f"{name}_in_gradients": value for name, value in facts.items()}


def judge_waits(facts: Facts, known: Known) -> tuple[str, Mapping[str, float]]:
    """Host waits a step: none if the device checks the update, one if the host does; the others are reported alone.

    Most events that are waited for, of memory that is used again, have passed long before.
    """
    figures = {}
    for name, each in facts.items():
        if name == "events":  # of the launcher, if the run heals
            continue
        allowed = 0 if name == LATE else 1
        if each["waits"] > allowed * each["steps"]:
            lines = ", ".join(each["lines"])
            got = f"{each['waits']} in {counted(each['steps'], 'step')} at {lines}"
            raise UnprovenError(f"{name}: expected at most {counted(allowed, 'host wait')} a step, got {got}")
        for kind in ("waits", "events", "polls"):
            figures[f"{name}, {kind} a step"] = each[kind] / each["steps"]
    return "; ".join(f"{name}: {value:.3g}" for name, value in figures.items()), figures


def left_out(row: Row, why: str) -> Result:
    """The result of a row that was not run."""
    return Result(row.name, "note", f"{LEFT_OUT}{why}", area=row.area)


LEFT_OUT = "left out: "
TOTAL_SECONDS = 1200.0
LEAST_SECONDS = 15.0  # less is not worth starting a row
START_SECONDS, END_SECONDS = 45.0, 20.0  # of a row, beside the time of its program
LOG_BYTES = 20_000
PROGRAMS = "samestep.doctor.proof_programs"


def prove(devices: str, output: Path, quick: bool, timeout_seconds: float) -> dict[str, Any]:
    """Runs all rows, with a line each on stderr, and writes the file; returns its content."""
    inventory = discover()
    selection = select(devices, inventory)
    path = _path_in(output, selection)
    machine = Machine(inventory, selection, selection.count)
    rows = make_rows(selection, inventory, quick, timeout_seconds)
    _say(f"{selection.describe()}: {counted(len(rows), 'row')}, at most {TOTAL_SECONDS / 60:.0f} minutes\n")
    begin = time.monotonic()
    entries = run_rows(rows)
    content = {
        "proven": is_sound(entries) and not quick,
        "left_out": [entry["name"] for entry in entries if entry["found"].startswith(LEFT_OUT)],
        "scope": _named(selection).replace("1 ", "one ") if selection.count == 1 else _named(selection),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begin, 1),
        "devices": selection.describe(),
        "num_devices": selection.count,
        "cpu": inventory.cpu.name,
        "cores": inventory.cores,
        "versions": {"samestep": __version__, "python": platform.python_version(), "system": platform.platform()},
        "torch": asdict(machine.torch),
        "rows": entries,
        "machine": [asdict(each) for each in check_node(machine)],
    }
    write_json(path, content)
    _say(f"{counted(len(rows), 'row')} in {content['seconds']:.0f} s; written to {path}\n")
    return content


def run_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The results of all rows, as JSON objects with their seconds, and of a bad one the end of its output."""
    begin, known = time.monotonic(), Known()
    entries = []
    with tempfile.TemporaryDirectory(prefix="samestep-prove-") as folder:
        for number, row in enumerate(rows, 1):
            _say(f"{number:2} of {len(rows)}  {row.name} … ")
            start = time.monotonic()
            result, log = _run_row(row, begin + TOTAL_SECONDS - start, Path(folder, str(number)), known)
            seconds = round(time.monotonic() - start, 1)
            _say(f"{result.found}\n" if result.state == "note" else f"{result.state}, {seconds:.0f} s\n")
            more = {"log": log} if result.state == "bad" else {}
            out_of_time = result.state == "note" and row.selection is not None
            common = asdict(replace(result, area=row.area))
            entries.append({**common, "seconds": seconds, "out_of_time": out_of_time, **more})
    return entries


def is_sound(entries: Sequence[Facts]) -> bool:
    """Whether no row has failed, and none was too late."""
    return not any(entry["state"] == "bad" or entry["out_of_time"] for entry in entries)


def verdict(content: Facts) -> str:
    """The sentence on all rows: proven, partly proven, or not; for which devices, and without what."""
    wrong = [row["name"] for row in content["rows"] if row["state"] == "bad"]
    late = [row["name"] for row in content["rows"] if row["out_of_time"]]
    if wrong:
        return f"not proven: {', '.join(wrong)}"
    if late:
        return (
            f"partly proven: the {TOTAL_SECONDS / 60:.0f} minutes were over before {counted(len(late), 'row')}: "
            f"{', '.join(late)}; ask for fewer of them by --quick or --devices"
        )
    rest = f"; left out: {', '.join(content['left_out'])}" if content["left_out"] else ""
    return f"{'proven' if content['proven'] else 'partly proven'} for {content['scope']}{rest}"


def _path_in(output: Path, selection: Selection) -> Path:
    """The file to write: `output`, or in that folder one with the name of the devices; its place is tried."""
    name = selection.devices[0].name
    name = f"cpu-{name}" if selection.kind == "cpu" else name
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{name}-x{selection.count}").strip("-")
    path = output / f"proven-{slug}.json" if output.is_dir() else output
    if not path.parent.is_dir():
        raise UsageError(f"got --output {output}, and there is no folder {path.parent}; name a file or a folder")
    with writing(path, "another place by --output"), tempfile.TemporaryFile(dir=path.parent):
        return path  # before the minutes that its content takes


def _run_row(row: Row, left: float, folder: Path, known: Known) -> tuple[Result, str]:
    """The result of a row, within the seconds that are left, and the end of its output."""
    if row.selection is None:
        return left_out(row, row.missing), ""
    if left < LEAST_SECONDS:
        return left_out(row, f"the {TOTAL_SECONDS / 60:.0f} minutes are over"), ""
    folder.mkdir()
    limit, facts_file, log_file = min(row.seconds + START_SECONDS, left), folder / "facts.json", folder / "log.txt"
    row = replace(row, options={**row.options, "folder": str(folder / "run")}) if row.survives else row
    with log_file.open("wb") as log:
        is_over = _run_child(pickle.dumps((row, facts_file)), log, limit, {**os.environ, **row.variables})
    facts = json.loads(facts_file.read_text(encoding="utf-8")) if facts_file.exists() else {}
    text = log_file.read_bytes()[-LOG_BYTES:].decode(errors="replace") + (facts.get("failure") or "")
    try:
        if is_over:
            raise UnprovenError(f"expected an end within {limit:.0f} s, got none: its processes were ended")
        if facts.get("result") is None:
            raise UnprovenError(f"expected a result, got {_reason(facts.get('failure') or text)}")
        found, figures = row.judge(facts["result"], known)
    except UnprovenError as error:
        return bad(row.name, str(error), "send in the file, which holds the output of this row"), text
    return replace(good(row.name, found), numbers=figures), text


def _reason(text: str) -> str:
    """The exception of a text, else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["nothing"]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\w*: ", line)), lines[0])


def _run_child(row: bytes, log: IO[bytes], seconds: float, environ: Mapping[str, str]) -> bool:
    """Runs a row in a child process; returns whether it took too long, and was ended."""
    # -P: with -c the working folder would be the first place of the search path.
    command = [sys.executable, "-P", "-c", "from samestep.doctor.proof import run_child; run_child()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environ) as child:
        try:
            child.communicate(row, timeout=seconds)
        except subprocess.TimeoutExpired:
            return True
        finally:  # upon SIGTERM it ends its workers; they end with it, too
            for end in (child.terminate, child.kill):
                if child.poll() is None:
                    end()
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(END_SECONDS)
    return False


def run_child() -> None:
    """Runs the row on stdin, which comes from the parent alone, and writes its facts."""
    row, path = pickle.load(sys.stdin.buffer)
    path.write_text(json.dumps(_perform(row, row.selection)), encoding="utf-8")


def _perform(row: Row, selection: Selection) -> dict[str, Any]:
    """Starts the workers of a row: the result of rank 0, and the failure, if there was one."""
    if row.program == COLLECTIVES:
        results, _ = check_ranks(selection, row.options["timeout_seconds"], False)
        return {"result": [asdict(each) for each in results]}
    if row.program == LOGICAL:
        return _run_logical(selection, row.options)
    kwargs = {"program": row.program, "seconds": row.seconds, "options": row.options}
    policy = Policy(heal=row.survives, hang_seconds=row.hang_seconds, grace_seconds=GRACE_SECONDS)
    preload = (*TRAINING, PROGRAMS)
    job = Job("function", f"{PROGRAMS}:start", kwargs=kwargs, quiet=True, preload=preload, policy=policy)
    begin, outcome = time.monotonic(), None
    if row.options.get("by", "") is None:  # an epoch on all, and the rest on one
        outcome = supervise(replace(job, kwargs={**kwargs, "options": {**row.options, "epochs": 1}}), selection)
        selection = _first(selection, discover(), 1)
    if outcome is None or not outcome.exit_code:
        outcome = supervise(job, selection)
    failure = outcome.failure or "it was stopped"
    if row.program == STARVED and outcome.exit_code:
        return {"result": {"failure": failure, "seconds": time.monotonic() - begin}}
    if outcome.exit_code:
        return {"failure": failure}
    events = {"events": outcome.events} if row.survives else {}
    return {"result": {**outcome.result, **events}}


def _run_logical(selection: Selection, options: Mapping[str, Any]) -> dict[str, Any]:
    """The digests of the script of `proof_script` as logical devices, on one device and on all, some times each."""
    found, module = {}, "samestep.logical.ranks"
    places = [_first(selection, discover(), size) for size in sorted({1, selection.count})]
    # Where one device is all there is, two runs at least: a single digest would be compared with nothing.
    for where, number in product(places, range(max(options["repeats"], 3 - len(places)))):
        with tempfile.TemporaryDirectory(prefix="samestep-logical-") as folder:
            digest = Path(folder, "digest")
            argv = [str(digest), options["kind"]]
            kwargs = {"kind": "module", "target": "samestep.doctor.proof_script", "argv": argv}
            job = Job("function", f"{module}:run_logical", kwargs=kwargs, quiet=True, preload=(*TRAINING, module))
            outcome = supervise(
                replace(job, logical_devices=options["num_ranks"], policy=Policy(hang_seconds=0)), where
            )
            if outcome.exit_code:
                return {"failure": outcome.failure or "it was stopped"}
            found[f"{_named(where)}, run {number + 1}"] = digest.read_text(encoding="utf-8")
    return {"result": found}


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
