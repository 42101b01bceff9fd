"""The kernels that an accelerator picks, where they keep other tensors for the backward than the CPU's do.

The step is traced with tensors that call themselves CPU tensors, for which PyTorch picks the CPU's forms. Each rule
here puts the accelerator's form in the place of one function. What no rule names is kept alike on both: linear layers
and convolutions keep their input, activations their input or output, normalisations two statistics a row, pooling its
indices.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Rule = Callable[..., Any]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Keeps a mask of one byte an element, the CPU's form one of the input's size."""
    if not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keeps query, key, value, the output and a float32 number a row; dropout is drawn anew in the backward."""
    mixed: Tensor = functional.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return mixed


def _in_float32(function: Rule) -> Rule:
    """Autocast's list for accelerators widens the input of these; that for the CPU leaves it as it is."""

    def widened(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu") and input.dtype in (torch.bfloat16, torch.float16):
            input = input.float()
            args = tuple(_wide(argument) for argument in args)
            kwargs = {name: _wide(argument) for name, argument in kwargs.items()}
        return function(input, *args, **kwargs)

    return widened


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


WIDENED = (
    *(functional.layer_norm, functional.group_norm, functional.softmax, functional.log_softmax),
    *(functional.cross_entropy, functional.nll_loss, functional.mse_loss),
    *(torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax),
)

ACCELERATOR_RULES: Mapping[Any, Rule] = {
    # aten/src/ATen/native/Dropout.cpp: the fused form, for tensors of an accelerator alone, saves a bool mask
    functional.dropout: _dropout,
    # aten/src/ATen/native/transformers: both fused forms save logsumexp; the CPU's fused form has the same outputs
    functional.scaled_dot_product_attention: _attention,
    # aten/src/ATen/autocast_mode.h, AT_FORALL_FP32
    **{function: _in_float32(function) for function in WIDENED},
}


class AcceleratorKernels(TorchFunctionMode):
    """While it is entered, functions named in the table keep what they keep on an accelerator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the rule of a function, or the function."""
        return ACCELERATOR_RULES.get(func, func)(*args, **(kwargs or {}))


WINOGRAD_TILES = 36 / 9  # F(4×4, 3×3) turns each filter of 3×3 into 6×6 (Lavin and Gray 2016)


def workspace(name: str, args: tuple[Any, ...]) -> float:
    """Bytes that a kernel takes beside its results while it runs.

    Convolutions of 3×3 with stride 1 are computed by Winograd's algorithm, of which the transformed filters are the
    largest piece: so oneDNN does it on the CPU; what cuDNN takes is not documented, and taken to be the same.
    """
    if name == "aten::convolution":
        weight, stride = args[1], args[3]
    elif name == "aten::convolution_backward":
        weight, stride = args[2], args[4]
    else:
        return 0.0
    if weight.ndim != 4 or tuple(weight.shape[2:]) != (3, 3) or set(stride) != {1}:
        return 0.0
    size: float = WINOGRAD_TILES * weight.numel() * weight.element_size()
    return size
