"""The timing of collectives: how long a small message takes, and how many bytes a second a large one moves.

Algorithm bandwidth is the size of the tensor by the time; bus bandwidth multiplies it by what the collective has to
move at least, so that it can be compared with what the hardware promises, whatever the number of ranks. Source:
nccl-tests, doc/PERFORMANCE.md.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from samestep.doctor.collectives import Collective, Operation, Ranks

LARGE_BYTES = {"cpu": 8 << 20}
LARGE_GPU_BYTES = 128 << 20
NUM_LARGE, NUM_SMALL, NUM_WARM = 3, 20, 2


def large_bytes(device: torch.device) -> int:
    """The size of a large tensor on a device."""
    return LARGE_BYTES.get(device.type, LARGE_GPU_BYTES)


def measure(ranks: Ranks, collective: Collective) -> tuple[float, float]:
    """Seconds of a small message and of a large one, on this rank: medians; zeros where there is nothing to time."""
    if collective.operation is None:
        return 0.0, 0.0
    small = _median(ranks, collective.operation(ranks, 1), NUM_SMALL)
    if collective.name == "barrier":
        return small, 0.0
    return small, _median(ranks, collective.operation(ranks, large_bytes(ranks.device)), NUM_LARGE)


def _median(ranks: Ranks, operation: Operation, repeats: int) -> float:
    """The median of several times; all ranks begin together."""
    synchronize = _synchronizer(ranks.device)
    seconds = []
    for number in range(NUM_WARM + repeats):
        ranks.communicator.barrier()
        start = time.perf_counter()
        operation()
        synchronize()
        if number >= NUM_WARM:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _synchronizer(device: torch.device) -> Callable[[], None]:
    """What waits until a device has done what it was asked for."""
    if device.type == "cpu":
        return lambda: None
    return torch.accelerator.synchronize


def speed(collective: Collective, small: float, large: float, num_bytes: int, num_ranks: int) -> dict[str, float]:
    """The bandwidths in GB/s and the latency in μs by name; without those that were not measured.

    Args:
        collective: which was timed.
        small: seconds of a small message, on the slowest rank; 0 where there is none.
        large: those of a large one; 0 where there is none.
        num_bytes: of the large one.
        num_ranks: between which.
    """
    numbers = {}
    if large:
        numbers["algorithm_gb_per_s"] = num_bytes / large / 1e9
        numbers["bus_gb_per_s"] = numbers["algorithm_gb_per_s"] * collective.bus_factor(num_ranks)
    if small:
        numbers["latency_us"] = 1e6 * small
    return numbers


def describe_speed(numbers: Mapping[str, float], num_bytes: int) -> str:
    """The numbers in words, such as "1.2 GB/s (bus 1.8) at 8 MiB, 35 μs"."""
    words = []
    if "bus_gb_per_s" in numbers:
        rates = f"{numbers['algorithm_gb_per_s']:.3g} GB/s (bus {numbers['bus_gb_per_s']:.3g})"
        words.append(f"{rates} at {num_bytes >> 20} MiB")
    if "latency_us" in numbers:
        words.append(f"{numbers['latency_us']:,.0f} μs")
    return ", ".join(words)
