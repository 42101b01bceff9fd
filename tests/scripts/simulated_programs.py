"""Helpers for the tests of simulated devices."""

from contextlib import contextmanager
from functools import partial

import torch

from samestep.comm.communicator import Communicator
from samestep.comm.transport import LocalTransport
from samestep.patch import Patch, applied, late_dynamo
from samestep.scripts.script_state import ScriptState, num_visible
from samestep.scripts.simulated.cuda import mark
from samestep.scripts.simulated.devices import simulated_devices


def alone(num_devices=4, num_microbatches=None, device="cpu", **fields):
    """The state of one process that plays several devices."""
    transport = LocalTransport()
    communicator = Communicator(torch.device(device), transport, transport)
    return ScriptState(communicator, num_microbatches, num_devices, **fields)


@contextmanager
def devices(num_devices=4, num_microbatches=None):
    """Simulated devices for the time of a block; the script."""
    script = alone(num_devices, num_microbatches)
    simulated = simulated_devices(partial(num_visible, script), script.notice)
    with applied(late_dynamo()), simulated, applied([Patch(script, "mark", mark)]):
        yield script
