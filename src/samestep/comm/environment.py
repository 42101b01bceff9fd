"""The environment of a process among the ranks of its run: the one place that reads rank variables.

torchrun and our own launcher set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; Slurm's srun and the MPI
starters (Open MPI, MPICH, Intel MPI) have names of their own. Without any of them this is a single process.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from samestep.checks import check_choice, check_number
from samestep.errors import PeerLostError, UsageError

LOOPBACK = "127.0.0.1"
MAX_PORT = 65_535
MAX_THREADS = 1024  # CPU threads of a worker
TRANSPORT_VARIABLE = "SAMESTEP_TRANSPORT"
TRANSPORTS = ("auto", "gloo", "shared")
NODES_VARIABLE = "SAMESTEP_NODES"
NODES = ("auto", "flat")
AUDIT_VARIABLE = "SAMESTEP_AUDIT"
AUDIT_ACTIONS = ("exclude", "warn", "stop")
WORKER_VARIABLE = "SAMESTEP_WORKER"
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
TORCHRUN_OPTIONS = (
    *("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("RDZV_ENDPOINT", "RDZV_ID", "RDZV_CONF"),
)


@dataclass(frozen=True)
class WorkerSettings:
    """What samestep's launcher has decided for a worker, as JSON in one variable.

    Programs that the worker starts inherit the variable, but not the descriptors.
    """

    device_kind: str | None = None  # "cpu", "cuda" or "mps"; None without a launcher
    num_threads: int | None = None  # CPU threads
    slot: int = 0  # the index on the page of heartbeats
    heals: bool = True  # whether the others go on if a rank is lost (--no-heal), where a supervisor can tell them
    joins: bool = False  # whether the worker was started late, in the place of a lost one
    device_index: int = 0  # of its device in the selection
    machine: int | None = None  # its machine's number, in a run on several
    fds: Mapping[str, int] = field(default_factory=dict)  # descriptors by name, as in `launcher.job.Instruction`

    def variables(self) -> dict[str, str]:
        """The variable by which a process finds these settings."""
        return {WORKER_VARIABLE: json.dumps(asdict(self))}


def read_settings(variables: Mapping[str, str] | None = None) -> WorkerSettings:
    """The settings of this worker; the defaults without a launcher."""
    return WorkerSettings(**json.loads((os.environ if variables is None else variables).get(WORKER_VARIABLE, "{}")))


@dataclass(frozen=True)
class Environment:
    """The place of a process in its run."""

    rank: int = 0  # 0 … world_size - 1
    world_size: int = 1  # number of ranks
    local_rank: int = 0  # rank on this node
    local_world_size: int = 1  # ranks on this node
    master_addr: str = LOOPBACK  # address of the store
    master_port: int = 0  # its port
    launcher: str = "none"  # "none", "samestep", "torchrun", "slurm", "mpi" or "other"
    store_is_kept: bool = False  # whether the launcher hosts the store; if not, rank 0 does
    transport: str = "auto"  # one of `TRANSPORTS`
    nodes: str = "auto"  # whether sums go by nodes, one of `NODES`
    settings: WorkerSettings = WorkerSettings()

    def among(self, slots: Sequence[int], slot: int) -> "Environment":
        """The place of the worker in a slot, if those in these slots are the run."""
        if slot not in slots:
            raise PeerLostError("this rank was taken for lost, and the others have gone on without it")
        rank, size = slots.index(slot), len(slots)
        return replace(self, rank=rank, world_size=size, local_rank=rank, local_world_size=size)


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Reads the place of this process from environment variables."""
    env = os.environ if variables is None else variables
    if "RANK" in env and "WORLD_SIZE" in env:
        # Our launcher sets torchrun's variables as well, for scripts that read them.
        launcher = "samestep" if WORKER_VARIABLE in env else "other"
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env and launcher == "other" else launcher
        return _checked(env, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), launcher)
    # The MPI starters come first: inside a Slurm job they start through srun, whose variables then count their daemons.
    if "OMPI_COMM_WORLD_RANK" in env:
        ranks = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        return _checked(env, tuple(f"OMPI_COMM_WORLD_{name}" for name in ranks), "mpi")
    # MPICH and Intel MPI; then the starters of some supercomputers.
    for local in (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")):
        if "PMI_RANK" in env and "PMI_SIZE" in env and local[0] in env:
            return _checked(env, ("PMI_RANK", "PMI_SIZE", *local), "mpi")
    # Only in a step (srun) of several tasks: a batch script itself runs once, with the variables of the whole job.
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
        return _checked(env, names, "slurm")
    # A lone WORLD_SIZE=1 is common in containers, and harmless.
    if _number(env, "WORLD_SIZE", 1) > 1 or _number(env, "RANK", 0) > 0:
        missing = "RANK" if "WORLD_SIZE" in env else "WORLD_SIZE"
        raise UsageError(f"the environment variable {missing} is not set; RANK and WORLD_SIZE are set together or not")
    return Environment()


def _checked(env: Mapping[str, str], names: Sequence[str], launcher: str) -> Environment:
    """The environment, from the launcher's names of rank, world size, local rank and local world size."""
    rank, world_size = _number(env, names[0]), _number(env, names[1])
    if not 0 <= rank < world_size:
        raise UsageError(f"got {names[0]}={rank} and {names[1]}={world_size}; the rank must be below the world size")
    local_world_size = _slurm_tasks_here(env) if launcher == "slurm" else None
    if local_world_size is None:
        local_world_size = _number(env, names[3], world_size)
    if not 1 <= local_world_size <= world_size:
        raise UsageError(f"got {names[3]}={local_world_size} and {names[1]}={world_size}; needed: 1 to {world_size}")
    local_rank = _number(env, names[2], rank % local_world_size)
    if local_rank >= local_world_size:
        raise UsageError(f"got {names[2]}={local_rank} and {names[3]}={local_world_size}; the first must be lower")
    port = _number(env, "MASTER_PORT", _shared_port(env, launcher) if launcher in ("slurm", "mpi") else 0)
    address = env.get("MASTER_ADDR") or (_first_slurm_host(env) if launcher == "slurm" else None) or LOOPBACK
    if world_size > 1 and port == 0:
        raise UsageError(f"got {names[1]}={world_size} but no MASTER_PORT; use torchrun or samestep run, or set it")
    check_number("MASTER_PORT", port, high=MAX_PORT, option="")
    # Without it each node would host a store of its own, and all would wait until the timeout.
    if not env.get("MASTER_ADDR") and launcher in ("mpi", "other") and local_world_size < world_size:
        raise UsageError("a run over several nodes needs MASTER_ADDR: set it to the first node's address")
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=address,
        master_port=port,
        launcher=launcher,
        store_is_kept=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        transport=chosen_transport(env),
        nodes=chosen_nodes(env),
        settings=read_settings(env),
    )


def chosen_transport(variables: Mapping[str, str] | None = None) -> str:
    """The value of SAMESTEP_TRANSPORT, one of `TRANSPORTS`.

    "auto" is memory between ranks of one host, NCCL between GPUs, else gloo; "gloo" and "shared" (memory) allow nothing
    else.
    """
    return _choice(variables, TRANSPORT_VARIABLE, TRANSPORTS)


def chosen_nodes(variables: Mapping[str, str] | None = None) -> str:
    """The value of SAMESTEP_NODES, one of `NODES`; "auto" sums within each node first, then between nodes."""
    return _choice(variables, NODES_VARIABLE, NODES)


def chosen_audit(variables: Mapping[str, str] | None = None) -> str | None:
    """SAMESTEP_AUDIT, as `parse_audit` reads it; None without an audit."""
    text = (os.environ if variables is None else variables).get(AUDIT_VARIABLE) or None
    if text is not None:
        parse_audit(text, AUDIT_VARIABLE)
    return text


def parse_audit(value: int | str, name: str = "audit") -> tuple[int, str]:
    """How often steps are audited, and what follows: of 10 or "10:warn"; the first of `AUDIT_ACTIONS` by default."""
    every, colon, action = str(value).partition(":")
    if not every.isdecimal() or int(every) < 1 or (colon and action not in AUDIT_ACTIONS):
        raise UsageError(
            f"got {name}={value!r}; needed: a number of steps, 1 or more, alone or with what follows, "
            f"{', '.join(AUDIT_ACTIONS)}: 10 or '10:warn' (--audit)"
        )
    return int(every), action or AUDIT_ACTIONS[0]


def torchrun_defaults(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The defaults of torchrun's options, by their names with underscores, from PET_NNODES, PET_NODE_RANK and so on.

    Kubeflow's runtime for PyTorch sets them; torchrun reads them in `torch/distributed/argparse_util.py`.
    """
    env = os.environ if variables is None else variables
    return {name.lower(): env["PET_" + name] for name in TORCHRUN_OPTIONS if env.get("PET_" + name)}


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """An integer variable; the default if it is absent."""
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise UsageError(f"the environment variable {name} is {text!r}; it must be a number that is not negative")
    return int(text)


def _shared_port(env: Mapping[str, str], launcher: str) -> int:
    """A port that all ranks of one Slurm or MPI job derive alike, and other jobs most likely not.

    It comes from variables with one value for all ranks. MPICH has none, so two of its jobs on one machine need a
    MASTER_PORT each.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID") if launcher == "slurm" else ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    key = "/".join(env.get(name, "") for name in names)
    # Above the ports that need privileges, below those that systems give to clients (32,768 on Linux).
    return 20_000 + zlib.crc32(key.encode()) % 12_000


def _slurm_tasks_here(env: Mapping[str, str]) -> int | None:
    """The tasks of this step on this node: of `4(x2),1` for nodes 0 to 2, the one at SLURM_NODEID; None if not said."""
    counts: list[int] = []
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(tasks)] * int(repeats or 1)
    node = _number(env, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else None


def _first_slurm_host(env: Mapping[str, str]) -> str | None:
    """The first host of a Slurm node list: `gpu[03-05,9],x1` gives `gpu03`, `rack[1-2]n[4,7]` gives `rack1n4`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", env.get("SLURM_STEP_NODELIST", ""))
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group()) if first else None


def _choice(variables: Mapping[str, str] | None, name: str, choices: Sequence[str]) -> str:
    """The value of a variable, one of some choices; "auto" if it is absent or empty."""
    choice = (os.environ if variables is None else variables).get(name) or "auto"
    check_choice(name, choice, choices, option="")
    return choice
