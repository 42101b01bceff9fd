"""What a rank of a test's world does: it runs an example as a single-process script."""

from scripts import run_script

from samestep.scripts.shared_script import SharedScript
from samestep.scripts.single_process import patched

SEED = 3


def run_example(communicator, name, arguments, folder, num_microbatches, wrap=None):
    """What the example prints on this rank, and the (forward, chunk) pairs that this rank ran."""
    script = SharedScript(communicator, num_microbatches=num_microbatches, num_devices=communicator.world_size)
    within = patched(script, simulated=communicator.device.type == "cpu", seed=SEED, wrap=wrap)
    said = run_script(name, arguments, folder, within)
    return said, script.chunks_run
