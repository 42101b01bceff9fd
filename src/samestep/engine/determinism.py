"""Determinism of a process: its threads, and the switches of deterministic kernels."""

import sys

import torch

from samestep.engine.deterministic_kernels import register_kernels


def make_deterministic(threads: int) -> None:
    """Sets the process-wide switches that equal bits need."""
    # On a GPU too: CPU kernels load the data there and initialise the model. So the number must not follow from the
    # cores a rank: with fewer devices each rank has more.
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms(True), without importing inductor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a pass over memory for nothing
    torch.backends.cudnn.benchmark = False
    register_kernels()
    if "torch._inductor.config" in sys.modules:  # else it reads the variable that `samestep` has set
        sys.modules["torch._inductor.config"].deterministic = True  # type: ignore[attr-defined]
