"""Kernels that take the place of CUDA's where those are not deterministic: their numbers, and the bits of a training.

On CPUs they are registered for the CPU; on GPUs they are where they belong.
"""

from functools import partial

import pytest
import torch
from engine_programs import in_turns, make_step
from torch import nn
from torch.nn import functional
from worlds import DEVICE

from samestep.checkpoint.digest import state_digest
from samestep.engine import deterministic_kernels

IMAGE = (2, 3, 7, 6)


def sampled(x, mode, padding_mode, align_corners):
    """Points inside, outside and on the borders, for images and volumes; their gradient reaches `x` too."""
    sizes = x.shape[2:]
    places = x[:, : len(sizes)].movedim(1, -1).tanh() * 1.5
    places = torch.cat([places, torch.ones_like(places[:, :1]), -torch.ones_like(places[:, :1])], 1)
    return functional.grid_sample(x, places, mode, padding_mode, align_corners)


def classified(x, weighted, **options):
    classes = (torch.arange(2 * 7 * 6, device=x.device) % 4).clamp(max=2).view(2, 7, 6)
    classes[0, :2] = -100
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=x.dtype, device=x.device) if weighted else None
    return functional.cross_entropy(x, classes, weight, **options)


CASES = {
    **{
        f"cross_entropy of images, {reduction}, weights {weighted}": (
            partial(classified, weighted=weighted, reduction=reduction),
            IMAGE,
        )
        for reduction in ("mean", "sum", "none")
        for weighted in (True, False)
    },
    **{
        f"adaptive_avg_pool to {sizes}": (pool, (2, 3, *[7, 6, 5][: len(sizes)]))
        for sizes in ((3,), (3, 4), (9, 8), (1, 6), (7, 6), (2, 3, 4))
        for pool in [partial(getattr(functional, f"adaptive_avg_pool{len(sizes)}d"), output_size=sizes)]
    },
    **{
        f"reflection by {sizes}": (
            partial(functional.pad, pad=sizes, mode="reflect"),
            (2, 3, *[5, 4, 6][: len(sizes) // 2]),
        )
        for sizes in ((4, 0), (-2, 3), (1, 2, 3, 4), (1, 2, 3, 0, 2, 1))
    },
    **{
        f"{mode}, antialias {antialias}, aligned {aligned}, {how}": (
            partial(functional.interpolate, mode=mode, antialias=antialias, align_corners=aligned, **how),
            (2, 3, *[7, 6, 5][:dimensions]),
        )
        for mode, dimensions, antialias in (
            ("linear", 1, False),
            ("bilinear", 2, False),
            ("bicubic", 2, False),
            ("trilinear", 3, False),
            ("bilinear", 2, True),
            ("bicubic", 2, True),
        )
        for aligned in (False, True)
        for how in ({"size": 13}, {"size": 3}, {"size": 1}, {"scale_factor": 1.7}, {"scale_factor": 0.6})
    },
    **{
        f"grid_sample, {mode}, {padding}, aligned {aligned}, {len(shape) - 2} dimensions": (
            partial(sampled, mode=mode, padding_mode=padding, align_corners=aligned),
            shape,
        )
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection")
        for aligned in (False, True)
        for shape in ((2, 3, 7, 6), (2, 3, 4, 5, 3))
        if mode != "bicubic" or len(shape) == 4
    },
    **{
        f"cumsum of {shape} along {dim}": (partial(torch.cumsum, dim=dim), shape)
        for shape, dim in (((9, 4), 0), ((4, 9), -1), ((), 0), ((0, 3), 1), ((3, 1), 1))
    },
    "cumsum in place": (lambda x: (x * 1).cumsum_(0), (5, 3)),
    "cumprod in place": (lambda x: (x * 1).cumprod_(0), (15,)),
    "cumsum of whole numbers": (lambda x: x * torch.arange(5, device=x.device).cumsum(0), (3, 5)),
    **{
        f"{scan.__name__} of {shape} along {dim}": (partial(scan, dim=dim), shape)
        for scan in (torch.cumprod, torch.logcumsumexp)
        for shape, dim in (((5, 3), 0), ((40,), 0), ((1, 40), -1), ((40, 1), -2), ((), 0), ((0,), 0))
    },
}


def on_cpus(table):
    """The kernels for the CPU's dispatch keys, until the library is destroyed."""
    keys = {"CUDA": "CPU", "AutogradCUDA": "AutogradCPU"}
    library = torch.library.Library("aten", "IMPL")
    for name, (key, kernel) in table.items():
        if "attention" not in name and "cudnn" not in name:
            replacing = deterministic_kernels._replacing(name, keys[key], kernel)
            library.impl(name, replacing, keys[key], with_keyset=True)
    return library


@pytest.fixture
def deterministic():
    """Mode "error", in which kernels of the table run on the device of the tests."""
    torch.set_deterministic_debug_mode("error")
    library = deterministic_kernels.register_kernels() if DEVICE != "cpu" else on_cpus(deterministic_kernels.KERNELS)
    yield
    torch.set_deterministic_debug_mode("default")
    if DEVICE == "cpu":
        library._destroy()


def differentiated(function, shape, dtype, device):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device, dtype)
    x.requires_grad_()
    output = function(x)
    output.square().sum().backward()
    return output.detach().cpu(), x.grad.cpu()


@pytest.fixture(scope="module")
def expected():
    """The results of torch's own kernels on the CPU."""
    return {
        (name, dtype): differentiated(*case, dtype, "cpu")
        for name, case in CASES.items()
        for dtype in (torch.float64, torch.float32)
    }


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch_on_the_cpu(expected, deterministic, name):
    # Sums in another order. In float32 torch's own gradients of bicubic sampling are 1e-4 from those in float64.
    for dtype, rtol, atol in ((torch.float64, 1e-9, 1e-10), (torch.float32, 1e-4, 2e-4)):
        found, again = (differentiated(*CASES[name], dtype, DEVICE) for _ in range(2))
        for one, same, wanted in zip(found, again, expected[name, dtype], strict=True):
            assert torch.equal(one, same)
            torch.testing.assert_close(one, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_scans_into_a_given_tensor_have_the_bits_of_those_that_make_one(deterministic, scan):
    x = torch.rand(40, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for values, dim in ((x, 0), (x.view(8, 5), 0), (x.view(1, -1), -1)):
        out = torch.empty(0, device=DEVICE)
        assert scan(values, dim, out=out) is out
        assert torch.equal(out, scan(values, dim))


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_twin_another_filter_is_noticed(deterministic):
    function = partial(functional.interpolate, mode="bicubic", size=13)
    library = torch.library.Library("aten", "IMPL")
    linear = partial(deterministic_kernels._upsample_backward, None)
    name, other = "upsample_bicubic2d_backward", lambda *args: linear(*args)
    library.impl(name, other, DEVICE.upper(), allow_override=True)  # which torch 2.10 does not by default
    found = differentiated(function, IMAGE, torch.float64, DEVICE)[1]
    library._destroy()
    assert not torch.allclose(found, differentiated(function, IMAGE, torch.float64, DEVICE)[1])


class Segments(nn.Module):
    """Warped, padded and resized images, a class for each pixel, and a scan over what is pooled."""

    def __init__(self):
        super().__init__()
        self.warp, self.convolution = nn.Linear(12, 6), nn.Conv2d(3, 3, 3)
        self.layers = nn.Sequential(nn.ReflectionPad2d(2), self.convolution, nn.Upsample(size=(9, 8), mode="bicubic"))

    def forward(self, x):
        pooled = functional.adaptive_avg_pool2d(x, (2, 2)).flatten(1).cumsum(1)
        grid = functional.affine_grid(self.warp(pooled).view(-1, 2, 3), x.shape, align_corners=False)
        return self.layers(functional.grid_sample(x, grid, align_corners=False))


def segments(communicator):
    model = Segments()

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    step = make_step(communicator, model, loss, num_microbatches=4)
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 3, 7, 6, generator=drawn), torch.randint(0, 3, (24, 9, 8), generator=drawn)
    losses = [step((x, y)).loss for _ in range(2)]
    return losses, state_digest(model, step.optimizers)


def test_models_with_such_operations_train_to_the_same_bits_on_any_number_of_devices():
    (alone,) = set(map(str, in_turns(1, segments)))
    assert {*map(str, in_turns(2, segments)), *map(str, in_turns(3, segments))} == {alone}
