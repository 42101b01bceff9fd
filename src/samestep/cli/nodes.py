"""The options for several machines, which torchrun takes: the same for `samestep run` and `train`."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.errors import UsageError

if TYPE_CHECKING:
    from samestep.launcher.policy import Policy
    from samestep.launcher.torchrun import Torchrun

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
    int | None, typer.Option("--node-rank", rich_help_panel=PANEL, metavar="R", help="This machine's number.")
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
    typer.Option(
        "--rdzv-backend", rich_help_panel=PANEL, metavar="c10d|static", help="c10d unless machines have numbers."
    ),
]
Conf = Annotated[
    str | None,
    typer.Option("--rdzv-conf", rich_help_panel=PANEL, metavar="NAME=N,…", help="Such as join_timeout=60."),
]
MasterAddress = Annotated[
    str | None,
    typer.Option("--master-addr", rich_help_panel=PANEL, metavar="HOST", help="Machine 0, for machines with numbers."),
]
MasterPort = Annotated[
    int | None, typer.Option("--master-port", rich_help_panel=PANEL, metavar="PORT", help="A free port there; 29500.")
]


def chosen_torchrun(policy: "Policy", start_method: str | None, **given: str | int | None) -> "Torchrun | None":
    """What torchrun is to be told, by the options and the variables that stand for them; None for this machine alone.

    Args:
        policy: what is done about failures; torchrun only restarts.
        start_method: as it was given.
        given: torchrun's options by their names with underscores.

    Raises:
        UsageError: these processes were started as ranks already, or an option is for one machine.
    """
    from samestep.comm.environment import read_environment, torchrun_defaults
    from samestep.launcher.policy import Policy
    from samestep.launcher.torchrun import Torchrun, parse_max_nodes

    options = {name: str(value) for name, value in given.items() if value is not None}
    launcher = read_environment().launcher
    if launcher not in ("none", "slurm", "mpi"):
        if options:
            raise UsageError(
                "got --nnodes, --rdzv-endpoint or the like under "
                f"{'torchrun or the like' if launcher == 'other' else launcher}, which has started the ranks of all "
                "nodes already; leave them out"
            )
        return None
    known = {**(torchrun_defaults() if launcher == "none" else {}), **options}
    max_nodes = parse_max_nodes(known.get("nnodes", "1"))
    if max_nodes == 1 and "rdzv_endpoint" not in known:
        return None
    if not known.keys() & {"rdzv_endpoint", "master_addr"}:
        raise UsageError(f"got --nnodes {known['nnodes']} and no place to meet; give --rdzv-endpoint HOST:PORT as well")
    if policy != Policy(max_restarts=policy.max_restarts) or start_method is not None:
        raise UsageError(
            "got --no-heal, --min-devices, --replace, --hang-timeout-seconds or --start-method with --nnodes; several "
            "machines are torchrun's, which restarts workers (--max-restarts) and knows none of these: leave them out"
        )
    if "rdzv_endpoint" in options and not known.keys() & {"rdzv_backend", "node_rank"}:
        options["rdzv_backend"] = "c10d"  # torchrun's default, static, takes a machine without a number for number 0
    return Torchrun({name.replace("_", "-"): value for name, value in options.items()}, max_nodes)


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
