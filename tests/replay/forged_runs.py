"""How many forged runs does an audit find, and does it doubt an honest one? A table, and the exit code 1 if it fails.

    python tests/replay/forged_runs.py [--forged 25] [--honest 200] [--healed 4]

A run has ten segments of two steps each. Each kind of forgery is made in `--forged` runs, whose manifests are made good
again; all segments of each are audited once, and from them 40 draws of k segments are taken as `samestep audit` draws
them. Expected is 1 - C(n - m, k) / C(n, k) where m of n segments are forged.
"""

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from replay_programs import BATCH, NUM_MICROBATCHES, Net, data_of
from torch.nn import functional
from worlds import in_turns

from samestep.checkpoint.verified_files import MANIFEST_FILE, Manifest, manifest_bytes, read_manifest, seal
from samestep.replay.auditing import audit
from samestep.run.run import Run
from samestep.run.trainer import Trainer
from samestep.runs.ledger import from_line, to_line

SEGMENTS, STEPS, DRAWS = 10, 20, 40
TAMPER = {}  # what a forger does in training; an honest program has the same code
STATE = {}


def loss_fn(model, batch):
    step = STATE["trainer"].step.num_steps
    x, y = batch
    if step in TAMPER.get("swapped", ()):
        x = x.flip(0)
    if step in TAMPER.get("lr", ()):
        STATE["optimizer"].param_groups[0]["lr"] = 0.2
    return functional.cross_entropy(model(x), y)


def train(communicator, folder, seed=3, fit=(), max_steps=STEPS):
    run = Run(BATCH, NUM_MICROBATCHES, TAMPER.get("seed", seed), communicator=communicator)
    model = Net()
    model.body[3].p = TAMPER.get("dropout", 0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.1))
    options = {"checkpoint_steps": 2, "keep": 99, "digest_every": 5}
    with Trainer(run, model, optimizer, loss_fn, run_dir=folder, **options) as trainer:
        STATE.update(trainer=trainer, optimizer=optimizer)
        trainer.fit(data_of("net", None), max_steps=max_steps, **dict(fit))


def recorded(folder, world_size=1, **options):
    in_turns(world_size, lambda communicator: train(communicator, folder, **options))


def audited(folder, **options):
    return audit(folder, 0, program=lambda: train(None, folder, **options))


def rewrite(folder, change):
    """Changes the entries of the ledger."""
    path = folder / "ledger.jsonl"
    entries = change([from_line(line) for line in path.read_bytes().splitlines()])
    path.write_bytes(b"".join(map(to_line, entries)))


def steps_of(entries):
    return {entry["step"]: entry for entry in entries if "event" not in entry}


def replace_file(checkpoint, file, change):
    """Changes the bytes of a file of a checkpoint, and makes its manifest good again."""
    data = bytearray((checkpoint / file).read_bytes())
    (checkpoint / file).write_bytes(change(data))
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, file: seal(checkpoint / file)}
    (checkpoint / MANIFEST_FILE).write_bytes(manifest_bytes(Manifest(manifest.step, files)))


def claim(folder, honest):
    """Has a folder claim the contract of another run, in its record and in all checkpoints."""
    shutil.copy(honest / "run.json", folder / "run.json")
    contract = json.loads((honest / "checkpoints/step-00000002/state.json").read_bytes())["run"]["rest"]["contract"]

    def change(data):
        facts = json.loads(bytes(data))
        facts["run"]["rest"]["contract"] = contract
        return json.dumps(facts, separators=(",", ":")).encode()

    for checkpoint in (folder / "checkpoints").glob("step-*"):
        replace_file(checkpoint, "state.json", change)
    rewrite(
        folder, lambda entries: [{**entry, **({"lr": [(0.1).hex()]} if "lr" in entry else {})} for entry in entries]
    )


def a_loss(folder, rng):
    step = rng.randrange(STEPS)

    def change(entries):
        value = float.fromhex(steps_of(entries)[step]["loss"])
        steps_of(entries)[step]["loss"] = rng.choice((math.nextafter(value, 0), value * 0.9)).hex()
        return entries

    rewrite(folder, change)


def a_line(folder, rng):
    step = rng.randrange(STEPS)
    rewrite(folder, lambda entries: [each for each in entries if "event" in each or each["step"] != step])


def an_exchange(folder, rng):
    first = 2 * rng.randrange(SEGMENTS)

    def change(entries):
        one, other = (steps_of(entries)[step] for step in (first, first + 1))
        for name in ("loss", "grad_norm"):
            one[name], other[name] = other[name], one[name]
        return entries

    rewrite(folder, change)


def a_weight(folder, rng):
    def change(data):
        place = rng.randrange(8 + int.from_bytes(data[:8], "little"), len(data))
        data[place] ^= 1 << rng.randrange(8)
        return data

    step = 2 * rng.randrange(1, SEGMENTS)
    replace_file(folder / "checkpoints" / f"step-{step:08d}", "model.safetensors", change)


def trained_so(**tamper):
    def forge(folder, rng):
        honest = folder.with_name("honest")
        shutil.rmtree(folder)
        first = 2 * rng.randrange(SEGMENTS)
        start = rng.randrange(STEPS - 9)
        places = {"swapped": range(first, first + 2), "lr": range(start, start + 10)}
        TAMPER.update({name: places.get(name, value) for name, value in tamper.items()})
        try:
            recorded(folder)
        finally:
            TAMPER.clear()
        claim(folder, honest)

    return forge


FORGERIES = {
    "a loss edited": a_loss,
    "a line removed": a_line,
    "two lines exchanged": an_exchange,
    "a bit of a weight": a_weight,
    "samples swapped": trained_so(swapped=True),
    "another seed": trained_so(seed=4),
    "another learning rate for ten steps": trained_so(lr=True),
    "another script": trained_so(dropout=0.3),
}
KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import forged_runs
from forged_runs import loss_fn, train

def killing(model, batch, own=loss_fn):
    if os.environ.get("RANK") == "1" and forged_runs.STATE["trainer"].step.num_steps == {step}:
        os.kill(os.getpid(), 9)
    return own(model, batch)

killing.__wrapped__ = loss_fn  # the source of the contract
forged_runs.loss_fn = killing
train(None, {run!r})
"""


def share(results, k):
    """The share of draws of k segments that find a forgery."""
    found = drawn = 0
    for bad, is_certain in results:
        for seed in range(DRAWS if k < SEGMENTS else 1):
            chosen = random.Random(seed).sample(range(1, SEGMENTS + 1), k)
            found, drawn = found + (is_certain or not bad.isdisjoint(chosen)), drawn + 1
    return found / drawn


def expected(results, k):
    chances = [1 if sure else 1 - math.comb(SEGMENTS - len(bad), k) / math.comb(SEGMENTS, k) for bad, sure in results]
    return sum(chances) / len(chances)


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("forged", 25), ("honest", 200), ("healed", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked, began, rng, failed = parser.parse_args(), time.time(), random.Random(0), 0
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(sys.stderr):
        place, lines = Path(place), []
        recorded(place / "honest")
        for name, forge in FORGERIES.items():
            results = []
            for _ in range(asked.forged):
                shutil.copytree(place / "honest", place / "forged")
                forge(place / "forged", rng)
                result = audited(place / "forged")
                bad = {each.number for each in result.segments if each.difference is not None}
                results.append((bad, bool(result.faults)))
                failed += result.holds
                shutil.rmtree(place / "forged")
            ks = (1, 2, 5, SEGMENTS)
            cells = [f"{share(results, k):.0%} ({expected(results, k):.0%})" for k in ks]
            print(name, len(results), cells, f"{time.time() - began:.0f} s", flush=True)
            lines.append(f"| {name} | {sum(len(bad) for bad, _ in results) / len(results):.1f} | {' | '.join(cells)} |")
        lengths = {each.number: each.last - each.first + 1 for each in audited(place / "honest").segments}
        draws = {k: [random.Random(seed).sample(sorted(lengths), k) for seed in range(DRAWS)] for k in ks}
        costs = [sum(lengths[each] for draw in draws[k] for each in draw) / DRAWS / STEPS for k in ks]
        lines.append(f"| steps taken again, of those of the run | | {' | '.join(f'{cost:.0%}' for cost in costs)} |")
        alarms = 0
        for number in range(asked.honest):
            folder, sizes, options = place / f"run-{number}", rng.choices((1, 2, 3), k=2), {"seed": number % 5}
            if number % 2:
                recorded(folder, sizes[0], **options, max_steps=rng.randrange(1, STEPS))
                options["fit"] = (("resume", "auto"),)
            recorded(folder, sizes[1], **options)
            alarms += not audited(folder, seed=number % 5).holds
            print(f"honest: {number + 1}, false alarms: {alarms}", flush=True)
            shutil.rmtree(folder)
        for number in range(asked.healed):
            folder, script = place / f"healed-{number}", place / f"killed_{number}.py"
            text = KILLED.format(folder=str(Path(__file__).parent), step=3 + 4 * number, run=str(folder))
            script.write_text(text)
            words = [sys.executable, "-m", "samestep", "run", "--devices", "cpu:3", str(script)]
            subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
            assert '"event": "heal"' in (folder / "ledger.jsonl").read_text(), "no worker was lost"
            alarms += not audited(folder).holds
    print(
        "| forgery | forged segments of 10 | k = 1 | k = 2 | k = 5 | all |\n|---|---|---|---|---|---|", *lines, sep="\n"
    )
    count = asked.forged * len(FORGERIES)
    print(
        f"{failed} of {count} forged runs missed by all segments; {alarms} false alarms in {asked.honest} honest runs"
    )
    print(f"and {asked.healed} healed ones; {time.time() - began:.0f} s")
    sys.exit(1 if failed or alarms else 0)


if __name__ == "__main__":
    main()
