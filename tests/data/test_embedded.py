"""Embedded data: the tables of scikit-learn, read without importing it, the same bytes everywhere."""

import hashlib
import importlib.util
import subprocess
import sys

import pytest

from samestep.data import named
from samestep.errors import DataError, UsageError


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_the_digits_are_the_same_bytes_everywhere():
    images, labels = named.digits()
    assert images.shape == (1797, 1, 28, 28)
    content = images.numpy().tobytes() + labels.numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == GOLDEN


GOLDEN = "d33441ab4580c381ea50573800d7a4682b16680226bdade45152b75f57b7045a"


def test_the_tables_are_those_of_scikit_learn_and_the_digits_are_scaled_bilinearly():
    result = run("""
import torch
from sklearn.datasets import load_diabetes, load_digits
from samestep.data import named

images, labels = named.digits()
scans = torch.from_numpy(load_digits().images).unsqueeze(1)
scaled = torch.nn.functional.interpolate(scans, size=(28, 28), mode="bilinear", align_corners=False) * 255 / 16
# Half a step of rounding to bytes, and a little for the roundings of float64 before it.
assert (images - scaled).abs().max() <= 0.5 + 1e-9
assert labels.tolist() == load_digits().target.tolist()

features, target = named.diabetes()
table = load_diabetes(scaled=False)
assert torch.equal(features, torch.from_numpy(table.data).float())
assert torch.equal(target, torch.from_numpy(table.target).float().unsqueeze(1))
""")
    assert result.returncode == 0, result.stderr


def test_reading_them_neither_imports_scikit_learn_nor_changes_the_environment():
    result = run("""
import os, sys
from samestep.data import named
before = dict(os.environ)
named.digits(), named.diabetes()
assert "sklearn" not in sys.modules
assert "scipy" not in sys.modules
assert dict(os.environ) == before
""")
    assert result.returncode == 0, result.stderr


def test_without_scikit_learn_the_extra_that_brings_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'samestep\[recipes\]', or give other data by --data"):
        named.digits()


def test_a_scikit_learn_without_the_file_is_named(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location(
        "sklearn", tmp_path / "x.py", submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match=r"diabetes_data_raw\.csv\.gz: there is no such file"):
        named.diabetes()
