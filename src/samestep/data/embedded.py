"""Data that needs no download: the small real tables that ship with scikit-learn.

They are read from the installed package without importing it, because the import takes seconds in every worker, starts
thread pools and sets environment variables.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.errors import DataError, UsageError
from samestep.extras import is_installed, missing

OLD_SIDE, NEW_SIDE = 8, 28
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
        raise UsageError(f"{missing('sklearn', 'the embedded data')}, or give other data by --data or --data-dir")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / name
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such file; the embedded data needs another version of scikit-learn, tested is 1.9: "
            "or give other data by --data or --data-dir"
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
