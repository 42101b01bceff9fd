"""The examination: the table of checks, and what carries them out."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.devices.device import Device
from samestep.devices.inventory import Inventory
from samestep.devices.selection import Selection
from samestep.doctor import clocks, health, links, network, storage, system, variables, versions
from samestep.doctor.findings import Finding, bad, note
from samestep.doctor.machine import Machine, ask_torch, own_environment

Look = Callable[[Machine], Finding | Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        area: the part of the examination.
        name: what it looks at, where the check itself fails.
        look: what it does.
    """

    area: str
    name: str
    look: Look


def look_at(inventory: Inventory, selection: Selection, num_ranks: int, num_nodes: int = 1) -> Machine:
    """Gathers what the checks look at.

    Args:
        inventory: the devices that are there.
        selection: those that would be used.
        num_ranks: how many ranks there would be on this machine.
        num_nodes: on how many machines ranks run.
    """
    return Machine(
        inventory,
        selection,
        num_ranks,
        num_nodes,
        ask_torch(),
        health.read_driver(),
        own_environment(),
        Path.cwd(),
    )


def _shm(machine: Machine) -> Finding:
    return system.check_shm(*system.shm_space(), machine.num_ranks)


def _segment(machine: Machine) -> Finding:
    return system.check_segment(system.segment_refusal(), system.read_limits().get("as"), machine.num_ranks)


def _limits(machine: Machine) -> Iterable[Finding]:
    on_gpus = machine.selection.kind == "cuda"
    return system.check_limits(system.read_limits(), machine.num_ranks, on_gpus=on_gpus)


def _memory(machine: Machine) -> Finding:
    cpu = machine.inventory.cpu
    return system.check_memory(cpu.memory_total, cpu.memory_free, system.cgroup_limits()[0], machine.num_ranks)


def _processors(machine: Machine) -> Finding:
    return system.check_processors(machine.inventory.cores, system.cgroup_limits()[1], machine.num_ranks)


def _swap(machine: Machine) -> Finding:
    return system.check_swap(*system.swap_space())


def _host_name(machine: Machine) -> Finding:
    name = network.host_name()
    return network.check_host_name(
        name,
        network.resolve(name),
        network.is_own_address,
        has_interface="GLOO_SOCKET_IFNAME" in machine.environ,
        num_nodes=machine.num_nodes,
    )


def _devices(machine: Machine) -> Iterable[Finding]:
    for sentence in (*machine.inventory.notes, *machine.selection.notes):
        yield note("devices", sentence.rstrip("."))


CHECKS = (
    Check("versions", "Python", lambda machine: versions.check_python((sys.version_info[0], sys.version_info[1]))),
    Check("versions", "torch", lambda machine: versions.check_torch(machine.torch)),
    Check("versions", "driver", lambda machine: versions.check_driver(machine.torch, machine.driver)),
    Check(
        "versions",
        "compute capability",
        lambda machine: versions.check_archs(machine.torch.capabilities, machine.torch.archs),
    ),
    Check("versions", "NCCL", lambda machine: versions.check_nccl(machine.torch.nccl)),
    Check("versions", "libraries", lambda machine: versions.check_packages(machine.torch)),
    Check("versions", "requirements", lambda machine: versions.check_conflicts()),
    Check("devices", "devices", _devices),
    Check("devices", "health", lambda machine: health.check_health(machine.driver.gpus)),
    Check("devices", "use", lambda machine: health.check_use(_accelerators(machine))),
    Check("devices", "peer access", lambda machine: links.check_peers(machine.inventory.devices, machine.torch.peers)),
    Check("system", "/dev/shm", _shm),
    Check("system", "shared memory", _segment),
    Check("system", "limits", _limits),
    Check("system", "memory", _memory),
    Check("system", "processors", _processors),
    Check("system", "swap", _swap),
    Check("system", "disk", lambda machine: storage.check_space(storage.free_space(machine.folder), machine.folder)),
    Check("system", "run folder", lambda machine: storage.check_run_folder(machine.folder)),
    Check("system", "temporary files", lambda machine: storage.check_temporary()),
    Check("system", "loopback", lambda machine: network.check_loopback()),
    Check("system", "host name", _host_name),
    Check("system", "clock", lambda machine: clocks.check_clock()),
    Check(
        "system",
        "environment variables",
        lambda machine: variables.check_variables(machine.environ, variables.own_interfaces()),
    ),
)
"""All that is looked at on one machine, in the order in which it is shown."""


def _accelerators(machine: Machine) -> tuple[Device, ...]:
    """The accelerators that would be used."""
    return () if machine.selection.kind == "cpu" else machine.selection.devices


def examine_machine(machine: Machine, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Carries out the checks of one machine.

    Args:
        machine: what they look at.
        checks: which.
    """
    return [finding for check in checks for finding in carry_out(check, machine)]


def carry_out(check: Check, machine: Machine) -> list[Finding]:
    """Carries out a check; one that fails itself is a bad finding."""
    try:
        found = check.look(machine)
        findings = [found] if isinstance(found, Finding) else list(found)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        findings = [bad(check.name, f"cannot be looked at: {reason}", "mend what it says, or tell us of it")]
    return [replace(finding, area=check.area) for finding in findings]
