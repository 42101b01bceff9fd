"""What a process of a test's world does: it runs an example as a single-process script, or computes for it."""

from driving import driving
from scripts import run_script

from samestep.scripts.script_state import ScriptState
from samestep.scripts.single_process import patched

SEED = 3


def run_example(communicator, name, arguments, folder, num_microbatches, wrap=None):
    """What the example prints, and the (forward, chunk) pairs that this process ran."""
    script = ScriptState(communicator, num_microbatches=num_microbatches, num_devices=communicator.world_size)
    with driving(script, folder) as own:
        if own is None:
            return "", script.chunks_run
        within = patched(own, simulated=communicator.device.type == "cpu", seed=SEED, wrap=wrap)
        return run_script(name, arguments, folder, within), script.chunks_run
