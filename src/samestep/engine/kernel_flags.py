"""torch's process-wide flags that decide which kernels run and how they round: in the contract, and between steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn
from torch.cuda import get_allocator_backend, tunable

from samestep.errors import DeterminismError

MATMUL_NAMES = {
    ("ieee", "ieee"): "highest",
    ("tf32", "ieee"): "high",  # by cuda.matmul.allow_tf32
    ("tf32", "tf32"): "high",
    ("tf32", "bf16"): "medium",
}
"""The argument of `torch.set_float32_matmul_precision` that sets these precisions on CUDA and in oneDNN."""

CUDA = {"cuda.matmul": cuda.matmul, **{f"cudnn.{name}": getattr(cudnn, name) for name in ("conv", "rnn")}}
CPU = {f"mkldnn.{name}": getattr(mkldnn, name) for name in ("matmul", "conv", "rnn")}  # oneDNN
"""What has an `fp32_precision`."""

ADVICE = {
    "cudnn.benchmark": "leave cudnn.benchmark off, which chooses kernels by their time",
    "cuda.tunable": "unset PYTORCH_TUNABLEOP_ENABLED: TunableOp chooses matrix products by their time",
    "cuda.allocator": "leave backend:… out of PYTORCH_ALLOC_CONF: torch's own allocator alone tells of a shortage",
    "deterministic_debug_mode": "leave deterministic algorithms on, without which kernels add in the order in which "
    "threads arrive",
}
ENFORCED: Mapping[str, Any] = {
    "cudnn.benchmark": False,
    "cuda.tunable": False,
    "cuda.allocator": "native",
    "deterministic_debug_mode": 2,
}
"""What equal bits need; `determinism.make_deterministic` sets it."""


def float32_precisions(backends: Mapping[str, Any] = CUDA | CPU) -> dict[str, str]:
    """The precision of float32 operations: "ieee", "tf32" or, on CPUs, "bf16".

    Not by `cudnn.allow_tf32` and `get_float32_matmul_precision`: once one of these names was set the older ones raise
    ("a mix of the legacy and new APIs"), or answer as before. Setting an older one sets these too (ATen/Context.cpp).
    """
    return {name: "ieee" if (it := of.fp32_precision) == "none" else it for name, of in backends.items()}


def recorded_flags(device_kind: str) -> dict[str, Any]:
    """The flags as the contract has them: precisions under torch's older names, as far as these can tell them."""
    (matmul, conv, rnn), on_cpu = float32_precisions(CUDA).values(), float32_precisions(CPU)
    cpu_matmul = on_cpu.pop("mkldnn.matmul")
    return {
        "float32_matmul_precision": MATMUL_NAMES.get((matmul, cpu_matmul), f"{matmul} on CUDA, {cpu_matmul} on CPUs"),
        "cudnn_allow_tf32": conv == "tf32" if conv == rnn else f"conv {conv}, rnn {rnn}",
        "cudnn_benchmark": cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        **{f"{name}.fp32_precision": value for name, value in on_cpu.items() if value != "ieee"},
        **(_cuda_flags() if device_kind == "cuda" else {}),
    }


def _cuda_flags() -> dict[str, Any]:
    """The flags of CUDA's matrix products in 16 bits, and of attention."""
    return {
        "matmul.allow_fp16_reduced_precision_reduction": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "matmul.allow_bf16_reduced_precision_reduction": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "matmul.allow_fp16_accumulation": cuda.matmul.allow_fp16_accumulation,
        "flash_sdp": cuda.flash_sdp_enabled(),
        "mem_efficient_sdp": cuda.mem_efficient_sdp_enabled(),
        "math_sdp": cuda.math_sdp_enabled(),
        "cudnn_sdp": cuda.cudnn_sdp_enabled(),
        "fp16_bf16_reduction_math_sdp": cuda.fp16_bf16_reduction_math_sdp_allowed(),
    }


def kernel_flags(device_kind: str) -> dict[str, Any]:
    """The flags that decide the bits of a step on a kind of device; it takes microseconds, in each step."""
    on_gpu = device_kind == "cuda"
    precisions = float32_precisions(CUDA if on_gpu else CPU)
    return {
        **{f"{name}.fp32_precision": value for name, value in precisions.items()},
        "default_dtype": torch.get_default_dtype(),
        # 0, 1 ("warn", in which attention's backward is not deterministic) or 2 ("error")
        "deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        **({} if on_gpu else {"mkldnn.enabled": mkldnn.enabled}),
        **({"cudnn.enabled": cudnn.enabled, "cudnn.benchmark": cudnn.benchmark, **_cuda_flags()} if on_gpu else {}),
        **({"cuda.tunable": tunable.is_enabled(), "cuda.allocator": get_allocator_backend()} if on_gpu else {}),
    }


def num_shortages(device: torch.device) -> int:
    """How often this process got no memory of a GPU; no wait for it, and microseconds."""
    stats = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
    return int(stats.get("num_ooms", 0))


@contextmanager
def enough_memory(device: torch.device, where: str, advice: str) -> Iterator[None]:
    """Raises a `DeterminismError` after a block in which memory was short, and no error came of it."""
    before = num_shortages(device)
    yield
    check_shortages(before, device, where, advice)


def check_shortages(before: int, device: torch.device, where: str, advice: str) -> None:
    """Raises a `DeterminismError` if memory was short since there were `before` shortages, and no error came of it."""
    # A plan of cuDNN that gets no workspace is skipped without a word, and the next one is kept for the process
    # (aten/src/ATen/native/cudnn/Conv_v8.cpp, `try_plans`).
    if (number := num_shortages(device) - before) > 0:
        raise DeterminismError(
            f"the memory of {device} was short {number} times in {where}, which went on: cuDNN leaves out a kernel "
            "that gets no workspace, and runs another one from then on, so bits would depend on how much memory is "
            f"free. Let it need less: {advice}"
        )


def check_flags(before: Mapping[str, Any], device_kind: str, where: str) -> None:
    """Raises a `DeterminismError` that names the flags of `before` that have another value now."""
    now = kernel_flags(device_kind)
    changed = [name for name, value in before.items() if now.get(name, value) != value]  # some are CUDA's alone
    if not changed:
        return
    shown = ", ".join(f"{name} is {now[name]} {where} {before[name]}" for name in changed)
    advice = [ADVICE[name] for name in changed if name in ADVICE] or ["set them earlier, and leave them alone then"]
    raise DeterminismError(f"{shown}; such flags decide which kernels run, and how they round: {', and '.join(advice)}")
