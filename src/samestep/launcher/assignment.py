"""The assignment of a worker: its place in the run, its environment variables, and its instruction for the start."""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samestep.comm.channel import EVENTS_VARIABLE
from samestep.comm.device_token import TOKEN_VARIABLE
from samestep.comm.environment import LOOPBACK
from samestep.comm.heartbeat_page import PAGE_VARIABLE, SLOT_VARIABLE
from samestep.launcher.job import Job
from samestep.launcher.server_process import server_variables

if TYPE_CHECKING:
    from samestep.devices.selection import Selection

JOINS_VARIABLE = "SAMESTEP_JOINS"


@dataclass(frozen=True)
class Assignment:
    """One worker's place in the run."""

    rank: int
    world_size: int
    device_kind: str  # "cpu", "cuda" or "mps"
    device: str  # as messages name it
    num_threads: int
    run_id: str
    variables: Mapping[str, str]  # of the selection
    device_index: int = 0  # of its device in the selection
    shares_device: bool = False  # with other ranks, whose token is in the file of the descriptor "devices"
    slot: int = 0  # the worker's index on the page, its own as long as the page lives
    attempt: int = 0  # how often all workers have been restarted
    max_restarts: int = 0
    joins: bool = False  # whether it is a replacement, which waits until it is in a quorum


@dataclass(frozen=True)
class Instruction:
    """A worker's place and job, the store's port on the loopback address, and its descriptors by name.

    "events", "dump" (for crash dumps) and "page" always exist; "stdout" and "stderr" unless they are inherited;
    "payload" and "answer" if arguments and result are pickled; "devices" if ranks share devices.
    """

    assignment: Assignment
    job: Job
    port: int
    fds: Mapping[str, int]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Instruction":
        """The instruction of a JSON object that `asdict` made."""
        return cls(Assignment(**value["assignment"]), Job.from_json(value["job"]), value["port"], value["fds"])


def assign(
    selection: "Selection",
    num_threads: int,
    run_id: str,
    *,
    logical_devices: int | None = None,
    attempt: int = 0,
    max_restarts: int = 0,
) -> tuple[Assignment, ...]:
    """The places of all workers, in rank order: one a device, or as many as there are logical devices.

    Logical devices are dealt to the devices in contiguous ranges, and a worker then sees its own device alone.
    """
    world_size = logical_devices or selection.count
    places = []
    for rank in range(world_size):
        index = rank * selection.count // world_size
        seen = selection if logical_devices is None else selection.only(index)
        places.append(
            Assignment(
                rank=rank,
                world_size=world_size,
                device_kind=selection.kind,
                device=selection.label(index),
                num_threads=num_threads,
                run_id=run_id,
                variables=dict(seen.environment),
                device_index=index,
                shares_device=world_size > selection.count,
                slot=rank,
                attempt=attempt,
                max_restarts=max_restarts,
            )
        )
    return tuple(places)


def process_variables(selection: "Selection", num_threads: int) -> dict[str, str]:
    """The variables that must be set before a worker's process imports torch."""
    return {**server_variables(num_threads), **selection.environment}


def worker_variables(instruction: Instruction) -> dict[str, str]:
    """The variables of one worker: torchrun's, so that `env://` works, and samestep's own."""
    # A separate process hosts the store, so ranks must join it as clients: TORCHELASTIC_USE_AGENT_STORE does that in
    # torch's rendezvous (`torch/distributed/rendezvous.py`).
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
        "SAMESTEP_THREADS": str(place.num_threads),
        EVENTS_VARIABLE: str(instruction.fds["events"]),
        PAGE_VARIABLE: str(instruction.fds["page"]),
        SLOT_VARIABLE: str(place.slot),
    }
    if place.joins:
        variables[JOINS_VARIABLE] = "1"
    if place.shares_device:
        variables[TOKEN_VARIABLE] = f"{instruction.fds['devices']}:{place.device_index}"
    interface = _loopback()
    if "GLOO_SOCKET_IFNAME" not in os.environ and interface is not None:
        # Without it gloo resolves the host's name, and warns if that has no address.
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def _loopback() -> str | None:
    """The name of the loopback interface, which connects the ranks of one machine."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return loopback if any(name == loopback for _, name in socket.if_nameindex()) else None
