"""Sanity checks: whether agreement proves anything. Runs in which nothing happens agree, and so do idle ranks."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from samestep.verify.recording import Recording


@dataclass(frozen=True)
class Compared:
    """Counts of what was compared, in the reference, over the steps that all runs took."""

    steps: int
    parameters: int
    nonzero_gradients: int  # over all steps
    gradients: int
    samples: int | None  # None if that was not seen
    microbatches: int | None  # of all steps, or chunks; None if there are none
    metrics: int  # numbers that the program reduced over its ranks itself


def count_compared(recordings: Sequence[Recording]) -> Compared:
    """The counts of some runs, the reference first."""
    reference = recordings[0]
    steps = min(recording.num_steps for recording in recordings)
    lines = reference.steps[0][:steps] if reference.steps else ()
    norms = [norm for line in lines for group in line["gradients"] for norm in group["norm"] if norm is not None]
    ranks = reference.steps if reference.family == "ddp" else reference.steps[:1]  # else each rank knows them all
    counts = [line["num_samples"] for rank in ranks for line in rank[:steps]]
    return Compared(
        steps=steps,
        parameters=sum(len(line["names"]) for line in reference.lines("parameters")),
        nonzero_gradients=sum(norm != 0 for norm in norms),
        gradients=len(norms),
        samples=None if None in counts else sum(counts),
        microbatches=sum(len(line["microbatches"]) for rank in reference.steps for line in rank[:steps]) or None,
        metrics=sum(len(line["after"]) for line in reference.lines("metric")),
    )


def idle_parameters(recording: Recording) -> list[str]:
    """The parameters whose gradients are there and zero in all steps: of those agreement proves nothing."""
    is_idle: dict[tuple[int, int], bool] = {}
    for line in recording.steps[0] if recording.steps else ():
        for group in line["gradients"]:
            for index, norm in enumerate(group["norm"]):
                if norm is not None:
                    key = (group["optimizer"], index)
                    is_idle[key] = is_idle.get(key, True) and norm == 0
    return [recording.parameters(key[0])["names"][key[1]] for key, idle in sorted(is_idle.items()) if idle]


def refusals(recordings: Sequence[Recording]) -> Iterator[str]:
    """The reasons why agreement would prove nothing, as sentences."""
    if any(recording.num_steps == 0 for recording in recordings):
        yield "no optimizer took a step; seen are those of torch.optim optimizers and of samestep.Run"
        return
    yield from _not_learning(recordings[0])
    for recording in recordings:
        if recording.world_size > 1:
            yield from _not_shared(recording)


def _not_learning(recording: Recording) -> Iterator[str]:
    """Signs of a model that learns nothing."""
    lines = recording.steps[0][: recording.num_steps]
    norms = [norm for line in lines for group in line["gradients"] for norm in group["norm"]]
    sizes = ((step, norm) for step, line in enumerate(lines) for group in line["states"] for norm in group["norm"])
    poisoned = next((step for step, norm in sizes if not math.isfinite(norm)), None)
    losses = [sum(line["loss"]) for line in lines if line["loss"]]
    if not any(norms):
        yield "all gradients are zero: a model that learns nothing is the same on any devices"
    elif poisoned is not None:
        yield f"from step {poisoned} on parameters are not finite: NaN is the same on any devices"
    elif len(losses) > 2 and len(set(losses)) == 1:
        yield f"the loss is {losses[0]:.9g} in all {len(losses)} steps: nothing is learned, or not from the data"
    starts = {line["optimizer"]: line["bits"] for line in recording.lines("parameters")}
    last = {group["optimizer"]: group["bits"] for line in lines for group in line["states"]}
    if any(norms) and all(starts.get(number) == bits for number, bits in last.items()):
        yield "no parameter changed in any step: the learning rate is zero, or the optimizer holds other parameters"


def _not_shared(recording: Recording) -> Iterator[str]:
    """Signs that every rank did all of the work."""
    name, steps = recording.label, range(recording.num_steps)
    if recording.family == "ddp":
        ids = [[rank[step]["ids"] for rank in recording.steps] for step in steps]
        if all(all(taken) and len({tuple(sorted(one)) for one in taken}) == 1 for taken in ids):
            yield f"on {name} every rank trained on the same samples: nothing is shared out"
        return
    counts = [Counter(tuple(one) for rank in recording.steps for one in rank[step]["microbatches"]) for step in steps]
    for step, ran in enumerate(counts):
        if ran and max(ran.values()) > 1:
            (_, microbatch), count = ran.most_common(1)[0]
            yield f"on {name} microbatch {microbatch} of step {step} was computed {count} times"
            return
    if not any(counts):
        yield f"on {name} no work was shared out: every rank computed everything (--wrap names what to share out)"
