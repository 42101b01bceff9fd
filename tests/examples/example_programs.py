"""What a rank of a test's world does: it runs an example as an adopted script."""

from scripts import run_script

from samestep.scripts.adoption import Adoption
from samestep.scripts.script import adopted

SEED = 3


def run_example(communicator, name, arguments, folder, num_microbatches, wrap=None):
    """What the example prints on this rank, and the (forward, chunk) pairs that this rank ran."""
    adoption = Adoption(communicator, num_microbatches=num_microbatches, num_devices=communicator.world_size)
    within = adopted(adoption, virtual=communicator.device.type == "cpu", seed=SEED, wrap=wrap)
    said = run_script(name, arguments, folder, within)
    return said, adoption.chunks_run
