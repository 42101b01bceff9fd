"""How long does a run stand still when a worker is killed, and what do heartbeats cost? On CPU workers.

    python benchmarks/healing.py [--kills 12] [--rounds 40] [--json FILE]

Workers train lenet and kill themselves with SIGKILL, one after another, each in a step and a phase drawn from a seed,
until one of two, three or four is left. The time is from the signal to the end of the next step of those that go on.
For the heartbeats, steps whose phases are posted on a page, with a look at the view, take turns with steps that post
nothing, in one process; the ratio is the median over the rounds.
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

PHASES = ("forward", "backward", "update")
STEPS_BETWEEN = 6
NUM_MICROBATCHES = 8


def draw_kills(seed, devices):
    """Which slot is killed in which step and phase; one of them is left."""
    random_ = random.Random(seed)
    victims = random_.sample(range(devices), devices - 1)
    return [
        {"slot": slot, "step": STEPS_BETWEEN * (k + 1) + random_.randrange(3), "phase": random_.choice(PHASES)}
        for k, slot in enumerate(victims)
    ]


def make_step(run):
    """A step of lenet on its own data, and batches without end."""
    from samestep.recipes.catalog import load
    from samestep.recipes.job import make_optimizer
    from samestep.recipes.recipe import DataOptions

    recipe = load("lenet")
    content = recipe.data(DataOptions(seed=0))
    model = recipe.model(content)
    optimizer = make_optimizer(model, recipe.optimizer, recipe.lr, recipe.momentum)
    loader = run.loader(content.train, shuffle=True)
    return run.train_step(model, optimizer, recipe.loss), model, optimizer, (b for _ in iter(int, 1) for b in loader)


def train_until_killed(told):
    """A worker: notes when each step ended, and when it kills itself."""
    import samestep

    run = samestep.Run(global_batch_size=128, num_microbatches=NUM_MICROBATCHES)
    step, model, optimizer, batches = make_step(run)
    slot, folder = int(os.environ["SAMESTEP_SLOT"]), Path(told["folder"])
    mine = next((kill for kill in told["kills"] if kill["slot"] == slot), None)

    def strike(phase):
        if mine is not None and mine["phase"] == phase and step.num_steps == mine["step"]:
            (folder / f"killed-{slot}").write_text(json.dumps(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    model.register_forward_pre_hook(lambda *_: strike("forward"))
    next(model.parameters()).register_hook(lambda _: strike("backward"))
    optimizer.register_step_pre_hook(lambda *_: strike("update"))
    ends = []
    for _ in range(STEPS_BETWEEN * (len(told["kills"]) + 1) + 3):
        step(next(batches))
        ends.append((len(run.membership.healed), time.monotonic()))
    (folder / f"ends-{slot}").write_text(json.dumps(ends))


def time_kills(seed):
    """One run with as many kills as leave one worker; the seconds from each to the end of the next step."""
    from samestep.devices.selection import select
    from samestep.launcher.job import Job
    from samestep.launcher.supervisor import supervise

    devices = 2 + seed % 3
    kills = draw_kills(seed, devices)
    with tempfile.TemporaryDirectory() as folder:
        job = Job("script", __file__, ("--worker", json.dumps({"folder": folder, "kills": kills})), quiet=True)
        outcome = supervise(job, select(f"cpu:{devices}"))
        if outcome.exit_code != 0:
            raise SystemExit(f"the run with seed {seed} did not heal: {outcome.failure}")
        killed = sorted(json.loads(path.read_text()) for path in Path(folder).glob("killed-*"))
        ends = json.loads(next(Path(folder).glob("ends-*")).read_text())
    # Those that had all they needed end the step under way; the next one shows that they have gone on.
    return [min(end for count, end in ends if count > k) - when for k, when in enumerate(killed)]


def time_heartbeats(rounds):
    """Seconds a step without heartbeats, and how many times that it takes with them."""
    import torch.distributed as dist

    import samestep
    from samestep.comm.heartbeat_page import HeartbeatPage

    run = samestep.Run(global_batch_size=128, num_microbatches=NUM_MICROBATCHES)
    step, _, _, batches = make_step(run)
    page, membership = HeartbeatPage.create(1), run.membership
    membership._healing_store = dist.HashStore()  # so that it looks at the view as a supervised worker does
    seconds = {None: [], page: []}
    for number in range(rounds + 2):
        for watched in (None, page):
            batch = next(batches)
            membership.heartbeat.page = watched
            start = time.perf_counter()
            step(batch)
            if number >= 2:
                seconds[watched].append(time.perf_counter() - start)
    membership.heartbeat.page = None
    page.close()
    ratios = [watched / alone for alone, watched in zip(seconds[None], seconds[page], strict=True)]
    return statistics.median(seconds[None]), statistics.median(ratios)


def main():
    """Times the kills, then the heartbeats, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="how many, at least")
    parser.add_argument("--rounds", type=int, default=40, help="of steps with heartbeats and without")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train_until_killed(json.loads(args.worker))
        return
    waits, seed = [], 0
    while len(waits) < args.kills:
        waits += time_kills(seed)
        seed += 1
    without, ratio = time_heartbeats(args.rounds)
    figures = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "kills": len(waits),
        "death_to_next_step_seconds": {
            "median": round(statistics.median(waits), 3),
            "least": round(min(waits), 3),
            "most": round(max(waits), 3),
        },
        "step_seconds": round(without, 6),
        "heartbeats_ratio": round(ratio, 4),
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
