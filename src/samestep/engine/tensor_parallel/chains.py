"""Chains that were divided without being asked for: an `nn.Sequential` is one only if it is called as a whole."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from samestep.errors import LossError


def call_as_a_whole(model: nn.Module, divided: Iterable[str]) -> None:
    """Lets layers of chains raise a `LossError` where they are called one by one, with who knows what between them.

    Args:
        model: whose chains are divided as they follow each other.
        divided: the names of its divided modules.
    """
    names = set(divided)
    for path, chain in model.named_modules():
        prefix = f"{path}." if path else ""
        layers = [child for name, child in chain.named_children() if f"{prefix}{name}" in names]
        if isinstance(chain, nn.Sequential) and layers:
            _watch(path, chain, layers)


def _watch(path: str, chain: nn.Sequential, layers: Iterable[nn.Module]) -> None:
    running: list[None] = []

    def enter(*_: Any) -> None:
        running.append(None)

    def leave(*_: Any) -> None:
        running.pop()

    def check(*_: Any) -> None:
        if not running:
            raise LossError(
                f"layers of {path or 'the model'} (Sequential), which are divided as they follow each other, were "
                "called one by one: what is between them would see a part of the features; call it as a whole, or say "
                "what is to be divided: samestep.TensorParallel(plan={…})"
            )

    chain.register_forward_pre_hook(enter, prepend=True)
    chain.register_forward_hook(leave, always_call=True)
    for layer in layers:
        layer.register_forward_pre_hook(check, prepend=True)
