"""What an accelerator's kernels keep for the backward, where that is not what the CPU's keep."""

import torch
from forecast_models import subject
from torch import nn
from torch.nn import functional

from samestep.forecast.kernels import workspace
from samestep.forecast.tally import CPU_ATTENTION
from samestep.forecast.trace import trace

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


def saved(build, *shape, accelerator, precision="32-true"):
    return trace(subject(build, *shape), 8, accelerator, precision).saved.sum()


def test_dropout_keeps_a_byte_an_element_on_an_accelerator_and_four_on_a_cpu():
    masks = [saved(Dropped, 1024, accelerator=accelerator) for accelerator in (True, False)]
    assert abs((masks[1] - masks[0]) - 3 * ELEMENTS) < 2048  # sizes are rounded


def test_attention_keeps_no_matrix_of_scores():
    length = 512
    kept = saved(Attending, length, 16, accelerator=True)
    assert kept < 8 * 2 * length * length * 4 / 10
    traced = trace(subject(Attending, length, 16), 8, True)
    products = 2 * 2 * 8 * 2 * length * length * 8
    assert traced.operations[traced.operations[:, 0] == 2][:, 1].tolist() == [products, 2.5 * products]
    assert CPU_ATTENTION.startswith("aten::")


def test_softmax_is_widened_by_autocast_on_an_accelerator_alone():
    wide, narrow = (
        saved(Scored, 1024, accelerator=accelerator, precision="bf16-mixed") for accelerator in (True, False)
    )
    assert wide - narrow >= 2 * ELEMENTS


def test_a_convolution_of_3_by_3_takes_four_times_its_filters_for_a_while():
    weight = torch.zeros(8, 4, 3, 3)
    assert workspace("aten::convolution", (None, weight, None, [1, 1])) == 4 * 8 * 4 * 9 * 4
    assert workspace("aten::convolution", (None, weight, None, [2, 2])) == 0
    assert workspace("aten::convolution", (None, torch.zeros(8, 4, 1, 1), None, [1, 1])) == 0
    assert workspace("aten::mm", (weight, weight)) == 0
