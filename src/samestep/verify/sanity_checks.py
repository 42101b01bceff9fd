"""Soundness: whether agreement proves anything. Runs in which nothing happens agree, and so do ranks that do it all."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from samestep.verify.compare import label, samples_of
from samestep.verify.recording import Recording


@dataclass(frozen=True)
class Compared:
    """What was compared.

    Attributes:
        steps: optimizer steps.
        parameters: tensors whose gradients were compared.
        nonzero_gradients: how many of all those gradients, over all steps, were not zero.
        gradients: how many there were.
        samples: samples that the steps took; None where that was not seen.
        microbatches: microbatches or chunks that ran, all steps together; None where there are none.
        metrics: numbers that the program reduced over its ranks itself.
    """

    steps: int
    parameters: int
    nonzero_gradients: int
    gradients: int
    samples: int | None
    microbatches: int | None
    metrics: int


def what_was_compared(recordings: Sequence[Recording]) -> Compared:
    """Counts, in the reference, over the steps that all runs took."""
    reference = recordings[0]
    steps = min(recording.num_steps for recording in recordings)
    lines = reference.steps[0][:steps] if reference.steps else ()
    norms = [size for line in lines for group in line["gradients"] for size in group["norm"] if size is not None]
    counts = [line["num_samples"] for line in lines]
    microbatches = sum(len(rank[step]["microbatches"]) for rank in reference.steps for step in range(steps))
    return Compared(
        steps=steps,
        parameters=sum(len(line["names"]) for line in reference.lines("parameters")),
        nonzero_gradients=sum(size != 0 for size in norms),
        gradients=len(norms),
        samples=None if None in counts else sum(counts),
        microbatches=microbatches or None,
        metrics=sum(len(line["after"]) for line in reference.lines("metric")),
    )


def idle_parameters(recording: Recording) -> list[str]:
    """The parameters whose gradients are zero in all steps, of which agreement says nothing; not those without one."""
    names = {line["optimizer"]: line["names"] for line in recording.lines("parameters")}
    seen: dict[tuple[int, int], bool] = {}
    for line in recording.steps[0] if recording.steps else ():
        for group in line["gradients"]:
            for index, size in enumerate(group["norm"]):
                if size is not None:
                    place = (group["optimizer"], index)
                    seen[place] = seen.get(place, True) and size == 0
    return [names[number][index] for (number, index), idle in sorted(seen.items()) if idle]


def refusals(recordings: Sequence[Recording]) -> Iterator[str]:
    """Why agreement would prove nothing, in sentences."""
    reference = recordings[0]
    if any(recording.num_steps == 0 for recording in recordings):
        yield "no optimizer took a step; seen are those of torch.optim optimizers and of samestep.Run"
        return
    yield from _dead(reference)
    for recording in recordings:
        if recording.world_size > 1:
            yield from _not_shared(recording)


def _dead(recording: Recording) -> Iterator[str]:
    """Signs of a model that learns nothing."""
    lines = recording.steps[0][: recording.num_steps]
    norms = [size for line in lines for group in line["gradients"] for size in group["norm"]]
    losses = [sum(line["loss"]) for line in lines if line["loss"]]
    if not any(norms):
        yield "all gradients are zero: a model that learns nothing is the same on any devices"
    elif not any(size is not None and math.isfinite(size) for size in norms):
        yield "no gradient is finite"
    elif len(losses) > 2 and len(set(losses)) == 1:
        yield f"the loss is {losses[0]:.9g} in all {len(losses)} steps: nothing is learned, or not from the data"
    starts = {line["optimizer"]: line["bits"] for line in recording.lines("parameters")}
    last = {part["optimizer"]: part["bits"] for line in lines for part in line["states"]}
    if any(norms) and all(starts.get(number) == bits for number, bits in last.items()):
        yield "no parameter changed in any step: the learning rate is zero, or the optimizer holds other parameters"


def _not_shared(recording: Recording) -> Iterator[str]:
    """Signs that every rank did all of the work."""
    name = label(recording)
    if recording.family == "ddp":
        same = [
            step
            for step in range(recording.num_steps)
            if samples_of(recording, step) is not None
            and len({tuple(sorted(rank[step]["ids"])) for rank in recording.steps}) == 1
            and recording.steps[0][step]["ids"]
        ]
        if same and len(same) == recording.num_steps:
            yield f"on {name} every rank trained on the same samples: nothing is shared out"
        return
    total = 0
    for step in range(recording.num_steps):
        ran = Counter(tuple(microbatch) for rank in recording.steps for microbatch in rank[step]["microbatches"])
        total += ran.total()
        if ran and max(ran.values()) > 1:
            (_, microbatch), count = ran.most_common(1)[0]
            yield f"on {name} microbatch {microbatch} of step {step} was computed {count} times"
            return
    if not total:
        yield f"on {name} no work was shared out: every rank computed everything (--wrap names what to share out)"
