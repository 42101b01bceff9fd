"""How does the cost grow? With the microbatches, the devices, the parameters, and the size of the dataset.

    python benchmarks/growth.py [--rounds 7] [--quick] [--output benchmarks/results]

Microbatches and parameters are measured in one process with one thread, in interleaved turns; every step is compared
with PyTorch's own on the same model, with its data in one tensor. Devices are CPU workers with one thread each. The
loader is given virtual datasets, whose samples are computed from their ids: time and memory must not depend on how many
there are.
"""

import argparse
import itertools
import json
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import facts
import torch
from contest import EntrantError, contest, rotated, scratch
from rich.table import Table
from roster import BY_NAME, DEFAULT, PACKAGES
from scores import ratio, spread
from tables import targets_table, wide_console
from torch import Tensor, nn
from workloads import SEED, WORKLOADS, Workload

MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
DEVICES = (1, 2, 3, 4)
WIDTHS = (16, 64, 256, 1024, 2048)
SIZES = (16, 22, 28, 34, 40)
LOADER_BATCH = 256
SETTLING_STEPS = 2
MAX_TIME_RATIO = 1.2
MAX_MEMORY_RATIO = 1.05

Turn = Callable[[], None]


class VirtualSamples:
    """So many samples that lie nowhere: each is computed from its id when it is asked for."""

    transform = None

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        """One sample: 13 numbers."""
        sample: Tensor = self.gather(torch.tensor([index]))[0]
        return sample

    def gather(self, ids: Tensor) -> Tensor:
        """The samples of these ids: float32 `[N, 13]`."""
        return torch.sin(ids[:, None] * torch.arange(1, 14)).float()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures all four, prints tables and writes growth.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round of a few steps: does it all run?")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args(arguments)
    rounds, seconds = (1, 0.01) if options.quick else (options.rounds, 0.3)
    torch.set_num_threads(1)
    console = wide_console()
    results: dict[str, Any] = {"facts": {**facts.machine(), "versions": facts.versions(PACKAGES)}, "rounds": rounds}
    results["microbatches"] = {name: by_microbatches(name, rounds, seconds) for name in ("W1", "W2")}
    results["parameters"] = by_parameters(rounds, seconds)
    results["devices"] = {name: by_devices(name, rounds, seconds) for name in ("W1", "W2")}
    results["loader"] = by_dataset_size(rounds, seconds)
    results["targets"] = judge(results["loader"])
    for name, measured in results["microbatches"].items():
        console.print(growth_table(f"{name}: microbatches", measured, "1"))
        console.print(growth_table(f"{name}: devices, 8 microbatches", results["devices"][name], "1"))
    console.print(parameters_table(results["parameters"]))
    console.print(loader_table(results["loader"]))
    console.print(targets_table(results["targets"]))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "growth.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def by_microbatches(name: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds a step by the number of microbatches, on one device."""
    return interleave({str(count): our_step(WORKLOADS[name], count) for count in MICROBATCHES}, rounds, seconds)


def by_parameters(rounds: int, seconds: float) -> dict[str, Any]:
    """Microseconds a step by the number of parameters: PyTorch's own loop, one microbatch, and eight."""
    found = {}
    for width in WIDTHS:
        workload = square_network(width)
        parameters = sum(p.numel() for p in workload.make_model().parameters())
        turns = {"pytorch": plain_step(workload), "1": our_step(workload, 1), "8": our_step(workload, 8)}
        found[str(parameters)] = interleave(turns, rounds, seconds)
    return found


def by_devices(name: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds a step by the number of CPU workers, at the default of eight microbatches."""
    # One device has one thread here too: what is asked is what another worker changes, not another thread.
    measured: dict[str, list[float]] = {}
    with scratch() as folder:
        data = folder / "data.pt"
        torch.save(WORKLOADS[name].data(), data)
        selected = [(BY_NAME[DEFAULT], count) for count in DEVICES]
        arguments = [name, "--data", str(data), "--num-threads", "1"]
        with contest(selected, arguments, folder) as (ready, failed):
            for _, _, reason in failed:
                raise EntrantError(reason)
            steps = {c: max(3, round(seconds * 1e6 / c.take_turn(5))) for c in ready}
            for number in range(rounds):
                for contestant in rotated(ready, number):
                    taken = contestant.take_turn(steps[contestant])
                    measured.setdefault(str(contestant.num_processes), []).append(round(taken, 2))
    return dict(sorted(measured.items()))


def by_dataset_size(rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """The loader's microseconds a batch, shuffled, and the bytes that it holds at most, by log2 of the samples."""
    turns = {str(power): partial_of_loader(1 << power) for power in SIZES}
    times = interleave(turns, rounds, seconds)
    return {power: {"microseconds": times[power], "peak_bytes": peak_bytes(1 << int(power))} for power in turns}


def partial_of_loader(count: int) -> Turn:
    """A turn that fetches the next batch."""
    batches = virtual_batches(count)
    return lambda: next(batches)


def peak_bytes(count: int) -> int:
    """What Python and NumPy hold at most while a loader is made and gives its first batches."""
    next(virtual_batches(count))  # imports and caches are nobody's
    tracemalloc.start()
    try:
        for _ in itertools.islice(virtual_batches(count), 50):
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def virtual_batches(count: int) -> Iterator[Any]:
    """Batches of a shuffled virtual dataset, epoch after epoch."""
    import samestep

    loader = samestep.Run(LOADER_BATCH).loader(VirtualSamples(count), shuffle=True)
    return endless(loader)


def our_step(workload: Workload, num_microbatches: int) -> Turn:
    """A turn that loads a batch and trains a step on one device."""
    import samestep

    run = samestep.Run(workload.global_batch_size, num_microbatches, seed=SEED)
    model = workload.make_model()
    step = run.train_step(model, workload.make_optimizer(model.parameters()), workload.loss_of)
    batches = endless(run.loader(workload.data(20), shuffle=True))
    return lambda: discard(step(next(batches)))


def plain_step(workload: Workload) -> Turn:
    """The same in PyTorch, with its data in one tensor."""
    model = workload.make_model()
    optimizer = workload.make_optimizer(model.parameters())
    inputs, targets = workload.data(20)

    def all_ids() -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(len(inputs)).split(workload.global_batch_size)

    ids = all_ids()

    def turn() -> None:
        chosen = next(ids)
        optimizer.zero_grad()
        workload.loss_of(model, (inputs[chosen], targets[chosen])).backward()
        optimizer.step()

    return turn


def square_network(width: int) -> Workload:
    """Four layers of a width, batch 64."""
    return Workload(
        name=f"width {width}",
        title=f"four layers, {width} wide",
        global_batch_size=64,
        make_model=lambda: nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]),
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        loss=nn.functional.mse_loss,
        draw=lambda count, generator: (torch.randn(count, width, generator=generator), torch.zeros(count, width)),
    )


def interleave(turns: dict[str, Turn], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds of each, round by round; each turn lasts some seconds, and the order rotates."""
    counts = {}
    for name, turn in turns.items():
        turn()
        start = time.perf_counter()
        for _ in range(3):
            turn()
        counts[name] = max(3, round(seconds * 3 / (time.perf_counter() - start)))
    measured: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in rotated(list(turns), number):
            turn = turns[name]
            for _ in range(SETTLING_STEPS):
                turn()
            start = time.perf_counter()
            for _ in range(counts[name]):
                turn()
            measured[name].append(round((time.perf_counter() - start) / counts[name] * 1e6, 2))
    return measured


def endless(loader: Any) -> Iterator[Any]:
    """The batches of epoch after epoch."""
    while True:
        yield from loader


def discard(_: object) -> None:
    """Takes a result that nobody reads."""


def judge(loader: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether the loader's time and memory stay what they are as the dataset grows."""
    least, most = (loader[str(power)] for power in (SIZES[0], SIZES[-1]))
    times = ratio(most["microseconds"], least["microseconds"])
    memory = spread([most["peak_bytes"] / least["peak_bytes"]])
    text = f"2^{SIZES[-1]} samples / 2^{SIZES[0]} samples"
    return [
        {
            "workload": "loader",
            "text": f"{what}, {text}",
            "against": f"2^{SIZES[0]}",
            "ratio": asdict(found),
            "most": bound,
            "reached": found.median <= bound,
        }
        for what, found, bound in (("time a batch", times, MAX_TIME_RATIO), ("memory", memory, MAX_MEMORY_RATIO))
    ]


def growth_table(title: str, measured: dict[str, list[float]], base: str) -> Table:
    """Microseconds, and how many times those of the first."""
    table = Table("", "µs a step", f"× {base}", "least to greatest", title=title)
    for name, values in measured.items():
        times = ratio(values, measured[base])
        span = f"{times.least:.2f} to {times.greatest:.2f}"
        table.add_row(name, f"{spread(values).median:,.0f}", f"{times.median:.2f}", span)
    return table


def parameters_table(measured: dict[str, Any]) -> Table:
    """Steps by parameters, as times PyTorch's own loop."""
    table = Table(
        "parameters", "PyTorch, µs", "1 microbatch ×", "8 microbatches ×", title="Parameters, one device, batch 64"
    )
    for parameters, found in measured.items():
        own = spread(found["pytorch"]).median
        ratios = [f"{ratio(found[name], found['pytorch']).median:.2f}" for name in ("1", "8")]
        table.add_row(f"{int(parameters):,}", f"{own:,.0f}", *ratios)
    return table


def loader_table(measured: dict[str, dict[str, Any]]) -> Table:
    """The loader's time and memory by the size of the dataset."""
    table = Table("samples", "µs a batch", "peak kB", title=f"The loader, shuffled, batches of {LOADER_BATCH}")
    for power, found in measured.items():
        table.add_row(f"2^{power}", f"{spread(found['microseconds']).median:,.0f}", f"{found['peak_bytes'] / 1e3:,.0f}")
    return table


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
