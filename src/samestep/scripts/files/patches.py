"""All patches of files: rank 0 alone writes, readers wait for it, and queries get the answers of rank 0.

- `open`, `io.open`, `Path.open`, `gzip.open` … for writing, `os.open`: rank 0 opens the file, the others one that keeps
  nothing; with "+" a private copy that can be read back.
- `Path.write_text`, `write_bytes`, `touch`, `pickle.dump`, `json.dump`, `csv`, pandas, PIL, `logging.FileHandler`,
  `SummaryWriter`: write through `open`, so the same.
- `os.mkdir`, `makedirs`, `remove`, `unlink`, `rename`, `replace`, `rmdir`, `removedirs`, `symlink`, `link`, `truncate`,
  `chmod`, `utime` …, and `pathlib`'s: rank 0 does it; all ranks get the result or the error.
- `shutil.rmtree`, `copy`, `copytree`, `move`, `make_archive`, `unpack_archive`, `ZipFile.extractall`,
  `TarFile.extractall`: the same.
- `torch.save`, `torch.jit.save`, `numpy.save`, `savez`, `savetxt`, safetensors' `save_file`, matplotlib's `savefig`,
  `cv2.imwrite`: the same, if a path is given.
- `tempfile.mkdtemp`, `TemporaryDirectory`, `mkstemp`, `NamedTemporaryFile`: rank 0's path; those that a library makes
  are each process's own.
- Reading a written file by `open`, `torch.load`, `numpy.load`, safetensors' `load_file`; `os.chdir`: waits until rank 0
  arrives too, and takes rank 0's path if names differ (a clock in them).
- `os.path.exists`, `isfile`, `getsize` …, `os.stat`, `listdir`, `scandir`, `walk`, `glob.glob`, `Path.glob`, `iterdir`:
  answered as on rank 0, order and errors included.
- `subprocess.run`, `call`, `check_call`, `check_output`, `getoutput`, `os.system`, `os.popen` for reading,
  `os.get_terminal_size`, `input`: rank 0 does it; all ranks get the result. `subprocess.Popen` stays: each rank starts
  its own.
- `h5py.File`: for writing, rank 0 opens the file, the others a private copy; for reading, as `open`.
- `urlretrieve`, `torch.hub`, torchvision's data sets with `download=True`: fetched once a machine, also for libraries.

A line with very many queries between two wrapped forwards (it goes through a data set) is answered by each rank for
itself after a while. Files that a library writes on its own account are written by rank 0, and no rank waits; hidden
folders in the home, compilers' caches and temporary folders of libraries are left alone. Other threads, forked worker
processes of a DataLoader, and chunks of a wrapped forward write on rank 0 only. All ranks must see one file system.

Not covered: writers in C that open files themselves (pyarrow, sqlite3), and processes that are spawned.
"""

from functools import partial
from types import ModuleType
from typing import Any

from samestep.scripts.adoption import Adoption
from samestep.scripts.files import downloads, opening, operations
from samestep.scripts.files.operations import Write, loading, writing
from samestep.scripts.files.rank0_files import Rank0Files
from samestep.scripts.patch import Patch, PatchesOf, late_patches


def patches(adoption: Adoption) -> list[Patch]:
    """All patches listed above; none if there is one rank. All ranks call it."""
    if adoption.world_size == 1:
        return []
    rank0_files = Rank0Files(adoption)
    lock = downloads.make_lock(rank0_files)
    return [
        *opening.patches(rank0_files),
        *operations.patches(rank0_files),
        *downloads.patches(rank0_files, lock),
        *late_patches(_late(rank0_files, lock)),
    ]


def _late(rank0_files: Rank0Files, lock: downloads.MachineLock) -> dict[str, PatchesOf]:
    """Patches of libraries that the script may import."""
    return {
        "safetensors.torch": partial(
            _writers_and_loaders, rank0_files, (("save_file", 1), ("save_model", 1)), ("load_file",)
        ),
        "safetensors.numpy": partial(_writers_and_loaders, rank0_files, (("save_file", 1),), ("load_file",)),
        "matplotlib.figure": lambda module: _writers(rank0_files, module.Figure, (("savefig", 1),), "fname"),
        "matplotlib.pyplot": lambda module: _writers(rank0_files, module, (("savefig", 0),), "fname"),
        "h5py": partial(opening.h5py_patches, rank0_files),
        "cv2": partial(_writers_and_loaders, rank0_files, (("imwrite", 0),), ("imread",), result=True),
        "torchvision.datasets.utils": partial(downloads.torchvision_utils, rank0_files, lock),
        "torchvision.datasets": partial(downloads.torchvision_datasets, rank0_files, lock),
    }


def _writers_and_loaders(
    rank0_files: Rank0Files,
    writers: tuple[tuple[str, int], ...],
    loaders: tuple[str, ...],
    module: ModuleType,
    result: Any = None,
) -> list[Patch]:
    """Patches of functions that write to (name, position of the path), or load from, a file named `filename`."""
    found = _writers(rank0_files, module, writers, "filename", result)
    return [*found, *(loading(rank0_files, module, name) for name in loaders)]


def _writers(
    rank0_files: Rank0Files, owner: Any, writers: tuple[tuple[str, int], ...], target: str, result: Any = None
) -> list[Patch]:
    return [
        writing(rank0_files, Write(owner, name, ((place, target),), lambda args, kwargs: result, leaves=True))
        for name, place in writers
    ]
