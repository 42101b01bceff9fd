"""The machine as it is examined: what the checks look at, gathered once."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.devices.inventory import Inventory
from samestep.devices.selection import Selection
from samestep.doctor import probe
from samestep.doctor.health import Driver

PROBE_SECONDS = 180.0
NUM_TAIL_CHARACTERS = 300


@dataclass(frozen=True)
class TorchFacts:
    """What the installed torch says of itself.

    Attributes:
        version: such as "2.13.0+cu130"; None where it cannot be imported.
        problem: why it cannot.
        cuda: the CUDA version that it was built with, None without; likewise `hip`.
        cudnn: cuDNN's version as one number, such as 91002.
        nccl: NCCL's version, such as (2, 27, 7).
        gloo: whether it was built with gloo.
        archs: what its kernels were compiled for, such as "sm_90".
        capabilities: the compute capability of every GPU that it shows.
        peers: whether GPU i can read the memory of GPU j.
    """

    version: str | None = None
    problem: str = ""
    cuda: str | None = None
    hip: str | None = None
    cudnn: int | None = None
    nccl: tuple[int, ...] | None = None
    gloo: bool = False
    archs: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()


@dataclass(frozen=True)
class Machine:
    """What the checks look at.

    Attributes:
        inventory: the devices that are there.
        selection: those that would be used, one rank each.
        num_ranks: how many ranks there would be on this machine.
        num_nodes: on how many machines ranks run.
        torch: what the installed torch says.
        driver: what NVML says of the driver and of each GPU's health.
        environ: the environment variables.
        folder: where runs would be written.
    """

    inventory: Inventory
    selection: Selection
    num_ranks: int
    num_nodes: int
    torch: TorchFacts
    driver: Driver
    environ: Mapping[str, str]
    folder: Path


def ask_torch(command: tuple[str, ...] | None = None) -> TorchFacts:
    """Asks torch, in a child process.

    Args:
        command: what to run; the probe if None.
    """
    command = command or (sys.executable, "-P", str(probe.__file__))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return TorchFacts(problem=f"importing it takes more than {PROBE_SECONDS:g} s")
    except OSError as error:
        return TorchFacts(problem=str(error))
    if done.returncode < 0:
        return TorchFacts(problem=f"importing it ends in {signal.Signals(-done.returncode).name}")
    try:
        return _facts(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError, KeyError):
        return TorchFacts(problem=done.stderr.strip()[-NUM_TAIL_CHARACTERS:] or f"exit code {done.returncode}")


def _facts(row: Mapping[str, Any]) -> TorchFacts:
    """What the probe printed."""
    return TorchFacts(
        version=row["version"],
        cuda=row["cuda"],
        hip=row["hip"],
        cudnn=row["cudnn"],
        nccl=None if row["nccl"] is None else tuple(row["nccl"]),
        gloo=row["gloo"],
        archs=tuple(row["archs"]),
        capabilities=tuple((major, minor) for major, minor in row["capabilities"]),
        peers=tuple(tuple(reached) for reached in row["peers"]),
    )


def own_environment() -> Mapping[str, str]:
    """This process's environment as it was when it was looked at."""
    return dict(os.environ)
