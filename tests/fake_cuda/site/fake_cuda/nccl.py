"""NCCL: not yet."""

from types import ModuleType


def complete(module: ModuleType) -> None:
    """Nothing yet."""
