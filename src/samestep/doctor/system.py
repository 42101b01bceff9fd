"""The system: shared memory, limits, memory, processors, as they bear on so many ranks."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil

from samestep.comm.shm.segment import OUTBOX_SIZES, NoSegmentError, check_machine
from samestep.devices.device import counted, gib
from samestep.doctor.findings import Finding, bad, good, note

MIB, GIB = 2**20, 2**30
SHM_PER_RANK = (64 * MIB, 512 * MIB)
"""Bytes of /dev/shm a rank: below the first loading data by workers, or NCCL, ends in a bus error; below the second
it may. What counts are the batches under way and NCCL's buffers; a container has 64 MiB unless told otherwise."""
MEMORY_PER_RANK = (512 * MIB, 2 * GIB)
"""Bytes of host memory a rank: torch alone takes the first; a small training stays below the second."""
FILES = (256, 1024)
FILES_PER_RANK = 16
MEMLOCK_BYTES = 64 * MIB
SWAP_IN_USE = 0.25


def check_shm(free: int | None, total: int | None, num_ranks: int) -> Finding:
    """Whether /dev/shm is large enough for the workers that load data, and for NCCL.

    Args:
        free: its bytes; None where there is no /dev/shm.
        total: its size.
        num_ranks: how many use it.
    """
    name = "/dev/shm"
    if free is None or total is None:
        return note(name, "there is none", "load data without workers (--num-workers 0)")
    least, enough = (size * num_ranks for size in SHM_PER_RANK)
    found = f"{gib(free)} of {gib(total)} free, for {counted(num_ranks, 'rank')}"
    advice = f"make it larger, {gib(enough)} or more: docker run --shm-size={math.ceil(enough / GIB)}g (or --ipc=host)"
    if free < least:
        return bad(name, found, advice)
    return note(name, found, f"{advice}, if workers load the data") if free < enough else good(name, found)


def shm_space(path: str = "/dev/shm") -> tuple[int | None, int | None]:
    """Free bytes and size of /dev/shm; None where it is not there."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.free, usage.total


def check_segment(refusal: str, address_space: int | None, num_ranks: int) -> Finding:
    """Whether ranks of this host can share memory for their exchange.

    Args:
        refusal: why this machine cannot, empty if it can.
        address_space: the limit on a process's address space in bytes; None where there is none.
        num_ranks: how many ranks share it.
    """
    name = "shared memory"
    if refusal:
        return note(name, refusal, "ranks talk by gloo instead: right, and slower for small models")
    needed = OUTBOX_SIZES[-1] * num_ranks
    if address_space is not None and address_space < needed:
        advice = f"raise it above {gib(needed)} (ulimit -v unlimited); ranks talk by gloo until then"
        return note(name, f"the limit on address space is {gib(address_space)}", advice)
    return good(name, "ranks of this host can share memory")


def segment_refusal() -> str:
    """Why ranks of this machine cannot share memory; empty if they can."""
    try:
        check_machine()
    except NoSegmentError as error:
        return str(error)
    return ""


def read_limits() -> dict[str, int | None]:
    """The soft limits on this process by their names in `ulimit -a`; None for unlimited."""
    try:
        import resource
    except ImportError:  # Windows has none
        return {}
    names = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC", "core": "RLIMIT_CORE"}
    names["as"] = "RLIMIT_AS"
    limits: dict[str, int | None] = {}
    for name, constant in names.items():
        if (number := getattr(resource, constant, None)) is not None:
            soft = resource.getrlimit(number)[0]
            limits[name] = None if soft == resource.RLIM_INFINITY else soft
    return limits


def check_limits(limits: Mapping[str, int | None], num_ranks: int, *, on_gpus: bool) -> list[Finding]:
    """The limits on open files, locked memory, processes and core files.

    Args:
        limits: from `read_limits`.
        num_ranks: how many ranks there would be.
        on_gpus: whether they drive GPUs.
    """
    findings = []
    files = limits.get("nofile")
    needed = FILES[0] + FILES_PER_RANK * num_ranks
    if files is not None and files < needed:
        advice = f"ulimit -n 65536, or at least {needed}"
        findings.append(bad("open files", f"at most {files}, for {counted(num_ranks, 'rank')}", advice))
    elif files is not None and files < FILES[1]:
        findings.append(note("open files", f"at most {files}", "workers that load data need many: ulimit -n 65536"))
    locked = limits.get("memlock")
    if on_gpus and locked is not None and locked < MEMLOCK_BYTES:
        advice = "ulimit -l unlimited (docker run --ulimit memlock=-1): InfiniBand and pinned memory need it"
        findings.append(note("locked memory", f"at most {locked // 1024} KiB", advice))
    processes = limits.get("nproc")
    if processes is not None and processes < 64 * num_ranks:
        advice = "ulimit -u: it counts the threads of all your processes"
        findings.append(note("processes", f"at most {processes} of this user", advice))
    if not findings:
        shown = ", ".join(
            f"{name} {_limit(name, limits[name])}" for name in ("nofile", "memlock", "nproc", "core") if name in limits
        )
        findings.append(good("limits", shown or "none on this system"))
    return findings


def _limit(name: str, value: int | None) -> str:
    """A limit as people read it."""
    if value is None:
        return "unlimited"
    return f"{value // 1024:,} KiB" if name in ("memlock", "core") and value else f"{value:,}"


def cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), membership: str | None = None
) -> tuple[int | None, float | None]:
    """What the control group of this process allows: bytes of memory, and processors; None for no limit.

    Both versions of control groups are read; in version 2 the limits of all groups above count, too.

    Args:
        root: where they are mounted.
        membership: the text of /proc/self/cgroup; read if None.
    """
    if membership is None:
        try:
            membership = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        except OSError:
            membership = ""
    own = next((line[3:].strip("/") for line in membership.splitlines() if line.startswith("0::")), "")
    groups = [root / own, *(root / own).parents]
    groups = [group for group in groups if group == root or root in group.parents]
    memory = [_number(group / "memory.max") for group in groups] + [_number(root / "memory/memory.limit_in_bytes")]
    processors = [_quota(group / "cpu.max") for group in groups] + [_old_quota(root / "cpu")]
    most = psutil.virtual_memory().total
    return (
        min((size for size in memory if size is not None and size < most), default=None),
        min((share for share in processors if share is not None), default=None),
    )


def _words(path: Path) -> list[str]:
    """The words of a small file; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none ("max")."""
    words = _words(path)
    return int(words[0]) if words and words[0].isdecimal() else None


def _quota(path: Path) -> float | None:
    """How many processors "50000 100000" allows; None for "max 100000"."""
    words = _words(path)
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdecimal() else None


def _old_quota(folder: Path) -> float | None:
    """The same of version 1."""
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return None if quota is None or not period else quota / period


def check_memory(total: int, available: int, limit: int | None, num_ranks: int) -> Finding:
    """Host memory against what the ranks need.

    Args:
        total: what the machine has, in bytes.
        available: what is free for programs.
        limit: what the control group allows.
        num_ranks: how many ranks there would be.
    """
    usable = available if limit is None else min(available, limit)
    found = f"{gib(usable)} of {gib(total)} can be had, for {counted(num_ranks, 'rank')}"
    if limit is not None:
        found += f"; the container may use {gib(limit)}, whatever programs see"
    least, enough = (size * num_ranks for size in MEMORY_PER_RANK)
    if usable < least:
        return bad("memory", found, f"free some, or use fewer ranks: {gib(least)} are needed for torch alone")
    if usable < enough:
        return note("memory", found, "enough for small models; more ranks than that end in the out-of-memory killer")
    return note("memory", found, "what exceeds it is killed") if limit is not None else good("memory", found)


def check_processors(cores: int, quota: float | None, num_ranks: int) -> Finding:
    """Processors against ranks.

    Args:
        cores: those that this process may use.
        quota: how many the control group allows at a time.
        num_ranks: how many ranks there would be.
    """
    usable = cores if quota is None else min(cores, quota)
    found = f"{counted(cores, 'core')} for {counted(num_ranks, 'rank')}"
    if quota is not None and quota < cores:
        found += f"; the container may use {quota:g} of them at a time, whatever programs see"
    if num_ranks > usable:
        return note("processors", found, "ranks that share a core wait for each other; the bits are the same")
    return (
        note("processors", found, f"use no more threads than {quota:g}")
        if usable < cores
        else good("processors", found)
    )


def check_swap(total: int, used: int) -> Finding:
    """Whether memory is swapped out."""
    if total == 0:
        return good("swap", "none")
    found = f"{gib(used)} of {gib(total)} in use"
    if used > SWAP_IN_USE * total and used > GIB:
        return note("swap", found, "memory is short, or was: training that swaps crawls")
    return good("swap", found)


def swap_space() -> tuple[int, int]:
    """Size of the swap space, and bytes of it in use."""
    swap = psutil.swap_memory()
    return swap.total, swap.used
