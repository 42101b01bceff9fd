"""What does it cost to hand over bytes between the CPU workers of one host, through shared memory and through gloo?

    python benchmarks/transport.py [--ranks 2 4] [--rounds 15] [--forms] [--json FILE]

For each size, rounds of both transports take turns in the same processes; a round is as many operations, one after
another, as take about 20 ms. Shown are the medians over the rounds of rank 0, microseconds an operation, and the median
of the rounds' ratios, with its quartiles. An exchange of n bytes gives each other rank n / ranks of them; a gather of n
bytes gives each rank n / ranks of every other. "begin" is the part before an operation is under way.

With --forms: what does it cost to sum a tensor in one message, and in two (`samestep.comm.reduction`)? Shown are the
medians in microseconds, and how many bytes more are received in one message. Where the two cost the same, those bytes
are what a message costs: the constant `LATENCY_BYTES` of the transport.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import facts

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20)
FORM_SIZES = tuple(1 << power for power in range(11, 22))
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


def sum_in_form(transport, latency_bytes, size):
    """What sums tensors of this many bytes, one block a rank, in the form that this latency makes it take."""
    import torch

    from samestep.comm.reduction import Reduction, ordered
    from samestep.core.microbatches import microbatch_ranges
    from samestep.core.tree import rank_blocks

    ranks = transport.world_size
    numel = -(-size // (256 * ranks)) * 64 * ranks
    blocks_by_rank = rank_blocks(microbatch_ranges(ranks, ranks), ranks)
    tensor = torch.ones(numel)

    def begin():
        transport.latency_bytes = latency_bytes
        reduction = Reduction(ordered(transport, blocks_by_rank, [tensor], tensor))
        reduction.fold()
        return SimpleNamespace(wait=reduction.finish)

    return begin


def measure_forms(rank, world_size, path, rounds, pipe):
    """One rank: both forms of the reduction in turns, over both transports; rank 0 sends what it found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(path, world_size)
    found = []
    for name in ("shared", "gloo"):
        transport = connected(rank, world_size, store, name)
        for size in FORM_SIZES:
            begins = {"one": sum_in_form(transport, 1 << 60, size), "two": sum_in_form(transport, -1, size)}
            once = max(timed(begin, 3)[0] for begin in begins.values() for _ in range(2))
            count = agree(transport, max(1, round(ROUND_SECONDS / once)))
            times = {form: [] for form in begins}
            for _ in range(rounds):
                for form, begin in begins.items():
                    times[form].append(1e6 * timed(begin, count)[0])
            extra = size * (world_size - 1) * (world_size - 2) // world_size
            medians = {f"{form}_us": statistics.median(values) for form, values in times.items()}
            found.append({"transport": name, "ranks": world_size, "bytes": size, "extra_bytes": extra, **medians})
        transport.close()
    if rank == 0:
        pipe.send(found)


def summary(times):
    """Medians, and the ratio by rounds."""
    ratios = sorted(a / b for (a, _), (b, _) in zip(times["shared"], times["gloo"], strict=True))
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    found = {"ratio": median, "ratio_quartiles": [low, high]}
    for name, values in times.items():
        found[f"{name}_us"] = 1e6 * statistics.median(whole for whole, _ in values)
        found[f"{name}_begin_us"] = 1e6 * statistics.median(begun for _, begun in values)
    return found


def run(world_size, rounds, program=measure):
    """What rank 0 of so many processes found."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        processes = [
            context.Process(target=program, args=(rank, world_size, path, rounds, theirs)) for rank in range(world_size)
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


def show_form(row):
    """One line of the table of forms."""
    sizes = f"{row['transport']:9} {row['ranks']:5} {row['bytes']:>11,} {row['extra_bytes']:>11,}"
    return f"{sizes} {row['one_us']:>10,.1f} {row['two_us']:>10,.1f} {row['one_us'] / row['two_us']:>7.3f}"


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Shared memory against gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--forms", action="store_true", help="compare the two forms of the reduction")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    program, show_row = (measure_forms, show_form) if options.forms else (measure, show)
    if options.forms:
        print(f"{'transport':9} {'ranks':>5} {'bytes':>11} {'more':>11} {'one us':>10} {'two us':>10}   ratio")
    else:
        print(
            f"{'kind':9} {'ranks':>5} {'bytes':>11} {'shared us':>10} {'begin':>8} {'gloo us':>10} {'begin':>8}   ratio"
        )
    rows = []
    for world_size in options.ranks:
        for row in run(world_size, options.rounds, program):
            rows.append(row)
            print(show_row(row), flush=True)
    if options.json:
        found = {"machine": facts.machine(), "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
