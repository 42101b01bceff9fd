"""The examination of a group of ranks that another launcher started: torchrun, srun, mpirun."""

import os
from collections.abc import Callable
from dataclasses import replace

from samestep.comm.environment import Environment
from samestep.devices.inventory import discover
from samestep.devices.selection import select
from samestep.doctor.examination import examine_machine, look_at
from samestep.doctor.findings import AREA, Finding, bad
from samestep.doctor.ranks import take_part
from samestep.doctor.showing import is_good
from samestep.errors import SamestepError

ADVICE = "see what the other ranks print; do all nodes reach MASTER_ADDR? --timeout-seconds gives them more time"


def examine_group(
    place: Environment, timeout_seconds: float, quick: bool, show: Callable[[list[Finding]], None]
) -> int:
    """Examines the machines of a group, and the collectives between its ranks.

    The first rank of every node looks at its machine.

    Args:
        place: ours in the group.
        timeout_seconds: how long ranks wait for each other.
        quick: whether to leave out the collectives.
        show: shows the findings, on rank 0, once.

    Returns:
        The exit code of this rank.
    """
    findings = _examine_node(place) if place.local_rank == 0 else []
    about_node = tuple(findings)

    def tell(finding: Finding) -> None:
        findings.append(replace(finding, area=finding.area or AREA))

    def give_up() -> None:
        if place.rank == 0:
            show(findings)
        os._exit(1)

    lost = False
    try:
        take_part(place, timeout_seconds, quick, tell, give_up, about_node=about_node)
    except SamestepError as error:
        lost = True
        if is_good(findings):
            tell(bad("ranks", str(error), ADVICE))
    if place.rank == 0:
        show(findings)
        return 0 if is_good(findings) else 1
    return int(lost)


def _examine_node(place: Environment) -> list[Finding]:
    """What is found of this machine."""
    inventory = discover()
    selection = select("auto" if inventory.devices else f"cpu:{place.local_world_size}", inventory)
    num_nodes = -(-place.world_size // place.local_world_size)
    return examine_machine(look_at(inventory, selection, place.local_world_size, num_nodes))
