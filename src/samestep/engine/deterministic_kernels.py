"""Deterministic kernels for operations of CUDA that have none, or use theirs in one mode only.

They are registered with torch's dispatcher, so that each caller gets them: modules, functions, autograd in C++. They
take the place of CUDA's while deterministic algorithms are on, in both modes ("error" and "warn"); else CUDA's run.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

Kernel = Callable[..., Any]


@cache
def register_kernels() -> torch.library.Library | None:
    """Registers the kernels of the table in this process, once; does nothing for a build of torch without CUDA."""
    if torch.version.cuda is None:
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the first kernel that takes another's place
        for name, kernel in KERNELS.items():
            library.impl(name, _replacing(name, kernel), "CUDA", with_keyset=True)
    return library  # the cache keeps it, and with it the kernels


def _replacing(name: str, kernel: Kernel) -> Kernel:
    """A kernel of the table, which may call the one that it replaces."""
    original: Any = torch.library.get_kernel(f"aten::{name}", "CUDA")

    def replacing(keys: torch.DispatchKeySet, *args: Any, **options: Any) -> Any:
        if torch.are_deterministic_algorithms_enabled():
            return kernel(partial(original.call_boxed, keys), *args, **options)
        return original.call_boxed(keys, *args, **options)

    return replacing


def _in_error_mode(original: Kernel, *args: Any, **options: Any) -> Any:
    """Runs CUDA's kernel in mode "error": under "warn" it adds by atomics, or by splits (attention_backward.cu)."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        return original(*args, **options)
    # As use_deterministic_algorithms, without importing inductor. A call of another thread that raises meanwhile would
    # have warned.
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        return original(*args, **options)
    finally:
        torch._C._set_deterministic_algorithms(True, warn_only=True)


KERNELS: dict[str, Kernel] = {
    "_flash_attention_backward": _in_error_mode,
    "_efficient_attention_backward": _in_error_mode,
    "_scaled_dot_product_flash_attention_backward": _in_error_mode,
    "_scaled_dot_product_efficient_attention_backward": _in_error_mode,
}
