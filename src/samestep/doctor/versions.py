"""Versions of Python, torch, NCCL, the NVIDIA driver and libraries, and whether they fit together.

torch is asked in a child process: if it cannot be imported, or crashes, that is a result like any other.
`torch.utils.collect_env` has fewer of these facts, as text, and takes seconds.
"""

import importlib.metadata
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from samestep.doctor.result import Result, bad, good, note

NEWER = "newer than those that samestep is tested with"
PYTHON = (3, 13)
TORCHES = ((2, 10), (2, 13))
ABORT_BUGS = ((2, 28, 3), (2, 28, 8))
"""NCCL releases in which giving up a communicator may hang."""
LIBRARIES = ("numpy", "safetensors", "tensorboard", "triton")
PROBE_SECONDS = 180.0
PROBE = "import json; from samestep.doctor import versions; print(json.dumps(versions.probe_torch()))"


@dataclass(frozen=True)
class TorchFacts:
    """Facts about the installed torch; no version if it cannot be imported. `peers[i][j]`: GPU i can read GPU j."""

    version: str | None = None
    problem: str = ""
    build: str = "the CPU"
    gloo: bool = False
    nccl: Sequence[int] | None = None
    cudnn: int | None = None
    capabilities: Sequence[Sequence[int]] = ()
    peers: Sequence[Sequence[bool]] = ()


def probe_torch() -> dict[str, Any]:
    """The facts as the torch of this process reports them; runs in the child process."""
    import warnings

    import torch
    import torch.distributed as dist

    version, gloo = torch.__version__, dist.is_available() and dist.is_gloo_available()
    if torch.version.cuda is None and torch.version.hip is None:
        return asdict(TorchFacts(version, gloo=gloo))
    nccl = cudnn = None
    with suppress(RuntimeError, AttributeError, ImportError):
        nccl = torch.cuda.nccl.version()
    with suppress(RuntimeError):
        cudnn = torch.backends.cudnn.version()
    problem = ""
    with warnings.catch_warnings(record=True) as caught:  # torch warns of a driver that is too old
        gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if not gpus and caught:
        problem = str(caught[0].message).partition("\n")[0]
    for index in gpus:
        try:
            torch.ones(1, device=f"cuda:{index}").add_(1)  # fails if torch has no kernels for this GPU
            torch.cuda.synchronize(index)
        except RuntimeError as error:
            problem = problem or f"cuda:{index}: {str(error).partition(chr(10))[0]}"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    capabilities = [torch.cuda.get_device_capability(index) for index in gpus]
    peers = [[here == there or torch.cuda.can_device_access_peer(here, there) for there in gpus] for here in gpus]
    return asdict(TorchFacts(version, problem, build, gloo, nccl, cudnn, capabilities, peers))


def ask_torch(command: Sequence[str] = (sys.executable, "-P", "-c", PROBE)) -> TorchFacts:
    """The facts from a child process that runs `command`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        if done.returncode < 0:
            return TorchFacts(problem=f"importing it ends in {signal.Signals(-done.returncode).name}")
        return TorchFacts(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return TorchFacts(problem=f"importing it takes more than {PROBE_SECONDS:g} s")
    except OSError as error:
        return TorchFacts(problem=str(error))
    except (ValueError, IndexError):
        return TorchFacts(problem=done.stderr.strip()[-300:] or f"exit code {done.returncode}")


def check_python() -> Result:
    """Python; older releases cannot install samestep."""
    version = sys.version_info[:2]
    found = f"{_dotted(version)} at {sys.executable}"
    return note("Python", found, NEWER) if version > PYTHON else good("Python", found)


def check_torch(torch: TorchFacts) -> Result:
    """torch against the releases that samestep is tested with, and whether it can use the GPUs."""
    if torch.version is None:
        return bad("torch", f"cannot be imported: {torch.problem}", "install it anew: https://pytorch.org/get-started")
    if not torch.gloo:
        return bad("torch", f"{torch.version}, built without gloo", "install a build with torch.distributed and gloo")
    found = f"{torch.version}, built for {torch.build}"
    if torch.problem:
        advice = "install a torch built for these GPUs and this driver, a newer driver, or use other --devices"
        return bad("torch", f"{found}: {torch.problem}", advice)
    version = tuple(int(number) for number in torch.version.split(".")[:2])
    if version < TORCHES[0]:
        return bad("torch", found, f"needed: {_dotted(TORCHES[0])} or newer")
    return note("torch", found, NEWER) if version > TORCHES[1] else good("torch", found)


def check_libraries(torch: TorchFacts) -> Iterator[Result]:
    """NCCL and the other libraries beside torch."""
    if torch.nccl is not None and ABORT_BUGS[0] <= tuple(torch.nccl) <= ABORT_BUGS[1]:
        advice = "giving up a connection may hang: when a rank is lost others may, too; use 2.28.9 or newer"
        yield note("NCCL", _dotted(torch.nccl), advice)
    elif torch.nccl is not None:
        yield good("NCCL", _dotted(torch.nccl))
    versions = {}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if torch.cudnn:
        versions["cuDNN"] = _dotted((torch.cudnn // 10_000, torch.cudnn // 100 % 100, torch.cudnn % 100))
    yield good("libraries", ", ".join(f"{name} {version}" for name, version in versions.items()))
    if torch.build.startswith("CUDA") and "triton" not in versions:
        yield note("Triton", "not installed", "compile=True needs it: pip install triton")
    if len({tuple(capability) for capability in torch.capabilities}) > 1:
        found = ", ".join(map(_dotted, torch.capabilities))
        yield note("compute capability", found, "different GPUs round differently: bits are equal between equal ones")


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
