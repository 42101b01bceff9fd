"""Image data by name, by folder, or embedded: MNIST, Fashion-MNIST, and the digits that need no download.

Addresses and md5 sums are those of the data sets' authors and of `torchvision.datasets.MNIST` and `FashionMNIST`.
"""

import hashlib
import http.client
import os
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from torch import Tensor

from samestep.data.idx import TEST, TRAIN, find_pairs, read_image_label_pair
from samestep.data.tensors import TensorData, head_tail
from samestep.errors import DataError, UsageError

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


def image_data(
    name: str | None = None, data_dir: str | PathLike[str] | None = None
) -> tuple[TensorData, TensorData, str]:
    """Grey images in 10 classes: the training set, the test set and a description.

    Args:
        name: "digits" (the default), "mnist" or "fashion-mnist".
        data_dir: a folder of IDX files to read instead of a download.

    Raises:
        UsageError: an unknown name.
        DataError: the files are damaged, or cannot be downloaded.
    """
    if name is not None and name not in NAMES:
        raise UsageError(
            f"unknown image data {name!r}; known by --data: {', '.join(NAMES)}; "
            "a folder of IDX files is read by --data-dir"
        )
    if name == "digits" and data_dir is not None:
        raise UsageError("the digits are embedded and read no folder; leave out --data digits or --data-dir")
    if data_dir is None and name in (None, "digits"):
        from samestep.data.embedded import digits

        train, test = head_tail(TensorData(digits(), bytes_to_unit), TRAIN_FRACTION)
        return train, test, _describe("digits", "scans", train, test)
    download = DOWNLOADS.get(name or "")
    if data_dir is not None:
        folder = Path(data_dir)
    else:
        assert name is not None
        assert download is not None
        folder = cache_folder() / name
        for file, md5 in download.md5.items():
            fetch([mirror + file for mirror in download.mirrors], folder / file, md5)
    pairs = {part: read_image_label_pair(*paths, transform=bytes_to_unit) for part, paths in find_pairs(folder).items()}
    if len(pairs) == 2:
        train, test = pairs[TRAIN], pairs[TEST]
    else:
        (only,) = pairs.values()
        train, test = head_tail(only, TRAIN_FRACTION)
    noun = "images" if download is None else download.noun
    return train, test, _describe(name or folder.resolve().name, noun, train, test)


def bytes_to_unit(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Scales a batch `(x, y)` of uint8 images to float32 in 0…1."""
    x, y = batch
    return x.float() / 255, y


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
            "folder, or read the files from one by --data-dir"
        ) from error
    hint = "without a network, put the files into a folder and give it by --data-dir"
    raise DataError(f"{path.name} could not be downloaded; {hint}\n" + "\n".join(problems))


def _write(path: Path, content: bytes) -> None:
    """Writes a file that is complete when it gets its name."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Excludes other processes that download to a folder, if its file system has locks."""
    try:
        import fcntl
    except ImportError:  # Windows: each process downloads
        yield
        return
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
