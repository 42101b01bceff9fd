"""What audits find of flipped bits, whether they raise false alarms, and what they cost.

    python benchmarks/audit.py flips [--count 1000]     bits that flip on one of three ranks, at K = 1, 10, 100
    python benchmarks/audit.py clean [--steps 100000]   steps without any, each of them audited
    python benchmarks/audit.py cost                     CPU time with audits beside that without, in turns

All ranks take turns in one process. Each flip is one bit on one rank, at a drawn step; the training ends after the next
audited step that follows. It has V = 4 microbatches, `cost` has V = 8.
"""

import argparse
import random
import statistics
import time
from collections import Counter
from functools import partial

import torch
from bit_flips import COMPUTED, KEPT, Flip, Flipping
from torch import nn

from samestep.checkpoint.digest import state_digest
from samestep.comm.communicator import Communicator
from samestep.comm.sequential import SequentialWorld
from samestep.errors import AuditError, NonFiniteError
from samestep.run.run import Run

RANKS, V = 3, 4
EVERY = (1, 10, 100)
# The kind of a flip, the number of the exchange that it strikes, and whether each rank gets and adds all sums itself
# (small gradients), or adds its part of them, which is gathered then.
ROWS = {
    "activation": ("activation", 0, True),
    "gradient": ("gradient", 0, True),
    "parameter": ("parameter", 0, True),
    "optimizer state": ("optimizer", 0, True),
    "sent, added by every rank": ("sent", 0, True),
    "received, added by every rank": ("received", 0, True),
    "sent, added by one rank": ("sent", 0, False),
    "received, added by one rank": ("received", 0, False),
    "sent, gathered": ("sent", 1, False),
    "received, gathered": ("received", 1, False),
}
LOST = ("sent, added by one rank", "received, added by one rank")


def in_turns(num_ranks, program):
    """Runs a program on ranks that take turns."""
    device = torch.device("cpu")
    return SequentialWorld(num_ranks).run(lambda end: program(Communicator(device, end, end)))


def made(communicator, flip=None, audit=None, is_small=True):
    """A training step of a small network by AdamW."""
    communicator.transport.latency_bytes = 2**16 if is_small else 0
    run = Run(8, V, communicator=communicator)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    observers = [] if flip is None else [Flipping(flip, communicator, model, optimizer)]
    given = {"audit": audit and f"{audit}:warn", "observers": observers, "on_nonfinite": "skip"}
    return run.train_step(model, optimizer, squared, **given)


def squared(model, batch):
    """A loss a sample."""
    return (model(batch[0]) - batch[1]).square().squeeze(1)


def batches(count):
    """So many global batches, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 5, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(count)]


def undisturbed(count, data):
    """The digests of the state after 0, 1, … steps."""

    def program(communicator):
        step = made(communicator)
        digests = [state_digest(step)]
        for number in range(count):
            step(data[number % len(data)])
            digests.append(state_digest(step))
        return digests

    return in_turns(1, program)[0]


def strike(flip, audit, is_small, data):
    """A training with one flip, until it ends or stops: what rank by rank is left, and what was found."""

    def program(communicator):
        step = made(communicator, flip, audit, is_small)
        try:
            for number in range(flip.step + audit + 1):  # up to the next audited one after the flip's at least
                step(data[number])
        except (AuditError, NonFiniteError):
            pass
        return step.num_steps, state_digest(step), step.audit_findings

    return in_turns(RANKS, program)


def measure_flips(count):
    """Prints what is found of flips of each kind."""
    draw = random.Random(3)
    data = batches(2 * EVERY[-1] + 1)
    digests = undisturbed(len(data), data)
    for every in EVERY:
        print(
            f"\nK = {every}                         flips  no effect  found  share  expected  named right  same digest"
        )
        for name, (kind, call, is_small) in ROWS.items():
            seen = Counter()
            for _ in range(count // len(ROWS)):
                first = 1 if kind in KEPT else 0  # the optimizer has no state before
                rank, step = draw.randrange(RANKS), draw.randrange(first, first + max(every, 10))
                own = [m for m in range(V) if rank * V // RANKS <= m < (rank + 1) * V // RANKS]
                flip = Flip(kind, rank, step, draw.choice(own), draw.randrange(2**40), call)
                ranks = strike(flip, every, is_small, data)
                findings = ranks[0][2]
                is_same = [end == digests[done] for done, end, _ in ranks]
                if not findings:
                    seen["no effect" if all(is_same) else "missed"] += 1
                    continue
                [finding] = findings[:1]
                right = [is_same[other] for other in range(RANKS) if other not in finding.ranks or kind in COMPUTED]
                seen["found"] += 1
                seen["named"] += finding.ranks == (rank,) or (kind == "sent" and len(finding.ranks) == 1)
                seen["same"] += all(right)
            flips = seen["found"] + seen["missed"]
            share = seen["found"] / flips if flips else 0.0
            expected = 1 / (every * V) if kind in COMPUTED else 0.0 if name in LOST else 1.0
            print(
                f"{name:32}{flips + seen['no effect']:6}{seen['no effect']:11}{seen['found']:7}{share:7.3f}"
                f"{expected:10.4f}{seen['named']:13}{seen['same']:13}",
                flush=True,
            )


def measure_clean(count):
    """Prints the number of alarms without any flip."""
    data = batches(64)

    def program(communicator, audit):
        step = made(communicator, audit=audit)
        for number in range(count):
            step(data[number % len(data)])
        return state_digest(step), len(step.audit_findings)

    audited = in_turns(RANKS, lambda communicator: program(communicator, 1))
    plain = in_turns(1, lambda communicator: program(communicator, None))[0][0]
    alarms = sum(number for _, number in audited)
    same = all(digest == plain for digest, _ in audited)
    print(
        f"{count} steps on {RANKS} ranks, each audited: {alarms} alarms; the digest of one rank without audits: {same}"
    )


def dense():
    """Little computation for each parameter: checksums weigh most."""
    layers = nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    return nn.Sequential(*layers), (torch.randn(256, 784), torch.randint(10, (256,)))


def convolutional():
    """Much computation for each parameter."""
    first = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    layers = *first, *second, nn.Flatten(), nn.Linear(2048, 10)
    return nn.Sequential(*layers), (torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))


MODELS = {make.__name__: make for make in (dense, convolutional)}


def measure_cost(pairs, models):
    """Prints the CPU time of steps with audits, as a share of those without; both are taken in turns."""

    def made_of(communicator, make, audit):
        model, batch = make()
        run = Run(len(batch[0]), 8, communicator=communicator)
        optimizer, loss = torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss()
        step = run.train_step(model, optimizer, lambda model, batch: loss(model(batch[0]), batch[1]), audit=audit)
        return lambda count: [step(batch) for _ in range(count)]

    def both(communicator, make, every):
        take = {audit: made_of(communicator, make, audit) for audit in (None, every)}
        length, ratios = max(10, every), []
        for audit in take:
            take[audit](length)
        for number in range(pairs if every < 100 else max(3, pairs // 3)):
            seconds = {}
            for audit in (None, every) if number % 2 else (every, None):
                communicator.barrier()
                start = time.process_time()
                take[audit](length)
                communicator.barrier()
                seconds[audit] = time.process_time() - start
            ratios.append(seconds[every] / seconds[None] - 1)
        return ratios

    print("model          ranks    K   cost of a step   1/(K V)   difference   quartiles")
    for make in models:
        for num_ranks in (1, 2):
            for every in EVERY:
                program = partial(both, make=make, every=every)
                low, middle, high = statistics.quantiles(in_turns(num_ranks, program)[0], n=4)
                due = 1 / (8 * every)
                figures = f"{middle:17.2%}{due:10.2%}{middle - due:13.2%}   {low:.2%} to {high:.2%}"
                print(f"{make.__name__:15}{num_ranks:5}{every:5}{figures}", flush=True)


def main():
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("flips", "clean", "cost"))
    parser.add_argument("--count", type=int, default=1000, help="flips at each K")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "flips":
        measure_flips(asked.count)
    elif asked.what == "clean":
        measure_clean(asked.steps)
    else:
        measure_cost(asked.pairs, [MODELS[name] for name in asked.models])


if __name__ == "__main__":
    main()
