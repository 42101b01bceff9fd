"""What does it cost to hand over bytes between the CPU workers of one host, through shared memory and through gloo?

    python benchmarks/transport.py [--ranks 2 4] [--rounds 15] [--json FILE]

For each size, rounds of both transports take turns in the same processes; a round is as many operations, one after
another, as take about 20 ms. Shown are the medians over the rounds of rank 0, microseconds an operation, and the median
of the rounds' ratios, with its quartiles. An exchange of n bytes gives each other rank n / ranks of them; a gather of n
bytes gives each rank n / ranks of every other. "begin" is the part before an operation is under way.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20)
KINDS = ("exchange", "gather")
ROUND_SECONDS = 0.02
TIMEOUT = timedelta(seconds=120)


def connected(rank, world_size, store, name):
    """One rank's end of a transport."""
    import torch
    import torch.distributed as dist

    from samestep.comm.connecting import connect_at
    from samestep.comm.environment import Environment

    place = Environment(rank, world_size, rank, world_size, transport=name)
    return connect_at(dist.PrefixStore(name, store), place, torch.device("cpu"), TIMEOUT, TIMEOUT)[0]


def operation(transport, kind, size):
    """What begins one operation of this many bytes."""
    import torch

    ranks = transport.world_size
    part = size // ranks
    if kind == "gather":
        tensor = torch.ones(part, dtype=torch.uint8)
        return lambda: transport.gather(tensor)
    tensor = torch.ones(part * ranks, dtype=torch.uint8)
    return lambda: transport.exchange(tensor, [part] * ranks, [part] * ranks)


def timed(begin, count):
    """Seconds an operation, and seconds until it is under way."""
    begun = 0.0
    start = time.perf_counter()
    for _ in range(count):
        before = time.perf_counter()
        pending = begin()
        begun += time.perf_counter() - before
        pending.wait()
    return (time.perf_counter() - start) / count, begun / count


def agree(transport, count):
    """The same number on all ranks: that of rank 0."""
    import torch

    told = torch.tensor([count])
    transport.broadcast(told, 0)
    return int(told)


def measure(rank, world_size, path, rounds, pipe):
    """One rank: all sizes and kinds, both transports in turns; rank 0 sends what it found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(path, world_size)
    transports = {name: connected(rank, world_size, store, name) for name in ("shared", "gloo")}
    found = []
    for kind in KINDS:
        for size in SIZES:
            begins = {name: operation(transport, kind, size) for name, transport in transports.items()}
            once = {name: max(timed(begin, 3)[0] for _ in range(2)) for name, begin in begins.items()}
            counts = {
                name: agree(transports[name], max(1, round(ROUND_SECONDS / seconds))) for name, seconds in once.items()
            }
            times = {name: [] for name in transports}
            for _ in range(rounds):
                for name, begin in begins.items():
                    times[name].append(timed(begin, counts[name]))
            found.append({"kind": kind, "ranks": world_size, "bytes": size, **summary(times)})
    if rank == 0:
        pipe.send(found)
    for transport in transports.values():
        transport.close()


def summary(times):
    """Medians, and the ratio by rounds."""
    ratios = sorted(a / b for (a, _), (b, _) in zip(times["shared"], times["gloo"], strict=True))
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    found = {"ratio": median, "ratio_quartiles": [low, high]}
    for name, values in times.items():
        found[f"{name}_us"] = 1e6 * statistics.median(whole for whole, _ in values)
        found[f"{name}_begin_us"] = 1e6 * statistics.median(begun for _, begun in values)
    return found


def run(world_size, rounds):
    """What rank 0 of so many processes found."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        processes = [
            context.Process(target=measure, args=(rank, world_size, path, rounds, theirs)) for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        while not ours.poll(0.1):
            if any(process.exitcode for process in processes):
                raise SystemExit("a rank failed")
        found = ours.recv()
        for process in processes:
            process.join()
    return found


def show(row):
    """One line of the table."""
    rate = row["bytes"] / row["shared_us"] / 1e3
    low, high = row["ratio_quartiles"]
    shared = f"{row['shared_us']:>10,.1f} {row['shared_begin_us']:>8,.1f}"
    gloo = f"{row['gloo_us']:>10,.1f} {row['gloo_begin_us']:>8,.1f}"
    ratio = f"{row['ratio']:>7.3f} ({low:.3f}-{high:.3f})"
    return f"{row['kind']:9} {row['ranks']:5} {row['bytes']:>11,} {shared} {gloo} {ratio} {rate:>6.2f} GB/s"


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Shared memory against gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{'kind':9} {'ranks':>5} {'bytes':>11} {'shared us':>10} {'begin':>8} {'gloo us':>10} {'begin':>8}   ratio")
    rows = []
    for world_size in options.ranks:
        for row in run(world_size, options.rounds):
            rows.append(row)
            print(show(row), flush=True)
    if options.json:
        machine = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}
        options.json.write_text(json.dumps({**machine, "rounds": options.rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
