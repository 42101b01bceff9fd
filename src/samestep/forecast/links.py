"""The links: how long collectives take, by the alpha-beta model.

A message of m bytes takes alpha + m / beta seconds: a latency, and a bandwidth (Hockney 1994). Of n devices in a ring,
each step of a collective sends a message to the neighbour (Thakur, Rabenseifner and Gropp 2005, section 4):

    all-gather, reduce-scatter    (n - 1) alpha + (n - 1) / n · m / beta
    all-reduce                    both: 2 (n - 1) alpha + 2 (n - 1) / n · m / beta
    all-to-all, pairwise          (n - 1) alpha + (n - 1) / n · m / beta
    point to point                alpha + m / beta

m is the whole tensor: what all devices hold together after a gather, or each before a scatter. Over several nodes of g
devices they go hierarchically: within the node, then between nodes, where each device moves its g-th part beside the
others, each over its part of the node's link.
"""

from dataclasses import dataclass

from samestep.forecast.devices import Machines

WITHIN_LATENCY, BETWEEN_LATENCY = 5e-6, 2e-5  # seconds a message: those of NCCL's rings, in order of magnitude
LINK_SHARE = 0.8  # of a link's peak that large messages reach


@dataclass(frozen=True)
class Link:
    """What a message takes.

    Attributes:
        alpha: seconds, whatever its size.
        beta: bytes a second.
    """

    alpha: float
    beta: float

    def ring(self, num_devices: int, num_bytes: float) -> float:
        """An all-gather, a reduce-scatter, or a pairwise all-to-all."""
        if num_devices < 2:
            return 0.0
        return (num_devices - 1) * self.alpha + (num_devices - 1) / num_devices * num_bytes / self.beta

    def send(self, num_bytes: float) -> float:
        """Point to point."""
        return self.alpha + num_bytes / self.beta


@dataclass(frozen=True)
class Links:
    """The links of a group of devices.

    Attributes:
        within: inside a node.
        between: of one device to others on other nodes, while all of its node's use their link.
        per_node: devices of the group on a node.
        num_nodes: nodes of the group.
    """

    within: Link
    between: Link
    per_node: int
    num_nodes: int

    def gather(self, num_bytes: float) -> float:
        """All-gather of so many bytes in all; a reduce-scatter of so many takes as long."""
        inside = self.within.ring(self.per_node, num_bytes)
        return inside + self.between.ring(self.num_nodes, num_bytes / self.per_node)

    def scatter(self, num_bytes: float) -> float:
        """Reduce-scatter of so many bytes on each device."""
        return self.gather(num_bytes)

    def reduce(self, num_bytes: float) -> float:
        """All-reduce of so many bytes on each device."""
        return 2 * self.gather(num_bytes)

    def exchange(self, num_bytes: float) -> float:
        """All-to-all of so many bytes on each device, within nodes first and between them then."""
        return self.gather(num_bytes)

    def send(self, num_bytes: float) -> float:
        """Point to point, to a device of another node if there is one."""
        return (self.within if self.num_nodes == 1 else self.between).send(num_bytes)


def links_of(machines: Machines, group: int, stride: int = 1) -> Links:
    """The links of groups of devices.

    Args:
        machines: all of them.
        group: devices of a group.
        stride: how far apart they are: 1 where neighbours form a group.
    """
    kind = machines.kind
    per_node = max(1, min(group, machines.per_node // stride))
    return Links(
        within=Link(WITHIN_LATENCY, kind.link_gbs * 1e9 * LINK_SHARE),
        between=Link(BETWEEN_LATENCY, kind.node_gbits / 8 * 1e9 * LINK_SHARE / machines.per_node),
        per_node=per_node,
        num_nodes=-(-group // per_node),
    )
