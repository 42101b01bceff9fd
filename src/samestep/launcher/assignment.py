"""The assignment: one worker's place in the run, the environment variables that say so, and what it is to do."""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from samestep.comm.channel import EVENTS_VARIABLE
from samestep.comm.environment import LOOPBACK
from samestep.comm.heartbeat_page import PAGE_VARIABLE, SLOT_VARIABLE
from samestep.devices.selection import Selection
from samestep.launcher.job import Job

JOINS_VARIABLE = "SAMESTEP_JOINS"


@dataclass(frozen=True)
class Assignment:
    """One worker's place.

    Attributes:
        rank: its rank, 0 … world_size - 1.
        world_size: number of workers.
        device_kind: "cpu", "cuda", "mps" or "xpu".
        device: the device as messages name it.
        threads: CPU threads of the worker.
        run_id: names the run among those on the machine.
        variables: the selection's environment variables.
        slot: the worker's number on the page; its own for as long as the page lives.
        attempt: how often all workers have been started again.
        max_restarts: how often they may be.
        joins: whether it is started late, and waits until the others count it in.
    """

    rank: int
    world_size: int
    device_kind: str
    device: str
    threads: int
    run_id: str
    variables: Mapping[str, str]
    slot: int = 0
    attempt: int = 0
    max_restarts: int = 0
    joins: bool = False


@dataclass(frozen=True)
class Instruction:
    """All that a worker is told.

    Attributes:
        assignment: its place.
        job: what to do.
        port: where the store listens on the loopback address.
        fds: its descriptors by name: "events", "words" and "page" always; "stdout" and "stderr" unless they are
            inherited; "payload" and "answer" when arguments and result travel pickled.
    """

    assignment: Assignment
    job: Job
    port: int
    fds: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """The instruction as a JSON object."""
        return {
            "assignment": asdict(self.assignment) | {"variables": dict(self.assignment.variables)},
            "job": self.job.to_json(),
            "port": self.port,
            "fds": dict(self.fds),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Instruction":
        """The instruction that `to_json` wrote."""
        return cls(Assignment(**value["assignment"]), Job.from_json(value["job"]), value["port"], value["fds"])


def assign(
    selection: Selection, threads: int, run_id: str, *, attempt: int = 0, max_restarts: int = 0
) -> tuple[Assignment, ...]:
    """The places of all workers, in rank order."""
    return tuple(
        Assignment(
            rank=rank,
            world_size=selection.count,
            device_kind=selection.kind,
            device=_device_label(selection, rank),
            threads=threads,
            run_id=run_id,
            variables=dict(selection.environment),
            slot=rank,
            attempt=attempt,
            max_restarts=max_restarts,
        )
        for rank in range(selection.count)
    )


def process_variables(selection: Selection, threads: int) -> dict[str, str]:
    """What must be in the environment before a worker's process imports torch.

    OpenBLAS starts its threads when numpy is imported, which would spoil the fork; cuBLAS reads its workspace setting,
    needed for deterministic results, when it starts (see `torch.use_deterministic_algorithms`). Python orders sets of
    strings by a hash that differs between processes; a vocabulary made of a set must not.
    """
    variables = {
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **selection.environment,
    }
    defaults = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0"}
    return variables | {name: value for name, value in defaults.items() if name not in os.environ}


def worker_variables(instruction: Instruction) -> dict[str, str]:
    """The variables of one worker: torchrun's, so that `env://` works, and samestep's own.

    The store is hosted by a process of its own, so ranks must join it as clients: that is what
    TORCHELASTIC_USE_AGENT_STORE says to torch's rendezvous (`torch/distributed/rendezvous.py`).
    """
    place = instruction.assignment
    variables = {
        **place.variables,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(instruction.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "SAMESTEP_DEVICE_KIND": place.device_kind,
        "SAMESTEP_THREADS": str(place.threads),
        EVENTS_VARIABLE: str(instruction.fds["events"]),
        PAGE_VARIABLE: str(instruction.fds["page"]),
        SLOT_VARIABLE: str(place.slot),
    }
    if place.joins:
        variables[JOINS_VARIABLE] = "1"
    interface = _loopback()
    if "GLOO_SOCKET_IFNAME" not in os.environ and interface is not None:
        # Otherwise gloo asks what address the host's name has, and warns where it has none.
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def _loopback() -> str | None:
    """The loopback interface, by which ranks of one machine find each other."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return loopback if any(name == loopback for _, name in socket.if_nameindex()) else None


def _device_label(selection: Selection, rank: int) -> str:
    """A rank's device as messages name it: "CPU worker 1", "cuda:4 (NVIDIA H200)"."""
    if selection.kind == "cpu":
        return f"CPU worker {rank}"
    device = selection.devices[rank]
    return f"{device.torch_name} ({device.name})"
