"""The statistics of tensors: what torch says, whatever the layout, the type, and what is not finite."""

import math

import pytest
import torch

from samestep.replay.views import measure


def check(found, values):
    """Compares statistics with those of a plain list of finite values."""
    exact = torch.as_tensor(values, dtype=torch.float64)
    assert found.finite == exact.numel()
    assert (found.min, found.max) == (float(exact.min()), float(exact.max()))
    assert found.mean == pytest.approx(float(exact.mean()), rel=1e-12, abs=1e-12)
    assert found.std == pytest.approx(float(exact.std(correction=0)), rel=1e-9, abs=1e-12)
    assert found.norm == pytest.approx(float(exact.norm()), rel=1e-9)
    assert abs(found.peak) == float(exact.abs().max())
    assert found.zeros == int((exact == 0).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_statistics_are_those_of_all_elements(dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(5, 4, 3, generator=generator) * 2).to(dtype).transpose(0, 1)
    found = measure(tensor)
    check(found, tensor.flatten().double())
    assert found.shape == (4, 5, 3)
    assert found.row == int(tensor.double().abs().flatten(1).amax(1).argmax())


def test_what_is_not_finite_is_counted_and_left_out_of_the_rest():
    tensor = torch.tensor([[1.0, 0.0], [-7.0, 2.0], [math.nan, 3.0], [math.inf, -math.inf]])
    found = measure(tensor)
    check(found, [1.0, 0.0, -7.0, 2.0, 3.0])
    assert (found.nonfinite, found.row, found.bad) == (3, 2, "nan")
    nothing = measure(torch.full((2, 2), math.inf))
    assert (nothing.finite, nothing.bad, nothing.norm) == (0, "inf", 0.0)


def test_empty_scalar_complex_and_sparse_tensors_are_no_trouble():
    assert measure(torch.zeros(0, 3)).elements == 0
    assert measure(torch.tensor(-2.0)).row is None
    check(measure(torch.tensor([3 + 4j]).conj()), [3.0, -4.0])
    assert measure(torch.eye(2).to_sparse()) is None
