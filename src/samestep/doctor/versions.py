"""The versions: Python, torch, the driver and the libraries, and whether they fit together."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Sequence

from samestep.doctor.findings import Finding, bad, good, note
from samestep.doctor.health import Driver
from samestep.doctor.machine import TorchFacts

PYTHONS = ((3, 11), (3, 13))
TORCHES = ((2, 10), (2, 13))
ABORT_BUGS = ((2, 28, 3), (2, 28, 8))
"""NCCL releases in which giving up a communicator may hang."""
PACKAGES = ("numpy", "safetensors", "tensorboard", "triton")


def check_python(version: tuple[int, int]) -> Finding:
    """Python against what samestep is tested with."""
    found = f"{_dotted(version)} at {sys.executable}"
    if version < PYTHONS[0]:
        return bad("Python", found, f"needed: {_dotted(PYTHONS[0])} or newer")
    if version > PYTHONS[1]:
        return note("Python", found, f"newer than {_dotted(PYTHONS[1])}, the newest that samestep is tested with")
    return good("Python", found)


def check_torch(torch: TorchFacts) -> Finding:
    """The torch that is installed against what samestep is tested with."""
    if torch.version is None:
        return bad("torch", f"cannot be imported: {torch.problem}", "install it anew: https://pytorch.org/get-started")
    if not torch.gloo:
        return bad("torch", f"{torch.version}, built without gloo", "install a build with torch.distributed and gloo")
    built_for = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "the CPU"
    found = f"{torch.version}, built for {built_for}"
    version = _numbers(torch.version)[:2]
    if version < TORCHES[0]:
        return bad("torch", found, f"needed: {_dotted(TORCHES[0])} or newer")
    if version > TORCHES[1]:
        return note("torch", found, f"newer than {_dotted(TORCHES[1])}, the newest that samestep is tested with")
    return good("torch", found)


def check_driver(torch: TorchFacts, driver: Driver) -> list[Finding]:
    """The CUDA that torch was built with against what the NVIDIA driver supports.

    A driver runs all CUDA versions up to its own; of its own major version also newer ones, without what is new in
    them (NVIDIA, CUDA compatibility, "Minor version compatibility").
    """
    if driver.version is None:
        if torch.cuda is None:
            return []
        advice = "on a machine without an NVIDIA GPU this is as it should be; else install the driver"
        return [note("driver", f"none answers, and torch was built for CUDA {torch.cuda}", advice)]
    supported = "" if driver.cuda is None else f", up to CUDA {_dotted(driver.cuda)}"
    found = f"NVIDIA {driver.version}{supported}"
    if torch.cuda is None or driver.cuda is None:
        return [good("driver", found)]
    built = _numbers(torch.cuda)[:2]
    if built[:1] > driver.cuda[:1]:
        advice = f"install a newer driver, or a torch built for CUDA {driver.cuda[0]} or older"
        return [bad("driver", f"{found}; torch needs CUDA {torch.cuda}", advice)]
    if built > driver.cuda:
        advice = "it works by minor version compatibility; a newer driver is safer"
        return [note("driver", f"{found}; torch was built with CUDA {torch.cuda}", advice)]
    return [good("driver", found)]


def check_archs(capabilities: Sequence[tuple[int, int]], archs: Sequence[str]) -> list[Finding]:
    """The GPUs' compute capabilities against what torch's kernels were compiled for."""
    if not capabilities or not any(arch.startswith(("sm_", "compute_")) for arch in archs):
        return []
    lacking = [index for index, capability in enumerate(capabilities) if not _runs_on(capability, archs)]
    if lacking:
        named = ", ".join(f"cuda:{index} has {_dotted(capabilities[index])}" for index in lacking)
        advice = "install a torch built for these GPUs, or leave them out (--devices)"
        return [bad("compute capability", f"{named}; torch was compiled for {', '.join(archs)}", advice)]
    found = ", ".join(sorted({_dotted(capability) for capability in capabilities}))
    if len(set(capabilities)) > 1:
        advice = "different GPUs round differently: bits are equal between devices of one kind"
        return [note("compute capability", found, advice)]
    return [good("compute capability", found)]


def _runs_on(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Whether code of one of the architectures runs on a GPU.

    Machine code (sm_86) runs on the same major and at least that minor version, PTX (compute_80) on all from there on;
    what has a letter (sm_90a) on that very one. Source: CUDA C++ programming guide, "Application compatibility".
    """
    major, minor = capability
    for arch in archs:
        form, _, digits = arch.partition("_")
        exact = digits.rstrip("af") != digits
        number = int(digits.rstrip("af") or 0)
        built = number // 10, number % 10
        if exact and built == capability:
            return True
        if not exact and ((form == "compute" and built <= capability) or (built[0] == major and built[1] <= minor)):
            return True
    return False


def check_nccl(version: tuple[int, ...] | None) -> list[Finding]:
    """NCCL against releases with known faults."""
    if version is None:
        return []
    found = _dotted(version)
    if ABORT_BUGS[0] <= version <= ABORT_BUGS[1]:
        advice = "giving up a connection may hang: when a rank is lost others may, too; use 2.28.9 or newer"
        return [note("NCCL", found, advice)]
    return [good("NCCL", found)]


def check_packages(torch: TorchFacts, version_of: Callable[[str], str | None] | None = None) -> list[Finding]:
    """The libraries beside torch.

    Args:
        torch: knows cuDNN.
        version_of: the version of an installed package; None where it is not installed.
    """
    version_of = version_of or installed_version
    versions = {name: version_of(name) for name in PACKAGES}
    missing = [name for name in PACKAGES[:3] if versions[name] is None]
    if missing:
        return [bad("libraries", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")]
    words = [f"{name} {version}" for name, version in versions.items() if version]
    if torch.cudnn:
        major, rest = divmod(torch.cudnn, 10_000)
        words.append(f"cuDNN {major}.{rest // 100}.{rest % 100}")
    findings = [good("libraries", ", ".join(words))]
    if torch.cuda and versions["triton"] is None:
        advice = "compile=True and the exchange's kernel need it: pip install triton"
        findings.append(note("Triton", "not installed", advice))
    return findings


def check_conflicts(distribution: str = "samestep") -> Finding:
    """Whether every requirement of samestep, and of what it requires, is met by what is installed."""
    from packaging.requirements import Requirement

    wrong: list[str] = []
    waiting, seen = [distribution], {distribution}
    while waiting:
        name = waiting.pop()
        for text in _requirements(name):
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            version = installed_version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{name} needs {requirement}, {version or 'nothing'} is installed")
            elif requirement.name not in seen:
                seen.add(requirement.name)
                waiting.append(requirement.name)
    if wrong:
        return bad("requirements", "; ".join(sorted(wrong)), "install what is needed: pip install --upgrade samestep")
    return good("requirements", f"all met by the {len(seen)} packages that are needed")


def _requirements(name: str) -> Iterable[str]:
    """What an installed package says that it needs."""
    try:
        return importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def installed_version(name: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cu130" gives (2, 13, 0)."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
