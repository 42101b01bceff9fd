"""What does the ledger cost? Steps of lenet, gpt and vgg with and without it, on the device that `samestep.Run` takes.

    python benchmarks/ledger.py [--steps 20] [--recipe lenet ...] [--json FILE]

Steps without a ledger and steps with a line and a checksum each (K = 1) take turns, so that both see the same machine;
the line and the checksum are also timed by themselves. The ratio at K = 100, the default, follows from these: a line
each step, and a hundredth of a checksum. The floor is the time to read the state once, as torch sums it as words of
64 bits. All times are medians.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import samestep
from samestep.checkpoint.digest import as_hex, state_checksum
from samestep.data.named import image_data, text_data
from samestep.recipes import gpt, lenet, vgg
from samestep.runs.ledger import LedgerWriter, learning_rates, ledger_entry

DEFAULT_K = 100
AIM = 1.01
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
RECIPES = {  # by name: data, model, loss and optimizer
    "lenet": (partial(image_data, transform=lenet.standardize), lenet.make_model, lenet.loss_fn, SGD),
    "vgg": (image_data, vgg.make_model, vgg.loss_fn, SGD),
    "gpt": (
        *(partial(text_data, None, 64), partial(gpt.Gpt, 4, 128, 4, 64, 0.1), gpt.loss_fn),
        partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1),
    ),
}
WARM_UP = 2


def timed(function, device):
    """A function's result and its seconds, with what it started on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    result = function()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return result, time.perf_counter() - start


def state_of(model, optimizer):
    """The tensors that the checksum is of."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [tensor.detach() for tensor in tensors]


def read_once(tensors):
    """Reads every byte, at the pace of the memory."""
    return [t.reshape(-1).view(torch.int64).sum() for t in tensors if t.numel() * t.element_size() % 8 == 0]


def batches(loader):
    """Batches without end."""
    while True:
        yield from loader


def measure(name, num_steps, path):
    """The medians of one recipe, in seconds, and the bytes of its state."""
    run = samestep.Run(64 if name == "gpt" else 128)
    data, make, loss_fn, make_optimizer = RECIPES[name]
    model = make().to(run.device)
    optimizer = make_optimizer(model.parameters())
    step = run.train_step(model, optimizer, loss_fn, max_grad_norm=1.0 if name == "gpt" else None)
    times = {"without": [], "with": [], "line": [], "checksum": [], "floor": []}
    drawn = batches(run.loader(data()[0], shuffle=True, drop_last=True))
    with LedgerWriter(path) as ledger:

        def record(result, batch, digest):
            ledger.write(ledger_entry(result, batch, learning_rates([optimizer]), run.world_size, digest))

        def step_with_ledger(batch):
            result = step(batch)
            record(result, batch, as_hex(int(state_checksum(model, [optimizer]))))

        for number in range(2 * (num_steps + WARM_UP)):
            batch = next(drawn)
            warm = number >= 2 * WARM_UP
            if number % 2:
                found = {"with": timed(partial(step_with_ledger, batch), run.device)[1]}
            else:
                result, seconds = timed(partial(step, batch), run.device)
                word, of_checksum = timed(lambda: int(state_checksum(model, [optimizer])), run.device)
                found = {"without": seconds, "checksum": of_checksum}
                result.loss  # noqa: B018 - fetched, as the trainer does before it writes
                line = partial(record, result, batch, as_hex(word))
                found["line"] = timed(line, run.device)[1]
                found["floor"] = timed(lambda: read_once(state_of(model, optimizer)), run.device)[1]
            for key, seconds in found.items() if warm else ():
                times[key].append(seconds)
    medians = {key: statistics.median(values) for key, values in times.items()}
    medians["bytes"] = sum(t.numel() * t.element_size() for t in state_of(model, optimizer))
    medians["ratio at K = 1"] = medians["with"] / medians["without"]
    added = medians["line"] + medians["checksum"] / DEFAULT_K
    medians[f"ratio at K = {DEFAULT_K}"] = 1 + added / medians["without"]
    return medians, run.device


def main():
    """Measures the recipes and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each sort")
    parser.add_argument("--recipe", action="append", help="lenet, gpt and vgg by default; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    options = parser.parse_args()
    table = Table(
        *("recipe", "state", "step", "checksum", "speed", "floor", "line"),
        *("K = 1", f"K = {DEFAULT_K}"),
        title=f"medians, and ratios of step times with the ledger to without (aim: {AIM} at K = {DEFAULT_K})",
    )
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.recipe or ("lenet", "gpt", "vgg"):
            m, device = measure(name, options.steps, Path(folder) / f"{name}.jsonl")
            found[name] = m
            table.add_row(
                *(name, f"{m['bytes'] / 1e6:.1f} MB", f"{m['without'] * 1e3:.2f} ms", f"{m['checksum'] * 1e3:.2f} ms"),
                *(f"{m['bytes'] / m['checksum'] / 1e9:.1f} GB/s", f"{m['floor'] * 1e3:.2f} ms"),
                *(f"{m['line'] * 1e6:.0f} µs", f"{m['ratio at K = 1']:.3f}"),
                f"{m[f'ratio at K = {DEFAULT_K}']:.4f}",
            )
    Console(width=110).print(table)
    facts = {"torch": torch.__version__, "python": platform.python_version(), "device": str(device)}
    facts["cores"] = os.cpu_count()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    if options.json:
        options.json.write_text(json.dumps({**facts, "recipes": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
