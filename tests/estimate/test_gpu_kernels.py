"""GPU kernels whose saved tensors differ from those of the CPU kernels."""

import torch
from estimate_models import workload
from torch import nn
from torch.nn import functional

from samestep.estimate.trace import trace, workspace_bytes

ELEMENTS = 8 * 1024


class Dropped(nn.Module):
    """A linear layer with dropout before it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 10)

    def forward(self, x):
        return self.layer(functional.dropout(x * self.layer.weight[0, 0], 0.5, self.training))


class Attending(nn.Module):
    """Attention of a sequence with itself, and a mean."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        x = self.layer(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return functional.scaled_dot_product_attention(x, x, x).mean((1, 2))


class Scored(nn.Module):
    """A linear layer and a softmax."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)

    def forward(self, x):
        return self.layer(x).softmax(-1)


def saved(build, *shape, is_gpu, precision="32-true"):
    return trace(workload(build, *shape), 8, is_gpu, precision).saved.sum()


def test_dropout_keeps_a_byte_an_element_on_a_gpu_and_four_on_a_cpu():
    masks = [saved(Dropped, 1024, is_gpu=is_gpu) for is_gpu in (True, False)]
    assert abs((masks[1] - masks[0]) - 3 * ELEMENTS) < 2048  # sizes are rounded


def test_attention_keeps_no_matrix_of_scores():
    length = 512
    kept = saved(Attending, length, 16, is_gpu=True)
    assert kept < 8 * 2 * length * length * 4 / 10
    traced = trace(workload(Attending, length, 16), 8, True)
    products = 2 * 2 * 8 * 2 * length * length * 8
    assert {products, 2.5 * products} <= set(traced.operations[:, 0].tolist())


def test_softmax_is_widened_by_autocast_on_a_gpu_alone():
    wide, narrow = (saved(Scored, 1024, is_gpu=is_gpu, precision="bf16-mixed") for is_gpu in (True, False))
    assert wide - narrow >= 2 * ELEMENTS


def test_a_convolution_of_3_by_3_takes_four_times_its_filters_for_a_while():
    weight = torch.zeros(8, 4, 3, 3)
    assert workspace_bytes("aten::convolution", (None, weight, None, [1, 1])) == 4 * 8 * 4 * 9 * 4
    assert workspace_bytes("aten::convolution", (None, weight, None, [2, 2])) == 0
    assert workspace_bytes("aten::convolution", (None, torch.zeros(8, 4, 1, 1), None, [1, 1])) == 0
    assert workspace_bytes("aten::mm", (weight, weight)) == 0
