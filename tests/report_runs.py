"""Run folders made by arithmetic, with all that a long and eventful run leaves: for the report's tests and for eyes."""

import json
import math
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from samestep.runs.ledger import to_line

BEGIN = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
BATCH = 128
CONTRACT = {
    "global_batch_size": BATCH,
    "num_microbatches": 8,
    "seed": 0,
    "device_kind": "cpu",
    "num_threads": 1,
    "versions": {"samestep": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "platform": "linux-x86_64"},
    "flags": {"float32_matmul_precision": "highest", "deterministic_algorithms": True},
    "precision": "32-true",
    "data": "digits: 1,797 scans, 28×28",
    "max_grad_norm": None,
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.9,
    "options": {},
    "devices": ["cpu", "cpu", "cpu"],
    "command": ["python", "-m", "samestep.recipes.lenet"],
}
PHASES = {"data": 0.004, "compute": 0.021, "exchange": 0.007, "update": 0.002, "checkpoint": 0.0005}


@dataclass
class MadeRun:
    """What to make; `events` holds (name, step, fields) and may hold them in any order.

    Attributes:
        steps: of the run.
        epoch_steps: steps of an epoch.
        seed: of the numbers; runs of one seed have the same bits.
        differs_from: the first step from which the losses are others.
        nonfinite: steps whose loss is "nan" or "inf".
        events: beside start and end.
        resume_from: (stopped at, resumed from): the steps between are recorded twice.
        finished: whether it reached its end.
        timed: whether phases and memory were measured.
    """

    steps: int = 60
    epoch_steps: int = 12
    seed: int = 0
    differs_from: int | None = None
    nonfinite: dict[int, str] = field(default_factory=dict)
    events: list = field(default_factory=list)
    resume_from: tuple[int, int] | None = None
    finished: bool = True
    timed: bool = True
    contract: dict = field(default_factory=dict)
    digest_every: int = 10
    speed: float = 1.0


def make_run(folder: Path, made: MadeRun = MadeRun()) -> Path:  # noqa: B008 - never changed
    """Writes the folder of a run."""
    folder.mkdir(parents=True)
    contract = CONTRACT | {"seed": made.seed} | made.contract
    (folder / "run.json").write_text(json.dumps(contract, indent=2))
    order = list(range(made.steps))
    if made.resume_from:
        stopped, back = made.resume_from
        order = [*range(stopped), *range(back, made.steps)]
    rows = _rows(made)
    events = sorted(made.events, key=lambda event: event[1])
    step_seconds = sum(PHASES.values()) / made.speed
    now, resumed = BEGIN, False
    ledger = [_event("start", 0, now, world_size=3, devices=["cpu"] * 3)]
    metrics, world = [], 3
    pending = list(events)
    for place, step in enumerate(order):
        if made.resume_from and not resumed and place >= made.resume_from[0]:
            ledger.append(_event("stop", made.resume_from[0], now, signal="SIGTERM"))
            now += timedelta(hours=3)
            source = f"step-{made.resume_from[1]:08d}"
            ledger.append(_event("resume", made.resume_from[1], now, **{"from": source, "world_size": 2}))
            resumed, world = True, 2
        while pending and pending[0][1] <= step:
            name, at, fields = pending.pop(0)
            now += timedelta(seconds=0.4)
            ledger.append(_event(name, at, now, **fields))
            world = fields.get("world_size", world)
        now += timedelta(seconds=step_seconds)
        row = rows[step]
        ledger.append(to_line(row["ledger"] | {"world_size": world}).decode().rstrip())
        metrics.append(row["metrics"])
        metrics += _timing(made, step, world) if made.timed else []
        if (step + 1) % made.epoch_steps == 0:
            metrics.append(_epoch(made, step, step_seconds))
    if made.finished:
        digest = f"{made.seed:064x}"
        ledger.append(_event("end", made.steps, now, digest=digest))
    (folder / "ledger.jsonl").write_text("".join(f"{line}\n" for line in ledger), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics), encoding="utf-8")
    return folder


def eventful(steps: int = 400) -> list:
    """Twelve events within five steps: deaths, heals, a checkpoint, a device that joins."""
    at = steps // 2
    return [
        ("checkpoint", at, {"name": f"step-{at:08d}", "blocked_seconds": 0.003, "seconds": 0.12}),
        ("death", at, {"rank": 2, "device": "cpu", "phase": "backward", "cause": "SIGKILL"}),
        ("heal", at, {"world_size": 2, "seconds": 0.8, "lost": [2]}),
        ("death", at + 1, {"rank": 1, "device": "cpu", "phase": "exchange", "cause": "hang"}),
        ("heal", at + 1, {"world_size": 1, "seconds": 1.3, "lost": [1]}),
        ("join", at + 2, {"world_size": 2}),
        ("join", at + 2, {"world_size": 3}),
        ("death", at + 3, {"rank": 0, "device": "cpu", "phase": "data", "cause": "exit code 3"}),
        ("heal", at + 3, {"world_size": 2, "seconds": 0.7, "lost": [0]}),
        ("contract_change", at + 4, {"fields": [["versions.numpy", "2.4.5", "2.4.6"]]}),
        ("join", at + 4, {"world_size": 3}),
        ("checkpoint", at + 4, {"name": f"step-{at + 4:08d}", "blocked_seconds": 0.002, "seconds": 0.11}),
    ]


def _rows(made: MadeRun) -> list:
    """The ledger's and the metrics' lines of every step, which depend on the seed alone."""
    draw = random.Random(made.seed)
    other = random.Random(made.seed + 1000)
    rows = []
    for step in range(made.steps):
        progress = step / max(1, made.steps)
        noise, norm = draw.gauss(0, 0.06), draw.gauss(0, 0.25)
        if made.differs_from is not None and step >= made.differs_from:
            noise += other.gauss(0, 0.01)
        loss = (2.3 * math.exp(-4.5 * progress) + 0.08) * math.exp(noise)
        if step % 997 == 996:
            loss *= 6
        grad = (1.4 * math.exp(-1.5 * progress) + 0.3) * math.exp(norm)
        value = made.nonfinite.get(step)
        rate = 0.05 * min(1.0, (step + 1) / (0.05 * made.steps + 1)) * 0.5 * (1 + math.cos(math.pi * progress))
        epoch, place = divmod(step, made.epoch_steps)
        entry = {
            "step": step + 1, "epoch": epoch, "position": place * BATCH, "num_samples": BATCH,
            "ids": f"{step * 7919:016x}",
            "loss": float(value or loss).hex(), "grad_norm": grad.hex(), "lr": [rate.hex()], "skipped": bool(value),
        }  # fmt: skip
        if (step + 1) % made.digest_every == 0:
            entry["digest"] = f"{hash((made.seed, step, loss)) & (2**64 - 1):016x}"
        rows.append(
            {"ledger": entry, "metrics": {"step": step + 1, "loss/train": value or loss, "grad_norm": grad, "lr": rate}}
        )
    return rows


def _timing(made: MadeRun, step: int, world: int) -> list:
    """About once a second: the phases and the memory."""
    every = max(1, round(made.speed / sum(PHASES.values()) * (1 if made.steps < 5000 else 10)))
    every = min(every, max(1, made.steps // 8))
    if (step + 1) % every:
        return []
    draw = random.Random(step)
    seconds = {f"seconds/{name}": value / made.speed * draw.uniform(0.85, 1.2) for name, value in PHASES.items()}
    seconds["seconds/compute"] *= 3 / world
    memory = {"memory/host_bytes": 4.1e8 + 3e7 * math.sin(step / 50), "memory/device_bytes": 2.2e9 + 1e6 * (step % 90)}
    return [{"step": step + 1, **seconds, **memory}]


def _epoch(made: MadeRun, step: int, step_seconds: float) -> dict:
    progress = (step + 1) / made.steps
    return {
        "step": step + 1,
        "epoch": float((step + 1) // made.epoch_steps),
        "loss/train_epoch": 2.3 * math.exp(-4.3 * progress) + 0.09,
        "samples_per_second": BATCH / step_seconds,
        "accuracy/eval": 0.99 - 0.85 * math.exp(-5 * progress) - 0.004 * made.seed,
        "loss/eval": 2.2 * math.exp(-4.0 * progress) + 0.15 + 0.02 * made.seed,
    }


def _event(name: str, step: int, now: datetime, /, **fields: object) -> str:
    return (
        to_line({"event": name, "step": step, "time": now.isoformat(timespec="milliseconds"), **fields})
        .decode()
        .rstrip()
    )
