"""Files: only rank 0 writes, whoever reads what the script wrote waits for it, and questions get rank 0's answers.

- `open`, `io.open`, `Path.open`, `gzip.open` … for writing, `os.open`: rank 0 opens the file, the others one that keeps
  nothing; with "+" a private copy that can be read back.
- `Path.write_text`, `write_bytes`, `touch`, `pickle.dump`, `json.dump`, `csv`, pandas, PIL, `logging.FileHandler`,
  `SummaryWriter`: write through `open`, so the same.
- `os.mkdir`, `makedirs`, `remove`, `unlink`, `rename`, `replace`, `rmdir`, `removedirs`, `symlink`, `link`, `truncate`,
  `chmod`, `utime` …, and `pathlib`'s: rank 0 does it; the result, or the error, is everybody's.
- `shutil.rmtree`, `copy`, `copytree`, `move`, `make_archive`, `unpack_archive`, `ZipFile.extractall`,
  `TarFile.extractall`: the same.
- `torch.save`, `torch.jit.save`, `numpy.save`, `savez`, `savetxt`, safetensors' `save_file`, matplotlib's `savefig`,
  `cv2.imwrite`: the same, where a path is given.
- `tempfile.mkdtemp`, `TemporaryDirectory`, `mkstemp`, `NamedTemporaryFile`: rank 0's path; those that a library makes
  are each process's own.
- Reading what was written, by `open`, `torch.load`, `numpy.load`, safetensors' `load_file`; `os.chdir`: waits until
  rank 0 is there too, and takes rank 0's path where names differ (a clock in them).
- `os.path.exists`, `isfile`, `getsize` …, `os.stat`, `listdir`, `scandir`, `walk`, `glob.glob`, `Path.glob`, `iterdir`:
  answered as on rank 0, order and errors included.
- `subprocess.run`, `call`, `check_call`, `check_output`, `getoutput`, `os.system`, `os.popen` for reading,
  `os.get_terminal_size`, `input`: rank 0 does it; the result is everybody's. `subprocess.Popen` stays: each rank starts
  its own.
- `h5py.File`: for writing, rank 0 opens the file, the others a private copy; for reading, as `open`.
- `urlretrieve`, `torch.hub`, torchvision's data sets with `download=True`: fetched once a machine, also for libraries.

A line that asks very many questions between two wrapped forwards (it goes through a data set) is answered by each rank
for itself after a while. What a library writes on its own account rank 0 writes alone, and nobody waits; hidden folders
in the home, compilers' caches and temporary folders of libraries are left alone. Other threads, worker processes of a
DataLoader that are forked, and chunks of a wrapped forward write on rank 0 only. All ranks must see one file system.

Not covered: writers in C that open files themselves (pyarrow, sqlite3), and processes that are spawned.
"""

from types import ModuleType
from typing import Any

from samestep.scripts.adoption import Adoption
from samestep.scripts.files import commands, downloads, opening, reads, temporary, writes
from samestep.scripts.files.imports import PatchesOf, late_patches
from samestep.scripts.files.rank0_files import Rank0Files
from samestep.scripts.files.reads import loading
from samestep.scripts.files.writes import Write, writing
from samestep.scripts.patch import Patch


def patches(adoption: Adoption) -> list[Patch]:
    """Everything in the table above; nothing where there is one rank. All ranks call it."""
    if adoption.world_size == 1:
        return []
    rank0_files = Rank0Files(adoption)
    turns = downloads.make_turns(rank0_files)
    return [
        *opening.patches(rank0_files),
        *writes.patches(rank0_files),
        *temporary.patches(rank0_files),
        *reads.patches(rank0_files),
        *commands.patches(rank0_files),
        *downloads.patches(rank0_files, turns),
        *late_patches(_late(rank0_files, turns)),
    ]


def _late(rank0_files: Rank0Files, turns: downloads.Turns) -> dict[str, PatchesOf]:
    """What is changed in libraries that the script may import."""
    tensors = ("save_file", 1), ("save_model", 1)
    return {
        "safetensors.torch": _writers_and_loaders(rank0_files, tensors, ("load_file",)),
        "safetensors.numpy": _writers_and_loaders(rank0_files, tensors[:1], ("load_file",)),
        "matplotlib.figure": lambda module: _writers(rank0_files, module.Figure, (("savefig", 1),), "fname"),
        "matplotlib.pyplot": lambda module: _writers(rank0_files, module, (("savefig", 0),), "fname"),
        "h5py": opening.h5py_files(rank0_files),
        "cv2": _writers_and_loaders(rank0_files, (("imwrite", 0),), ("imread",), True),
        "torchvision.datasets.utils": downloads.torchvision_utils(rank0_files, turns),
        "torchvision.datasets": downloads.torchvision_datasets(rank0_files, turns),
    }


def _writers_and_loaders(
    rank0_files: Rank0Files, writers: tuple[tuple[str, int], ...], loaders: tuple[str, ...], result: Any = None
) -> PatchesOf:
    """The patches of a module's functions that write to, and that load from, a file named `filename`."""

    def patches_of(module: ModuleType) -> list[Patch]:
        found = _writers(rank0_files, module, writers, "filename", result)
        return [*found, *(loading(rank0_files, module, name) for name in loaders)]

    return patches_of


def _writers(
    rank0_files: Rank0Files, owner: Any, writers: tuple[tuple[str, int], ...], target: str, result: Any = None
) -> list[Patch]:
    return [
        writing(rank0_files, Write(owner, name, ((place, target),), lambda args, kwargs: result, leaves=True))
        for name, place in writers
    ]
