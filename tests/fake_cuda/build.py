"""Builds the fake CUDA device, once for each torch and source: `make fake-cuda`."""

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
BESIDE_CUDA = "the fake CUDA device takes the place of CUDA: its tests need a build of torch without it"
NO_CUDA = "cuda: Optional[str] = None"  # in torch's version.py


def is_beside_cuda() -> bool:
    """Whether the installed torch is a build for CUDA, which registers itself where the fake device does."""
    spec = importlib.util.find_spec("torch")  # a Python without torch has no build
    return spec is not None and NO_CUDA not in _version_file(spec.origin).read_text(encoding="utf-8")


def _version_file(torch_file: str | None) -> Path:
    """The version.py of torch itself."""
    assert torch_file is not None
    return Path(torch_file).with_name("version.py")


def library() -> Path:
    """The library for this torch, Python and source, which may not be there yet; loads no torch."""
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__)]):
        digest.update(path.read_bytes())
    version = importlib.metadata.version("torch")
    name = f"torch-{version}-py{sys.version_info.major}{sys.version_info.minor}-{digest.hexdigest()[:12]}"
    return Path(sys.prefix) / "fake_cuda" / name / "_fake_cuda.so"


def missing() -> str:
    """What is needed for a build and not there; empty if nothing is."""
    if shutil.which("g++") is None:
        return "the fake CUDA device needs a C++ compiler: install g++ (apt install g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the fake CUDA device needs Python's headers: install python3-dev (apt install python3-dev)"
    return ""


def build() -> Path:
    """Compiles the sources that are not compiled yet, two at once, and links them."""
    target = library()
    if target.exists():
        return target
    if problem := missing():
        raise SystemExit(problem)
    import torch
    from torch.utils.cpp_extension import include_paths

    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    paths = [*include_paths(), sysconfig.get_path("include")]
    abi = int(torch.compiled_with_cxx11_abi())
    flags = [
        "-O1",
        "-g0",
        "-fPIC",
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        "-DTORCH_EXTENSION_NAME=_fake_cuda",
    ]
    sources = sorted(HERE.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    flags += ["-DWITH_NCCL"] if any(path.stem == "nccl" for path in sources) else []

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        _run(["g++", *flags, *(f"-I{path}" for path in paths), "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    libraries = Path(torch.__file__).parent / "lib"
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")]
    (folder / "torch").mkdir(exist_ok=True)
    version = _version_file(torch.__file__).read_text(encoding="utf-8").replace(NO_CUDA, "cuda: Optional[str] = '12.8'")
    (folder / "torch" / "version.py").write_text(version, encoding="utf-8")
    half = target.with_suffix(".half")
    _run(["g++", "-shared", "-o", str(half), *map(str, objects), *links])
    half.rename(target)  # at once: processes that look meanwhile find nothing or all of it
    for made in objects:
        made.unlink()
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed on {command[-3]}:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    start = time.monotonic()
    print(BESIDE_CUDA if is_beside_cuda() else f"{build()} ({time.monotonic() - start:.0f} s)")
