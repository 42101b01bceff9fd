"""Who we are among the processes: the one place where rank variables are read.

torchrun and our own launcher set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; Slurm's srun and the MPI
starters (Open MPI, MPICH, Intel MPI) have names of their own. Without any of them this is a single process.
"""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import UsageError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Environment:
    """One process's place in the world.

    Attributes:
        rank: 0 … world_size - 1.
        world_size: number of ranks.
        local_rank: rank on this node.
        local_world_size: ranks on this node.
        master_addr: where rank 0 (or the launcher) keeps the store.
        master_port: its port.
        launcher: who started us: "none", "samestep", "torchrun", "slurm", "mpi" or "other".
        device_kind: the kind of device that our launcher chose ("cpu", "cuda", …); None if it is not said.
        num_threads: CPU threads a worker that our launcher chose; None if it is not said.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = LOOPBACK
    master_port: int = 0
    launcher: str = "none"
    device_kind: str | None = None
    num_threads: int | None = None


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Reads the process's place from its environment variables.

    Args:
        variables: the variables; `os.environ` if None.

    Raises:
        UsageError: they are incomplete or contradict each other.
    """
    env = os.environ if variables is None else variables
    if "RANK" in env and "WORLD_SIZE" in env:
        started_by = "samestep" if "SAMESTEP_DEVICE_KIND" in env else "other"
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return _checked(
            env, names, "torchrun" if "TORCHELASTIC_RUN_ID" in env and started_by == "other" else started_by
        )
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _checked(
            env, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"), "slurm"
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        prefix = "OMPI_COMM_WORLD_"
        names = (prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE")
        return _checked(env, names, "mpi")
    if "PMI_RANK" in env and "PMI_SIZE" in env:
        return _checked(env, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "mpi")
    return Environment()


def _checked(env: Mapping[str, str], names: tuple[str, str, str, str], launcher: str) -> Environment:
    """Builds the environment from the launcher's four variable names."""
    rank, world_size = _number(env, names[0]), _number(env, names[1])
    if not 0 <= rank < world_size:
        raise UsageError(f"got {names[0]}={rank} and {names[1]}={world_size}; the rank must be below the world size")
    local_world_size = _number(env, names[3], world_size)
    local_rank = _number(env, names[2], rank % local_world_size)
    default_port = _shared_port(env) if launcher in ("slurm", "mpi") else 0
    port = _number(env, "MASTER_PORT", default_port)
    address = env.get("MASTER_ADDR") or _first_slurm_host(env) or LOOPBACK
    if world_size > 1 and port == 0:
        raise UsageError(
            f"got {names[1]}={world_size} but no MASTER_PORT; start with torchrun or samestep run, or set it"
        )
    if "MASTER_ADDR" not in env and launcher == "mpi" and local_world_size < world_size:
        raise UsageError("mpirun over several nodes needs MASTER_ADDR: set it to the first node's address")
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=address,
        master_port=port,
        launcher=launcher,
        device_kind=env.get("SAMESTEP_DEVICE_KIND"),
        num_threads=_number(env, "SAMESTEP_THREADS", 0) or None,
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """An integer variable; its default where it is absent."""
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdigit():
        raise UsageError(f"the environment variable {name} is {text!r}; it must be a number that is not negative")
    return int(text)


def _shared_port(env: Mapping[str, str]) -> int:
    """A port that all ranks of one Slurm or MPI job derive alike, and other jobs most likely not."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_ID", "HYDI_CONTROL_FD")
    key = "/".join(env.get(name, "") for name in names)
    return 20_000 + zlib.crc32(key.encode()) % 12_000


def _first_slurm_host(env: Mapping[str, str]) -> str | None:
    """The first host of a Slurm node list: `gpu[03-05,9],x1` gives `gpu03`."""
    hosts = env.get("SLURM_STEP_NODELIST")
    if not hosts:
        return None
    head, bracket, rest = hosts.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]
