"""The rows of `samestep doctor --prove`: their devices and programs, and the judgement of what came back.

The trainings on one device are the reference: all other rows must end in their bits. Nothing here imports torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from samestep.devices.inventory import Inventory
from samestep.devices.selection import Selection, select
from samestep.doctor.result import Result, from_objects
from samestep.errors import SamestepError
from samestep.text import counted
from samestep.verify.ledger import Ledger, cause, compare, extent

COLLECTIVES = "collectives"  # the one program that `check_table` has
MODELS, PRECISIONS, OPTIMIZERS = ("lenet", "gpt"), ("32-true", "bf16-mixed", "16-mixed"), ("sgd", "adamw")
TRAININGS = [f"{model} {precision} {name}" for model in MODELS for precision in PRECISIONS for name in OPTIMIZERS]
PLACED = ("lenet 32-true sgd", "gpt bf16-mixed adamw")  # for rows about the placement of the state
LATE = "gpt 32-true adamw"  # fused on GPUs, where the device itself leaves out a non-finite update
CHECKED = "gpt 32-true sgd"  # where the host checks before each update
NUM_MICROBATCHES, EPOCHS = 8, 3
EVERY_COUNT = 8  # up to so many devices each number of them has a row
ROW_SECONDS, MATRIX_SECONDS = 120.0, 240.0
ROUNDING = 1e-4  # float32 sums of at most 256 terms in another order, over a dozen steps: some hundred times as much
GPU_MODEL = {"width": 512, "layers": 6, "context": 256, "microbatch_size": 16}
CPU_MODEL = {"width": 64, "layers": 2, "context": 32, "microbatch_size": 2}
SHARED = "two processes on one GPU"  # through host memory: NCCL wants one a device
NEEDS_GPU, NEEDS_TWO = "needs a CUDA device", "needs two devices or more"

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


def make_rows(chosen: Selection, inventory: Inventory, quick: bool, timeout_seconds: float) -> list[Row]:
    """All rows for some devices, in their order; `quick` leaves out the collectives."""
    count, is_gpu = chosen.count, chosen.kind == "cuda"
    first = partial(_first, chosen, inventory)
    everything, alone = first(count), first(1)
    can_share = is_gpu and (bool(alone.environment) or len(inventory.devices) == 1)
    shared = replace(alone, devices=alone.devices * 2) if can_share else None
    several = everything if count > 1 else shared
    rows: list[Row] = []

    def add(
        area: str,
        what: str,
        program: str,
        where: Selection | None,
        judge: Any,
        options: Mapping[str, Any],
        missing: str = NEEDS_TWO,
        seconds: float = ROW_SECONDS,
        survives: bool = False,
    ) -> None:
        place = "" if where is None else f" on {SHARED if where is shared else _named(where)}"
        options = {"num_microbatches": max(NUM_MICROBATCHES, count), **options}
        rows.append(Row(area, f"{what}{place}", program, where, judge, missing, options, seconds, survives))

    if not quick:
        for where in [several] if several is shared or not is_gpu else [several, shared]:
            asked = {"timeout_seconds": timeout_seconds}
            add("collectives", "collectives", COLLECTIVES, where, judge_collectives, asked)
    area, what, twice = "the same bits", "models and precisions", {"names": TRAININGS, "epochs": EPOCHS, "repeats": 2}
    matrix = partial(add, area, program="trainings", seconds=MATRIX_SECONDS)
    matrix(what=f"{what}, each twice,", where=alone, judge=partial(judge_bits, is_first=True), options=twice)
    several_sizes = sorted({*range(2, min(count, EVERY_COUNT) + 1), count} - {1})
    for where in [shared, *map(first, several_sizes)]:
        name = what if where is not None else f"{what} on {SHARED}"
        matrix(
            what=name, where=where, judge=judge_bits, options={"names": TRAININGS, "epochs": EPOCHS}, missing=NEEDS_GPU
        )
    sharded, pipeline = {"strategy": "sharded"}, {"strategy": "pipeline", "mesh": {"data": -1, "pipe": 2}}
    even = first(count - count % 2) if count > 1 else shared
    for what, where, placed in (("sharded (FSDP2)", everything, sharded), ("pipeline", even, pipeline)):
        add(area, what, "trainings", where, judge_bits, {"names": PLACED, "epochs": EPOCHS, **placed})
    on_tensors = {"repeats": 2, "mesh": {"data": -1, "tensor": 2}, "on_tensor_axis": True}
    pairs = [first(size) for size in sorted({2, count - count % 2})] if count > 1 else [None]
    for number, where in enumerate(pairs):
        judge = partial(judge_tensor, is_first=number == 0)
        add(area, "DTensor", "trainings", where, judge, {"names": [LATE], "epochs": EPOCHS, **on_tensors})
    add("failures", "a killed rank", "killed", several, judge_killed, {"name": LATE, "epochs": EPOCHS}, survives=True)
    area, watched = "streams and waits", {"names": [LATE, PLACED[0]], "epochs": EPOCHS}
    sizes = sorted({1, count})
    for where in map(first, sizes) if is_gpu else [None]:
        add(area, "stream sanitizer", "streams", where, judge_streams, watched, missing=NEEDS_GPU)
        add(area, "host waits", "host_waits", where, judge_waits, {"names": [LATE, CHECKED]}, missing=NEEDS_GPU)
    model = GPU_MODEL if is_gpu else CPU_MODEL
    for where in map(first, sizes):
        add("speed", "time of a step by a plain loop's", "speed", where, judge_speed, model)
    return rows


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
    if len(set(ends.values())) < len(ends):
        raise UnprovenError(f"expected another end of each training, got {ends}: they did not train")
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


def judge_tensor(facts: Facts, known: Known, is_first: bool) -> tuple[str, Mapping[str, float]]:
    """A model on DTensors: its own bits along "data", and one device's losses up to rounding."""
    text, _ = judge_bits(facts, known, is_first, "tensor: ")
    worst = 0.0
    for name, runs in facts.items():
        if (reference := known.get(name)) is None:
            raise UnprovenError(f"{name}: expected the losses of one device, got none to compare with: its row failed")
        for entry in runs[0]["steps"]:
            mine, theirs = (float.fromhex(each["loss"]) for each in (entry, reference.steps[entry["step"]]))
            worst = max(worst, abs(mine - theirs) / abs(theirs))
    if not worst <= ROUNDING:
        raise UnprovenError(f"expected the losses of one device within {ROUNDING:g}, got {worst:.3g} apart")
    text = text if is_first else text.replace("one device", "one pair of devices")
    return f"{text}; losses within {worst:.1e} of one device's", {"largest_loss_difference": worst}


def judge_killed(facts: Facts, known: Known) -> tuple[str, Mapping[str, float]]:
    """A run of which one rank was killed, with the events of the launcher."""
    events = facts["events"]
    heals = [event for event in events if event["event"] == "heal"]
    if not heals:
        raise UnprovenError(f"expected a rank to die and the others to go on, got {events}")
    reference = known.get(LATE)
    if reference is None:
        raise UnprovenError("expected the digest of one device, got none to compare with: its row failed")
    expected, got = reference.events[-1]["digest"], facts["digest"]
    if expected != got:
        raise UnprovenError(f"expected the undisturbed digest {expected}, got {got} after {events}")
    seconds = heals[0]["seconds"]
    return f"the others went on after {seconds:.2g} s, and ended in the undisturbed bits", {"heal_seconds": seconds}


def judge_streams(facts: Facts, known: Known) -> tuple[str, Mapping[str, float]]:
    """Trainings under the sanitizer, which must have found the race that was planted."""
    if not facts["planted"]:
        raise UnprovenError("expected the sanitizer to find a planted race, got nothing: it sees no streams here")
    judge_bits(facts["trainings"], known)
    return "no race in the exchange, where a planted one is found; the same bits", {}


def judge_waits(facts: Facts, known: Known) -> tuple[str, Mapping[str, float]]:
    """Host waits a step: none if the device checks the update, one if the host does."""
    figures = {f"{name}, waits a step": each["waits"] / each["steps"] for name, each in facts.items()}
    for name, each in facts.items():
        allowed = 0 if name == LATE else 1
        if each["waits"] > allowed * each["steps"]:
            lines = ", ".join(each["lines"])
            got = f"{each['waits']} in {counted(each['steps'], 'step')} at {lines}"
            raise UnprovenError(f"{name}: expected at most {counted(allowed, 'host wait')} a step, got {got}")
    return "; ".join(f"{name}: {value:.3g}" for name, value in figures.items()), figures


def judge_speed(facts: Facts, known: Known) -> tuple[str, Mapping[str, float]]:
    """Ratios, which prove nothing by themselves."""
    return "; ".join(f"{name}: {ratio:.2f}" for name, ratio in facts.items()), facts


def left_out(row: Row, why: str) -> Result:
    """The result of a row that was not run."""
    return Result(row.name, "note", f"left out: {why}", area=row.area)
