"""The table of causes: everything that is known to make results depend on the devices."""

from samestep.verify.causes import batches, draws, losses, machine, modules, own, rounding, samples, updates
from samestep.verify.causes.cause import Cause

__all__ = ["CAUSES", "LISTENERS", "Cause"]

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
