"""The data of recipes: images of a folder, a text, and small real tables that ship with scikit-learn.

The tables are read from the installed package without importing it, because the import takes seconds in every worker,
starts thread pools and sets environment variables.
"""

import importlib.util
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


def bytes_to_unit(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Scales a batch `(x, y)` of uint8 images to float32 in 0…1."""
    x, y = batch
    return x.float() / 255, y


def image_data(
    source: str | None = None, transform: Transform = bytes_to_unit, *, sides: range = range(1, MAX_SIDE + 1)
) -> tuple[TensorData, TensorData, str]:
    """Grey images in 10 classes, as bytes: the training set, the test set and a description.

    Args:
        source: a folder of IDX files, such as MNIST's; "digits", the default, are scikit-learn's.
        transform: of a batch `(x, y)` of uint8 `[N, 1, height, width]` and labels, on its device.
        sides: the heights and widths that the model takes.

    Raises:
        UsageError: neither "digits" nor a folder.
        DataError: the files are damaged, or the images have another size.
    """
    name = "digits" if source is None else source
    if name == "digits":
        noun, (train, test) = "scans", head_tail(TensorData(digits(), transform), TRAIN_FRACTION)
    else:
        noun, folder = "images", Path(name)
        if not folder.is_dir():
            raise UsageError(
                f"got --data {name}; needed: digits, or a folder of IDX files, as torchvision.datasets.MNIST(FOLDER, "
                "download=True) makes one: FOLDER/MNIST/raw"
            )
        pairs = {part: read_image_label_pair(*paths, transform=transform) for part, paths in find_pairs(folder).items()}
        if len(pairs) == 2:
            train, test = pairs[TRAIN], pairs[TEST]
        else:
            train, test = head_tail(next(iter(pairs.values())), TRAIN_FRACTION)
        name = folder.resolve().name
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
