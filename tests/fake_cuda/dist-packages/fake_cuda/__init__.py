"""CUDA devices in host memory, for tests: streams that run late and in order, events, a caching allocator, NCCL.

With this folder's parent on PYTHONPATH, a Python process has as many GPUs as FAKE_CUDA_DEVICES says. Further variables:

    FAKE_CUDA_ORDER       which stream goes on where several could: "late" (default: only what the host waits
                          for), "early" (everything else first), "random" (by FAKE_CUDA_SEED)
    FAKE_CUDA_LATE_US     the time in μs before work begins that nobody waits for (20,000)
    FAKE_CUDA_ALIEN       0: kernels round as those of the host where IEEE 754 leaves it open, too (rounding.cpp)
    FAKE_CUDA_MEMORY_MIB  the memory of a GPU (81,920)
    FAKE_NCCL_FAULT       "KIND RANK N": that rank's N-th all-to-all or send fails; "abort RANK N": its
                          aborts do not return; nccl.cpp has all kinds
    FAKE_CUDA_PINNED_MIB  how much of the host's memory can be pinned (no limit)
    FAKE_CUDA_QUEUE       the launches that a GPU takes before it has executed them (1,024)
    FAKE_CUDA_NAME        the model of the GPUs ("Fake GPU")
    FAKE_CUDA_SMS         the multiprocessors of the GPUs, "132,66,…" (132 each)
    FAKE_CUDA_COMPUTE_MODE  0, or 3 (EXCLUSIVE_PROCESS), of which the management library tells alone
    FAKE_CUDA_NUMA        anything, for cores in two groups, each near to half of the GPUs
    FAKE_CUDA_NVML        0 for machines without the management library, on which the driver itself answers

`counts`, `host_waits`, `held_up` and `queued` show what a test may demand.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def install() -> None:
    """Has torch find the fake GPUs as soon as it is imported; nothing for a build of torch with CUDA of its own."""
    if not _build.is_beside_cuda():
        sys.meta_path.insert(0, _Finder())


def counts() -> tuple[int, int]:
    """How often the host has waited for a device so far, and how many kernels were launched."""
    from fake_cuda import cuda

    waits, launches = cuda.native.counts()
    return waits, launches


def held_up() -> int:
    """How often a launch has blocked the host so far, since 1,024 others were queued and not executed."""
    from fake_cuda import cuda

    number: int = cuda.native.held_up()
    return number


@contextmanager
def queued() -> Iterator[list[tuple[str, int, int, str]]]:
    """Collects what is queued: "launch", "record" or "wait"; device; stream; the kernel's name or the mark's number."""
    from fake_cuda import cuda

    entries: list[tuple[str, int, int, str]] = []
    cuda.native.trace(begins=True)
    try:
        yield entries
    finally:
        entries += cuda.native.trace(begins=False)


@contextmanager
def host_waits(within: str = "/samestep/") -> Iterator[list[str]]:
    """Collects each wait of the host for a device: its kind, and the innermost line in a file with `within`."""
    from fake_cuda import cuda

    waits: list[str] = []

    def note(kind: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if within in frame.filename]
        place = f"{frames[-1].filename}:{frames[-1].lineno} {frames[-1].line}" if frames else "?"
        waits.append(f"{kind} at {place}")

    cuda.native.listen(note)
    try:
        yield waits
    finally:
        cuda.native.listen(None)


class _Finder(importlib.abc.MetaPathFinder):
    """Prepares torch's modules for CUDA before they are imported, and completes them afterwards."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that completes it; None for all other modules."""
        if name not in ("torch", "torch.cuda", "torch.distributed.distributed_c10d", "pynvml", "ctypes"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        if name == "torch":  # first the folder with the version.py of a build for CUDA
            assert spec.submodule_search_locations is not None
            spec.submodule_search_locations.insert(0, str(_build.library().parent / "torch"))
        elif name == "torch.cuda":
            from fake_cuda import cuda

            cuda.prepare()
            spec.loader = _Loader(spec.loader, cuda.complete)
        elif name in ("pynvml", "ctypes"):
            from fake_cuda import nvml

            complete = nvml.complete if name == "pynvml" else nvml.complete_ctypes
            spec.loader = _Loader(spec.loader, complete)
        else:
            from fake_cuda import nccl

            spec.loader = _Loader(spec.loader, nccl.complete)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, loader: importlib.machinery.SourceFileLoader, complete: Callable[[ModuleType], None]) -> None:
        super().__init__(loader.name, loader.path)
        self._complete = complete

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module, then completes it."""
        super().exec_module(module)
        self._complete(module)


def cannot_be() -> str:
    """A sentence if the installed torch is a build for CUDA; imports no torch."""
    return str(_build.BESIDE_CUDA) if _build.is_beside_cuda() else ""


def is_built() -> bool:
    """Whether the compiled half is there for the installed torch; imports no torch."""
    return bool(_build.library().exists())


def load_native() -> Any:
    """The compiled half; build.py makes it."""
    path = _build.library()
    if not is_built():
        raise ImportError(f"the fake CUDA device is not built for this torch ({path}): run make fake-cuda")
    loader = importlib.machinery.ExtensionFileLoader("_fake_cuda", str(path))
    spec = importlib.util.spec_from_loader("_fake_cuda", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _load_build() -> Any:
    """The script that compiles it, which lies outside of what is on the path."""
    spec = importlib.util.spec_from_file_location("fake_cuda_build", Path(__file__).parents[2] / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_build = _load_build()
