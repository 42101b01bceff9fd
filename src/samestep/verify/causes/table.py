"""The table of causes, everything that is known to make results depend on the devices, and the recorder for them.

The recorder changes no number: it looks at arguments, shapes, checksums and the states of generators. Each family of
causes says itself what it listens to (its `listen`) and what it makes of it (its causes' `suspect`).
"""

from typing import Any

from samestep.scripts.patch import Patch
from samestep.verify.causes import batches, draws, losses, machine, modules, own, rounding, samples, updates
from samestep.verify.causes.cause import Cause
from samestep.verify.causes.notes import Notes, composed

__all__ = ["CAUSES", "LISTENERS", "Cause", "Recorder"]

CAUSES: tuple[Cause, ...] = (
    machine.UNSEEDED,
    machine.RACES,
    machine.FLAGS,
    updates.ALONE,
    batches.GLOBAL_BATCH_CAUSE,
    batches.UNSHARED,
    batches.ORDER,
    batches.SAMPLER,
    samples.AUGMENTATION,
    samples.STREAM,
    own.OWN_GENERATORS,
    draws.DROPOUT,
    draws.DRAWS,
    modules.BATCHNORM,
    modules.BUFFERS,
    modules.ATTRIBUTES,
    losses.MEAN_OF_MEANS,
    losses.METRICS,
    updates.LEARNING_RATE,
    updates.LOCAL_CLIP,
    updates.LOSS_SCALE,
    updates.UNUSED,
    rounding.NATIVE,
    rounding.KERNELS,
    rounding.ACCUMULATION,
    rounding.EXCHANGE,
)

LISTENERS = tuple(part.listen for part in (modules, draws, samples, own, batches, losses, updates, machine, rounding))


class Recorder:
    """Notes down, in one worker, what may make results depend on the devices.

    Args:
        rank: of this worker.
        world_size: number of workers.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._notes = Notes(rank, world_size)

    def patches(self) -> list[Patch]:
        """The places that are listened at; they enclose whatever is there when this is called."""
        return composed((wrap for listen in LISTENERS for wrap in listen(self._notes)), in_compiled=False)

    def facts(self) -> list[dict[str, Any]]:
        """What is new since the last call, as JSON objects with a "name"; to be called after every step."""
        return self._notes.take()
