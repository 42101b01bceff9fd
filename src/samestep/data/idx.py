"""IDX files: the format in which MNIST and similar data sets are published, plain or gzipped.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section "File formats": two zero
bytes, a dtype code, the number of dimensions; one big-endian uint32 a dimension; then the values, big-endian,
row-major.
"""

import gzip
import math
import struct
import zlib
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.data.files import read_file
from samestep.data.tensors import TensorData, Transform
from samestep.errors import DataError

DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype("u1"),
    0x09: np.dtype("i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
GZIP_MAGIC = b"\x1f\x8b"
TRAIN, TEST = "train", "t10k"


def read_idx(path: str | PathLike[str]) -> Tensor:
    """Reads one IDX file, gzipped or not, as its first bytes show.

    Raises:
        DataError: the file is missing, damaged or truncated, or no IDX file.
    """
    content = read_file(path, "an IDX file")
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: cannot be unpacked as gzip ({error}); it is damaged or truncated") from error
        if not content:
            raise DataError(f"{path}: is empty; an IDX file is needed")
    magic = content[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in DTYPES or magic[3] == 0:
        codes = ", ".join(f"{code:02x}" for code in DTYPES)
        raise DataError(
            f"{path}: starts with the bytes {magic.hex(' ')}; an IDX file starts with 00 00, a dtype ({codes}) and "
            "the number of dimensions"
        )
    dtype, num_dims = DTYPES[magic[2]], magic[3]
    start = 4 + 4 * num_dims
    if len(content) < start:
        raise DataError(f"{path}: is truncated in its header of {num_dims} dimensions, after {len(content)} bytes")
    shape = struct.unpack(f">{num_dims}I", content[4:start])
    needed, found = math.prod(shape) * dtype.itemsize, len(content) - start
    if found != needed:
        size = " x ".join(map(str, shape))
        got = f"only {found} follow: it is truncated" if found < needed else "more follow"
        raise DataError(f"{path}: its header says {size} values, {needed} bytes, but {got}")
    array = np.frombuffer(content, dtype=dtype, offset=start)
    return torch.from_numpy(array.astype(dtype.newbyteorder("="))).reshape(shape)


def read_image_label_pair(
    images: str | PathLike[str], labels: str | PathLike[str], num_classes: int = 10, transform: Transform | None = None
) -> TensorData:
    """Reads grey images and their labels, as a dataset of uint8 `[1, height, width]` and int64 labels.

    Raises:
        DataError: a file cannot be read, the two do not belong together, or a label is out of range.
    """
    x, y = read_idx(images), read_idx(labels)
    if x.dtype != torch.uint8 or x.ndim != 3:
        raise DataError(
            f"{images}: holds {_describe(x)}; images are needed: bytes with 3 dimensions (number, height, width)"
        )
    if y.is_floating_point() or y.ndim != 1:
        raise DataError(f"{labels}: holds {_describe(y)}; labels are needed: integers with 1 dimension")
    if len(x) != len(y):
        raise DataError(f"{images} holds {len(x)} images and {labels} {len(y)} labels; the numbers must be equal")
    if x.numel() == 0:
        raise DataError(f"{images}: holds {_describe(x)}, no image; at least one is needed")
    y = y.long()
    wrong = torch.nonzero((y < 0) | (y >= num_classes)).flatten()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{labels}: label {int(y[first])} at index {first} is out of range; needed: 0 to {num_classes - 1}"
        )
    return TensorData((x.unsqueeze(1), y), transform)


def find_pairs(folder: str | PathLike[str]) -> dict[str, tuple[Path, Path]]:
    """The image and label files of a folder under their usual names, by `TRAIN` and `TEST`.

    The names are `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, `t10k-…` for the test set, with `-` or `.`
    before `idx`, with or without `.gz`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; needed: one with IDX files, by --data-dir")
    pairs: dict[str, tuple[Path, Path]] = {}
    for part in (TRAIN, TEST):
        images, labels = _find(folder, f"{part}-images", "idx3"), _find(folder, f"{part}-labels", "idx1")
        if images and labels:
            pairs[part] = (images, labels)
        elif found := images or labels:
            lost = f"{part}-labels-idx1-ubyte" if images else f"{part}-images-idx3-ubyte"
            raise DataError(f"{folder}: has {found.name} but no {lost} (or {lost}.gz) to go with it")
    if not pairs:
        raise DataError(
            f"{folder}: holds no pair of IDX files; needed: train-images-idx3-ubyte and train-labels-idx1-ubyte, or "
            "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, or both pairs, each with .gz or without"
        )
    return pairs


def _find(folder: Path, stem: str, kind: str) -> Path | None:
    names = (f"{stem}{mark}{kind}-ubyte{ending}" for mark in "-." for ending in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _describe(tensor: Tensor) -> str:
    return f"{' x '.join(map(str, tensor.shape))} values of {str(tensor.dtype).removeprefix('torch.')}"
