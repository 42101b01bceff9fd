"""The advice: what the numbers of a profile say should be changed, in sentences."""

from collections.abc import Iterator
from dataclasses import dataclass

from samestep.train.profile.numbers import Numbers, RankNumbers

MUCH = 0.10  # of the step: data, exchange, the script, or waiting for a slower rank
SOME = 0.02  # of the step: checkpoints, the ledger
UNEVEN = 0.15  # by how much the computing of the ranks may differ
SMALL_MICROBATCH_MS = 0.5  # below it Python and the dispatch of operations take most of a microbatch's time


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        about: "exchange", "data", "ranks", "microbatches", "checkpoint", "ledger", "script"; "nothing" where all is
            well.
        text: a sentence.
    """

    about: str
    text: str


def advise(numbers: Numbers) -> list[Advice]:
    """What follows from the numbers, the dearest first; one that says so where nothing does."""
    slowest = numbers.slowest
    found = sorted(_found(numbers), key=lambda pair: -pair[0])
    if found:
        return [advice for _, advice in found]
    computing = slowest.share("compute") + slowest.share("update")
    text = f"nothing to mend: {_percent(computing)} of the step is forward, backward and update."
    return [Advice("nothing", text)]


def _found(numbers: Numbers) -> Iterator[tuple[float, Advice]]:
    """Advice with the part of the step that it is about."""
    slowest, adopted = numbers.slowest, numbers.is_adopted
    exposed = slowest.share("exchange exposed")
    if exposed > MUCH:
        buckets = "" if adopted else "larger buckets (train_step(bucket_bytes=…)), "
        mend = f"{buckets}fewer devices, or a larger global batch, which is another training."
        yield exposed, Advice("exchange", f"exchange exposed {_percent(exposed)}: {mend}")
    data = slowest.share("data")
    if data > MUCH:
        options = "DataLoader(num_workers=N)" if adopted else "--num-workers N, loader(num_workers=N)"
        cache = "cache the dataset as tensors in memory."
        if slowest.profile.facts.get("cacheable"):
            cache = 'keep its tensors on the device, if they fit (run.loader(…, cache="device")).'
        mend = f"fetch samples in processes of their own ({options}), or {cache}"
        yield data, Advice("data", f"data {_percent(data)}: {mend}")
    yield from _uneven(numbers)
    if not adopted:
        yield from _small_microbatches(slowest)
    checkpoint = slowest.share("checkpoint")
    if checkpoint > SOME:
        mend = "write them less often (--checkpoint-minutes, --checkpoint-steps)."
        yield checkpoint, Advice("checkpoint", f"checkpoints {_percent(checkpoint)}: {mend}")
    checksum = slowest.checksum_share
    if checksum > SOME:
        mend = "take the checksum of the state less often (--digest-every)."
        yield checksum, Advice("ledger", f"ledger: its checksums {_percent(checksum)}: {mend}")
    script = slowest.share("script")
    if script > MUCH:
        mend = "what the loop does between two steps; read losses and log less often, and together."
        yield script, Advice("script", f"the script {_percent(script)}: {mend}")


def _uneven(numbers: Numbers) -> Iterator[tuple[float, Advice]]:
    """Whether some ranks wait for the computing of another."""
    working = [rank for rank in numbers.ranks if rank.microbatches]
    if len(working) < 2:
        return
    quickest = min(working, key=lambda rank: rank.median_ms("compute"))
    longest = max(working, key=lambda rank: rank.median_ms("compute"))
    most, least = longest.median_ms("compute"), quickest.median_ms("compute")
    gap = most - least
    if gap <= UNEVEN * most or gap <= MUCH * longest.step_ms:
        return
    text = f"uneven ranks: rank {longest.rank} computes {most:.3g} ms a step, rank {quickest.rank} {least:.3g} ms; "
    times = [rank.median_ms("compute") / rank.microbatches for rank in working]
    if numbers.is_adopted:
        text += "see what else runs on the slower device, or leave it out (--devices)."
    elif max(times) <= (1 + UNEVEN) * min(times):
        text += f"they have {longest.microbatches} and {quickest.microbatches} microbatches: take a number of devices that divides them."
    else:
        shares = ",".join(f"{max(times) / each:.2g}" for each in times)
        text += f"give each what it can do (--shares {shares}, Run(shares=…)): the same bits."
    yield gap / longest.step_ms, Advice("ranks", text)


def _small_microbatches(rank: RankNumbers) -> Iterator[tuple[float, Advice]]:
    """Whether microbatches are so small that Python takes most of their time."""
    if rank.microbatches < 2:
        return
    microbatch = rank.median_ms("compute") / rank.microbatches
    if microbatch < SMALL_MICROBATCH_MS and rank.share("compute") > MUCH:
        again = ", which is another training"
        compiling = "" if rank.profile.facts.get("compiles") else ", or --compile, train_step(compile=True)"
        text = f"a microbatch computes for {microbatch:.2g} ms, most of it Python: fewer microbatches (--num-microbatches{again}){compiling}."
        yield rank.share("compute"), Advice("microbatches", text)


def _percent(part: float) -> str:
    """`34 %`, `2.3 %`."""
    return f"{100 * part:.{0 if part >= 0.1 else 1}f} %"
