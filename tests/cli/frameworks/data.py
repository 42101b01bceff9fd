"""Real data that scikit-learn has, read from its files: to import it takes longer than to train on them."""

import importlib.util
from pathlib import Path

import numpy as np

FOLDER = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets"


def load_digits():
    """Scanned digits: 64 pixels each, from 0 to 16, and the labels."""
    table = np.loadtxt(FOLDER / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)


def load_texts():
    """The descriptions of the data sets."""
    return [path.read_text(encoding="utf-8") for path in sorted((FOLDER / "descr").glob("*.rst"))]
