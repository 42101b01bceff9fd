"""How does the cost grow? With parameters, tensors, microbatches, ranks and samples, beside plain PyTorch.

    python benchmarks/growth.py [--rounds 5] [--only tensors,samples] [--quick] [--output benchmarks/results]

Parameters, tensors and microbatches are measured in one process with one thread, in interleaved turns, PyTorch in as
many micro-batches as samestep has microbatches, both with their data in one tensor. Ranks are processes with one thread
each, which take turns on the cores if there are more of them; PyTorch is DistributedDataParallel, and samestep has as
many microbatches as ranks. Samples are computed from their ids, so that a dataset of any size can be shuffled. The
slopes of both in a log-log plot are printed side by side: samestep's must not be steeper.
"""

import argparse
import gc
import itertools
import json
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import facts
import torch
from bench import take_rounds
from contest import EntrantError, contest, rotated, scratch
from roster import BY_NAME, DEFAULT, PACKAGES
from tables import growth_tables, slope_table, terminal, wide_console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from workloads import SEED, WORKLOADS, Workload

WIDTHS = (1, 5, 16, 50, 158, 500, 1581, 5000)  # four layers of a width have 8 to 100 million parameters
TENSORS = (1, 10, 100, 1_000, 10_000)
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
RANKS = (1, 2, 4, 8, 16)
SAMPLES = (1_000, 1 << 16, 1 << 22, 1 << 28, 1 << 34, 1 << 40)
MOST_OF_PYTORCH = 1 << 22  # its sampler holds the whole permutation: 160 MB of it here
LOADER_BATCH = 256
SETTLING_STEPS = 2
OURS, PYTORCH = "samestep", "pytorch"

Turn = Callable[[], object]
Points = dict[str, dict[str, list[float]]]
"""By size: the rounds of samestep, and of PyTorch if it was measured."""
Key = TypeVar("Key", bound=Hashable)


class VirtualSamples(Dataset[Tensor]):
    """So many samples that lie nowhere: each is computed from its id when it is asked for."""

    def __init__(self, count: int) -> None:
        self.count, self._row = count, torch.arange(1, 14)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        """One sample: 13 numbers."""
        return torch.sin(self._row * index)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures all five, prints tables and writes growth.json."""
    measures = {
        "parameters": by_parameters,
        "tensors": by_tensors,
        "microbatches": by_microbatches,
        "ranks": by_ranks,
        "samples": by_samples,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(measures), metavar="NAMES", help=f"of {', '.join(measures)}")
    parser.add_argument(
        "--quick", action="store_true", help="one round of a few steps of small sizes: does it all run?"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := [name for name in names if name not in measures]:
        parser.error(f"got {', '.join(unknown)}; there are {', '.join(measures)}")
    options.rounds, options.turn_seconds = (1, 0.01) if options.quick else (options.rounds, 0.3)
    torch.set_num_threads(1)
    console = wide_console()
    results: dict[str, Any] = {
        "facts": {**facts.machine(), "versions": facts.versions(PACKAGES)},
        "rounds": options.rounds,
        "growth": {},
    }
    for name in names:
        console.print(f"growing: {name}", style="dim")
        results["growth"][name] = measures[name](options)
        for table in growth_tables(results["growth"][name]):
            console.print(terminal(name, table))
    console.print(terminal("Slopes", slope_table(results["growth"])))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "growth.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def by_parameters(options: argparse.Namespace) -> dict[str, Points]:
    """Microseconds a step by the number of parameters, in one microbatch and in eight."""
    return by_model([square_network(width) for width in small(WIDTHS, options)], lambda p: p.numel(), options)


def by_tensors(options: argparse.Namespace) -> dict[str, Points]:
    """Microseconds a step by the number of parameter tensors of 16 numbers, in one microbatch and in eight."""
    return by_model([chain(count) for count in small(TENSORS, options)], lambda _: 1, options)


def by_model(
    workloads: Sequence[Workload], size: Callable[[nn.Parameter], int], options: argparse.Namespace
) -> dict[str, Points]:
    """Microseconds a step of some models, whose size is a sum over their parameters."""
    found: dict[str, Points] = {"1 microbatch": {}, "8 microbatches": {}}
    for workload in workloads:
        name = str(sum(size(p) for p in workload.make_model().parameters()))
        for points, point in zip(found.values(), by_count(workload, (1, 8), options).values(), strict=True):
            points[name] = point
        gc.collect()  # the models of the largest size take some gigabytes
    return found


def by_microbatches(options: argparse.Namespace) -> dict[str, Points]:
    """Microseconds a step by the number of microbatches."""
    return {name: by_count(WORKLOADS[name], small(MICROBATCHES, options), options) for name in ("W1", "W2")}


def by_count(workload: Workload, counts: Sequence[int], options: argparse.Namespace) -> Points:
    """Microseconds a step of one model, by the number of microbatches."""
    makers = {PYTORCH: plain_step, OURS: our_step}
    turns = {(count, who): make(workload, count) for count in counts for who, make in makers.items()}
    times = interleave(turns, options.rounds, options.turn_seconds)
    return {str(count): {who: times[count, who] for who in makers} for count in counts}


def by_ranks(options: argparse.Namespace) -> dict[str, Points]:
    """Microseconds a step by the number of processes, which have a microbatch each."""
    found: dict[str, Points] = {}
    for name in ("W1", "W2"):
        found[name] = {}
        for count in small(RANKS, options):
            ours = replace(BY_NAME[DEFAULT], options=("--num-microbatches", str(count)))
            with scratch() as folder:
                data = folder / "data.pt"
                torch.save(WORKLOADS[name].data(20), data)
                arguments = [name, "--data", str(data), "--num-threads", "1"]
                with contest([(BY_NAME["tensor"], count), (ours, count)], arguments, folder) as (ready, failed):
                    rounds = take_rounds(ready, failed, options, wide_console())
                if failed:
                    raise EntrantError(failed[0][2])
            names = {DEFAULT: OURS, "tensor": PYTORCH}
            found[name][str(count)] = {names[c.entrant.name]: values for c, (_, values) in rounds.items()}
    return found


def by_samples(options: argparse.Namespace) -> dict[str, Points]:
    """The loader, shuffled: microseconds a batch and to the first one of an epoch, and the bytes held at most."""
    makers: dict[str, Callable[[int], Any]] = {OURS: our_loader, PYTORCH: plain_loader}
    pairs = [(n, who) for n in small(SAMPLES, options) for who in makers if who == OURS or n <= MOST_OF_PYTORCH]
    found: dict[str, Points] = {"a batch": {}, "the first batch": {}, "kB": {}}
    turns: dict[str, dict[tuple[int, str], Turn]] = {"a batch": {}, "the first batch": {}}
    for count, who in pairs:
        loader = makers[who](count)
        turns["a batch"][count, who] = partial_of(endless(makers[who](count)))
        turns["the first batch"][count, who] = lambda loader=loader: next(iter(loader))
    for what, each in turns.items():
        for (count, who), values in interleave(each, options.rounds, options.turn_seconds).items():
            found[what].setdefault(str(count), {})[who] = values
    for count, who in pairs:
        found["kB"].setdefault(str(count), {})[who] = [peak_bytes(makers[who](count)) / 1e3]
    return found


def small(sizes: Sequence[int], options: argparse.Namespace) -> Sequence[int]:
    """The sizes to measure: the two least if it is to be quick."""
    return sizes[:2] if options.quick else sizes


def partial_of(batches: Iterator[Any]) -> Turn:
    """A turn that fetches the next batch."""
    return lambda: next(batches)


def peak_bytes(loader: Any) -> int:
    """The most memory that Python and NumPy hold while a loader gives its first batches."""
    next(iter(loader))  # imports and caches belong to none
    tracemalloc.start()
    try:
        for _ in itertools.islice(endless(loader), 50):
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def our_loader(count: int) -> Any:
    """samestep's loader over a shuffled virtual dataset."""
    import samestep

    return samestep.Run(LOADER_BATCH).loader(VirtualSamples(count), shuffle=True)


def plain_loader(count: int) -> Any:
    """PyTorch's."""
    return DataLoader(VirtualSamples(count), batch_size=LOADER_BATCH, shuffle=True)


def our_step(workload: Workload, num_microbatches: int) -> Turn:
    """A turn that loads a batch and trains a step on one device."""
    import samestep

    run = samestep.Run(workload.global_batch_size, num_microbatches, seed=SEED)
    model = workload.make_model()
    step = run.train_step(model, workload.make_optimizer(model.parameters()), workload.loss_of)
    batches = endless(run.loader(workload.data(20), shuffle=True))
    return lambda: step(next(batches))


def plain_step(workload: Workload, num_micro_batches: int) -> Turn:
    """The same in PyTorch, with its data in one tensor."""
    model = workload.make_model()
    optimizer = workload.make_optimizer(model.parameters())
    inputs, targets = workload.data(20)

    def all_ids() -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(len(inputs)).split(workload.global_batch_size)

    ids = all_ids()

    def turn() -> None:
        optimizer.zero_grad()
        for chosen in next(ids).chunk(num_micro_batches):
            loss = workload.loss_of(model, (inputs[chosen], targets[chosen]))
            (loss if num_micro_batches == 1 else loss / num_micro_batches).backward()
        optimizer.step()

    return turn


def square_network(width: int) -> Workload:
    """Four layers of a width, batch 64."""
    return regression(
        width, lambda: nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())])
    )


def chain(count: int) -> Workload:
    """So many vectors of 16 numbers, by each of which the input is multiplied; batch 64."""
    return regression(16, lambda: Chain(count))


class Chain(nn.Module):
    """`[N, 16]` -> `[N, 16]`; the factors begin as ones, so that no product leaves the range of numbers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([torch.ones(16) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies by each."""
        for factor in self.factors:
            x = x * factor
        return x


def regression(width: int, make_model: Callable[[], nn.Module]) -> Workload:
    """A model from some numbers to as many, with SGD."""
    return Workload(
        name=f"width {width}",
        title=f"{width} wide",
        global_batch_size=64,
        make_model=make_model,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
        loss=nn.functional.mse_loss,
        draw=lambda count, generator: (torch.randn(count, width, generator=generator), torch.zeros(count, width)),
    )


def interleave(turns: dict[Key, Turn], rounds: int, seconds: float) -> dict[Key, list[float]]:
    """Microseconds of each, round by round; each turn lasts some seconds, and the order rotates."""
    counts = {}
    for name, turn in turns.items():
        for _ in range(SETTLING_STEPS):
            turn()
        start = time.perf_counter()
        turn()
        counts[name] = max(1, round(seconds / (time.perf_counter() - start)))
    measured: dict[Key, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in rotated(list(turns), number):
            turn = turns[name]
            for _ in range(min(SETTLING_STEPS, counts[name])):
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


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
