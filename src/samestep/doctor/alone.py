"""The examination of a machine by a process that nobody started as a rank: it starts the ranks itself."""

from samestep.devices.inventory import discover
from samestep.devices.selection import select
from samestep.doctor.examination import examine_machine, look_at
from samestep.doctor.findings import Finding
from samestep.doctor.showing import is_good
from samestep.doctor.starting import examine_ranks


def examine_alone(devices: str, timeout_seconds: float, quick: bool) -> tuple[list[Finding], int]:
    """Examines this machine, and the collectives between ranks on it.

    Args:
        devices: as `samestep run --devices` takes them.
        timeout_seconds: how long ranks wait for each other.
        quick: whether to leave out the collectives.

    Returns:
        The findings and the exit code.

    Raises:
        DeviceError: the devices are not there.
    """
    inventory = discover()
    selection = select(devices, inventory)
    machine = look_at(inventory, selection, selection.count)
    findings = examine_machine(machine)
    stopped = 0
    if machine.torch.version is not None:  # else there is a finding about that, and no rank could say more
        found, stopped = examine_ranks(selection, timeout_seconds, quick)
        findings += found
    return findings, 128 + stopped if stopped else 0 if is_good(findings) else 1
