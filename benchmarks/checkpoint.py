"""What does a checkpoint cost the training? The time a step is blocked, against a plain copy of the same state.

    python benchmarks/checkpoint.py [--rounds 15] [--folder DIR] [--json FILE]

Each round measures a clone of every tensor, a copy into memory that is there, then a checkpoint: packing, copying and
handing over; the writer is idle when a round begins. Then training steps are timed alone and beside the writer, in
turns: give it a core of its own, or the ratio is that of two programs on one.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from samestep.checkpoint.async_save import CheckpointSaver
from samestep.checkpoint.packing import pack
from samestep.checkpoint.storage import Snapshot, newest_checkpoint

AIM = 1.2


def mlp(width, depth):
    """A model and its Adam state after one step."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.randn(8, width)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def seconds(function):
    """How long a call takes, and what it returns."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def snapshot(model, optimizer, saver, step):
    """Packs and copies the state, as a run does at a checkpoint."""
    packed = {"model": pack(model.state_dict(), "model"), "optimizer": pack(optimizer.state_dict(), "optimizer")}
    files = saver.to_host_copy({name: each.tensors for name, each in packed.items()})
    return Snapshot(step, files, {name: each.facts for name, each in packed.items()})


def blocked(model, optimizer, folder, rounds):
    """Bytes, tensors, and median seconds: clone, copy, packing and copying, the whole call, writing."""
    saver = CheckpointSaver(folder)
    tensors = [t for part in (model, optimizer) for t in pack(part.state_dict(), "").tensors.values()]
    places = [tensor.clone() for tensor in tensors]
    cloned, plain, copied, whole, written = [], [], [], [], []
    for step in range(rounds + 2):
        cloned.append(seconds(lambda: [tensor.clone() for tensor in tensors])[0])
        plain.append(seconds(lambda: [place.copy_(tensor) for place, tensor in zip(places, tensors, strict=True)])[0])
        took, state = seconds(lambda step=step: snapshot(model, optimizer, saver, step))
        copied.append(took)
        whole.append(took + seconds(lambda state=state: saver.save(state))[0])
        wait(saver, written)
    saver.close()
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    return size, len(tensors), *(statistics.median(values[2:]) for values in (cloned, plain, copied, whole, written))


def wait(saver, written):
    """Waits until the writer is idle."""
    while not (done := saver.poll()):
        time.sleep(0.001)
    written += [saved.seconds for saved in done]


def beside(model, optimizer, folder, rounds):
    """Seconds of a training step alone and beside the writer, medians."""
    inputs = torch.randn(64, model[0].in_features)

    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    saver, alone, together = CheckpointSaver(folder), [], []
    for number in range(rounds):
        alone += [seconds(step)[0] for _ in range(5)]
        saver.save(snapshot(model, optimizer, saver, number))
        while not saver.poll():
            together.append(seconds(step)[0])
    saver.close()
    return statistics.median(alone), statistics.median(together), len(together)


def main():
    """Measures a small, a middle and a large state, and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="checkpoints-"))
    console, rows = Console(), []
    columns = ("state", "tensors", "clone", "copy", "blocked", f"/ clone, aim {AIM}", "/ copy", "pack, copy", "writing")
    table = Table(*columns, title="milliseconds")
    slowed = Table("state", "step alone, ms", "beside the writer, ms", "ratio", "steps beside it")
    try:
        for width, depth in ((64, 3), (512, 6), (1024, 20), (2048, 12)):
            model, optimizer = mlp(width, depth)
            place = folder / f"{width}-{depth}"
            size, count, cloned, plain, copied, whole, written = blocked(model, optimizer, place, options.rounds)
            name, ratio = f"{size / 2**20:.1f} MiB", whole / cloned
            milliseconds = [f"{1000 * value:.3f}" for value in (cloned, plain, whole, copied, written)]
            met = "met" if ratio <= AIM else "missed"
            table.add_row(
                name, str(count), *milliseconds[:3], f"{ratio:.2f} {met}", f"{whole / plain:.2f}", *milliseconds[3:]
            )
            alone, together, steps = beside(model, optimizer, place, max(2, options.rounds // 4))
            slowed.add_row(name, f"{1000 * alone:.2f}", f"{1000 * together:.2f}", f"{together / alone:.2f}", str(steps))
            rows.append(
                {"bytes": size, "tensors": count, "clone": cloned, "copy": plain, "blocked": whole, "written": written}
            )
            rows[-1] |= {"step_alone": alone, "step_beside": together}
            assert newest_checkpoint(place).skipped == ()
            shutil.rmtree(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(table)
    console.print(slowed)
    if options.json:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({**facts, "seconds": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
