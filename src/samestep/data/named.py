"""Image data by name, by folder, or embedded: MNIST, Fashion-MNIST, and small real tables that need no download.

Data that needs no download: the small real tables that ship with scikit-learn.

They are read from the installed package without importing it, because the import takes seconds in every worker, starts
thread pools and sets environment variables.

Addresses and md5 sums are those of the data sets' authors and of `torchvision.datasets.MNIST` and `FashionMNIST`.
"""

import fcntl
import hashlib
import http.client
import importlib.util
import os
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.data.readers import TEST, TRAIN, ByteWindows, find_pairs, read_bytes, read_image_label_pair, to_bytes
from samestep.data.tensors import TensorData, Transform, head_tail
from samestep.errors import DataError, UsageError
from samestep.extras import is_installed, missing

OLD_SIDE, NEW_SIDE = 8, 28
MAX_SIDE = 2**31
BRIGHTEST = 16


def digits() -> tuple[Tensor, Tensor]:
    """1,797 scanned digits, scaled from 8×8 to 28×28.

    Source: "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, as in
    `sklearn.datasets.load_digits`.
    """
    table = _read("digits.csv.gz", ",").astype(np.int64)
    images, labels = table[:, :-1].reshape(-1, OLD_SIDE, OLD_SIDE), table[:, -1]
    return _enlarge(images), torch.from_numpy(labels.copy())


def diabetes() -> tuple[Tensor, Tensor]:
    """442 patients: 10 measurements, and the progression of the disease a year later.

    Source: Efron, Hastie, Johnstone, Tibshirani, "Least angle regression", 2004, as in
    `sklearn.datasets.load_diabetes(scaled=False)`.
    """
    features, target = _read("diabetes_data_raw.csv.gz", None), _read("diabetes_target.csv.gz", None)
    return torch.from_numpy(features).float(), torch.from_numpy(target).float().unsqueeze(1)


def _read(name: str, delimiter: str | None) -> NDArray[np.float64]:
    spec = importlib.util.find_spec("sklearn") if is_installed("sklearn") else None
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"{missing('sklearn', 'the embedded data')}, or give other data by --data")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / name
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such file; the embedded data needs another version of scikit-learn, tested is 1.9: "
            "or give other data by --data"
        )
    return np.loadtxt(path, delimiter=delimiter)


def _enlarge(images: NDArray[np.int64]) -> Tensor:
    """Bilinear interpolation of N×8×8 values in 0…16 to N×1×28×28 bytes, as with `align_corners=False`.

    In whole numbers: output row i lies at (4i − 5)/14 input rows, so all weights are 14ths and all bytes exact, on
    every machine and with every version.
    """
    weights = np.zeros((NEW_SIDE, OLD_SIDE), dtype=np.int64)
    for row in range(NEW_SIDE):
        low, part = divmod(min(max(4 * row - 5, 0), 14 * (OLD_SIDE - 1)), 14)
        weights[row, low] += 14 - part
        weights[row, min(low + 1, OLD_SIDE - 1)] += part
    sums = weights @ images @ weights.T
    full = BRIGHTEST * 14 * 14
    return torch.from_numpy(((2 * 255 * sums + full) // (2 * full)).astype(np.uint8)).unsqueeze(1)


TRAIN_FRACTION = 0.8
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Download:
    """A data set that is downloaded."""

    noun: str  # of its images, for descriptions
    mirrors: tuple[str, ...]  # address prefixes, tried in this order
    md5: dict[str, str]  # of each file, by name


DOWNLOADS = {
    "mnist": Download(
        "handwritten digits",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": Download(
        "pictures of clothes",
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}
NAMES = ("digits", *DOWNLOADS)


def bytes_to_unit(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Scales a batch `(x, y)` of uint8 images to float32 in 0…1."""
    x, y = batch
    return x.float() / 255, y


def image_data(
    source: str | None = None, transform: Transform = bytes_to_unit, *, sides: range = range(1, MAX_SIDE + 1)
) -> tuple[TensorData, TensorData, str]:
    """Grey images in 10 classes, as bytes: the training set, the test set and a description.

    Args:
        source: "digits", "mnist" or "fashion-mnist", the last two downloaded once, or a folder of IDX files.
        transform: of a batch `(x, y)` of uint8 `[N, 1, height, width]` and labels, on its device.
        sides: the heights and widths that the model takes.

    Raises:
        UsageError: neither a name nor a folder.
        DataError: the files are damaged, or cannot be downloaded, or the images have another size.
    """
    name = "digits" if source is None else source
    if name == "digits":
        noun, (train, test) = "scans", head_tail(TensorData(digits(), transform), TRAIN_FRACTION)
    else:
        noun, folder = "images", Path(name)
        if name in DOWNLOADS:
            download = DOWNLOADS[name]
            noun, folder = download.noun, cache_folder() / name
            for file, md5 in download.md5.items():
                fetch([mirror + file for mirror in download.mirrors], folder / file, md5)
        elif not folder.is_dir():
            raise UsageError(f"got --data {name}; needed: {', '.join(NAMES)} or a folder of IDX files")
        pairs = {part: read_image_label_pair(*paths, transform=transform) for part, paths in find_pairs(folder).items()}
        if len(pairs) == 2:
            train, test = pairs[TRAIN], pairs[TEST]
        else:
            train, test = head_tail(next(iter(pairs.values())), TRAIN_FRACTION)
        name = name if name in DOWNLOADS else folder.resolve().name
    about = _describe(name, noun, train, test)
    for part in (train, test):
        height, width = part.tensors[0].shape[-2:]
        if height not in sides or width not in sides:
            needed = f"{sides[-1]} x {sides[-1]}" if len(sides) == 1 else f"at most {sides[-1]} x {sides[-1]}"
            raise DataError(f"{about}: images of {height} x {width} pixels; the model takes {needed}")
    return train, test, about


def text_data(file: str | PathLike[str] | None, context: int) -> tuple[ByteWindows, ByteWindows, str]:
    """A text's bytes in windows: the first 90 % to train, the rest to test, and a description.

    Args:
        file: of any kind; None for the language reference that is part of CPython, which differs between its versions.
        context: bytes of a window.

    Raises:
        DataError: the file cannot be read, or is too short.
    """
    if file is None:
        from pydoc_data.topics import topics

        name, text = "Python's language reference", to_bytes("\n".join(topics[key] for key in sorted(topics)).encode())
    else:
        name, text = Path(file).name, read_bytes(file)
    if len(text) < 20:
        raise DataError(f"{name}: {len(text)} bytes are too short a text; at least 20 are needed")
    cut = len(text) - len(text) // 10
    train, test = ByteWindows(text[:cut], context), ByteWindows(text[cut:], context)
    about = f"{name}: {len(text):,} bytes ({len(train):,} windows of {context} train, {len(test):,} test)"
    return train, test, about


def _describe(name: str, noun: str, train: TensorData, test: TensorData) -> str:
    height, width = train.tensors[0].shape[-2:]
    size = f"{height}×{width}"
    return f"{name}: {len(train) + len(test):,} {noun}, {size} ({len(train):,} train, {len(test):,} test)"


def cache_folder() -> Path:
    """The folder for downloads: `samestep` in `$XDG_CACHE_HOME`, else in `~/.cache` or macOS's `~/Library/Caches`."""
    home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or home) / "samestep"


def fetch(urls: Sequence[str], path: Path, md5: str) -> None:
    """Downloads a file from the first of the addresses that has it, unless it is there with the right md5.

    The file gets its name when it is complete and checked. If several processes call this, one downloads and the others
    wait.
    """
    problems = []
    try:
        if _has_md5(path, md5):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            if _has_md5(path, md5):
                return
            for url in urls:
                try:
                    request = urllib.request.Request(url, headers={"User-Agent": "samestep"})
                    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                        content = answer.read()  # in memory, so that an OSError here is the network's, not the disk's
                except (OSError, http.client.HTTPException, ValueError) as error:
                    problems.append(f"  {url}: {error or type(error).__name__}")
                    continue
                got = hashlib.md5(content, usedforsecurity=False).hexdigest()
                if got == md5:
                    _write(path, content)
                    return
                problems.append(f"  {url}: the file there has the md5 {got}, needed: {md5}")
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}; set XDG_CACHE_HOME to another "
            "folder, or read the files from one by --data"
        ) from error
    hint = "without a network, put the files into a folder and give it by --data"
    raise DataError(f"{path.name} could not be downloaded; {hint}\n" + "\n".join(problems))


def _write(path: Path, content: bytes) -> None:
    """Writes a file that is complete when it gets its name."""
    # A name of this process's own: where the file system has no locks, two may write at once.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Excludes other processes that download to a folder, if its file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _has_md5(path: Path, md5: str) -> bool:
    try:
        return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() == md5
    except FileNotFoundError:
        return False
