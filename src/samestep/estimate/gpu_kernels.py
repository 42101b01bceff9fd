"""GPU kernels that save other tensors for the backward than the CPU kernels that a trace runs.

Fake tensors that claim to be on a GPU cannot run a backward where PyTorch has no GPU, so the step is traced on the CPU,
and each rule here replaces one function by the GPU's form. Functions without a rule save the same on both: linear
layers and convolutions their input, activations their input or output, norms two statistics a row, pooling its indices.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

WINOGRAD_TILES = 36 / 9  # F(4×4, 3×3) turns each filter of 3×3 into 6×6 (Lavin and Gray 2016)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Saves a mask of one byte an element; the CPU's form saves one of the input's size."""
    if not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """Saves query, key, value, the output and a float32 number a row; the backward draws dropout again."""
    attended: Tensor = functional.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **options)
    return attended


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose inputs autocast widens on GPUs but not on the CPU."""

    def widened(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        return function(*args, **kwargs)

    return widened


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


WIDENED = (
    *(functional.layer_norm, functional.group_norm, functional.softmax, functional.log_softmax),
    *(functional.cross_entropy, functional.nll_loss, functional.mse_loss),
    *(torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax),
)

GPU_RULES: Mapping[Any, Callable[..., Any]] = {
    # aten/src/ATen/native/Dropout.cpp: the fused form, for tensors of an accelerator alone, saves a bool mask
    functional.dropout: _dropout,
    # aten/src/ATen/native/transformers: both fused forms save logsumexp; the CPU's fused form has the same outputs
    functional.scaled_dot_product_attention: _attention,
    # aten/src/ATen/autocast_mode.h, AT_FORALL_FP32
    **{function: _in_float32(function) for function in WIDENED},
}


class GpuKernels(TorchFunctionMode):
    """While it is entered, functions of `GPU_RULES` save the tensors that they save on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the rule of a function, or the function."""
        return GPU_RULES.get(func, func)(*args, **(kwargs or {}))


def workspace_bytes(name: str, args: tuple[Any, ...]) -> float:
    """Temporary bytes of a kernel: the filters of a 3×3 convolution with stride 1, transformed by Winograd's algorithm.

    oneDNN does so on the CPU; cuDNN's workspace is not documented, and assumed to be the same.
    """
    if name not in ("aten::convolution", "aten::convolution_backward"):
        return 0.0
    first = 1 if name == "aten::convolution" else 2
    weight, stride = args[first], args[first + 2]
    if weight.ndim != 4 or tuple(weight.shape[2:]) != (3, 3) or set(stride) != {1}:
        return 0.0
    return float(WINOGRAD_TILES * weight.numel() * weight.element_size())
