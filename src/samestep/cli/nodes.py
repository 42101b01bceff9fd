"""The options that say on how many machines a run is, in torchrun's words: the same for `samestep run` and `train`."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.errors import UsageError

if TYPE_CHECKING:
    from samestep.launcher.cluster import Cluster

PANEL = "Several machines (torchrun's options; PET_… variables give their defaults)"

NumProcPerNode = Annotated[
    str | None,
    typer.Option(
        "--nproc-per-node",
        metavar="N",
        help="torchrun's spelling of --devices: a number, auto, gpu or cpu (one worker a core).",
    ),
]
NumNodes = Annotated[
    str | None,
    typer.Option("--nnodes", rich_help_panel=PANEL, metavar="N|MIN:MAX", help="On how many machines; 1 by default."),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        "--node-rank", rich_help_panel=PANEL, metavar="R", help="This machine's number; 0 hosts the meeting place."
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint", rich_help_panel=PANEL, metavar="HOST:PORT", help="Where they meet: at one of the machines."
    ),
]
RunId = Annotated[
    str | None, typer.Option("--rdzv-id", rich_help_panel=PANEL, metavar="ID", help="Names the run, alike on all.")
]
Backend = Annotated[
    str | None,
    typer.Option("--rdzv-backend", rich_help_panel=PANEL, metavar="c10d|static", help="Both are the same here."),
]
Conf = Annotated[
    str | None,
    typer.Option(
        "--rdzv-conf",
        rich_help_panel=PANEL,
        metavar="NAME=N,…",
        help="join_timeout, last_call_timeout, keep_alive_interval (seconds), keep_alive_max_attempt.",
    ),
]
MasterAddress = Annotated[
    str | None,
    typer.Option("--master-addr", rich_help_panel=PANEL, metavar="HOST", help="With --master-port: the meeting place."),
]
MasterPort = Annotated[int | None, typer.Option("--master-port", rich_help_panel=PANEL, metavar="PORT", help="29400.")]


def chosen_cluster(
    nnodes: str | None,
    node_rank: int | None,
    rdzv_endpoint: str | None,
    rdzv_id: str | None,
    rdzv_backend: str | None,
    rdzv_conf: str | None,
    master_addr: str | None,
    master_port: int | None,
) -> "Cluster | None":
    """The machines that the options ask for, and the variables that stand for them; None for this one alone.

    Raises:
        UsageError: they cannot be, or these processes were started as ranks already.
    """
    from samestep.comm.environment import read_environment, torchrun_defaults
    from samestep.launcher.cluster import ClusterOptions, cluster_of

    given = ClusterOptions(nnodes, node_rank, rdzv_endpoint, rdzv_id, rdzv_backend, rdzv_conf, master_addr, master_port)
    launcher = read_environment().launcher
    if launcher == "none":
        found = torchrun_defaults()
        values: dict[str, Any] = {
            name: value if value is not None else found.get(name) for name, value in vars(given).items()
        }
        for name in ("node_rank", "master_port"):
            values[name] = None if values[name] is None else _whole(name, values[name])
        if given.rdzv_endpoint is None and given.master_addr is not None:
            values["rdzv_endpoint"] = None
        given = ClusterOptions(**values)
    elif given != ClusterOptions() and launcher not in ("slurm", "mpi"):
        raise UsageError(
            "got --nnodes, --rdzv-endpoint or the like under "
            f"{'torchrun or the like' if launcher == 'other' else launcher}, which has started the ranks of all nodes "
            "already; leave them out"
        )
    return cluster_of(given)


def chosen_devices(devices: str | None, nproc_per_node: str | None) -> str | None:
    """The devices that --devices, --nproc-per-node, or the variable that stands for it, ask for; None for none of them.

    Raises:
        UsageError: both options were given.
    """
    from samestep.comm.environment import torchrun_defaults

    if devices is not None and nproc_per_node is not None:
        raise UsageError(f"got --devices {devices} and --nproc-per-node {nproc_per_node}; give one of the two")
    if devices is not None:
        return devices
    text = (nproc_per_node or torchrun_defaults().get("nproc_per_node", "")).strip().lower()
    if text == "cpu":
        return f"cpu:{os.cpu_count() or 1}"
    return "cuda" if text == "gpu" else text or None


def _whole(name: str, value: object) -> int:
    """An option's value from a variable, as a number."""
    if not str(value).isdecimal():
        raise UsageError(f"got PET_{name.upper()}={value}; needed: a number")
    return int(str(value))
