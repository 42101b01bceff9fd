"""Kernels in the place of MKL's and oneDNN's: exact roots, and no instruction that makers of CPUs round differently."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn
from worlds import cpu_only

from samestep.engine import portable_kernels
from samestep.errors import DeterminismError

pytestmark = cpu_only("kernels of CPUs")
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True, scope="module")
def library():
    """The kernels, in this process for as long as these tests run."""
    library = portable_kernels._registered(portable_kernels.KERNELS)
    yield library
    library._destroy()


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
def test_square_roots_are_those_of_ieee_754_in_every_form(dtype, data):
    kind = np.dtype(str(dtype).removeprefix("torch."))
    numbers = st.floats(width=8 * kind.itemsize)
    values = data.draw(arrays.arrays(kind, st.integers(0, 40), elements=numbers))
    x, empty = torch.from_numpy(values), torch.empty(0, dtype=dtype)
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(np.sqrt(values))
    forms = (x.sqrt(), x.clone().sqrt_(), torch.sqrt(x, out=empty.clone()), torch._foreach_sqrt([x])[0])
    powers = (x**0.5, x.clone().pow_(0.5), torch.pow(x, 0.5, out=empty.clone()), torch._foreach_pow([x], 0.5)[0])
    for found in (*forms, *powers, x[:, None].expand(-1, 3).sqrt()[:, 1]):
        assert found.dtype == dtype
        assert found.allclose(expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit() & (found == 0), expected.signbit() & (expected == 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["asin", "acos", "atan"])
def test_inverse_sines_cosines_and_tangents_are_right_to_the_last_bits(name, dtype):
    function, edges = getattr(torch, name), [1.0, -1.0, 0.0, -0.0, 1e-30, 0.5]
    x = torch.cat([torch.linspace(-1, 1, 4001, dtype=dtype), torch.tensor(edges, dtype=dtype)])
    expected = torch.from_numpy(np.asarray(getattr(np, "arc" + name[1:])(x.numpy().astype(np.longdouble)), np.float64))
    for found in (function(x), getattr(x.clone(), f"{name}_")(), function(x, out=torch.empty(0, dtype=dtype))):
        # Float32 is rounded from float64; there atan2 and the root under it are each off by an ulp at most.
        assert torch.allclose(found.double(), expected, rtol=6e-8 if dtype == torch.float32 else 1e-15, atol=0)
    assert function(torch.tensor([2.0, -1.5])).isnan().tolist() == [name != "atan"] * 2
    assert torch.autograd.gradcheck(function, torch.tensor([0.3, -0.6], dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("name", ["sqrt", "asin", "acos", "atan"])
def test_other_dtypes_are_torchs(name):
    function = getattr(torch, name)
    assert function(torch.tensor([0, 1])).dtype == torch.float32
    for dtype in (torch.float16, torch.bfloat16, torch.complex64):
        x = torch.tensor([0.0, 0.25, 0.5], dtype=dtype)
        assert function(x).dtype == dtype
        assert torch.allclose(function(x).abs().float(), function(x.abs().double()).abs().float(), rtol=1e-2, atol=1e-2)


def test_a_power_that_is_no_root_is_torchs():
    x = torch.tensor([1.5, 2.0, -3.0])
    assert torch.equal(x**2, x * x)
    assert torch.equal(torch.tensor([2, 3]) ** 2, torch.tensor([4, 9]))
    assert torch.equal(torch.tensor([4, 9]) ** 0.5, torch.tensor([2.0, 3.0]))


def lstm():
    torch.manual_seed(0)
    model, x = nn.LSTM(5, 7, 2, batch_first=True, dropout=0.1), torch.randn(3, 6, 5)
    torch.manual_seed(1)
    output = model(x)[0]
    output.square().sum().backward()
    waiting, nodes = [output.grad_fn], set()
    while waiting:
        nodes.add(node := waiting.pop())
        waiting += [other for other, _ in node.next_functions if other is not None and other not in nodes]
    return [output.detach(), *(p.grad for p in model.parameters())], {type(node).__name__ for node in nodes}


def test_an_lstm_is_not_onednns_also_without_a_gradient():
    found, nodes = lstm()
    with torch.backends.mkldnn.flags(enabled=False):
        expected, _ = lstm()
    assert all(map(torch.equal, found, expected))
    assert "MkldnnRnnLayerBackward0" not in nodes
    assert torch.backends.mkldnn.enabled


def test_products_of_int8_are_refused():
    x = torch.ones(32, 32, dtype=torch.int8)
    with pytest.raises(DeterminismError, match="int8 matrices differ between CPUs"):
        torch._int_mm(x, x)


def test_twin_without_the_kernels_an_lstm_is_onednns_and_int8_is_multiplied(library):
    library._destroy()
    x = torch.ones(32, 32, dtype=torch.int8)
    assert torch._int_mm(x, x)[0, 0] == 32
    if torch.backends.mkldnn.is_available():
        assert "MkldnnRnnLayerBackward0" in lstm()[1]
