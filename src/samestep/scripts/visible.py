"""Visible devices: how many devices the script believes in, and what its own CUDA_VISIBLE_DEVICES does to that."""

import os
import re

from samestep.scripts.adoption import Adoption

VARIABLE = "CUDA_VISIBLE_DEVICES"
MAX_DEVICES = 64  # a script may name any of these, however many it counts: the chunks are dealt to what there is


def num_visible(adoption: Adoption) -> int:
    """How many devices the script sees; the environment is read each time.

    In this order: the microbatches asked for; the ids in CUDA_VISIBLE_DEVICES, if the script assigned it ("0,4" counts
    two, whatever devices there are); the devices of the run.
    """
    if adoption.num_microbatches is not None:
        return adoption.num_microbatches
    ids = os.environ.get(VARIABLE)
    if ids is None or ids == adoption.visible_at_start:
        return adoption.num_devices
    return count_ids(ids)


def count_ids(ids: str) -> int:
    """How many devices a value of CUDA_VISIBLE_DEVICES names.

    The list ends at the first entry that is no device: "0,4" is two, "0,-1,2" one, "" and "-1" none. A device named
    twice leaves none, as in CUDA (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    named: list[str] = []
    for entry in ids.split(","):
        number = re.match(r"\+?\d+", entry.strip())
        if number is not None:
            name = str(int(number[0]))
        elif entry.strip().startswith(("GPU-", "MIG-")):
            name = entry.strip()
        else:
            break
        if name in named:
            return 0
        named.append(name)
    return len(named)
