"""The table of causes, everything that is known to make results depend on the devices, and the recorder of their signs.

The recorder changes no number: it observes arguments, shapes, checksums and the states of generators. Each family of
causes has its own wraps (`fact_wraps`), whose facts its causes' `suspect` reads.

A sign alone proves nothing. A suspected cause is confirmed if runs agree with its antidote and differ without it
(`verify.verdict`): so each antidote takes away the effect of one cause, in all runs that are compared.
"""

from typing import Any

from samestep.patch import Patch
from samestep.verify.causes import datasets, frameworks, machine, means, modules, rounding, samples, updates
from samestep.verify.causes.evidence import Cause, Facts
from samestep.verify.surroundings import record_numbers, watch_files
from samestep.verify.wraps import patches_for

CAUSES: tuple[Cause, ...] = (  # in the order in which they are suspected, and given their effect back from the end
    machine.UNSEEDED,
    machine.HASH_ORDER,
    machine.START,
    machine.RACES,
    machine.FLAGS,
    samples.GLOBAL_BATCH_CAUSE,
    samples.UNSHARED,
    samples.ORDER,
    samples.SAMPLER,
    datasets.AUGMENTATION,
    datasets.STREAM,
    datasets.OWN_GENERATORS,
    modules.DROPOUT,
    modules.DRAWS,
    modules.BATCHNORM,
    modules.BUFFERS,
    modules.ATTRIBUTES,
    means.LOSS_FACTOR,
    means.MEAN_OF_MEANS,
    means.PAIRS,
    means.METRICS,
    updates.LEARNING_RATE,
    updates.LOCAL_CLIP,
    updates.RESCALED,
    updates.LOSS_SCALE,
    updates.LEFT_OUT,
    updates.UNUSED,
    updates.ALONE,
    rounding.ROUNDING,
)


class FactRecorder:
    """Records, in one worker, the signs of all causes."""

    def __init__(self) -> None:
        self._facts = Facts()
        self._facts.at_step.append(lambda: record_numbers(self._facts))

    def watch_files(self, first_began: float, began: float) -> None:
        """Records until the process ends which files of earlier runs the script reads."""
        watch_files(self._facts, first_began, began)

    def patches(self) -> list[Patch]:
        """The patches of all families; they enclose whatever is in place when this is called."""
        families = (modules, datasets, samples, means, updates, machine, rounding, frameworks)
        wraps = [wrap for family in families for wrap in family.fact_wraps(self._facts)]
        return patches_for(wraps, in_compiled=False)

    def facts(self, *, after_step: bool = False) -> list[dict[str, Any]]:
        """The facts since the last call, as JSON objects with a "name"."""
        return self._facts.pop_new(after_step=after_step)
