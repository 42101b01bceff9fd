"""What does an all-reduce cost through the ordered process group, and through gloo?

    python benchmarks/collectives.py [--ranks 2 4 8] [--rounds 15] [--json FILE]

For each size, rounds of both groups take turns in the same processes; a round is as many operations, one after another,
as take about 20 ms. Shown are the medians over the rounds of rank 0, microseconds an operation, and the median of the
rounds' ratios, with its quartiles: of operations that are waited for at once, and of four that are under way together,
as buckets of DistributedDataParallel are.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import facts
import torch
import torch.distributed as dist

from samestep.logical.process_group import register_backend

SIZES = tuple(1 << power for power in range(10, 27, 4))
ROUND_SECONDS = 0.02
UNDER_WAY = 4
TIMEOUT = timedelta(seconds=300)


def one(group, tensors):
    """All-reduces, one after another."""
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)


def together(group, tensors):
    """All-reduces that are under way at the same time."""
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


KINDS = {"one by one": one, "together": together}


def timed(program, group, tensors, count):
    """Seconds an operation."""
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(count):
        program(group, tensors)
    return (time.perf_counter() - start) / count / len(tensors)


def measure(rank, world_size, path, sizes, rounds, pipe):
    """One rank: all kinds and sizes, both groups in turns; rank 0 sends what it found."""
    torch.set_num_threads(1)
    register_backend()
    dist.init_process_group(
        "samestep", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    groups = {"samestep": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=TIMEOUT)}
    for kind, program in KINDS.items():
        for size in sizes:
            tensors = [torch.zeros(size // 4) for _ in range(UNDER_WAY)]
            counts = {}
            for name, group in groups.items():
                timed(program, group, tensors, 1)
                once = torch.tensor(timed(program, group, tensors, 1))
                dist.broadcast(once, 0)
                counts[name] = max(1, round(ROUND_SECONDS / UNDER_WAY / float(once)))
            times = {name: [] for name in groups}
            for number in range(rounds):
                for name in sorted(groups, reverse=number % 2 == 1):
                    times[name].append(1e6 * timed(program, groups[name], tensors, counts[name]))
            if rank == 0:
                ratios = [ours / theirs for ours, theirs in zip(times["samestep"], times["gloo"], strict=True)]
                low, ratio, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
                medians = {f"{name}_us": statistics.median(values) for name, values in times.items()}
                found = {"kind": kind, "ranks": world_size, "bytes": size, **medians}
                pipe.send({**found, "ratio": ratio, "ratio_quartiles": [low, high]})
    dist.destroy_process_group()
    pipe.send(None)


def run(world_size, sizes, rounds):
    """The rows that rank 0 of so many processes sends."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, str(Path(folder) / "store"), sizes, rounds, theirs)
            processes.append(context.Process(target=measure, args=arguments))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        while (row := pipes[0].recv()) is not None:
            yield row
        for process in processes:
            process.join()


def show(row):
    """One line of the table."""
    low, high = row["ratio_quartiles"]
    times = f"{row['samestep_us']:>12,.1f} {row['gloo_us']:>12,.1f}"
    return f"{row['kind']:12} {row['ranks']:5} {row['bytes']:>11,} {times} {row['ratio']:>7.3f} ({low:.3f}-{high:.3f})"


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="The ordered process group against gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{'kind':12} {'ranks':>5} {'bytes':>11} {'samestep us':>12} {'gloo us':>12}   ratio")
    rows = []
    for world_size in options.ranks:
        for row in run(world_size, options.sizes, options.rounds):
            rows.append(row)
            print(show(row), flush=True)
    if options.json:
        found = {"machine": facts.machine(), "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
