"""What a rank asks of all, and what all have agreed on."""

from dataclasses import dataclass

END_OF_FIT = 256  # as `Requests.stop`: above all signals, which are asked for once more by the next step


@dataclass
class Requests:
    """This rank's own requests, which the next step takes to the others, and those agreed on in the last one."""

    asks_end: bool = False  # of the fit
    asks_checkpoint: bool = False
    stop: int = 0  # the signal by which the run is to stop, or `END_OF_FIT`; the same on all ranks
    checkpoint: bool = False  # whether any rank asked for one; the same on all ranks
