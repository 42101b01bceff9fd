"""The links: whether the GPUs can read each other's memory, and over what."""

from collections.abc import Sequence

from samestep.devices.device import Device
from samestep.doctor.findings import Finding, good, note

MAX_NAMED = 6


def check_peers(devices: Sequence[Device], peers: Sequence[Sequence[bool]]) -> list[Finding]:
    """Which pairs of GPUs have peer access.

    Args:
        devices: the GPUs as torch shows them.
        peers: whether the i-th can read the memory of the j-th.
    """
    if len(peers) < 2:
        return []
    kinds = {device.index: {link.peer: link.kind for link in device.links} for device in devices}
    without = [
        (here, there)
        for here, row in enumerate(peers)
        for there, reached in enumerate(row)
        if here < there and not (reached and peers[there][here])
    ]
    used = sorted({kind for links in kinds.values() for kind in links.values()})
    over = f" over {', '.join(used)}" if used else ""
    if not without:
        return [good("peer access", f"all {len(peers)} GPUs reach each other{over}")]
    pairs = [f"{here}-{there} ({kinds.get(here, {}).get(there, 'no link')})" for here, there in without[:MAX_NAMED]]
    more = f" and {len(without) - MAX_NAMED} more" if len(without) > MAX_NAMED else ""
    advice = (
        "their traffic goes through host memory: slower, and right. If NVLink or one PCIe switch joins them, look at "
        "nvidia-smi topo -p2p r, at PCIe access control (ACS) and at the IOMMU"
    )
    return [note("peer access", f"none between GPUs {', '.join(pairs)}{more}", advice)]
