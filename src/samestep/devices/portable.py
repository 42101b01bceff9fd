"""Portable CPU kernels: one path of each library on every x86-64 CPU with AVX2 and FMA. Torch-free.

ATen, oneDNN and MKL read their variables when they first compute, NumPy when it is imported.
"""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from samestep.checks import check_choice
from samestep.errors import UsageError

PORTABLE_VARIABLE = "SAMESTEP_PORTABLE"
CAPS: Mapping[str, str] = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",  # under every other value MKL asks for the maker of the CPU
    "OPENBLAS_CORETYPE": "Haswell",
    # Names of all versions of NumPy, which passes over those that are not its own.
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
}
CAPPED: set[int] = set()  # the id of this process, if it got the caps as it ran, before it imported NumPy
NEEDED = ("avx2", "fma")
ABOUT = Path("/proc/cpuinfo")


def asks_for_portable(variables: Mapping[str, str] | None = None) -> bool | None:
    """The value of SAMESTEP_PORTABLE, 1 or 0; None if it is absent or empty."""
    text = (os.environ if variables is None else variables).get(PORTABLE_VARIABLE) or None
    if text is not None:
        check_choice(PORTABLE_VARIABLE, text, ("0", "1"), option="")
    return None if text is None else text == "1"


def why_not_portable(device_kind: str, about: Path = ABOUT) -> str | None:
    """The reason why kernels cannot be portable here, as part of a sentence; None if they can."""
    if device_kind != "cpu":
        return f"it caps the kernels of CPUs, and the devices are {device_kind}'s (--devices cpu:N takes CPU workers)"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is for x86-64 CPUs under Linux, and this is {platform.machine()} under {sys.platform}"
    lines = about.read_text(encoding="utf-8", errors="replace").splitlines() if about.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    missing = [name for name in NEEDED if name not in flags]
    return f"this CPU has no {' and no '.join(missing)}" if missing else None


def check_portable(device_kind: str, about: Path = ABOUT) -> None:
    """Raises a `UsageError` where kernels cannot be portable."""
    if (reason := why_not_portable(device_kind, about)) is not None:
        raise UsageError(f"got --portable (SAMESTEP_PORTABLE=1), but {reason}; leave it out (--no-portable)")


def chosen_portable(device_kind: str, asked: bool | None, default: bool = False) -> bool | None:
    """Whether kernels are to be portable: by an option, else by SAMESTEP_PORTABLE, else, where they can be, by default.

    None if nothing says so. `portable_variables` has the check.
    """
    asked = asks_for_portable() if asked is None else asked
    return True if asked is None and default and why_not_portable(device_kind) is None else asked


def portable_variables(device_kind: str, asked: bool | None) -> dict[str, str]:
    """The variables of a process whose kernels are to be portable, before it imports NumPy; none if they are not."""
    if not asked:
        return {}
    check_portable(device_kind)
    return {PORTABLE_VARIABLE: "1", **CAPS}
