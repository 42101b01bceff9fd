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


def test_an_operation_that_has_a_kernel_of_python_already_gets_another():
    x, calls = torch.tensor([0.5]), []
    library = portable_kernels._registered({"asin": lambda original, x: calls.append(1) or original(x)})
    assert torch.equal(x.asin(), torch.tensor([0.5]).asin())
    assert len(calls) == 2
    library._destroy()


@pytest.mark.parametrize("form", [lambda x: x.sqrt_(), lambda x: x.pow_(0.5), lambda x: torch.sqrt(x, out=x.clone())])
def test_a_root_that_is_no_integer_is_not_put_into_one(form):
    with pytest.raises(RuntimeError, match="can't be cast"):
        form(torch.tensor([4, 2]))


def test_a_power_that_is_no_root_is_torchs():
    x = torch.tensor([1.5, 2.0, -3.0])
    assert torch.equal(x**2, x * x)
    assert torch.equal(torch.tensor([2, 3]) ** 2, torch.tensor([4, 9]))
    assert torch.equal(torch.tensor([4, 9]) ** 0.5, torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize("sizes", [(128, 128, 128), (1, 1024, 2048), (300, 1000, 70), (64, 64, 64)])
def test_large_products_are_onednns_and_all_are_right(sizes):
    m, k, n = sizes
    generator = torch.Generator().manual_seed(0)
    a, b, bias = (torch.randn(*size, generator=generator) for size in ((m, k), (n, k), (n,)))
    expected = (a.double() @ b.double().t(), a.double() @ b.double().t() + bias)
    row = torch.randn(1, k, generator=generator).expand(m, k)
    forms = (
        (a @ b.t(), expected[0]),
        (a.t().contiguous().t() @ b.t().contiguous(), expected[0]),
        (torch.mm(a, b.t(), out=torch.empty(0)), expected[0]),
        (nn.functional.linear(a, b, bias), expected[1]),
        (torch.addmm(bias, a, b.t(), out=torch.empty(m, n)), expected[1]),
        (torch.addmm(bias, a, b.t(), beta=2, alpha=0.5), expected[0] / 2 + 2 * bias),
        (row @ b.t(), row.double() @ b.double().t()),
        (torch.addmm(bias.expand(m, n), a, b.t()), expected[1]),
    )
    for number, (found, right) in enumerate(forms):
        assert found.shape == right.shape, number
        assert found.is_contiguous(), number
        # A sum of k products in float32, each of about 1.
        assert torch.allclose(found.double(), right, rtol=0, atol=1e-6 * k), number
    by_onednn = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    assert torch.equal(a @ b.t(), by_onednn) or m * k * n < portable_kernels.LARGE


def test_products_that_cannot_be_are_torchs_to_refuse():
    a, b = torch.ones(1024, 1024), torch.ones(1025, 1024)
    for wrong in (lambda: a @ b, lambda: a @ b.double().t(), lambda: torch.addmm(torch.ones(3), a, b.t())):
        with pytest.raises(RuntimeError, match=r"cannot be multiplied|dtype|must match"):
            wrong()


def test_the_gradients_of_a_linear_layer_are_right():
    a, b, bias = (torch.randn(*size, dtype=torch.float64) for size in ((200, 100), (60, 100), (60,)))
    found = [x.float().requires_grad_() for x in (a, b, bias)]
    expected = [x.requires_grad_() for x in (a, b, bias)]
    for three in (found, expected):
        nn.functional.linear(*three).square().sum().backward()
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.grad.double(), other.grad, rtol=1e-4, atol=1e-2)


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
